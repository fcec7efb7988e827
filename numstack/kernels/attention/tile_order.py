"""Which tile of queries a block takes next, so that blocks end together and the L2 cache serves them.

A block stays on its multiprocessor and takes tiles of queries in rounds. Tiles of one head read the same keys and
values, so heads are worked on in groups whose keys and values fit the L2 cache together; within a group the tiles that
see the most keys come first. Rounds go forth and back over the blocks (block b of n takes tiles b, 2 n - 1 - b, 2 n + b
...), so that who had the longest tile of a round has the shortest of the next. How many heads make a group is searched
for on the host, for the least work of the block that has most: a wrong number costs up to a fifth.
"""

import functools

import numpy as np
from numba import cuda, uint32

from numstack.kernels.attention.hopper import device
from numstack.kernels.launch import ceil_div

L2_BYTES = 32 << 20  # what stays in an L2 cache of 50 MB beside what passes through
TILE_COST = 1  # of changing to other queries, in tiles of keys


@device
def position(tile, heads, heads_of_batch, q_tiles, heads_of_group):
    """Tile of queries, batch and head of the tile with this number."""
    of_group = uint32(heads_of_group * q_tiles)
    number = uint32(tile // of_group)
    rest = uint32(tile - number * of_group)
    first = uint32(number * heads_of_group)
    size = uint32(min(heads_of_group, uint32(heads - first)))
    behind = uint32(rest // size)
    head = uint32(first + rest - behind * size)
    batch = uint32(head // heads_of_batch)
    return uint32(q_tiles - uint32(1) - behind), batch, uint32(head - batch * heads_of_batch)


@device
def first_step():
    """From this block's first tile to its second; :func:`next_step` gives the steps that follow."""
    return uint32(uint32(2) * (uint32(cuda.gridDim.x) - uint32(cuda.blockIdx.x)) - uint32(1))


@device
def next_step(step):
    """Two steps together are two rounds."""
    return uint32(uint32(2) * uint32(cuda.gridDim.x) - step)


@functools.lru_cache(maxsize=256)
def choose_heads_of_group(
    heads: int, queries: int, keys: int, width: int, tile_queries: int, tile_keys: int, causal: bool, blocks: int
) -> int:
    """How many heads to work on together, for ``blocks`` blocks.

    Parameters
    ----------
    heads : int
        Of all batches.
    queries, keys, width : int
        Of a head.
    tile_queries, tile_keys : int
    causal : bool
    blocks : int
    """
    q_tiles = ceil_div(queries, tile_queries)
    seen = np.minimum(keys, tile_queries * np.arange(q_tiles, 0, -1)) if causal else np.full(q_tiles, keys)
    work_of_tile = TILE_COST - (-seen // tile_keys)
    most = min(heads, max(1, L2_BYTES // (4 * keys * width)))

    def slowest(group: int) -> int:
        whole, rest = divmod(heads, group)
        work = np.concatenate([np.tile(np.repeat(work_of_tile, group), whole), np.repeat(work_of_tile, rest)])
        rounds = np.pad(work, (0, -len(work) % blocks)).reshape(-1, blocks)
        rounds[1::2] = rounds[1::2, ::-1].copy()
        return int(rounds.sum(axis=0).max())

    return min(range(most, most // 3, -1), key=slowest)
