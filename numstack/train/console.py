"""What rank 0 shows: a progress bar on a terminal, else a plain line every few seconds."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

PLAIN_INTERVAL_S = 5.0
_LAUNCHERS = ("prterun", "prted", "mpirun")  # Open MPI's, as the kernel knows them


class ProgressReport:
    """Shows how far a run is.

    Parameters
    ----------
    n_steps : int
        Steps of the whole run.
    step : int
        Steps done before.
    stream : where to; standard output if None
    """

    def __init__(self, *, n_steps: int, step: int = 0, stream: TextIO | None = None) -> None:
        self._n_steps = n_steps
        self._stream = stream or sys.stdout
        self._shown_s = time.monotonic()
        self._first: tuple[int, float] | None = None
        self._bar: Progress | None = None
        if is_terminal(self._stream):
            self._bar = Progress(
                BarColumn(bar_width=30),
                MofNCompleteColumn(),
                TextColumn("{task.description}"),
                console=Console(file=self._stream, force_terminal=True, highlight=False),
                refresh_per_second=4,
                redirect_stdout=False,
                redirect_stderr=False,
            )
            self._task = self._bar.add_task("", total=n_steps, completed=step)
            self._bar.start()

    def update(self, step: int, *, loss: float, tokens_per_s: float) -> None:
        """Show that ``step`` steps are done; ``loss`` is of the last one."""
        figures = f"loss {loss:.4f}  {tokens_per_s:,.0f} tokens/s{self._time_left(step)}"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, description=figures)
        elif time.monotonic() - self._shown_s >= PLAIN_INTERVAL_S:
            self._shown_s = time.monotonic()
            self.say(f"step {step}/{self._n_steps}  {figures}")

    def _time_left(self, step: int) -> str:
        """From the pace since the first step of this process, which may have compiled and so says nothing."""
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
            return ""
        first_step, first_s = self._first
        return f"  {duration((now - first_s) / (step - first_step) * (self._n_steps - step))} left"

    def say(self, line: str) -> None:
        """Print a line; on a terminal it stands above the bar."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, soft_wrap=True)
        else:
            print(line, file=self._stream, flush=True)

    def last_words(self, line: str) -> None:
        """Print a line on standard error, also when mpirun is about to kill this process and forwards nothing any more.

        Then, where it can be opened, the line goes to mpirun's own standard error.
        """
        text = f"{line}\n" if self._bar is None else f"\n{line}\n"  # the cursor is in the bar
        output = _launcher_output(2)
        try:
            if output is not None:
                with output.open("a") as stream:
                    stream.write(text)
                return
        except OSError:
            pass
        sys.stderr.write(text)
        sys.stderr.flush()

    def close(self) -> None:
        """Let the bar stand as it is, and the terminal be as it was."""
        if self._bar is not None:
            self._bar.stop()


def duration(seconds: float) -> str:
    """``1:02`` for 62 seconds, ``1:00:02`` for an hour and two seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def is_terminal(stream: TextIO) -> bool:
    """Whether a person watches ``stream``.

    Open MPI's mpirun gives every rank a pseudo terminal, even when its own output goes to a file: then the launcher's
    output decides.
    """
    if not stream.isatty():
        return False
    output = _launcher_output(1)
    return output is None or os.readlink(output).startswith(("/dev/pts/", "/dev/tty"))


def launched_by_mpirun() -> bool:
    """Whether the parent process is Open MPI's launcher."""
    try:
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip() in _LAUNCHERS
    except OSError:
        return False


def _launcher_output(descriptor: int) -> Path | None:
    """The launcher's standard output (1) or error (2) as a path, if mpirun is the parent and lets us see it."""
    path = Path(f"/proc/{os.getppid()}/fd/{descriptor}")
    return path if launched_by_mpirun() and os.access(path, os.W_OK) else None
