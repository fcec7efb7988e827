"""What memory is used for, in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from numstack.memory.block import State
from numstack.memory.sizes import format_size

if TYPE_CHECKING:
    from numstack.memory.scope import Scope


@dataclass(frozen=True, slots=True)
class ScopeStatistics:
    """Memory of one scope, or of all; sizes in bytes.

    Attributes
    ----------
    live : int
        In blocks that arrays refer to; a block is a multiple of 512 bytes.
    waiting : int
        In blocks that nothing refers to any more, but that another stream may still be using (``record_use``).
    reserved : int
        In regions: ``live + waiting + free``.
    peak : int
        Most ``live`` since the start or ``reset_peak``.
    largest_free : int
        Most that one request could get without a new region.
    fragmentation : float
        The share of free bytes outside the longest free stretch of their region: 0 when each region's free bytes lie
        together, towards 1 when they are scattered; 0 without free bytes.
    n_blocks, n_regions : int
        Live blocks; regions.
    """

    live: int
    waiting: int
    reserved: int
    peak: int
    largest_free: int
    fragmentation: float
    n_blocks: int
    n_regions: int

    @property
    def free(self) -> int:
        """Bytes of regions that are in no one's use."""
        return self.reserved - self.live - self.waiting


@dataclass(frozen=True, slots=True)
class Statistics(ScopeStatistics):
    """Memory of a device; ``by_scope`` has the same figures for each scope in use. Printing it gives a table.

    Attributes
    ----------
    limit : int or None
        Most bytes that may be reserved, if there is a limit.
    by_scope : mapping of str to ScopeStatistics
    """

    limit: int | None
    by_scope: Mapping[str, ScopeStatistics]

    def __str__(self) -> str:
        lines = [f"{'scope':<12}{'live':>12}{'free':>12}{'reserved':>12}{'peak':>12}{'fragmented':>12}{'blocks':>8}"]
        for name, row in [*self.by_scope.items(), ("all", self)]:
            sizes = "".join(f"{format_size(n):>12}" for n in (row.live, row.free, row.reserved, row.peak))
            lines.append(f"{name:<12}{sizes}{row.fragmentation:>12.0%}{row.n_blocks:>8}")
        if self.limit is not None:
            lines.append(f"limit: {format_size(self.limit)}")
        return "\n".join(lines)


def gather(scopes: Mapping[str, Scope], peak: int, limit: int | None) -> Statistics:
    """Statistics of these scopes; ``peak`` is that of their sum, which is not the sum of their peaks."""
    used = {name: scope for name, scope in scopes.items() if scope.regions or scope.peak}
    figures = {name: _figures(scope) for name, scope in used.items()}
    rows = [row for row, _ in figures.values()]
    return Statistics(
        live=sum(row.live for row in rows),
        waiting=sum(row.waiting for row in rows),
        reserved=sum(row.reserved for row in rows),
        peak=peak,
        largest_free=max((row.largest_free for row in rows), default=0),
        fragmentation=_share(sum(scattered for _, scattered in figures.values()), sum(row.free for row in rows)),
        n_blocks=sum(row.n_blocks for row in rows),
        n_regions=sum(row.n_regions for row in rows),
        limit=limit,
        by_scope={name: row for name, (row, _) in figures.items()},
    )


def _figures(scope: Scope) -> tuple[ScopeStatistics, int]:
    """The row of a scope, and how many of its free bytes are scattered."""
    longest = [max(region.free_runs(), default=0) for region in scope.regions]
    reserved = scope.reserved
    free = reserved - scope.live - scope.waiting
    scattered = free - sum(longest)
    row = ScopeStatistics(
        live=scope.live,
        waiting=scope.waiting,
        reserved=reserved,
        peak=scope.peak,
        largest_free=max(longest, default=0),
        fragmentation=_share(scattered, free),
        n_blocks=sum(block.state is State.LIVE for region in scope.regions for block in region.blocks()),
        n_regions=len(scope.regions),
    )
    return row, scattered


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
