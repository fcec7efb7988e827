"""NCCL's back end on several ranks: everywhere on a fake of NCCL, and on a GPU with NCCL itself."""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import pytest

from numstack.device import current_device
from tests.comm.body import names
from tests.mpirun import Finished, mpirun

FAKE_NAMES, REAL_NAMES = names("fake-nccl"), names("nccl")

# Four ranks share one GPU, unless NUMSTACK_RANKS_PER_GPU=1 gives each its own; libnccl must be 2.30 or newer for that
# (NUMSTACK_NCCL_LIBRARY names one).
on_a_gpu = pytest.mark.skipif(
    current_device().kind != "cuda",
    reason="needs a GPU: NUMSTACK_DEVICE=cuda python -m pytest tests/comm/test_nccl_ranks.py",
)
ON_A_GPU = {"NUMSTACK_DEVICE": "cuda", "NUMSTACK_RANKS_PER_GPU": os.environ.get("NUMSTACK_RANKS_PER_GPU", "4")}
ON_THE_CPU = {"NUMSTACK_DEVICE": "cpu"}


@functools.cache
def launched(backend: str, n: int) -> Finished:
    env = ON_A_GPU if backend == "nccl" else ON_THE_CPU
    return mpirun(n, "-m", "tests.comm.body", backend, timeout_s=280, env=env)


@pytest.mark.parametrize("name", FAKE_NAMES)
def test_fake(name: str) -> None:
    launched("fake-nccl", 3).check(name, FAKE_NAMES)


@on_a_gpu
@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("name", REAL_NAMES)
def test_nccl(name: str, n: int) -> None:
    launched("nccl", n).check(name, REAL_NAMES)


def test_the_launch_ends_well() -> None:
    assert launched("fake-nccl", 3).returncode == 0, launched("fake-nccl", 3).output


@on_a_gpu
@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_launch_on_a_gpu_ends_well(n: int) -> None:
    assert launched("nccl", n).returncode == 0, launched("nccl", n).output


# a rank that goes: all must end, and say why

FAKE = ("--fake",)
LIBRARIES = [pytest.param(FAKE, id="fake"), pytest.param((), id="nccl", marks=on_a_gpu)]


def leaving(how: str, library: tuple[str, ...], timeout_s: str, *options: str) -> Finished:
    env = {**(ON_THE_CPU if library else ON_A_GPU), "NUMSTACK_COMM_TIMEOUT_S": timeout_s}
    finished = mpirun(2, "-m", "tests.comm.nccl_program", how, *library, timeout_s=90, env=env, options=options)
    assert finished.returncode != 0 or options, finished.output  # mpirun returns 0 where deaths are tolerated
    assert "never reached" not in finished.output
    return finished


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_rank_that_leaves_early(library: tuple[str, ...]) -> None:
    finished = leaving("exit", library, "300")
    assert "error on rank 0 of 2: rank 1 ended without making the matching call (rank 1 last called #9" in (
        finished.output
    )
    assert finished.seconds < 40


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_rank_that_raises(library: tuple[str, ...]) -> None:
    finished = leaving("raise", library, "300")
    assert finished.output.count("ValueError: planted") == 1, finished.output
    assert finished.seconds < 40


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_rank_that_is_killed(library: tuple[str, ...]) -> None:
    finished = leaving("kill", library, "5")
    assert finished.seconds < 40  # mpirun ends the others, or they find out by themselves


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_rank_that_sleeps(library: tuple[str, ...]) -> None:
    finished = leaving("sleep", library, "3")
    assert "#10 allreduce(mean) of float32[1000] (4000 bytes): rank 0 waited 3 s, but rank 1 has not made" in (
        finished.output
    )
    assert finished.seconds < 40


@pytest.mark.skipif(
    not Path(sys.executable).with_name("mpirun").exists(), reason="needs Open MPI 5 from wheels: make test runs it"
)
def test_survivors_hear_of_a_death_from_mpi() -> None:
    """With fault tolerance in MPI, mpirun leaves the survivors alone, and their watchdogs find out at once."""
    finished = leaving("kill", FAKE, "60", "--with-ft", "ulfm")
    assert "#10 allreduce(mean) of float32[1000] (4000 bytes): rank 0 failed: Exception: MPI_ERR_PROC_FAILED" in (
        finished.output
    )
    assert finished.seconds < 40
