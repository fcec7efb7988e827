"""Launchers, libraries, and a rank that dies."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from numstack.comm.world import SIZE_VARIABLES, launcher
from numstack.device.ranks import LOCAL_RANK_VARIABLES, LOCAL_SIZE_VARIABLES
from tests.mpirun import ENVIRONMENT, ROOT, mpirun


@pytest.fixture
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for variable in (*SIZE_VARIABLES, *LOCAL_RANK_VARIABLES, *LOCAL_SIZE_VARIABLES, "PMIX_RANK"):
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


def test_no_launcher(no_launcher: pytest.MonkeyPatch) -> None:
    assert launcher() is None


@pytest.mark.parametrize("variable", SIZE_VARIABLES)
def test_each_launcher_is_seen(no_launcher: pytest.MonkeyPatch, variable: str) -> None:
    no_launcher.setenv(variable, "6")
    assert launcher() == (variable, 6)


def test_mpirun_inside_a_slurm_job_counts(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setenv("SLURM_STEP_NUM_TASKS", "1")
    no_launcher.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert launcher() == ("OMPI_COMM_WORLD_SIZE", 4)


def test_a_pmix_launcher_without_a_size(no_launcher: pytest.MonkeyPatch) -> None:
    no_launcher.setenv("PMIX_RANK", "0")
    assert launcher() == ("PMIX_RANK", None)


def run_alone(program: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_a_launcher_of_another_mpi_is_an_error() -> None:
    # What MPICH's mpiexec leaves in the environment, with Open MPI's library.
    program = "from numstack import comm; comm.World.from_mpi()"
    finished = run_alone(program, PMI_SIZE="2", PMI_RANK="0")
    assert finished.returncode != 0
    assert "CommError: mpiexec of MPICH or Intel MPI started 2 ranks (PMI_SIZE=2) but the MPI library, Open MPI" in (
        finished.stderr
    )
    assert "sees 1: launcher and library are of different MPIs" in finished.stderr


def test_mpi_without_a_launcher_when_asked_for() -> None:
    program = """
        from numstack import comm
        world = comm.World.from_mpi(always=True)
        assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)
        assert world.mpi is not None and comm.MpiCommunicator(world).backend == "mpi"
    """
    finished = run_alone(program)
    assert finished.returncode == 0, finished.stderr


def write(path: Path, program: str) -> str:
    path.write_text(textwrap.dedent(program))
    return str(path)


DIES = """
    import sys, threading, time
    import numpy as np
    from numstack import comm
    from numstack.errors import DataError

    world = comm.World.from_mpi()
    comm.abort_on_error(world)
    ranks = comm.create(world)
    ranks.barrier().synchronize()
    print("before", world.rank, world.local_rank, world.local_size)  # not flushed

    def fail():
        if sys.argv[1] == "data":
            raise DataError("corpus.bin is empty; give another file")
        raise ValueError("planted")

    if world.rank == 1 and sys.argv[1] == "thread":
        threading.Thread(target=fail).start()
        time.sleep(60)
    if world.rank == 1 and sys.argv[1] == "exit":
        sys.exit(3)
    if world.rank == 1:
        fail()
    ranks.allreduce(np.zeros(1000, np.float32)).synchronize()
"""


@pytest.mark.parametrize("where", ["main", "thread"])
def test_one_rank_s_exception_ends_all_and_is_seen(tmp_path: Path, where: str) -> None:
    finished = mpirun(2, write(tmp_path / "dies.py", DIES), where, env={"PYTHONPATH": str(ROOT)}, timeout_s=30)
    assert finished.returncode != 0
    assert finished.seconds < 10
    assert finished.output.count("ValueError: planted") == 1, finished.output
    assert "uncaught exception on rank 1 of 2:\nTraceback" in finished.output
    assert ", in fail" in finished.output
    assert "before 1 1 2" in finished.output


def test_an_error_on_purpose_is_one_line(tmp_path: Path) -> None:
    finished = mpirun(2, write(tmp_path / "dies.py", DIES), "data", env={"PYTHONPATH": str(ROOT)}, timeout_s=30)
    assert finished.returncode != 0
    assert finished.seconds < 10
    assert "error on rank 1 of 2: corpus.bin is empty; give another file\n" in finished.output
    assert "Traceback" not in finished.output


def test_a_rank_that_ends_early_ends_all(tmp_path: Path) -> None:
    finished = mpirun(2, write(tmp_path / "dies.py", DIES), "exit", env={"PYTHONPATH": str(ROOT)}, timeout_s=30)
    assert finished.returncode != 0
    assert finished.seconds < 10
    assert (
        "error on rank 0 of 2: #1 allreduce(sum) of float32[1000] (4000 bytes): rank 1 ended without" in finished.output
    )


def test_mpirun_ends_a_launch_that_hangs(tmp_path: Path) -> None:
    program = write(tmp_path / "hangs.py", "import time; print('up', flush=True); time.sleep(600)")
    with pytest.raises(TimeoutError, match=r"was ended after 3 s:\n.*up"):
        mpirun(2, program, timeout_s=3)
