"""How a product is cut: which part of c a block computes at a time, and into how many parts along k.

What counts is the longest path: as many tiles as a multiprocessor gets one after the other, each with its steps of k
and its store; what hangs over the edges of c is work too. The parts of a product that is cut along k are written and
read once more.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from numstack.device import current_device
from numstack.kernels.launch import ceil_div

# Tiles, with how their warps share them, and the rate that they reach where they divide the product, relative to the
# best: measured on an H200.
SHAPES = {
    (192, 256, 2, 4): 1.0,
    (256, 192, 2, 4): 1.0,
    (128, 320, 2, 4): 1.0,
    (256, 128, 4, 2): 0.95,
}
ROWS = 32  # of a strip
WIDEST_BUSY = 160 * 256  # elements of c: of larger tiles there are no registers left for an epilogue
DEEPEST = 4  # stages, of 64 steps of k; if three do not fit, of 32
STORE_STEPS = 1.5  # what storing a tile costs, in steps of k
GATHER_COST = 250  # of moving an element of a part, in multiply-adds
SHORTEST_PART = 8  # steps of k
MOST_PARTS = 32


class Tiles(NamedTuple):
    """A block's tile, and how its warps share it.

    Attributes
    ----------
    m, n, k : int
        The tile of c, and how deep a stage is.
    warps_m, warps_n : int
        Warps along m and along n.
    stages : int
        Of the ring.
    """

    m: int
    n: int
    k: int
    warps_m: int
    warps_n: int
    stages: int

    @property
    def warp_m(self) -> int:
        """Rows of a warp's part of the tile."""
        return self.m // self.warps_m

    @property
    def warp_n(self) -> int:
        """Columns of a warp's part."""
        return self.n // self.warps_n

    @property
    def strip(self) -> int:
        """Columns of a strip: of these, as of strips of ROWS rows, those of all warps take turns.

        So that a strip lies in one panel of an operand, and all warps' first strips, second ones... are as far apart.
        """
        return 32 if self.warp_n % 32 == 0 else 16

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def registers(self) -> tuple[int, int, int]:
        """Of a lane: for fragments of a and of b, and for accumulators."""
        return 8, self.warp_n // 4, self.warp_m * self.warp_n // 32

    @property
    def shared_bytes(self) -> int:
        """The ring, and two mbarriers a stage."""
        return self.stages * (2 * (self.m + self.n) * self.k + 16)


# For rows that are not whole 16 bytes: many small copies take registers.
IN_PIECES = Tiles(128, 64, 32, 4, 2, 3)
# On a CPU the kernel shows that it is right, not that it is fast: small parts compile in less time.
ON_CPU = Tiles(32, 64, 32, 1, 4, 3)


def fitted(m: int, n: int, warps_m: int, warps_n: int) -> Tiles | None:
    """A shape of tiles with as deep a ring as fits shared memory; None if that is none."""
    room = current_device().properties.shared_bytes_per_block
    for k in (64, 32):
        for stages in range(DEEPEST * 64 // k, 2, -1):
            tiles = Tiles(m, n, k, warps_m, warps_n, stages)
            if tiles.shared_bytes <= room:
                return tiles
    return None


def parts_of(steps: int) -> Iterator[int]:
    """Into how many parts so many steps can be cut."""
    yield 1
    yield from range(2, min(MOST_PARTS, steps // SHORTEST_PART) + 1)


@lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, most_parts: int, is_plain: bool) -> tuple[Tiles, int]:
    """The tiles that should be fastest for a product, and how many parts along k; at most so many.

    ``is_plain``: it has no epilogue.
    """
    workers = current_device().properties.multiprocessors
    best, least = (IN_PIECES, 1), float("inf")
    for shape, rate in SHAPES.items():
        tiles = fitted(*shape)
        if tiles is None or (tiles.m * tiles.n > WIDEST_BUSY and not is_plain):
            continue
        n_tiles, steps = ceil_div(m, tiles.m) * ceil_div(n, tiles.n), ceil_div(k, tiles.k)
        for parts in parts_of(steps):
            if parts > most_parts:
                break
            longest = ceil_div(n_tiles * parts, workers) * (ceil_div(steps, parts) + STORE_STEPS * 64 / tiles.k)
            cost = longest * tiles.m * tiles.n * tiles.k / rate
            if parts > 1:
                cost += GATHER_COST * parts * m * n / workers
            if cost < least:
                best, least = (tiles, parts), cost
    return best
