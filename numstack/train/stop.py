"""Signals that end a run early, after it has saved.

Ctrl-C (SIGINT), SIGTERM (batch systems), SIGUSR1 (Slurm's ``--signal``) and SIGUSR2 (``numstack train``) ask for the
end. The loop looks at the request after each step, agrees on it with the other ranks, saves and exits. The same signal
a second time kills at once.

Open MPI's mpirun answers Ctrl-C and SIGTERM by sending its ranks SIGCONT, SIGTERM 250 ms later and SIGKILL another 250
ms later, which can't be configured. So under mpirun SIGCONT already asks for a checkpoint: half a second is enough for
a small model on a local disk. For a larger one start with ``numstack train``, which lets the ranks finish.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

from numstack.train.console import launched_by_mpirun

SAVE = 1
END = 128
END_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


class Stopped(SystemExit):
    """The run was asked to end and has saved; exits with 128 + the signal's number, as shells do."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(END + signal_number)
        self.signal_number = signal_number


class StopRequest:
    """Remembers the signals that arrived. A context manager: handlers are put back at the end.

    Attributes
    ----------
    level : int
        0: nothing; ``SAVE``: save soon; ``END`` + n: signal n asks for the end. Ranks agree on the largest.
    """

    def __init__(self) -> None:
        self.level = 0
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        signals = [*END_SIGNALS, signal.SIGCONT] if launched_by_mpirun() else END_SIGNALS
        self._previous = {number: signal.signal(number, self._receive) for number in signals}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def saved(self) -> None:
        """A request to save has been met; one to end stays."""
        if self.level == SAVE:
            self.level = 0

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGCONT:
            self.level = max(self.level, SAVE)
        else:
            self.level = END + number
            signal.signal(number, signal.SIG_DFL)
