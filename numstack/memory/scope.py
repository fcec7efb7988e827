"""Scopes, and in each a pool of free blocks for every stream.

A free block belongs to the pool of the stream that last used it. That stream may have it again at once: what it does
next comes after what it did before. Another stream may have it

- once an event of the first stream is done that was recorded after the block was freed (the block is then *idle*), or
- at once, if it is made to wait for such an event. That costs overlap, so it is done only when memory is short.

The event is recorded when another stream first asks, not at each free: later than needed, but a program that
keeps each scope to one stream never pays for an event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from numstack.errors import ConfigError
from numstack.memory.block import Block, FreeList, State

if TYPE_CHECKING:
    from numstack.device import Event, Stream
    from numstack.memory.region import Region

# What requests are for. Memory freed in one scope serves only that scope, until a whole region of it is free.
SCOPES = ("persistent", "forward", "backward", "workspace", "comm")
DEFAULT_SCOPE = "forward"


def check_scope(name: str) -> None:
    """Raise unless ``name`` is a scope.

    Raises
    ------
    ConfigError
    """
    if name not in SCOPES:
        raise ConfigError(f"scope={name!r} is no memory scope; use one of {', '.join(SCOPES)}")


class Pool:
    """Free blocks of one scope that were last used on one stream.

    Blocks just freed stay whole, by size, because the next step asks for the same sizes again: such a request costs a
    dictionary look-up. Only when that fails are they joined with their neighbours, and the best fit is searched.
    """

    __slots__ = ("_fence", "_idle_stamp", "_n_freed", "free", "recent", "scope", "stream")

    def __init__(self, scope: Scope, stream: Stream) -> None:
        self.scope = scope
        self.stream = stream
        self.recent: dict[int, list[Block]] = {}
        self.free = FreeList()
        self._n_freed = 0
        self._idle_stamp = 0
        self._fence: tuple[Event, int] | None = None

    def stamp(self, block: Block) -> None:
        """Note that the last use of a block by this pool's stream is before now."""
        self._n_freed += 1
        block.stamp = self._n_freed

    def put(self, block: Block) -> None:
        """Take in a stamped block, for the stream of this pool to use again."""
        block.state = State.RECENT
        same_size = self.recent.get(block.nbytes)
        if same_size is None:
            self.recent[block.nbytes] = [block]
        else:
            same_size.append(block)

    def take(self, nbytes: int) -> Block | None:
        """Take out the best-fitting block; it may be larger than ``nbytes``."""
        self.join()
        return self.free.take_best(nbytes)

    def take_idle(self, nbytes: int) -> Block | None:
        """Take out the best-fitting block that any stream may use at once."""
        self.join()
        self._advance()
        return self.free.take_best(nbytes, self._idle_stamp)

    def join(self) -> None:
        """Join recently freed blocks with their free neighbours."""
        if not self.recent:
            return
        recent, self.recent = self.recent, {}
        for blocks in recent.values():
            for block in blocks:
                self.add(block)

    def add(self, block: Block) -> None:
        """Put a block into the free list, joined with its free neighbours."""
        block.pool = self
        block.state = State.FREE
        previous, following = block.previous, block.next
        if following is not None and self._can_join(following):
            self._take_out(following, block)
            block.absorb_next()
        if previous is not None and self._can_join(previous):
            self._take_out(previous, block)
            previous.pool, previous.stamp = self, block.stamp
            previous.absorb_next()
            block = previous
        self.free.add(block)

    def _can_join(self, neighbour: Block) -> bool:
        return neighbour.state is State.FREE and (neighbour.pool is self or neighbour.pool.is_idle(neighbour))

    def _take_out(self, neighbour: Block, block: Block) -> None:
        neighbour.pool.free.remove(neighbour)
        if neighbour.pool is self:
            block.stamp = max(block.stamp, neighbour.stamp)

    # what other streams may have

    def is_idle(self, block: Block) -> bool:
        """Whether all works that used this free block of the pool are known to have finished."""
        return block.stamp <= self._idle_stamp

    def fence(self) -> tuple[Event, int]:
        """An event after the last use of every block in the pool, and the stamp to confirm once it is done."""
        return self.stream.record(), self._n_freed

    def confirm(self, stamp: int) -> None:
        """Blocks up to this stamp are idle: the event of their fence is done."""
        self._idle_stamp = max(self._idle_stamp, stamp)

    def _advance(self) -> None:
        """Record a fence if blocks were freed since the last, and see whether it is done; never blocks."""
        if self._fence is None and self._idle_stamp < self._n_freed:
            self._fence = self.fence()
        if self._fence is not None and self._fence[0].done():
            self.confirm(self._fence[1])
            self._fence = None

    def adopt(self, other: Pool) -> None:
        """Take all blocks of another stream's pool; this stream waits for the other to be done with them."""
        other.join()
        if not other.free:
            return
        self.stream.wait(other.stream.record())
        for block in other.free.take_all():
            block.pool = self
            self.stamp(block)
            self.put(block)


class Scope:
    """What one use of memory holds: its regions, its pools of free blocks, its counters.

    Attributes
    ----------
    live, waiting, peak : int
        Bytes in blocks that arrays refer to; in blocks that wait for another stream; most ``live`` so far.
    """

    __slots__ = ("live", "name", "peak", "pools", "regions", "waiting")

    def __init__(self, name: str) -> None:
        self.name = name
        self.regions: list[Region] = []
        self.pools: dict[Stream, Pool] = {}
        self.live = 0
        self.waiting = 0
        self.peak = 0

    @property
    def reserved(self) -> int:
        """Bytes of all its regions."""
        return sum(region.nbytes for region in self.regions)

    def pool(self, stream: Stream) -> Pool:
        """The pool of a stream."""
        pool = self.pools.get(stream)
        if pool is None:
            pool = self.pools[stream] = Pool(self, stream)
        return pool

    def others(self, pool: Pool) -> list[Pool]:
        """All pools but one."""
        return [other for other in self.pools.values() if other is not pool]
