"""Gradients of an embedding and its positions on Hopper: one pass over dout. See :mod:`numstack.kernels.embedding`.

The table's gradient sums rows of dout of the same token, the positions' those of the same time. A block takes tiles of
dout, in shared memory: 128 ``fours`` channels of one time of all texts (or of 32). Some warps, the summers, add up its
rows for the time. Others, the adders, add rows to the table: all rows of a token where its first one lies. The rest,
a quarter of dout if tokens are evenly spread, come from the L2 cache or once more from memory.

Who is first? Before, all blocks count tokens, and each token's positions are put down in SLOTS places. Then the grid
meets; until it has, the copy engine fills the blocks' tiles. Planners look up the tokens of tiles, ahead of the adders.
Up to FEW positions, almost always, are sorted by one lane, up to SLOTS by the warp that adds them. Tokens with more are
added by all adders of a block together, before tiles, while other blocks take these.

Counts are kept from call to call, twice: one is zero and counts, while the other is cleared for the next call, so that
the grid meets once. Only sets are made of what is counted and put down in any order: the order of each sum is fixed,
times and then texts of a token with up to SLOTS positions, else positions of a stretch and then stretches. All blocks
must run at once, one on each multiprocessor, and calls follow one another.

32 x 1024 tokens of 50,304 with 768 channels and positions on an H200, microseconds, beside rows_of_clusters:

================  ======================  ======================  ================  ================
dout              evenly spread           clusters                words             clusters
================  ======================  ======================  ================  ================
bfloat16          62.1, 0.84 of a copy    63.1, 0.83              75                78
float32           74.2, 0.86              83.2, 0.77              102               120
================  ======================  ======================  ================  ================

207 MB come from memory and go there (bfloat16; 205 must), 273 of float32 (255), where clusters move 216 and 303. Each
block has seen its tokens after 2.7 us, all have met after 6, and the first tile has been added to the table after 8 us;
blocks end after 53 to 58. With counts and slots given it would take 59.5 and 72.7. What limits is how fast the copy
engine loads tiles: a row of one by an instruction takes some 50 ns, whatever its length, and tiles alone, with nothing
added anywhere, 29 us of bfloat16 and 41 of float32; in rows of 1,536 bytes 20. The table's rows alone take 56.

What helped: counts that are clear when a call begins, so that the grid meets once and not twice (4 us); frequent tokens
before tiles and not after (words: 9 us, of float32 27). What did not: rows of the table prefetched into the L2 cache,
by the copy engine or by lines (0 to 2 us slower), three or four of them under way (1 to 3), one, by more warps (2);
hints to keep rows of dout or to drop tiles (0 to 2); later tiles prefetched first, or the first loaded at a slower pace
(the same); whole rows as tiles (2 to 4: blocks end at times that differ more), tiles of 128 channels (float32: 15).
"""

import functools
from typing import Any

from numba import cuda, float32, int32, int64, uint32

from numstack.device import Kernel, kernel
from numstack.device.ptx import bulk, load4, mbarrier, store4, sync, turns
from numstack.device.ptx.integers import divide, multiply, opaque, remainder, shared_address
from numstack.device.ptx.words import words_of
from numstack.kernels.embedding_parts import FOUR
from numstack.kernels.embedding_tiles_parts import (
    COUNT,
    COUNTERS,
    COUNTS,
    FEW,
    FREQUENT,
    GROUP,
    HEAD,
    INFO,
    ITEM,
    LOOKS,
    MEETING,
    MEMBERS,
    N_FEW,
    N_MORE,
    NEXT_ITEM,
    NONE,
    ROW,
    ROWS,
    SLOTS,
    SUMMED,
    TOKEN,
    Size,
    adders_of,
    layout,
)  # fmt: skip
from numstack.kernels.warp import WARP


def is_faster(itemsize: int, C: int) -> bool:
    """Than clusters: rows of C elements of so many bytes, of 16 bits only if tiles are 768 bytes wide."""
    return itemsize == 4 or C % (3 * FOUR * WARP) == 0


def size_of(itemsize: int, C: int) -> Size:
    """For rows of C elements of so many bytes. Ends of rows that fill no tile take registers."""
    if itemsize == 2:
        return Size(3, 2, 14, 2, 5)
    return Size(2, 2, 15 if C % (2 * FOUR * WARP) == 0 else 11, 2, 6)


def kept_size(V: int) -> int:
    """Int32 elements that are kept from call to call."""
    return COUNTS + 2 * (V + COUNTERS)


def workspace_size(B: int, T: int, V: int) -> int:
    """Int32 elements for positions that are put down, and for tokens that have more."""
    return SLOTS * V + B * T // (SLOTS + 1) + 1


@functools.cache
def add_tiles(dtype: Any, size: Size, *, is_exact: bool) -> Kernel:
    """The kernel for a dout of a numba ``dtype``, of blocks of (32, ``size.warps``), all of which run at once.

    ``is_exact``: the channels are a multiple of ``size.channels``.
    """
    add_few, add_many, add_frequent, position_of, place_of, more = adders_of(dtype, size, is_exact=is_exact)
    elements = words_of(dtype).elements
    load_slots = words_of(float32).load
    fours, deep, adders, planners, ahead = size
    channels = size.channels
    itemsize = 4 // elements
    stages, infos, heads, half_at, _share, _sums, full_at, empty_at, landed_at, _nbytes = layout(size, itemsize)
    row_bytes = channels * itemsize
    tile_bytes = ROWS * row_bytes
    n_values = FOUR * fours
    many_values, many_words = deep * n_values, deep * n_values // elements
    more_words = more * n_values // elements
    n_summed = SUMMED * FOUR
    first_planner = adders + fours
    loader = size.warps - 1
    groupers_meet = sync.make_barrier(1, WARP * loader)

    @cuda.jit(device=True)
    def barrier(base, at, stage):
        return uint32(base + uint32(at) + uint32(8) * uint32(stage))

    @cuda.jit(device=True)
    def after(stage, parity, step):
        """The stage so many tiles later, and its parity."""
        stage = uint32(stage + uint32(step))
        is_round = stage >= uint32(stages)
        return uint32(stage - uint32(stages)) if is_round else stage, uint32(parity ^ uint32(1)) if is_round else parity

    @cuda.jit(device=True)
    def load_tiles(dout_N, kept, ints, base, V, C, B, T, n_slices, n_groups):
        """Claim items and load their tiles, by one warp. The first ``stages`` are the block's own, before anyone meets.

        The end is an item of -1, once for each planner.
        """
        lane = int32(cuda.threadIdx.x)
        n_items = int32(multiply(int32(T), int32(n_slices)))
        n_own = max(divide(int32(stages), int32(n_groups)), int32(1))
        n_claimed = int32(0)
        n_tiles = int32(0)
        n_ends = int32(0)
        group = int32(0)
        stage = uint32(0)
        parity = uint32(0)
        item = int32(cuda.blockIdx.x)
        while n_ends < planners:
            if n_tiles >= stages or n_claimed >= n_own:
                before = max(int32(n_tiles - ahead), int32(0))
                turn = divide(before, int32(stages))
                mbarrier.wait(barrier(base, empty_at, before - turn * stages), uint32(turn & 1))
            if group == 0 and n_claimed >= n_own and n_ends == 0:
                if lane == 0:
                    counter = COUNTS + 2 * V + COUNTERS * ints[half_at] + NEXT_ITEM
                    item = int32(n_own * cuda.gridDim.x + cuda.atomic.add(kept, counter, int32(1)))
                item = cuda.shfl_sync(0xFFFFFFFF, item, 0)
            landed = barrier(base, landed_at, stage)
            if item < n_items:
                t, c0 = place_of(item, n_slices)
                n_rows = min(ROWS, B - group * ROWS)
                nbytes = uint32(min(channels, C - c0) * itemsize)
                if lane == 0:
                    ints[heads + HEAD * stage + ITEM] = item
                    ints[heads + HEAD * stage + GROUP] = group
                    mbarrier.arrive_and_expect(landed, uint32(n_rows * nbytes))
                cuda.syncwarp()
                if lane < n_rows:
                    first = (int64(group * ROWS + lane) * T + t) * C + c0
                    target = uint32(base + stage * uint32(tile_bytes) + uint32(lane) * uint32(row_bytes))
                    bulk.load(dout_N, first, target, nbytes, landed)
                group = int32(group + 1)
                if group == n_groups:
                    group = int32(0)
                    n_claimed = int32(n_claimed + 1)
                    if n_claimed < n_own:
                        item = int32(item + cuda.gridDim.x)
            else:
                if lane == 0:
                    ints[heads + HEAD * stage + ITEM] = int32(-1)
                    mbarrier.arrive(landed)
                n_ends = int32(n_ends + 1)
            n_tiles = int32(n_tiles + 1)
            stage, parity = after(stage, parity, 1)

    @cuda.jit(device=True)
    def group_tokens(tokens_N, slots_N, frequent_N, kept, ints, V, B, T):
        """Count tokens and put their positions down, by all warps but the loader, and meet; which counts are used."""
        thread = int32(cuda.threadIdx.y * WARP + cuda.threadIdx.x)
        own = int32(cuda.blockIdx.x)
        n_blocks = int32(cuda.gridDim.x)
        half = int32(turns.times_met(kept, MEETING))
        counts = int32(COUNTS + half * V)
        counters = int32(COUNTS + 2 * V + COUNTERS * half)
        if thread == 0:
            ints[half_at] = half
        N = int32(tokens_N.size)
        share = divide(int32(N + n_blocks - 1), n_blocks)
        for n in range(own * share + thread, min((own + 1) * share, N), WARP * loader):
            token = tokens_N[n]
            if token >= 0 and token < V:
                slot = cuda.atomic.add(kept, counts + token, int32(1))
                if slot < SLOTS:
                    b = divide(int32(n), int32(T))
                    slots_N[int64(token) * SLOTS + slot] = int32((n - b * T) * B + b)
                elif slot == SLOTS:
                    frequent_N[cuda.atomic.add(kept, counters + FREQUENT, int32(1))] = token
        groupers_meet()
        if thread == 0:
            turns.meet(kept, MEETING, uint32(n_blocks), uint32(own), uint32(half))
        groupers_meet()
        others = COUNTS + (1 - half) * V
        for v in range(own * WARP * loader + thread, V, n_blocks * WARP * loader):
            kept[others + v] = int32(0)
        if own == 0 and thread < COUNTERS:
            kept[COUNTS + 2 * V + COUNTERS * (1 - half) + thread] = int32(0)
        return half

    @cuda.jit(device=True)
    def plan_tile(tokens_N, slots_N, kept, counts, ints, stage, V, B, T, n_slices, slots, places):
        """What is added to the table with a tile, by a warp, a lane for each row."""
        lane = int32(cuda.threadIdx.x)
        head = heads + HEAD * stage
        t, _ = place_of(ints[head + ITEM], n_slices)
        b = int32(ints[head + GROUP] * ROWS + lane)
        token = tokens_N[b * T + t] if b < B else int32(-1)
        is_known = token >= 0 and token < V
        row = int64(token if is_known else int32(0))
        count = kept[counts + row] if is_known else int32(0)
        load_slots(slots_N, row * SLOTS, slots, 0)
        load_slots(slots_N, row * SLOTS + 4, slots, 4)
        for k in range(FEW):
            places[k] = int32(slots[k]) if k < count else int32(NONE)
        for turn in range(FEW):  # neighbours change places until all are in order
            for k in range(turn % 2, FEW - 1, 2):
                lesser = min(places[k], places[k + 1])
                places[k + 1] = max(places[k], places[k + 1])
                places[k] = lesser
        first = places[0]
        for k in range(FEW, opaque(count if count <= SLOTS else int32(0))):
            first = min(first, slots_N[row * SLOTS + k])
        is_first = is_known and count <= SLOTS and first == t * B + b
        few = uint32(cuda.ballot_sync(0xFFFFFFFF, is_first and count <= FEW))
        many = uint32(cuda.ballot_sync(0xFFFFFFFF, is_first and count > FEW))
        if is_first:
            lanes_before = uint32((uint32(1) << uint32(lane)) - uint32(1))
            at = int32(cuda.popc(uint32(few & lanes_before)))
            if count > FEW:
                at = int32(cuda.popc(few) + cuda.popc(uint32(many & lanes_before)))
            info = infos + (int32(stage) * ROWS + at) * INFO
            ints[info + TOKEN] = token
            ints[info + COUNT] = count
            ints[info + ROW] = lane
            for k in range(1, FEW):
                if k < count:
                    ints[info + MEMBERS - 1 + k] = position_of(places[k], B, T)
        if lane == 0:
            ints[head + N_FEW] = int32(cuda.popc(few))
            ints[head + N_MORE] = int32(cuda.popc(many))
        cuda.syncwarp()

    @cuda.jit(device=True)
    def sum_tile(tile, ints, positions_P, stage, base, T, C, B, n_slices, n_groups, values, sums, old):
        """Add a tile's rows up, a summer's share of the channels; with the last texts, add them to the positions'."""
        c = int32((cuda.threadIdx.y - adders) * WARP * FOUR + cuda.threadIdx.x * FOUR)
        head = heads + HEAD * stage
        group = ints[head + GROUP]
        t, c0 = place_of(ints[head + ITEM], n_slices)
        at = int64(t) * C + c0 + c
        is_last = group == n_groups - 1 and (is_exact or c0 + c < C)
        if is_last:
            load4(positions_P, at, old, 0)
        n_rows = int32(min(ROWS, B - group * ROWS))
        first = int32(stage) * ROWS * channels + c
        n_whole = int32(n_rows & ~(SUMMED - 1))
        for r in range(0, opaque(n_whole), SUMMED):
            for k in range(SUMMED):
                load4(tile, first + (r + k) * channels, values, FOUR * k)
            for k in range(SUMMED):
                for e in range(FOUR):
                    sums[e] += values[FOUR * k + e]
        for r in range(n_whole, opaque(n_rows)):
            load4(tile, first + r * channels, values, 0)
            for e in range(FOUR):
                sums[e] += values[e]
        cuda.syncwarp()
        if cuda.threadIdx.x == 0:
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
        tokens_N, dout_N, table_VC, positions_P, slots_N, frequent_N, kept, B, T, n_slices, n_groups
    ):  # fmt: skip
        tile = cuda.shared.array(0, dtype)
        ints = cuda.shared.array(0, int32)
        floats = cuda.shared.array(0, float32)
        total = cuda.local.array(many_values, float32)
        values = cuda.local.array(n_values, float32)
        words = cuda.local.array(many_words, uint32)
        rows_words = cuda.local.array(more_words, uint32)
        infos_now = cuda.local.array(deep, int32)
        summed = cuda.local.array(n_summed, float32)
        sums = cuda.local.array(FOUR, float32)
        old = cuda.local.array(FOUR, float32)
        slots = cuda.local.array(FEW, uint32)
        places = cuda.local.array(FEW, int32)
        found = cuda.local.array(LOOKS, int32)
        lane = int32(cuda.threadIdx.x)
        warp = int32(cuda.threadIdx.y)
        V = int32(table_VC.shape[0])
        C = int32(table_VC.shape[1])
        base = shared_address(tile)
        if warp == 0 and lane == 0:
            for s in range(stages):
                mbarrier.init(barrier(base, full_at, s), uint32(1))
                mbarrier.init(barrier(base, empty_at, s), uint32(adders + fours))
                mbarrier.init(barrier(base, landed_at, s), uint32(1))
            mbarrier.fence_init()
        cuda.syncthreads()
        stage = uint32(0)
        parity = uint32(0)
        if warp == loader:
            load_tiles(dout_N, kept, ints, base, V, C, B, T, n_slices, n_groups)
        else:
            half = group_tokens(tokens_N, slots_N, frequent_N, kept, ints, V, B, T)
            counts = int32(COUNTS + half * V)
            counters = int32(COUNTS + 2 * V + COUNTERS * half)
            going = True
            if warp >= first_planner:
                stage = uint32(warp - first_planner)
                while going:
                    mbarrier.wait(barrier(base, landed_at, stage), parity)
                    going = ints[heads + HEAD * stage + ITEM] >= 0
                    if going:
                        plan_tile(tokens_N, slots_N, kept, counts, ints, stage, V, B, T, n_slices, slots, places)
                    if lane == 0:
                        mbarrier.arrive(barrier(base, full_at, stage))
                    stage, parity = after(stage, parity, planners)
            elif warp >= adders:
                for e in range(FOUR):
                    sums[e] = float32(0)
                while going:
                    mbarrier.wait(barrier(base, full_at, stage), parity)
                    going = ints[heads + HEAD * stage + ITEM] >= 0
                    if going:
                        sum_tile(tile, ints, positions_P, stage, base, T, C, B, n_slices, n_groups, summed, sums, old)
                        stage, parity = after(stage, parity, 1)
            else:
                add_frequent(
                    tokens_N, dout_N, table_VC, frequent_N, kept, counters, ints, floats, n_slices, total, rows_words,
                    found,
                )  # fmt: skip
                turn = int32(0)  # whose is the next unit
                while going:
                    mbarrier.wait(barrier(base, full_at, stage), parity)
                    head = heads + HEAD * stage
                    item = ints[head + ITEM]
                    going = item >= 0
                    if going:
                        _, c0 = place_of(item, n_slices)
                        width = min(channels, C - c0)
                        n_few = ints[head + N_FEW]
                        n_units = divide(int32(n_few + deep - 1), int32(deep))
                        unit = int32(warp - turn if warp >= turn else warp - turn + adders)
                        turn = remainder(int32(turn + n_units), int32(adders))
                        for u in range(unit, n_units, adders):
                            add_few(
                                dout_N,
                                table_VC,
                                tile,
                                ints,
                                stage,
                                u,
                                n_few,
                                c0,
                                width,
                                total,
                                values,
                                words,
                                infos_now,
                            )
                        for i in range(adders - 1 - warp, ints[head + N_MORE], adders):
                            info = infos + (int32(stage) * ROWS + n_few + i) * INFO
                            add_many(
                                dout_N, table_VC, slots_N, tile, ints, stage, info, B, T, c0, width, total, values,
                                rows_words,
                            )  # fmt: skip
                        cuda.syncwarp()
                        if lane == 0:
                            mbarrier.arrive(barrier(base, empty_at, stage))
                        stage, parity = after(stage, parity, 1)

    return tiles_of_times
