"""What a rank says of a collective before any data moves, and what the ranks' sayings amount to."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass

_LAYOUT = struct.Struct("<16s8s12siqqq")
NBYTES = _LAYOUT.size
assert NBYTES == 64

# In place of a rank, where it cannot be known which one.
ANYONE = -1


@dataclass(frozen=True, slots=True)
class Header:
    """One call, in 64 bytes on the wire.

    Attributes
    ----------
    operation : str
        Such as ``allreduce``; at most 16 bytes.
    op : str
        The reduction, at most 8 bytes; empty for an operation without one.
    dtype : str
        Of the elements, at most 12 bytes; empty for a barrier.
    count : int
        Elements: the whole array, or for ``allgather`` and ``reduce_scatter`` the part of one rank.
    nbytes : int
    root : int
        Of a broadcast; -1 otherwise.
    sequence : int
        The how-manieth collective of the communicator this is, from 0.
    """

    operation: str
    op: str = ""
    dtype: str = ""
    count: int = 0
    nbytes: int = 0
    root: int = -1
    sequence: int = -1

    def numbered(self, sequence: int) -> Header:
        """The same call as number ``sequence``."""
        # dataclasses.replace does the same, at three times the cost; this is done for every call.
        return Header(self.operation, self.op, self.dtype, self.count, self.nbytes, self.root, sequence)

    def pack(self) -> bytes:
        """The 64 bytes that go to the other ranks."""
        texts = (text.encode() for text in (self.operation, self.op, self.dtype))
        return _LAYOUT.pack(*texts, self.root, self.sequence, self.count, self.nbytes)

    @classmethod
    def unpack(cls, data: bytes) -> Header:
        """The header that ``pack`` made ``data`` of."""
        operation, op, dtype, root, sequence, count, nbytes = _LAYOUT.unpack(data)
        operation, op, dtype = (text.rstrip(b"\0").decode() for text in (operation, op, dtype))
        return cls(operation, op, dtype, count, nbytes, root, sequence)

    @property
    def is_collective(self) -> bool:
        """Whether all ranks make this call: it is no message between two."""
        return self.operation not in ("send", "recv", "group")

    @property
    def title(self) -> str:
        """The call with its number, as in ``#12 allreduce(sum) of float32[1000] (4000 bytes)``, if it has one."""
        return f"#{self.sequence} {self}" if self.sequence >= 0 else str(self)

    def __str__(self) -> str:
        options = ", ".join(([self.op] if self.op else []) + ([f"root {self.root}"] if self.root >= 0 else []))
        what = f"{self.operation}({options})"
        return f"{what} of {self.dtype}[{self.count}] ({self.nbytes} bytes)" if self.dtype else what


def disagreement(headers: Mapping[int, Header]) -> str | None:
    """What differs between the ranks' headers, as one sentence that is the same on all of them; ``None`` if nothing."""
    callers: dict[Header, list[int]] = {}
    for rank in sorted(headers):
        callers.setdefault(headers[rank], []).append(rank)
    if len(callers) == 1:
        return None
    first = headers[min(headers)]
    several_numbers = len({header.sequence for header in callers}) > 1
    sayings = ", but ".join(
        f"{name_ranks(who)} called {header}{f' as #{header.sequence}' if several_numbers else ''}"
        for header, who in callers.items()
    )
    return (
        f"collective #{first.sequence}: {sayings}; all ranks must call the same operations in the same order, with the "
        "same size, dtype and options"
    )


def name_ranks(ranks: list[int]) -> str:
    """``rank 3``, or ``ranks 0, 1, 2``; ``another rank`` for ``ANYONE``."""
    if ranks == [ANYONE]:
        return "another rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
