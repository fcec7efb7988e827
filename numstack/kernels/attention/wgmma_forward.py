"""Attention forward on Hopper: wgmma for both products, TMA for all traffic, and exponentials hidden behind wgmma.

A block has one producer warpgroup, of which one thread asks for copies, and some consumer warpgroups with 64 queries
each. Blocks stay on their multiprocessor and take one tile of queries after another; the ring of K and V tiles runs on
across them. For each tile of keys a consumer

1. starts  S' = Q K'^T  for the next tile, then  O += P V  for the current one;
2. waits for S' alone, and turns it into exponentials while O += P V is under way;
3. waits for O, corrects it for the maximum that grew, and packs S' as the next P: accumulators are laid out as wgmma
   takes operand A from registers.

The next tile may belong to the next queries: then their first scores and exponentials hide the end of these ones, and
the short loops of short sequences leave no gap. Other consumers fill what is left.

Keys come from the last to the first, so that only a consumer's first tile crosses the diagonal, or the end of the keys,
and needs a mask. Tiles of queries of one head read the same keys: heads are taken in groups whose keys and values fit
the L2 cache, within a group the tiles with the most keys first.

Sources: Shah et al. 2024, "FlashAttention-3", algorithm 2 and section 3.2; Milakov, Gimelshein 2018.
"""

import functools
import math
from typing import NamedTuple

from numba import cuda, float32, int32, uint8, uint32, uint64

from numstack.device import Array, Kernel, Stream, current_device, kernel
from numstack.device.ptx import integers, mbarrier, sync, tma, wgmma
from numstack.device.ptx import math as ptx_math
from numstack.kernels.attention import hopper, tile_order
from numstack.kernels.attention.hopper import LN2, MASKED, ROWS, SWIZZLED, Operands, device
from numstack.kernels.launch import ceil_div


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
        return {1: (24, 240), 2: (24, 240), 3: (32, 160), 4: (24, 112)}[self.consumers]


# The fastest found on an H200, by padded width.
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
TOLERATED = float32(8)  # growth of a maximum, as a power of two, that needs no correction: exponentials stay under 2^8


def layout(tiles: Tiles) -> Layout:
    """Tiles in the order of their use, then barriers."""
    q, kv = tiles.queries * tiles.width * 2, tiles.keys * tiles.width * 2
    sizes = [Q_STAGES * q, q, tiles.stages * kv, tiles.stages * kv]
    sizes += [8 * Q_STAGES] * 2 + [8 * tiles.stages] * 4
    starts = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    return Layout(*starts)


@functools.cache
def make_forward(tiles: Tiles, dtype: str) -> Kernel:
    """The kernel for one cut; ``dtype`` is bf16 or f16."""
    D, CONSUMERS, KEYS, STAGES, TURNS = tiles
    QUERIES = tiles.queries
    CHUNKS = D // SWIZZLED
    Q_BYTES, KV_BYTES = QUERIES * D * 2, KEYS * D * 2
    KV_CHUNK = KEYS * SWIZZLED * 2
    at = layout(tiles)
    S_REGISTERS, O_REGISTERS, P_REGISTERS = KEYS // 2, D // 2, KEYS // 4
    O_PAIRS = D // 4
    give = sync.make_set_registers("dec", tiles.registers[0])
    take = sync.make_set_registers("inc", tiles.registers[1])
    multiply_qk = wgmma.make_multiply(KEYS, dtype)
    multiply_pv = wgmma.make_multiply_registers(D, dtype, transpose_b=True)
    mn_major = wgmma.make_mn_major(KEYS)
    wait_first = wgmma.make_wait(0, S_REGISTERS)
    wait_scores = wgmma.make_wait(1, S_REGISTERS)
    wait_out = wgmma.make_wait(0, O_REGISTERS)
    store_read = tma.make_wait(0, reads_only=True)
    store_done = tma.make_wait(0, reads_only=False)
    softmax = hopper.make_softmax(KEYS, dtype)
    mask_columns, row_maxima, exponentials, pack = softmax
    put_tile = hopper.make_put_tile(D, dtype, QUERIES)
    advance = hopper.make_advance(STAGES)
    advance_q = hopper.make_advance(Q_STAGES)
    meet_0, meet_1, meet_2, meet_3 = (sync.make_barrier(1 + i, 128) for i in range(4))

    @device
    def meet(group):
        """The barrier of this warpgroup's threads."""
        if group == 0:
            meet_0()
        elif CONSUMERS > 1 and group == 1:
            meet_1()
        elif CONSUMERS > 2 and group == 2:
            meet_2()
        elif CONSUMERS > 3 and group == 3:
            meet_3()

    wait_0, wait_1 = sync.make_barrier(5, 256), sync.make_barrier(6, 256)
    let_0, let_1 = sync.make_barrier_arrive(5, 256), sync.make_barrier_arrive(6, 256)

    @device
    def wait_turn(group):
        if TURNS:
            if group == 0:
                wait_0()
            else:
                wait_1()

    @device
    def give_turn(group):
        if TURNS:
            if group == 0:
                let_1()
            else:
                let_0()

    @device
    def key_tiles(end, keys, causal):
        """How many tiles of keys the queries before ``end`` see."""
        seen = keys
        if causal:
            seen = uint32(min(keys, end))
        return uint32(uint32(seen + uint32(KEYS - 1)) // uint32(KEYS))

    @device
    def keys_of(first, own_row, keys, causal):
        """For 64 of the queries from ``first`` on: the last tile of keys that they see, and how many are behind it."""
        all_see = key_tiles(uint32(first + uint32(QUERIES)), keys, causal)
        these_see = key_tiles(uint32(first + own_row + uint32(ROWS)), keys, causal)
        return uint32(these_see - uint32(1)), uint32(all_see - these_see)

    @device
    def load(array, tile, barrier, chunk_bytes, row, head, batch):
        for chunk in range(CHUNKS):
            tma.load_4d(
                array,
                tile + uint32(chunk * chunk_bytes),
                barrier,
                int32(SWIZZLED * chunk),
                row,
                int32(head),
                int32(batch),
            )

    @device
    def produce(base, q_map, k_map, v_map, heads, H, keys, q_tiles, heads_of_group, causal):
        """Ask for all copies, each as soon as its place is free."""
        stage, parity = uint32(0), uint32(1)
        q_stage, q_parity = uint32(0), uint32(1)
        tile, step = uint32(cuda.blockIdx.x), tile_order.first_step()
        while tile < uint32(heads * q_tiles):
            q_tile, batch, head = tile_order.position(tile, heads, H, q_tiles, heads_of_group)
            mbarrier.wait(base + uint32(at.q_empty) + uint32(8) * q_stage, q_parity)
            full = uint32(base + uint32(at.q_full) + uint32(8) * q_stage)
            mbarrier.arrive_and_expect(full, uint32(Q_BYTES))
            place = uint32(base + uint32(at.q) + q_stage * uint32(Q_BYTES))
            load(q_map, place, full, QUERIES * SWIZZLED * 2, int32(q_tile * uint32(QUERIES)), head, batch)
            q_stage, q_parity = advance_q(q_stage, q_parity)
            left = key_tiles(uint32((q_tile + uint32(1)) * uint32(QUERIES)), keys, causal)
            while left > uint32(0):
                left = uint32(left - uint32(1))
                row = int32(left * uint32(KEYS))
                mbarrier.wait(base + uint32(at.k_empty) + uint32(8) * stage, parity)
                full = uint32(base + uint32(at.k_full) + uint32(8) * stage)
                mbarrier.arrive_and_expect(full, uint32(KV_BYTES))
                load(k_map, uint32(base + uint32(at.k) + stage * uint32(KV_BYTES)), full, KV_CHUNK, row, head, batch)
                mbarrier.wait(base + uint32(at.v_empty) + uint32(8) * stage, parity)
                full = uint32(base + uint32(at.v_full) + uint32(8) * stage)
                mbarrier.arrive_and_expect(full, uint32(KV_BYTES))
                load(v_map, uint32(base + uint32(at.v) + stage * uint32(KV_BYTES)), full, KV_CHUNK, row, head, batch)
                stage, parity = advance(stage, parity)
            tile, step = uint32(tile + step), tile_order.next_step(step)

    @device
    def start_scores(scores, q_tile, k_tile):
        """S = Q K^T."""
        q = wgmma.k_major(q_tile)
        k = wgmma.k_major(k_tile)
        wgmma.fence()
        for step in range(D // 16):
            q_step = uint64(step // 4 * (QUERIES * 8) + step % 4 * 2)
            k_step = uint64(step // 4 * (KEYS * 8) + step % 4 * 2)
            multiply_qk(scores, q + q_step, k + k_step, int32(step > 0))
        wgmma.commit()

    @device
    def start_values(out, p, v_tile):
        """O += P V."""
        v = mn_major(v_tile)
        wgmma.fence()
        for step in range(KEYS // 16):
            multiply_pv(out, p, 4 * step, v + uint64(128 * step), int32(1))
        wgmma.commit()

    @device
    def mask(scores, first_key, row, keys, causal):
        """Leave to row and row + 8 the keys that there are, and that they see."""
        if causal or uint32(first_key + uint32(KEYS)) > keys:
            column = int32(int32(first_key) + int32(2) * (int32(cuda.threadIdx.x) & int32(3)))
            first = int32(int32(keys) - column)
            second = first
            if causal:
                first = int32(min(first, int32(int32(row) + int32(1) - column)))
                second = int32(min(second, int32(int32(row) + int32(9) - column)))
            mask_columns(scores, first, second)

    @device
    def skip(base, n, stage, parity, leads):
        """Pass over tiles of keys that only consumers further down need."""
        while n > uint32(0):
            mbarrier.wait(base + uint32(at.k_full) + uint32(8) * stage, parity)
            mbarrier.wait(base + uint32(at.v_full) + uint32(8) * stage, parity)
            if leads:
                mbarrier.arrive(base + uint32(at.k_empty) + uint32(8) * stage)
                mbarrier.arrive(base + uint32(at.v_empty) + uint32(8) * stage)
            stage, parity = advance(stage, parity)
            n = uint32(n - uint32(1))
        return stage, parity

    @device
    def store_lse(lse_BHT, batch, head, row, m0, m1, l0, l1):
        """Of row and row + 8; one lane of their quad does."""
        if uint32(cuda.threadIdx.x) & uint32(3) == uint32(0):
            queries = uint32(lse_BHT.shape[2])
            if row < queries:
                lse_BHT[batch, head, row] = (m0 + ptx_math.log2(l0)) * LN2
            row = uint32(row + uint32(8))
            if row < queries:
                lse_BHT[batch, head, row] = (m1 + ptx_math.log2(l1)) * LN2

    @device
    def store_out(out, r0, r1, packed, out_map, place, group, leads, first, head, batch):
        """Rows times their factors; the copy engine writes them."""
        if leads:
            store_read()
        meet(group)
        put_tile(out, r0, r1, packed, place)
        tma.fence_async()
        meet(group)
        if leads:
            for chunk in range(CHUNKS):
                tma.store_4d(
                    out_map,
                    place + uint32(chunk * QUERIES * SWIZZLED * 2),
                    int32(SWIZZLED * chunk),
                    int32(first),
                    int32(head),
                    int32(batch),
                )
            tma.commit()

    @kernel(name=f"attention.forward wgmma D{D}")
    def _forward(q_map, k_map, v_map, out_map, lse_BHT, factor, batches, q_tiles, keys, heads_of_group, causal):
        """Grid: a block for each multiprocessor."""
        base = integers.round_up_1024(integers.shared_address(cuda.shared.array(0, uint8)))
        thread = uint32(cuda.threadIdx.x)
        group = sync.uniform(uint32(thread // uint32(128)))
        if thread == uint32(0):
            for i in range(Q_STAGES):
                mbarrier.init(base + uint32(at.q_full + 8 * i), uint32(1))
                mbarrier.init(base + uint32(at.q_empty + 8 * i), uint32(CONSUMERS))
            for i in range(STAGES):
                mbarrier.init(base + uint32(at.k_full + 8 * i), uint32(1))
                mbarrier.init(base + uint32(at.k_empty + 8 * i), uint32(CONSUMERS))
                mbarrier.init(base + uint32(at.v_full + 8 * i), uint32(1))
                mbarrier.init(base + uint32(at.v_empty + 8 * i), uint32(CONSUMERS))
            mbarrier.fence_init()
        cuda.syncthreads()
        H = uint32(lse_BHT.shape[1])
        heads = uint32(uint32(batches) * H)
        q_tiles = uint32(q_tiles)
        keys = uint32(keys)
        heads_of_group = uint32(heads_of_group)

        if group == uint32(CONSUMERS):
            give()
            if thread == uint32(128 * CONSUMERS):
                produce(base, q_map, k_map, v_map, heads, H, keys, q_tiles, heads_of_group, causal)
        else:
            take()
            scores = cuda.local.array(S_REGISTERS, float32)
            out = cuda.local.array(O_REGISTERS, float32)
            p = cuda.local.array(P_REGISTERS, uint32)
            packed = cuda.local.array(O_PAIRS, uint32)
            own_row = uint32(group * uint32(ROWS))  # this warpgroup's first, in a tile of queries
            row = uint32(thread // uint32(32) * uint32(16) + (thread & uint32(31)) // uint32(4))  # this thread's
            leads = (thread & uint32(127)) == uint32(0)
            k_tiles, v_tiles = uint32(base + uint32(at.k)), uint32(base + uint32(at.v))
            q_place = uint32(base + uint32(at.q) + own_row * uint32(SWIZZLED * 2))
            out_place = uint32(base + uint32(at.out) + own_row * uint32(SWIZZLED * 2))
            stage, parity = uint32(0), uint32(0)
            q_stage, q_parity = uint32(0), uint32(0)

            # The first scores of the first queries, which nothing hides.
            tile, step = uint32(cuda.blockIdx.x), tile_order.first_step()
            q_tile, batch, head = tile_order.position(tile, heads, H, q_tiles, heads_of_group)
            first = uint32(q_tile * uint32(QUERIES))
            left, unseen = keys_of(first, own_row, keys, causal)
            stage, parity = skip(base, unseen, stage, parity, leads)
            mbarrier.wait(base + uint32(at.q_full), q_parity)
            mbarrier.wait(base + uint32(at.k_full) + uint32(8) * stage, parity)
            start_scores(scores, q_place, uint32(k_tiles + stage * uint32(KV_BYTES)))
            wait_first(scores)
            if leads:
                mbarrier.arrive(base + uint32(at.k_empty) + uint32(8) * stage)
            mask(scores, uint32(left * uint32(KEYS)), uint32(first + row), keys, causal)
            m0, m1 = row_maxima(scores, MASKED, MASKED)
            m0, m1 = m0 * factor, m1 * factor
            l0, l1 = exponentials(scores, m0, m1, factor, float32(0), float32(0))
            pack(scores, p)
            for i in range(O_REGISTERS):
                out[i] = float32(0)
            v_stage, v_parity = stage, parity
            stage, parity = advance(stage, parity)

            if TURNS and group == uint32(1):
                let_0()
            correction0, correction1 = float32(1), float32(1)
            while True:
                ends = left == uint32(0)  # these queries have seen all their keys: the next scores are of others
                if ends:
                    if leads:
                        mbarrier.arrive(base + uint32(at.q_empty) + uint32(8) * q_stage)
                    l0 = hopper.quad_sum(l0)
                    l1 = hopper.quad_sum(l1)
                    store_lse(lse_BHT, batch, head, uint32(first + row), m0, m1, l0, l1)
                    old_first, old_head, old_batch, r0, r1 = (
                        uint32(first + own_row),
                        head,
                        batch,
                        ptx_math.reciprocal(l0),
                        ptx_math.reciprocal(l1),
                    )
                    l0, l1 = float32(0), float32(0)
                    m0, m1 = MASKED, MASKED
                    tile, step = uint32(tile + step), tile_order.next_step(step)
                    if tile >= uint32(heads * q_tiles):
                        break
                    q_tile, batch, head = tile_order.position(tile, heads, H, q_tiles, heads_of_group)
                    first = uint32(q_tile * uint32(QUERIES))
                    left, unseen = keys_of(first, own_row, keys, causal)
                    stage, parity = skip(base, unseen, stage, parity, leads)
                    q_stage, q_parity = advance_q(q_stage, q_parity)
                    mbarrier.wait(base + uint32(at.q_full) + uint32(8) * q_stage, q_parity)
                else:
                    left = uint32(left - uint32(1))
                mbarrier.wait(base + uint32(at.k_full) + uint32(8) * stage, parity)
                wait_turn(group)
                start_scores(
                    scores, uint32(q_place + q_stage * uint32(Q_BYTES)), uint32(k_tiles + stage * uint32(KV_BYTES))
                )
                mbarrier.wait(base + uint32(at.v_full) + uint32(8) * v_stage, v_parity)
                start_values(out, p, uint32(v_tiles + v_stage * uint32(KV_BYTES)))
                give_turn(group)
                wait_scores(scores)
                if leads:
                    mbarrier.arrive(base + uint32(at.k_empty) + uint32(8) * stage)
                if ends:
                    mask(scores, uint32(left * uint32(KEYS)), uint32(first + row), keys, causal)
                old0, old1 = m0, m1
                m0, m1 = row_maxima(scores, MASKED, MASKED)
                m0 = ptx_math.maximum(m0 * factor, old0)
                m1 = ptx_math.maximum(m1 * factor, old1)
                grown = cuda.any_sync(0xFFFFFFFF, ptx_math.maximum(m0 - old0, m1 - old1) > TOLERATED)
                if grown:
                    correction0 = ptx_math.exp2(old0 - m0)
                    correction1 = ptx_math.exp2(old1 - m1)
                    l0 *= correction0
                    l1 *= correction1
                else:
                    m0, m1 = old0, old1
                l0, l1 = exponentials(scores, m0, m1, factor, l0, l1)
                # Already over, but a loop: the assembler moves no exponential from above it to below the wait.
                mbarrier.wait(base + uint32(at.v_full) + uint32(8) * v_stage, v_parity)
                wait_out(out)
                if leads:
                    mbarrier.arrive(base + uint32(at.v_empty) + uint32(8) * v_stage)
                if ends:
                    store_out(out, r0, r1, packed, out_map, out_place, group, leads, old_first, old_head, old_batch)
                    for i in range(O_REGISTERS):
                        out[i] = float32(0)
                elif grown:
                    for i in range(O_REGISTERS // 4):
                        out[4 * i] *= correction0
                        out[4 * i + 1] *= correction0
                        out[4 * i + 2] *= correction1
                        out[4 * i + 3] *= correction1
                pack(scores, p)
                v_stage, v_parity = stage, parity
                stage, parity = advance(stage, parity)

            mbarrier.wait(base + uint32(at.v_full) + uint32(8) * v_stage, v_parity)
            start_values(out, p, uint32(v_tiles + v_stage * uint32(KV_BYTES)))
            wait_out(out)
            store_out(out, r0, r1, packed, out_map, out_place, group, leads, old_first, old_head, old_batch)
            if leads:
                store_done()

    return _forward


def supports(operands: Operands) -> bool:
    """16-bit floats that the copy engine can address, and a scale that keeps the order of scores."""
    return operands.scale > 0 and operands.fit_copy_engine()


def forward(arrays: tuple[Array, ...], scale: float, causal: bool, product_flops: int, stream: Stream | None) -> None:
    """Launch the forward pass over (q, k, v, out, lse)."""
    tiles = TILES[hopper.padded_width(arrays[0].shape[3])]
    launch(tiles, arrays, scale, causal, product_flops, stream)


def launch(
    tiles: Tiles,
    arrays: tuple[Array, ...],
    scale: float,
    causal: bool,
    product_flops: int,
    stream: Stream | None,
) -> None:
    """Launch with tiles of a given cut."""
    q, k, v, out, lse = arrays
    B, H, T, _ = q.shape
    keys = k.shape[2]
    device = current_device()
    maps = [
        device.tensor_map(array, (1, 1, rows, SWIZZLED))
        for array, rows in ((q, tiles.queries), (k, tiles.keys), (v, tiles.keys), (out, ROWS))
    ]
    q_tiles = ceil_div(T, tiles.queries)
    grid = min(device.properties.multiprocessors, B * H * q_tiles)
    heads_of_group = tile_order.choose_heads_of_group(
        B * H, T, keys, tiles.width, tiles.queries, tiles.keys, causal, grid
    )
    forward_kernel = make_forward(tiles, hopper.wgmma_dtype(q.dtype))
    forward_kernel[grid, tiles.threads, stream, 1024 + layout(tiles).end](
        *maps, lse, scale * math.log2(math.e), B, q_tiles, keys, heads_of_group, causal, flops=2 * product_flops
    )
