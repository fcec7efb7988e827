"""The kernel behind ``wgmma_backward``: a block turns tiles of queries into gradients of its tile of keys.

Blocks stay on their multiprocessor and draw items of work, a block of keys of a head each. A block of threads is three
warpgroups, the first with few registers, the others with many:

=====================  ==============================================================================================
producer (one thread)  draws items; brings K and V of each, then Q, dO, log-sum-exp and delta of its tiles of queries
writers (two threads)  add finished tiles of dq to global memory, each when it is the turn of its block of keys
two consumers          64 keys each: S' = K Q', dP' = V dO', P' and dS' in registers, dV += P' dO, dK += dS' Q; dS'
                       goes to shared memory as well, from where both take it for their half of dQ = dS K
=====================  ==============================================================================================

Scores are computed transposed, keys by queries, because accumulators are laid out as wgmma takes operand A from
registers: P' and dS' need no way through shared memory to become factors of dV and dK.

While a consumer computes, products run: it starts dQ and dK of the tile before and S' of this one; stores dQ while dK
runs; starts dP'; makes exponentials while dP' runs; starts dV, and makes dS' while dV runs. (Exponentials behind dQ and
dK instead, with P' rounded before dS' is made of it to save registers, were slower by 2%.)

Source: Shah et al. 2024, "FlashAttention-3", section 3 and its backward pass; PTX ISA (wgmma, TMA, mbarrier).
"""

import functools
from typing import Any, NamedTuple

from numba import cuda, float32, int32, uint8, uint32, uint64

from numstack.device import Kernel, kernel
from numstack.device.ptx import integers, mbarrier, shared, sync, tma, wgmma
from numstack.device.ptx.math import exp2
from numstack.kernels.attention.hopper import ROWS, SWIZZLED, device, pack_of
from numstack.kernels.attention.wgmma_backward_copies import make_produce, make_write_dq
from numstack.kernels.attention.wgmma_backward_layout import (
    DO_EMPTY,
    DO_FULL,
    DQ_EMPTY,
    DQ_FULL,
    DQ_HALF,
    DQ_REGISTERS,
    ITEM_EMPTY,
    ITEM_FULL,
    K_FULL,
    KEYS,
    KV_EMPTY,
    Q_EMPTY,
    Q_FULL,
    ROW_BYTES,
    V_FULL,
    Tiles,
    make_walk,
    tiles_of,
)


class Products(NamedTuple):
    """Device functions of a consumer; see :func:`make_products`."""

    by_rows: Any
    differentiate: Any
    by_columns: Any
    give_dq: Any


@functools.cache
def make_products(tiles: Tiles, dtype: str, causal: bool) -> Products:
    """Device functions of a consumer.

    ``by_rows(acc, rows, tile)`` starts S' or dP': 64 rows of K or V times a tile of Q or dO.

    ``differentiate(...)`` makes P' of S', starts dV, makes dS' of P' and dP', and leaves it in registers and in shared
    memory, where both consumers' halves are when it returns.

    ``by_columns(...)`` starts dQ and dK of a stage. ``give_dq(...)`` stores dQ for the writers.
    """
    width, queries = tiles.width, tiles.queries
    q, dout, ds, rows = tiles.q, tiles.dout, tiles.ds, tiles.rows
    q_bytes, ds_bytes, rows_bytes = tiles.q_bytes, tiles.ds_bytes, tiles.rows_bytes
    is_wide = width == 128
    n_scores, n_packed = queries // 2, queries // 4

    first_scores, more_scores = wgmma.make_first_multiply(queries, dtype), wgmma.make_multiply(queries, dtype)
    first_dq = wgmma.make_first_multiply(64, dtype, transpose_a=True, transpose_b=True)
    more_dq = wgmma.make_multiply(64, dtype, transpose_a=True, transpose_b=True)
    multiply_registers = wgmma.make_multiply_registers(width, dtype, transpose_b=True)
    wait_scores = wgmma.make_wait(1, n_scores)
    wait_dv = wgmma.make_wait(0, width // 2)
    key_columns, query_columns = wgmma.make_mn_major(KEYS), wgmma.make_mn_major(queries)
    both_consumers = sync.make_barrier(1, 256)
    pack = pack_of(dtype)
    put_ds = make_put_packed(queries)

    @device
    def by_rows(acc, rows, tile):
        # Opaque, or all steps' descriptors of K and V would be kept in registers from one tile to the next.
        a = wgmma.k_major(uint32(integers.opaque(int32(rows))))
        b = wgmma.k_major(tile)
        wgmma.fence()
        for step in range(width // 16):
            if step == 0:
                first_scores(acc, a, b)
            else:
                more_scores(
                    acc,
                    a + uint64(step // 4 * (KEYS * ROW_BYTES // 16) + step % 4 * 2),
                    b + uint64(step // 4 * (queries * ROW_BYTES // 16) + step % 4 * 2),
                    int32(1),
                )
        wgmma.commit()

    @device
    def differentiate(
        scores, dp, ds_packed, dv, base, barriers, stage, consumer, lane, key, last_key, n_keys, tile, factor
    ):
        packed = cuda.local.array(n_packed, uint32)
        column = uint32((uint32(integers.opaque(int32(cuda.threadIdx.x))) & uint32(3)) * uint32(2))
        lse_at = uint32(base + uint32(rows) + stage * uint32(rows_bytes) + column * uint32(4))
        wait_scores(scores)
        for j in range(queries // 8):
            lse0, lse1 = shared.load2(uint32(lse_at + uint32(32 * j)))
            scores[4 * j] = exp2(scores[4 * j] * factor - lse0)
            scores[4 * j + 1] = exp2(scores[4 * j + 1] * factor - lse1)
            scores[4 * j + 2] = exp2(scores[4 * j + 2] * factor - lse0)
            scores[4 * j + 3] = exp2(scores[4 * j + 3] * factor - lse1)
        query = int32(tile * int32(queries))
        crosses = last_key >= n_keys
        if causal:
            crosses = crosses or last_key > query
        if crosses:
            # Columns before ``first`` do not see this thread's first row, those before ``second`` not its second.
            first = int32(key - query - int32(column)) if causal else int32(0)
            second = int32(first + int32(8)) if causal else int32(0)
            if key >= n_keys:
                first = int32(queries)
            if int32(key + int32(8)) >= n_keys:
                second = int32(queries)
            for j in range(queries // 8):
                for i in range(2):
                    if int32(8 * j + i) < first:
                        scores[4 * j + i] = float32(0)
                    if int32(8 * j + i) < second:
                        scores[4 * j + 2 + i] = float32(0)
        for i in range(n_packed):
            packed[i] = pack(scores[2 * i], scores[2 * i + 1])
        do_columns = query_columns(uint32(base + uint32(dout) + stage * uint32(q_bytes)))
        wgmma.fence()
        for step in range(queries // 16):
            multiply_registers(dv, packed, 4 * step, do_columns + uint64(128 * step), int32(1))
        wgmma.commit()

        wait_scores(dp)
        for j in range(queries // 8):
            delta0, delta1 = shared.load2(uint32(lse_at + uint32(4 * queries + 32 * j)))
            ds_packed[2 * j] = pack(scores[4 * j] * (dp[4 * j] - delta0), scores[4 * j + 1] * (dp[4 * j + 1] - delta1))
            ds_packed[2 * j + 1] = pack(
                scores[4 * j + 2] * (dp[4 * j + 2] - delta0), scores[4 * j + 3] * (dp[4 * j + 3] - delta1)
            )
        place = uint32(base + uint32(ds) + stage * uint32(ds_bytes) + consumer * uint32(ROWS * ROW_BYTES))
        put_ds(ds_packed, place)
        tma.fence_async()
        wait_dv(dv)
        mbarrier.arrive(uint32(barriers + uint32(DO_EMPTY) + stage * uint32(8)))
        both_consumers()

    @device
    def by_columns(dq_part, dk, ds_packed, k_columns, base, stage, consumer):
        ds_tile = uint32(base + uint32(ds) + stage * uint32(ds_bytes))
        # A wide head's consumers share the rows of dQ and have half of its columns each; else half of its rows.
        a = key_columns(ds_tile if is_wide else uint32(ds_tile + consumer * uint32(KEYS * ROW_BYTES)))
        b = query_columns(uint32(base + uint32(q) + stage * uint32(q_bytes)))
        wgmma.fence()
        for step in range(KEYS // 16):
            if step == 0:
                first_dq(dq_part, a, k_columns)
            else:
                more_dq(dq_part, a + uint64(128 * step), k_columns + uint64(128 * step), int32(1))
        wgmma.commit()
        for step in range(queries // 16):
            multiply_registers(dk, ds_packed, 4 * step, b + uint64(128 * step), int32(1))
        wgmma.commit()

    @device
    def give_dq(dq_part, place, barriers, step):
        """The tile of ``step``, once the other writer has read the one before."""
        before = uint32(step - uint32(1))
        mbarrier.wait(
            uint32(barriers + uint32(DQ_EMPTY) + (before & uint32(1)) * uint32(8)), (before >> uint32(1)) & uint32(1)
        )
        for i in range(DQ_REGISTERS // 4):
            shared.store4(uint32(place + uint32(i * 128 * 16)), dq_part, 4 * i)
        tma.fence_async()
        mbarrier.arrive(uint32(barriers + uint32(DQ_FULL) + (step & uint32(1)) * uint32(8)))

    return Products(by_rows, differentiate, by_columns, give_dq)


@functools.cache
def make_put_packed(columns: int) -> Any:
    """A device function that puts a warpgroup's 64 x ``columns`` packed accumulators into a tile of ``KEYS`` rows.

    ``put_packed(packed, tile)``: ``tile`` is where the warpgroup's first row is; 64 columns, swizzled, then the next.
    """

    @device
    def put_packed(packed, tile):
        # Opaque, so that addresses are computed again for each tile and take no registers in between.
        thread = uint32(integers.opaque(int32(cuda.threadIdx.x)))
        row = uint32(tile + (((thread >> uint32(1)) & uint32(48)) + (thread & uint32(15))) * uint32(ROW_BYTES))
        half = uint32((thread & uint32(16)) ^ ((thread & uint32(7)) << uint32(4)))
        for j in range(columns // 16):
            place = uint32(row + (half ^ uint32(j % 4 * 32)) + uint32(j // 4 * KEYS * ROW_BYTES))
            shared.store_matrices(place, packed, 4 * j)

    return put_packed


@functools.cache
def make_consume(tiles: Tiles, dtype: str, causal: bool) -> Any:
    """A consumer: one of two warpgroups with 64 keys each."""
    width, queries = tiles.width, tiles.queries
    k, v, q, dout, ds, dq = tiles.k, tiles.v, tiles.q, tiles.dout, tiles.ds, tiles.dq
    q_bytes, kv_bytes = tiles.q_bytes, tiles.kv_bytes
    is_wide, n_parts = width == 128, width // SWIZZLED
    n_scores, n_packed, n_sums, n_sums_packed = queries // 2, queries // 4, width // 2, width // 4
    # dv leaves by the memory of dS', which it fits exactly, row by row; so does dk if there is room, and the next K and
    # V may come meanwhile. A wide dk takes that of K.
    dv_out, dk_out = ds, k if is_wide else ds + kv_bytes

    next_item, block_of_keys, first_tile, _ = make_walk(queries, causal)
    by_rows, differentiate, by_columns, give_dq = make_products(tiles, dtype, causal)
    wait_dq_before_scores, wait_dq = wgmma.make_wait(2, DQ_REGISTERS), wgmma.make_wait(1, DQ_REGISTERS)
    wait_dk_before_scores, wait_dk = wgmma.make_wait(1, n_sums), wgmma.make_wait(0, n_sums)
    key_columns = wgmma.make_mn_major(KEYS)
    both_consumers = sync.make_barrier(1, 256)
    consumer_0, consumer_1 = (sync.make_barrier(number, 128) for number in (2, 3))
    wait_until_read = tma.make_wait(0, reads_only=True)
    pack, put_sums = pack_of(dtype), make_put_packed(width)

    @device
    def this_consumer(consumer):
        if consumer == uint32(0):
            consumer_0()
        else:
            consumer_1()

    @device
    def consume(
        dk_map, dv_map, items, base, barriers, consumer, n_items, n_heads, n_blocks, n_tiles, n_keys, scale, factor
    ):
        thread = uint32(cuda.threadIdx.x) & uint32(127)
        lane = thread & uint32(31)
        scores = cuda.local.array(n_scores, float32)
        dp = cuda.local.array(n_scores, float32)
        dq_part = cuda.local.array(DQ_REGISTERS, float32)
        dk = cuda.local.array(n_sums, float32)
        dv = cuda.local.array(n_sums, float32)
        ds_packed = cuda.local.array(n_packed, uint32)
        packed = cuda.local.array(n_sums_packed, uint32)
        own_rows = uint32(consumer * uint32(ROWS * ROW_BYTES))
        k_rows = uint32(base + uint32(k) + own_rows)
        v_rows = uint32(base + uint32(v) + own_rows)
        own_part = uint32(consumer * uint32(KEYS * ROW_BYTES)) if is_wide else uint32(0)
        k_columns = key_columns(uint32(base + uint32(k) + own_part))
        own_key = int32(consumer * uint32(ROWS) + (thread >> uint32(5)) * uint32(16) + (lane >> uint32(2)))
        own_dq = uint32(base + uint32(dq) + consumer * uint32(4 * DQ_HALF) + thread * uint32(16))

        step = uint32(0)
        count = uint32(0)
        item = next_item(items, count, barriers)
        while item < n_items:
            block = block_of_keys(item, n_blocks)
            first_key = int32(block * int32(KEYS))
            last_key = int32(first_key + int32(KEYS - 1))
            key = int32(own_key + first_key)
            tile = first_tile(block)
            for i in range(n_sums):
                dk[i] = float32(0)
                dv[i] = float32(0)
            mbarrier.wait(uint32(barriers + uint32(K_FULL)), count & uint32(1))
            if tile < n_tiles:
                stage = step & uint32(1)
                parity = (step >> uint32(1)) & uint32(1)
                mbarrier.wait(uint32(barriers + uint32(Q_FULL) + stage * uint32(8)), parity)
                by_rows(scores, k_rows, uint32(base + uint32(q) + stage * uint32(q_bytes)))
                mbarrier.wait(uint32(barriers + uint32(V_FULL)), count & uint32(1))
                mbarrier.wait(uint32(barriers + uint32(DO_FULL) + stage * uint32(8)), parity)
                by_rows(dp, v_rows, uint32(base + uint32(dout) + stage * uint32(q_bytes)))
                if thread == uint32(0):
                    wait_until_read()  # dk and dv of the item before are out of the memory that dS' goes to
                this_consumer(consumer)
                differentiate(
                    scores,
                    dp,
                    ds_packed,
                    dv,
                    base,
                    barriers,
                    stage,
                    consumer,
                    lane,
                    key,
                    last_key,
                    n_keys,
                    tile,
                    factor,
                )
                tile = int32(tile + int32(1))
                step = uint32(step + uint32(1))
                while tile < n_tiles:
                    stage = step & uint32(1)
                    before = stage ^ uint32(1)
                    parity = (step >> uint32(1)) & uint32(1)
                    by_columns(dq_part, dk, ds_packed, k_columns, base, before, consumer)
                    mbarrier.wait(uint32(barriers + uint32(Q_FULL) + stage * uint32(8)), parity)
                    by_rows(scores, k_rows, uint32(base + uint32(q) + stage * uint32(q_bytes)))
                    wait_dq_before_scores(dq_part)
                    give_dq(dq_part, own_dq, barriers, uint32(step - uint32(1)))
                    wait_dk_before_scores(dk)
                    if lane == uint32(0):
                        mbarrier.arrive(uint32(barriers + uint32(Q_EMPTY) + before * uint32(8)))
                    mbarrier.wait(uint32(barriers + uint32(DO_FULL) + stage * uint32(8)), parity)
                    by_rows(dp, v_rows, uint32(base + uint32(dout) + stage * uint32(q_bytes)))
                    differentiate(
                        scores,
                        dp,
                        ds_packed,
                        dv,
                        base,
                        barriers,
                        stage,
                        consumer,
                        lane,
                        key,
                        last_key,
                        n_keys,
                        tile,
                        factor,
                    )
                    tile = int32(tile + int32(1))
                    step = uint32(step + uint32(1))
                before = (step & uint32(1)) ^ uint32(1)
                by_columns(dq_part, dk, ds_packed, k_columns, base, before, consumer)
                wait_dq(dq_part)
                give_dq(dq_part, own_dq, barriers, uint32(step - uint32(1)))
                wait_dk(dk)
                if lane == uint32(0):
                    mbarrier.arrive(uint32(barriers + uint32(Q_EMPTY) + before * uint32(8)))
            else:  # no query sees these keys
                mbarrier.wait(uint32(barriers + uint32(V_FULL)), count & uint32(1))
                if thread == uint32(0):
                    wait_until_read()

            both_consumers()
            if not is_wide and thread == uint32(0):
                mbarrier.arrive(uint32(barriers + uint32(KV_EMPTY)))
            for i in range(n_sums_packed):
                packed[i] = pack(dv[2 * i], dv[2 * i + 1])
            put_sums(packed, uint32(base + uint32(dv_out) + own_rows))
            for i in range(n_sums_packed):
                packed[i] = pack(dk[2 * i] * scale, dk[2 * i + 1] * scale)
            put_sums(packed, uint32(base + uint32(dk_out) + own_rows))
            tma.fence_async()
            this_consumer(consumer)
            if thread == uint32(0):
                plane = integers.divide(item, n_blocks)
                batch = integers.divide(plane, n_heads)
                head = integers.subtract(plane, integers.multiply(batch, n_heads))
                row = int32(first_key + int32(consumer * uint32(ROWS)))
                for part in range(n_parts):
                    place = uint32(base + own_rows + uint32(part * KEYS * ROW_BYTES))
                    tma.store_4d(dv_map, uint32(place + uint32(dv_out)), int32(SWIZZLED * part), row, head, batch)
                    tma.store_4d(dk_map, uint32(place + uint32(dk_out)), int32(SWIZZLED * part), row, head, batch)
                tma.commit()
                if is_wide:
                    wait_until_read()
                    mbarrier.arrive(uint32(barriers + uint32(KV_EMPTY)))
            if lane == uint32(0):
                mbarrier.arrive(uint32(barriers + uint32(ITEM_EMPTY) + (count & uint32(1)) * uint32(8)))
            count = uint32(count + uint32(1))
            item = next_item(items, count, barriers)
        if thread == uint32(0):
            wait_until_read()

    return consume


@functools.cache
def make_gradients(width: int, dtype: str, causal: bool) -> Kernel:
    """The kernel for a width of 64 or 128, ``bf16`` or ``f16``.

    Launched with at most as many blocks of ``THREADS`` as are resident at once and ``tiles_of(width).nbytes`` of shared
    memory. Writes dk and dv, and dq unscaled as float32 to ``dq_E``: for each tile of queries of each head the two
    consumers' parts, 8 x 128 x 4 values: of each thread four accumulators at a time. ``rows_R`` holds for each tile its
    log-sum-exp in units of log 2, infinite beyond the last query, then its delta; ``turns_S`` and ``tickets_1`` are 0.
    """
    tiles = tiles_of(width)
    queries, barriers_at = tiles.queries, tiles.barriers
    produce, write_dq = make_produce(tiles, causal), make_write_dq(tiles, causal)
    consume = make_consume(tiles, dtype, causal)
    give_registers, take_registers = sync.make_set_registers("dec", 24), sync.make_set_registers("inc", 240)

    @device
    def make_barriers(barriers):
        for offset in (K_FULL, V_FULL, ITEM_FULL, ITEM_FULL + 8, Q_FULL, Q_FULL + 8, DO_FULL, DO_FULL + 8):
            mbarrier.init(uint32(barriers + uint32(offset)), uint32(1))
        mbarrier.init(uint32(barriers + uint32(KV_EMPTY)), uint32(2))  # a thread of each consumer
        for stage in range(2):
            place = uint32(barriers + uint32(8 * stage))
            mbarrier.init(uint32(place + uint32(ITEM_EMPTY)), uint32(10))  # the consumers' warps and the writers
            mbarrier.init(uint32(place + uint32(Q_EMPTY)), uint32(8))  # the consumers' warps
            mbarrier.init(uint32(place + uint32(DO_EMPTY)), uint32(256))  # consumers: each read log-sum-exp and delta
            mbarrier.init(uint32(place + uint32(DQ_FULL)), uint32(256))
            mbarrier.init(uint32(place + uint32(DQ_EMPTY)), uint32(1))
        mbarrier.fence_init()

    @kernel(name=f"attention.gradients D={width}{' causal' if causal else ''}")
    def _gradients(
        k_map,
        v_map,
        q_map,
        do_map,
        dk_map,
        dv_map,
        rows_R,
        dq_E,
        turns_S,
        tickets_1,
        n_items,
        n_heads,
        n_queries,
        n_keys,
        scale,
        factor,
    ):
        items = cuda.shared.array(2, int32)
        base = integers.round_up_1024(integers.shared_address(cuda.shared.array(0, uint8)))
        barriers = uint32(base + uint32(barriers_at))
        if cuda.threadIdx.x == 0:
            tma.acquire_map(q_map)
            tma.acquire_map(k_map)
            tma.acquire_map(v_map)
            tma.acquire_map(do_map)
            tma.acquire_map(dk_map)
            tma.acquire_map(dv_map)
            make_barriers(barriers)
        cuda.syncthreads()
        n_tiles = integers.divide(int32(n_queries + int32(queries - 1)), int32(queries))
        n_blocks = integers.divide(int32(n_keys + int32(KEYS - 1)), int32(KEYS))
        warp = sync.uniform(uint32(cuda.threadIdx.x) >> uint32(5))
        if warp < uint32(4):
            give_registers()
            if (uint32(cuda.threadIdx.x) & uint32(31)) == uint32(0):
                if warp == uint32(0):
                    produce(
                        k_map,
                        v_map,
                        q_map,
                        do_map,
                        rows_R,
                        tickets_1,
                        items,
                        base,
                        barriers,
                        n_items,
                        n_heads,
                        n_blocks,
                        n_tiles,
                    )
                elif warp < uint32(3):
                    write_dq(dq_E, turns_S, items, base, barriers, uint32(warp - uint32(1)), n_items, n_blocks, n_tiles)
        else:
            take_registers()
            consumer = uint32((warp >> uint32(2)) - uint32(1))
            consume(
                dk_map,
                dv_map,
                items,
                base,
                barriers,
                consumer,
                n_items,
                n_heads,
                n_blocks,
                n_tiles,
                n_keys,
                scale,
                factor,
            )

    return _gradients
