"""Regions: what the device hands out, where it comes from, and the blocks in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from numstack.errors import OutOfMemory
from numstack.memory.block import Block, State
from numstack.memory.sizes import format_size

if TYPE_CHECKING:
    from numstack import device
    from numstack.memory.scope import Pool


class RegionSource(Protocol):
    """Where regions come from. Sources compose: a limit over a device, later a spill to the host over that.

    A ``Device`` is the plainest source.
    """

    def allocate(self, nbytes: int) -> device.Region:
        """Device memory, a multiple of the region granule.

        Raises
        ------
        OutOfMemory
            If there is not enough; the message says why, in one sentence.
        """

    def release(self, region: device.Region) -> None:
        """Take a region back; nothing uses it any more, on any stream."""


class LimitedSource:
    """Passes requests on to another source as long as their sum stays within a limit.

    Attributes
    ----------
    limit : int or None
        Bytes; ``None`` leaves it to the source underneath.
    reserved : int
        Bytes out at present.
    """

    def __init__(self, source: RegionSource, limit: int | None = None) -> None:
        self._source = source
        self.limit = limit
        self.reserved = 0

    def allocate(self, nbytes: int) -> device.Region:
        """A region of the source underneath, if the limit allows it.

        Raises
        ------
        OutOfMemory
            If the limit does not, or the source has none.
        """
        if self.limit is not None and self.reserved + nbytes > self.limit:
            raise OutOfMemory(
                f"the memory limit is {format_size(self.limit)}, {format_size(self.reserved)} are reserved, "
                f"and {format_size(nbytes)} more would be needed"
            )
        region = self._source.allocate(nbytes)
        self.reserved += nbytes
        return region

    def release(self, region: device.Region) -> None:
        """Give a region back to the source underneath."""
        self._source.release(region)
        self.reserved -= region.nbytes


class Region:
    """A region of a scope, cut into blocks.

    Attributes
    ----------
    granted : device.Region
        What the source gave, and gets back.
    first : Block
        At the lowest address; the others hang on it by ``next``.
    """

    __slots__ = ("first", "granted")

    def __init__(self, granted: device.Region, pool: Pool) -> None:
        self.granted = granted
        self.first = Block(self, pool, granted.address, granted.nbytes)

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.granted.nbytes

    def __contains__(self, address: int) -> bool:
        return 0 <= address - self.granted.address < self.granted.nbytes

    def blocks(self) -> Iterator[Block]:
        """All blocks, by ascending address."""
        block: Block | None = self.first
        while block is not None:
            yield block
            block = block.next

    def block_at(self, address: int) -> Block:
        """The block that an address of this region lies in."""
        return next(block for block in self.blocks() if address < block.address + block.nbytes)

    def free_runs(self) -> Iterator[int]:
        """Sizes in bytes of the longest stretches of free blocks."""
        run = 0
        for block in self.blocks():
            if block.state in (State.FREE, State.RECENT):
                run += block.nbytes
            elif run:
                yield run
                run = 0
        if run:
            yield run

    def is_idle(self) -> bool:
        """Whether no array refers to any of it and no stream can still be using it; all its pools must be joined."""
        return all(block.state is State.FREE and block.pool.is_idle(block) for block in self.blocks())
