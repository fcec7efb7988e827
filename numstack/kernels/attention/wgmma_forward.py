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

from numba import cuda, float32, int32, uint8, uint32, uint64

from numstack.device import Array, Kernel, Stream, current_device, kernel
from numstack.device.ptx import integers, mbarrier, sync, tma, wgmma
from numstack.device.ptx import math as ptx_math
from numstack.kernels.attention import hopper, tile_order
from numstack.kernels.attention.hopper import LN2, MASKED, ROWS, SWIZZLED, Operands, device
from numstack.kernels.attention.wgmma_forward_copies import make_keys_of, make_produce, make_skip, make_store_out
from numstack.kernels.attention.wgmma_forward_layout import Q_STAGES, TILES, Tiles, layout
from numstack.kernels.launch import ceil_div

# Growth of a maximum, as a power of two, that needs no correction: exponentials stay under 2^8.
TOLERATED = float32(8)


@functools.cache
def make_forward(tiles: Tiles, dtype: str) -> Kernel:
    """The kernel for one cut; ``dtype`` is bf16 or f16."""
    D, CONSUMERS, KEYS, STAGES, TURNS = tiles
    QUERIES = tiles.queries
    Q_BYTES, KV_BYTES = QUERIES * D * 2, KEYS * D * 2
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
    store_done = tma.make_wait(0, reads_only=False)
    softmax = hopper.make_softmax(KEYS, dtype)
    mask_columns, row_maxima, exponentials, pack = softmax
    skip, store_out = make_skip(tiles), make_store_out(tiles, dtype)
    produce = make_produce(tiles)
    _, keys_of = make_keys_of(tiles)
    wait_turn, give_turn = hopper.make_turns(CONSUMERS, TURNS)
    advance = hopper.make_advance(STAGES)
    advance_q = hopper.make_advance(Q_STAGES)

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
    def store_lse(lse_BHT, batch, head, row, m0, m1, l0, l1):
        """Of row and row + 8; one lane of their quad does."""
        if uint32(cuda.threadIdx.x) & uint32(3) == uint32(0):
            queries = uint32(lse_BHT.shape[2])
            if row < queries:
                lse_BHT[batch, head, row] = (m0 + ptx_math.log2(l0)) * LN2
            row = uint32(row + uint32(8))
            if row < queries:
                lse_BHT[batch, head, row] = (m1 + ptx_math.log2(l1)) * LN2

    @kernel(name=f"attention.forward wgmma D{D}")
    def _forward(q_map, k_map, v_map, out_map, lse_BHT, factor, batches, q_tiles, keys, heads_of_group, causal):
        """Grid: a block for each multiprocessor."""
        base = integers.round_up_1024(integers.shared_address(cuda.shared.array(0, uint8)))
        thread = uint32(cuda.threadIdx.x)
        group = sync.uniform(uint32(thread // uint32(128)))
        if thread == uint32(0):
            tma.acquire_map(q_map)
            tma.acquire_map(k_map)
            tma.acquire_map(v_map)
            tma.acquire_map(out_map)
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

            if group == uint32(CONSUMERS - 1):
                give_turn(group)
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
