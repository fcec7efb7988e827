"""What all ranks have called, compared as it becomes known: behind the data, so that nobody waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from numstack.comm import header as headers
from numstack.comm.header import Header, disagreement

# A call on the wire: whether its ranks agree on it before it moves data, and its header.
ASKED, UNASKED = b"?", b"!"
NBYTES = 1 + headers.NBYTES


class CallLog:
    """The collectives of all ranks of a communicator, in order; calls that all have made alike are forgotten.

    A call may be one that ranks agree on before it moves data. If all of them ask, a difference is for them to find,
    and none here; if one asks while another goes ahead, it is.

    ``called`` is for the thread that calls, everything else for the one that compares.

    Parameters
    ----------
    rank, size : int
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._own: deque[bytes] = deque()
        self._first = 0  # number of the call that _own starts with
        self._n_told = 0
        self._others = {other: _Heard() for other in range(size) if other != rank}

    def called(self, call: Header, *, asked: bool) -> None:
        """This rank makes its next call; ``asked``: not before all agree."""
        self._own.append((ASKED if asked else UNASKED) + call.pack())

    @property
    def n_called(self) -> int:
        """Calls of this rank so far."""
        return self._first + len(self._own)

    def take_new(self) -> bytes:
        """This rank's calls since the last time: what the others have to hear."""
        start, self._n_told = self._n_told, self.n_called
        return b"".join(self._own[number - self._first] for number in range(start, self._n_told))

    def heard(self, rank: int, calls: bytes) -> None:
        """Another rank's next calls, as its ``take_new`` gave them."""
        self._others[rank].waiting.extend(calls[i : i + NBYTES] for i in range(0, len(calls), NBYTES))

    def n_heard(self, rank: int) -> int:
        """Calls of another rank, as far as heard."""
        return self._others[rank].n_heard

    def last_heard(self, rank: int) -> Header | None:
        """The last of them."""
        last = self._others[rank].last
        return _header(last) if last is not None else None

    def compare(self) -> str | None:
        """What differs between the calls that are known by now, as one sentence; ``None`` if nothing."""
        for other in self._others.values():
            while other.waiting and other.n_compared < self.n_called:
                if not _alike(other.waiting[0], self._own[other.n_compared - self._first]):
                    return disagreement(self._known(other.n_compared)) or UNLIKE_CHECKS
                other.compared()
        settled = min([self._n_told, *(other.n_compared for other in self._others.values())])
        while self._first < settled:
            self._own.popleft()
            self._first += 1
        return None

    def _known(self, number: int) -> Mapping[int, Header]:
        """What each rank is known to have called as its ``number``-th."""
        own = self._own[number - self._first]
        known = {self._rank: own}
        for rank, other in self._others.items():
            if number < other.n_compared:
                known[rank] = own
            elif number < other.n_heard:
                known[rank] = other.waiting[number - other.n_compared]
        return {rank: _header(call) for rank, call in known.items()}


UNLIKE_CHECKS = "ranks do not check the same calls; give NUMSTACK_COMM_CHECK one value on all of them"


def _alike(a: bytes, b: bytes) -> bool:
    return a == b or a[:1] == b[:1] == ASKED


def _header(call: bytes) -> Header:
    return Header.unpack(call[1:])


class _Heard:
    """Calls of another rank: those that were compared are gone but for the last, the others wait."""

    def __init__(self) -> None:
        self.n_compared = 0
        self.waiting: deque[bytes] = deque()
        self._last_compared: bytes | None = None

    def compared(self) -> None:
        self._last_compared = self.waiting.popleft()
        self.n_compared += 1

    @property
    def n_heard(self) -> int:
        return self.n_compared + len(self.waiting)

    @property
    def last(self) -> bytes | None:
        return self.waiting[-1] if self.waiting else self._last_compared
