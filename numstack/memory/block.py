"""Blocks: the pieces a region is cut into, and the list that finds the best-fitting free one."""

from __future__ import annotations

from bisect import bisect_left, insort
from enum import Enum
from types import CodeType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numstack.device import Stream
    from numstack.memory.region import Region
    from numstack.memory.scope import Pool

# Where a request came from: code object and instruction. The line number is worked out only when somebody asks.
Where = tuple[CodeType, int]


class State(Enum):
    """What a block is doing."""

    LIVE = "live"  # arrays refer to it
    WAITING = "waiting"  # nothing refers to it, but another stream may still be using it
    RECENT = "recent"  # free, kept whole for the next request of its size
    FREE = "free"  # free, joined with its neighbours, in its pool's free list


class Block:
    """A piece of a region, linked to its neighbours by address.

    Attributes
    ----------
    address, nbytes : int
        Multiples of the block granule.
    region : Region
    previous, next : Block or None
        The neighbours in the region.
    pool : Pool
        The scope it belongs to, and the stream it was last allocated for.
    state : State
    stamp : int
        Of a free block: when it was freed, counted in frees of its pool.
    users : set of Stream or None
        Other streams that use a live block (``record_use``).
    where : Where or None
        Of a live block: who allocated it.
    """

    __slots__ = ("address", "nbytes", "next", "pool", "previous", "region", "stamp", "state", "users", "where")

    def __init__(self, region: Region, pool: Pool, address: int, nbytes: int) -> None:
        self.region = region
        self.pool = pool
        self.address = address
        self.nbytes = nbytes
        self.previous: Block | None = None
        self.next: Block | None = None
        self.state = State.FREE
        self.stamp = 0
        self.users: set[Stream] | None = None
        self.where: Where | None = None

    def split(self, nbytes: int) -> Block:
        """Keep the first ``nbytes`` and return a new block of the same pool and stamp that holds the rest."""
        rest = Block(self.region, self.pool, self.address + nbytes, self.nbytes - nbytes)
        rest.stamp = self.stamp
        rest.previous, rest.next = self, self.next
        if self.next is not None:
            self.next.previous = rest
        self.next = rest
        self.nbytes = nbytes
        return rest

    def absorb_next(self) -> None:
        """Join with the next block, which ceases to exist; the caller keeps stamps and lists right."""
        gone = self.next
        assert gone is not None
        self.nbytes += gone.nbytes
        self.next = gone.next
        if gone.next is not None:
            gone.next.previous = self


class FreeList:
    """Free blocks in order of size, then address."""

    __slots__ = ("_sorted",)

    def __init__(self) -> None:
        self._sorted: list[tuple[int, int, Block]] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, block: Block) -> None:
        """Put in a block; addresses are unique, so that blocks themselves are never compared."""
        insort(self._sorted, (block.nbytes, block.address, block))

    def remove(self, block: Block) -> None:
        """Take out this block, whose size must not have changed since it was put in."""
        del self._sorted[bisect_left(self._sorted, (block.nbytes, block.address))]

    def take_best(self, nbytes: int, newest: int | None = None) -> Block | None:
        """Take out the smallest block of at least ``nbytes``; of those, the one at the lowest address.

        With ``newest``, only blocks whose stamp is at most that count.
        """
        blocks = self._sorted
        for i in range(bisect_left(blocks, (nbytes,)), len(blocks)):
            block = blocks[i][2]
            if newest is None or block.stamp <= newest:
                del blocks[i]
                return block
        return None

    def take_all(self) -> list[Block]:
        """Empty the list."""
        blocks = [entry[2] for entry in self._sorted]
        self._sorted.clear()
        return blocks
