"""The checks of body.py on 1, 2, 3 and 4 ranks, one launch for each number."""

from __future__ import annotations

import functools

import pytest

from tests.comm.body import names
from tests.mpirun import Finished, mpirun

BACKENDS = ("ring", "mpi")
NAMES = [name for backend in BACKENDS for name in names(backend)]


@functools.cache
def launched(n: int) -> Finished:
    return mpirun(n, "-m", "tests.comm.body", *BACKENDS, timeout_s=100)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", NAMES)
def test_ranks(name: str, n: int) -> None:
    launched(n).check(name, NAMES)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_launch_ends_well(n: int) -> None:
    assert launched(n).returncode == 0, launched(n).output
