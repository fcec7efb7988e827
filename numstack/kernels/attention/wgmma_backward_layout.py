"""How attention's backward pass for Hopper is cut: tiles, what lies where in shared memory, and the order of work."""

import functools
from typing import Any, NamedTuple

from numba import int32, uint32

from numstack.device.ptx import integers, mbarrier
from numstack.kernels.attention.hopper import ROWS, SWIZZLED, device

THREADS = 384
KEYS = 2 * ROWS  # of a block: 64 for each consumer
STAGES = 2  # query tiles on their way or in use; also of dS, which one consumer may still read when the other writes
ROW_BYTES = SWIZZLED * 2
DQ_REGISTERS = ROWS * 64 // 128  # of dq each consumer makes 64 x 64
DQ_HALF = ROWS * 64

# mbarriers, 8 bytes each, from the first on; those with a stage are two.
K_FULL, V_FULL, KV_EMPTY = 0, 8, 16
ITEM_FULL, ITEM_EMPTY = 24, 40
Q_FULL, Q_EMPTY, DO_FULL, DO_EMPTY = 56, 72, 88, 104
DQ_FULL, DQ_EMPTY = 120, 136
BARRIER_BYTES = 152


class Tiles(NamedTuple):
    """How the kernel of a width is cut, and where things lie in shared memory.

    Attributes
    ----------
    width : int
        D, 64 or 128.
    queries : int
        Of a tile.
    k, v, q, dout, ds, dq, rows, barriers : int
        Bytes from the start: tiles of K and V, a ring of Q and one of dO, two of dS', one of dQ as float32, the ring of
        log-sum-exp and delta, the mbarriers.
    nbytes : int
        In all, with what it takes to start at a multiple of 1024.
    """

    width: int
    queries: int
    k: int
    v: int
    q: int
    dout: int
    ds: int
    dq: int
    rows: int
    barriers: int
    nbytes: int

    @property
    def kv_bytes(self) -> int:
        return KEYS * self.width * 2

    @property
    def q_bytes(self) -> int:
        return self.queries * self.width * 2

    @property
    def ds_bytes(self) -> int:
        return KEYS * self.queries * 2

    @property
    def rows_bytes(self) -> int:
        """Of log-sum-exp and delta of a tile."""
        return 2 * self.queries * 4


@functools.cache
def tiles_of(width: int) -> Tiles:
    """As many queries as keep a consumer's accumulators in 240 registers a thread."""
    queries = 2 * ROWS if width == 64 else ROWS
    sizes = [KEYS * width * 2] * 2 + [STAGES * queries * width * 2] * 2
    sizes += [STAGES * KEYS * queries * 2, 2 * DQ_HALF * 4, STAGES * 2 * queries * 4, BARRIER_BYTES, 1024]
    offsets = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    k, v, q, dout, ds, dq, rows, barriers, _, nbytes = offsets
    return Tiles(width, queries, k, v, q, dout, ds, dq, rows, barriers, nbytes)


class Walk(NamedTuple):
    """Device functions that say which item is next, and what its tiles are; see :func:`make_walk`."""

    next_item: Any
    block_of_keys: Any
    first_tile: Any
    turn: Any


@functools.cache
def make_walk(queries: int, causal: bool) -> Walk:
    """The order of work, in which all roles of all blocks agree.

    An item is a block of keys of a head. Each tile of dq is summed by its blocks of keys in a fixed order, so that
    every run gives the same bits; a block that comes to a tile before its turn has to wait.

    Causal: items with few tiles come first, and each walks from the diagonal on. Items of a head that start together
    then come to a tile of dq one after the other, the block of the last keys first, one step apart: nobody waits. (From
    the last tile to the diagonal, all would be at the same tile at the same time.) Otherwise all items of a head have
    the same tiles; each follows the one drawn before it.

    An item waits only for items that were drawn before it, so there is no deadlock.

    ``next_item(items, count, barriers)`` waits for the item number ``count`` of this block of threads.
    ``block_of_keys(item, n_blocks)``; ``first_tile(block)``; ``turn(tile, block, n_blocks)``, from 0.
    """

    @device
    def next_item(items, count, barriers):
        slot = count & uint32(1)
        mbarrier.wait(uint32(barriers + uint32(ITEM_FULL) + slot * uint32(8)), (count >> uint32(1)) & uint32(1))
        return items[slot]

    @device
    def block_of_keys(item, n_blocks):
        block = integers.remainder(item, n_blocks)
        return int32(n_blocks - int32(1) - block) if causal else block

    @device
    def first_tile(block):
        return int32(block * int32(KEYS // queries)) if causal else int32(0)

    @device
    def turn(tile, block, n_blocks):
        if causal:
            last = integers.divide(tile, int32(KEYS // queries))
            return int32(min(last, int32(n_blocks - int32(1))) - block)
        return block

    return Walk(next_item, block_of_keys, first_tile, turn)
