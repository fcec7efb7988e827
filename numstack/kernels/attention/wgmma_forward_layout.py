"""How attention's forward kernel for Hopper is cut, and where things lie in its shared memory."""

from typing import NamedTuple

from numstack.kernels.attention.hopper import ROWS


class Tiles(NamedTuple):
    """How a kernel is cut.

    Attributes
    ----------
    width : int
        D, padded.
    consumers : int
        Warpgroups with 64 queries each.
    keys : int
        Of a tile of K and V.
    stages : int
        Tiles of K and of V that are loaded ahead; at least as many as consumers, so that those that skip tiles which
        others need find them there.
    turns : bool
        Whether two consumers start their products in turns, so that one computes exponentials while the other
        multiplies; all consumers must need the same tiles of keys.
    """

    width: int
    consumers: int
    keys: int
    stages: int
    turns: bool = False

    @property
    def queries(self) -> int:
        return self.consumers * ROWS

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a producer's and of a consumer's thread; together as many as the block has at entry."""
        return {2: (24, 240), 3: (32, 160), 4: (24, 112)}[self.consumers]


# The fastest found on an H200, by padded width. For 64, many warps that hide one another's waits count for more than
# large tiles: causal, T = 1024, two or three consumers with tiles of 128 keys reached 0.8 to 0.9 of this. Turns changed
# little there, and computing each fourth or eighth exponential by a polynomial made it slower. For 128, turns gave 5%.
TILES = {64: Tiles(64, 4, 64, 4), 128: Tiles(128, 2, 128, 2, turns=True)}


class Layout(NamedTuple):
    """Where things lie in shared memory, in bytes from a multiple of 1024."""

    q: int
    out: int
    k: int
    v: int
    q_full: int
    q_empty: int
    k_full: int
    k_empty: int
    v_full: int
    v_empty: int
    end: int


Q_STAGES = 2  # the next queries are loaded while these are worked on


def layout(tiles: Tiles) -> Layout:
    """Tiles in the order of their use, then barriers."""
    q, kv = tiles.queries * tiles.width * 2, tiles.keys * tiles.width * 2
    sizes = [Q_STAGES * q, q, tiles.stages * kv, tiles.stages * kv]
    sizes += [8 * Q_STAGES] * 2 + [8 * tiles.stages] * 4
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return Layout(*starts)
