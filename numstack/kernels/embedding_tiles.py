"""Gradients of an embedding and its positions on Hopper: one pass over dout. See :mod:`numstack.kernels.embedding`.

The positions' gradient adds rows of dout that have the same time, the table's those that have the same token. A tile is
32 texts of a time, ``Size.channels`` channels of each, in a block's shared memory. The copy engine loads it, and its
plan (:mod:`numstack.kernels.embedding_groups.format`) beside it, and two kinds of warps add it up:

1. One thread *loads*: it claims tiles in the order of times, and asks for as many as there is room for.
2. *Adders* add a row of dout that is the first of its token, and from memory the others of that token, to the row of
   the table, in the order of positions: ``deep`` rows of the table at once. Tokens that have more than MANY positions
   come first, each summed by all adders of a block together.
3. *Summers* add up the tile, in order, for the positions.

32 x 1024 evenly spread tokens of 50,304 with 768 channels on an H200, microseconds, and of an equal copy's rate (which
moves by 6% from run to run: nine had 0.88 to 0.94):

================  ==============  ====================
dout              tiles_of_times  looking for tokens
================  ==============  ====================
bfloat16          57.0, 0.93      63.3, 0.83
float32           68.8, 0.93      82.9, 0.77
================  ==============  ====================

Tokens as frequent as words take 60 and 74 (80 and 121). "Looking for tokens" is a kernel of clusters of blocks, each of
which looked through the tokens for those of its own rows; dout passed the L2 cache twice.

What helped: groups made in the forward pass. Made by a kernel before this one, of whose time all but 4 us was hidden,
or by the same kernel first, they cost 60.0 and 73.6 us in all. Warps in whole numbers for each of a multiprocessor's
four schedulers: of 16 warps a thread has 128 registers, of 17 to 20 it has 96, and spills. Rows of a float32 table kept
in the L2 cache until they are written (1%).

What did not: rows of dout that are read again kept and released (2% of float32, 0 to 1% of bfloat16, for a good deal
of bookkeeping), tiles dropped first by the cache, plans that come before their tiles, tiles of 128 channels (12 to 20%
slower), more tiles claimed ahead (2%), rows of the table written as what is needed soon (0 to 1% slower), a slice of
all times before the next (0 to 1%).

Nor did kernels without copy engine, in short blocks that go slice by slice, so that dout comes twice but once from
DRAM: 184 MB are read of float32, 194 here. Ten in a row took tiles 59.5 and 71.0 us. Blocks of their own for positions:
58.3 and 75.7, words 46 and 66 (60 and 74); float32 waits for the L2 cache. A warp with some texts of a time in its
registers, for both sums: 62 and 70, words 55 and 68; it waits for each row in turn.
"""

import functools
from typing import Any

from numba import cuda, float32, int32, int64, uint32

from numstack.device import Array, Kernel, current_device, kernel
from numstack.device.ptx import bulk, load4, mbarrier, store4, tma
from numstack.device.ptx.integers import divide, multiply, opaque, remainder, shared_address
from numstack.device.ptx.words import words_of
from numstack.device.tensor_map import TensorMap
from numstack.kernels.embedding_groups.format import HEAD_OF_TILE, N_FEW, N_MANY, NEXT_ITEM, PLAN, ROWS, WORDS_OF_ROW
from numstack.kernels.embedding_tiles_parts import (
    BOX,
    FIRST,
    FOUR,
    GROUP,
    HEAD,
    SUMMED,
    TIME,
    Size,
    adders_of,
    layout,
)
from numstack.kernels.launch import ceil_div
from numstack.kernels.warp import WARP


def size_of(itemsize: int, C: int) -> Size:
    """For rows of C elements of so many bytes: 384 channels of 16 bits that fill whole tiles, else 256."""
    if itemsize == 2 and C % (3 * BOX) == 0:
        return Size(3, 2, 12, 4)
    return Size(2, 3, 13, 5) if C % (2 * BOX) == 0 else Size(2, 2, 13, 5)  # to ask for the row's end takes registers


def slices_of(size: Size, C: int) -> int:
    """Tiles of C channels."""
    return ceil_div(C, size.channels)


def shared_bytes(size: Size, itemsize: int) -> int:
    """Of a block."""
    return layout(size, itemsize).nbytes


def map_of(dout_BTC: Array) -> TensorMap:
    """By which the copy engine loads a tile, BOX channels at once."""
    return current_device().tensor_map(dout_BTC, (ROWS, 1, BOX), swizzle_bytes=0)


@functools.cache
def add_tiles(dtype: Any, size: Size, *, is_exact: bool, keeps_rows: bool) -> Kernel:
    """The kernel for a dout of a numba ``dtype``, in blocks of (32, ``size.warps``); the rest as ``adders_of``."""
    add_few, add_many, add_frequent, place_of, more = adders_of(dtype, size, is_exact=is_exact, keeps_rows=keeps_rows)
    elements = words_of(dtype).elements
    fours, deep, adders, ahead = size
    itemsize = 4 // elements
    stages, plans, heads, _share, _sums, landed_at, empty_at, _nbytes = layout(size, itemsize)
    box_bytes = ROWS * BOX * itemsize
    tile_bytes = fours * box_bytes
    n_values = FOUR * fours
    many_values, many_words = deep * n_values, deep * n_values // elements
    more_words = more * n_values // elements
    n_summed = SUMMED * FOUR
    loader = size.warps - 1

    @cuda.jit(device=True)
    def barrier(base, at, stage):
        return uint32(base + uint32(at) + uint32(8) * uint32(stage))

    @cuda.jit(device=True)
    def after(stage, parity):
        """The next stage, and its parity."""
        is_round = stage + uint32(1) == uint32(stages)
        return uint32(0) if is_round else uint32(stage + uint32(1)), uint32(parity ^ uint32(1)) if is_round else parity

    @cuda.jit(device=True)
    def claim(header, n_own, n_items):
        """Another item. Each block claims one too many, and the last of them clears the counter."""
        n_blocks = int32(cuda.gridDim.x)
        claimed = int32(cuda.atomic.add(header, NEXT_ITEM, int32(1)))
        if claimed == max(n_items - n_own * n_blocks, int32(0)) + n_blocks - 1:
            header[NEXT_ITEM] = int32(0)
        return int32(n_own * n_blocks + claimed)

    @cuda.jit(device=True)
    def load_tile(dout_BTC, plans_N, ints, base, stage, t, c0, group, n_groups):
        """Ask for a tile and its plan."""
        landed = barrier(base, landed_at, stage)
        head = heads + HEAD * stage
        ints[head + TIME] = t
        ints[head + FIRST] = c0
        ints[head + GROUP] = group
        mbarrier.arrive_and_expect(landed, uint32(tile_bytes + 4 * PLAN))
        plan = uint32(base + uint32(4) * uint32(plans + int32(stage) * PLAN))
        bulk.load(plans_N, (int64(t) * n_groups + group) * PLAN, plan, uint32(4 * PLAN), landed)
        for k in range(fours):
            box = uint32(base + stage * uint32(tile_bytes) + uint32(k * box_bytes))
            tma.load_3d(dout_BTC, box, landed, int32(c0 + k * BOX), t, int32(group * ROWS))

    @cuda.jit(device=True)
    def load_tiles(dout_BTC, header, plans_N, ints, base, n_items, n_slices, n_groups):
        """Claim items, each all tiles of a time and of some channels, and load them, by one thread.

        The first are the block's own: as many as there is room for, before anyone has to wait for a claim.
        """
        n_own = max(divide(int32(stages), int32(n_groups)), int32(1))
        n_claimed = int32(0)
        n_tiles = int32(0)
        n_emptied = int32(0)  # tiles, in turn
        group = int32(0)
        stage = uint32(0)
        parity = uint32(0)
        item = int32(cuda.blockIdx.x)
        going = True
        tma.acquire_map(dout_BTC)
        while going:
            if n_tiles >= stages or n_claimed >= n_own:
                while n_emptied <= n_tiles - ahead:
                    turn = divide(n_emptied, int32(stages))
                    mbarrier.wait(barrier(base, empty_at, n_emptied - turn * stages), uint32(turn & 1))
                    n_emptied = int32(n_emptied + 1)
            if group == 0 and n_claimed >= n_own:
                item = claim(header, n_own, n_items)
            if item < n_items:
                t, c0 = place_of(item, n_slices)
                load_tile(dout_BTC, plans_N, ints, base, stage, t, c0, group, n_groups)
                group = int32(group + 1)
                if group == n_groups:
                    group = int32(0)
                    n_claimed = int32(n_claimed + 1)
                    if n_claimed < n_own:
                        item = int32(item + cuda.gridDim.x)
                n_tiles = int32(n_tiles + 1)
                stage, parity = after(stage, parity)
            elif n_claimed < n_own:
                n_claimed = n_own  # there are no more of its own
            else:
                ints[heads + HEAD * stage + TIME] = int32(-1)
                mbarrier.arrive(barrier(base, landed_at, stage))
                going = False

    @cuda.jit(device=True)
    def sum_tile(tile, ints, positions_P, stage, base, T, C, B, n_groups, values, sums, old):
        """Add a tile's rows up, a summer's share of the channels; with the last texts, add them to the positions'."""
        summer = int32(cuda.threadIdx.y - adders)
        lane = int32(cuda.threadIdx.x)
        head = heads + HEAD * stage
        group = ints[head + GROUP]
        c = int32(ints[head + FIRST] + summer * BOX + lane * FOUR)
        at = int64(ints[head + TIME]) * C + c
        is_last = group == n_groups - 1 and (is_exact or c < C)
        if is_last:
            load4(positions_P, at, old, 0)
        n_rows = int32(min(ROWS, B - group * ROWS))
        first = int32(((int32(stage) * fours + summer) * ROWS * WARP + lane) * FOUR)
        n_whole = int32(n_rows & ~(SUMMED - 1))
        for r in range(0, opaque(n_whole), SUMMED):
            for k in range(SUMMED):
                load4(tile, first + (r + k) * BOX, values, FOUR * k)
            for k in range(SUMMED):
                for e in range(FOUR):
                    sums[e] += values[FOUR * k + e]
        for r in range(n_whole, opaque(n_rows)):
            load4(tile, first + r * BOX, values, 0)
            for e in range(FOUR):
                sums[e] += values[e]
        mbarrier.arrive(barrier(base, empty_at, stage))
        if is_last:
            for e in range(FOUR):
                old[e] += sums[e]
            store4(positions_P, at, old, 0)
        if group == n_groups - 1:
            for e in range(FOUR):
                sums[e] = float32(0)

    @kernel(name="embedding.backward tiles_of_times")
    def tiles_of_times(
        dout_N, dout_BTC, table_VC, positions_P, header, order_N, frequent_N, plans_N, B, T, n_slices, n_groups
    ):
        tile = cuda.shared.array(0, dtype)
        ints = cuda.shared.array(0, int32)
        floats = cuda.shared.array(0, float32)
        total = cuda.local.array(many_values, float32)
        values = cuda.local.array(n_values, float32)
        words = cuda.local.array(many_words, uint32)
        rows_words = cuda.local.array(more_words, uint32)
        rows = cuda.local.array(deep, int32)
        summed = cuda.local.array(n_summed, float32)
        sums = cuda.local.array(FOUR, float32)
        old = cuda.local.array(FOUR, float32)
        lane = int32(cuda.threadIdx.x)
        warp = int32(cuda.threadIdx.y)
        C = int32(table_VC.shape[1])
        n_items = int32(multiply(int32(T), int32(n_slices)))
        base = shared_address(tile)
        if warp == 0 and lane == 0:
            for s in range(stages):
                mbarrier.init(barrier(base, empty_at, s), uint32(WARP * (adders + fours)))
                mbarrier.init(barrier(base, landed_at, s), uint32(1))
            mbarrier.fence_init()
        cuda.syncthreads()
        stage = uint32(0)
        parity = uint32(0)
        going = True
        if warp == loader:
            if lane == 0:
                load_tiles(dout_BTC, header, plans_N, ints, base, n_items, n_slices, n_groups)
        elif warp >= adders:
            for e in range(FOUR):
                sums[e] = float32(0)
            while going:
                mbarrier.wait(barrier(base, landed_at, stage), parity)
                going = ints[heads + HEAD * stage + TIME] >= 0
                if going:
                    sum_tile(tile, ints, positions_P, stage, base, T, C, B, n_groups, summed, sums, old)
                    stage, parity = after(stage, parity)
        else:
            add_frequent(dout_N, table_VC, order_N, frequent_N, header, ints, floats, n_slices, total, rows_words)
            turn = int32(0)  # whose is the next unit
            while going:
                mbarrier.wait(barrier(base, landed_at, stage), parity)
                head = heads + HEAD * stage
                going = ints[head + TIME] >= 0
                if going:
                    c0 = ints[head + FIRST]
                    plan = plans + int32(stage) * PLAN
                    n_few = ints[plan + N_FEW]
                    n_units = divide(int32(n_few + deep - 1), int32(deep))
                    unit = int32(warp - turn if warp >= turn else warp - turn + adders)
                    turn = remainder(int32(turn + n_units), int32(adders))
                    for u in range(unit, n_units, adders):
                        add_few(
                            dout_N, table_VC, order_N, tile, ints, stage, u, n_few, c0, total, values, words, rows
                        )  # fmt: skip
                    for i in range(adders - 1 - warp, ints[plan + N_MANY], adders):
                        row = plan + HEAD_OF_TILE + (ROWS - 1 - i) * WORDS_OF_ROW
                        add_many(dout_N, table_VC, order_N, tile, ints, stage, row, c0, total, values, rows_words)
                    mbarrier.arrive(barrier(base, empty_at, stage))
                    stage, parity = after(stage, parity)

    return tiles_of_times
