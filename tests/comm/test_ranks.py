"""The checks of body.py on 1, 2, 3 and 4 ranks, one launch for each number."""

from __future__ import annotations

import functools

import pytest

from tests.comm.body import CHECKS
from tests.mpirun import Finished, mpirun


@functools.cache
def launched(n: int) -> Finished:
    return mpirun(n, "-m", "tests.comm.body", timeout_s=100)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CHECKS)
def test_ranks(name: str, n: int) -> None:
    finished = launched(n)
    passed = [line[3:] for line in finished.output.splitlines() if line.startswith("ok ")]
    if name not in passed:
        names = list(CHECKS)
        failed = names[len(passed)] if len(passed) < len(names) else None
        assert name != failed, f"mpirun -n {n} python -m tests.comm.body:\n{finished.output}"
        pytest.fail(f"not run: {failed} failed before it")


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_the_launch_ends_well(n: int) -> None:
    assert launched(n).returncode == 0, launched(n).output
