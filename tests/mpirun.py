"""Start ranks for a test, and be sure that they end."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# As root Open MPI wants to be told twice; ranks that wait should not take the core from those that compute.
ENVIRONMENT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",
    "NUMSTACK_DEVICE": os.environ.get("NUMSTACK_DEVICE", "cpu"),
    "NUMSTACK_THREADS": "1",
    # On a GPU machine a test's ranks share the one GPU that every such machine has.
    "NUMSTACK_RANKS_PER_GPU": os.environ.get("NUMSTACK_RANKS_PER_GPU", "4"),
}


@dataclass(frozen=True)
class Finished:
    """How a launch ended: standard output and error together, in the order in which they came."""

    returncode: int
    output: str
    seconds: float

    def check(self, name: str, names: Sequence[str]) -> None:
        """Fail unless the launch, which runs the checks ``names`` in order, printed ``ok NAME``."""
        passed = [line[3:] for line in self.output.splitlines() if line.startswith("ok ")]
        if name not in passed:
            failed = names[len(passed)] if len(passed) < len(names) else None
            assert name != failed, self.output
            pytest.fail(f"not run: {failed} failed before it")


def mpirun(
    n: int,
    *arguments: str,
    timeout_s: float = 60,
    env: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> Finished:
    """Run ``python *arguments`` on ``n`` ranks from the root of the repository; ``options`` are for mpirun itself.

    Raises
    ------
    TimeoutError
        After ``timeout_s``, with the output so far; by then every process of the launch is gone.
    """
    command = [_launcher(), "-n", str(n), "--oversubscribe", "--bind-to", "none", *options]
    began = time.monotonic()
    process = subprocess.Popen(
        [*command, sys.executable, *arguments],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,  # so that all its processes can be found
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        end_session(process.pid)
        output, _ = process.communicate()
        raise TimeoutError(f"mpirun -n {n} {' '.join(arguments)} was ended after {timeout_s:g} s:\n{output}") from None
    # Some versions of mpirun give ranks a terminal, on which colours are switched on and off.
    output = re.sub("\x1b\\[[0-9;]*m", "", output).rstrip() + "\n"
    return Finished(process.returncode, output, time.monotonic() - began)


def _launcher() -> str:
    """The environment's mpirun, else the system's."""
    beside = Path(sys.executable).with_name("mpirun")
    return str(beside) if beside.exists() else shutil.which("mpirun") or "mpirun"


def end_session(session: int, patience_s: float = 5) -> None:
    """End all processes of a session: mpirun puts each rank into a process group of its own, so one signal won't do."""
    os.kill(session, signal.SIGTERM)  # mpirun passes it on
    deadline = time.monotonic() + patience_s
    while any(_alive(session)) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in _alive(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _alive(session: int) -> Iterator[int]:
    """Processes of a session that run, from Linux's /proc: ``pid (name) state parent group session ...``."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, of = stat.read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                yield int(stat.parent.name)
