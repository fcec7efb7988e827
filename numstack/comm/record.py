"""The flight recorder: the last collectives of this rank, for the moment when one of them fails."""

from __future__ import annotations

import os
import tempfile
import time
from collections import deque

from numstack.comm.header import Header

CAPACITY = 64
SHOWN = 5


class FlightRecorder:
    """What this rank called last, and how far each call came.

    Calls begin in the communicator's thread alone; any thread may mark or read them. ``NUMSTACK_COMM_RECORD_DIR`` is
    where a failure is written to, by default the system's directory for temporary files.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._calls: deque[Call] = deque(maxlen=CAPACITY)

    def begin(self, header: Header) -> None:
        """A call starts; it waits for the other ranks first."""
        self._calls.append(Call(header))

    @property
    def present(self) -> Call:
        """The call that began last."""
        return self._calls[-1]

    def reached(self, state: str) -> None:
        """The present call came to ``state``."""
        self.present.reached(state)

    def lines(self) -> list[str]:
        """One line a call, the oldest first."""
        return [str(call) for call in list(self._calls)]

    def dump(self, reason: str) -> str:
        """Write everything to a file; return where it is, or the last calls themselves if it cannot be written."""
        directory = os.environ.get("NUMSTACK_COMM_RECORD_DIR") or tempfile.gettempdir()
        path = os.path.join(directory, f"numstack-collectives-rank{self._rank}-{os.getpid()}.txt")
        lines = self.lines()
        try:
            with open(path, "w") as file:
                file.write("\n".join([reason, "", *lines, ""]))
        except OSError as error:
            return f"last calls, not written to {path} ({error.strerror}): " + "; ".join(lines[-SHOWN:])
        return f"last calls in {path}"


class Call:
    """One call, the state that it came to and how long that took."""

    __slots__ = ("_began", "_clock", "_seconds", "header", "state")

    def __init__(self, header: Header) -> None:
        self.header = header
        self.state = "waiting for the other ranks"
        self._seconds = 0.0
        self._began = time.perf_counter()
        self._clock = time.time()

    def reached(self, state: str) -> None:
        """It came to ``state`` just now."""
        self.state, self._seconds = state, time.perf_counter() - self._began

    def __str__(self) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(self._clock)) + f"{self._clock % 1:.3f}"[1:]
        return f"{clock} {self.header.title} {self.state} after {self._seconds * 1e3:.2f} ms"
