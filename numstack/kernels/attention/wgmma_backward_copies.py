"""The copying roles of attention's backward pass for Hopper: what is read comes by TMA, dq leaves by bulk additions."""

import functools
from typing import Any

from numba import cuda, int32, int64, uint32

from numstack.device.ptx import bulk, integers, mbarrier, tma, turns
from numstack.kernels.attention.hopper import SWIZZLED, device
from numstack.kernels.attention.wgmma_backward_layout import (
    DO_EMPTY,
    DO_FULL,
    DQ_EMPTY,
    DQ_FULL,
    DQ_HALF,
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
)


@functools.cache
def make_produce(tiles: Tiles, causal: bool) -> Any:
    """The producer: one thread draws items and asks for all that is read."""
    queries, n_parts = tiles.queries, tiles.width // SWIZZLED
    kv_bytes, q_bytes, rows_bytes = tiles.kv_bytes, tiles.q_bytes, tiles.rows_bytes
    k, v, q, dout, rows = tiles.k, tiles.v, tiles.q, tiles.dout, tiles.rows
    _, block_of_keys, first_tile, _ = make_walk(queries, causal)

    @device
    def load(array, tile, part_bytes, barrier, row, head, batch):
        for part in range(n_parts):
            place = uint32(tile + uint32(part * part_bytes))
            tma.load_4d(array, place, barrier, int32(SWIZZLED * part), row, head, batch)

    @device
    def produce(
        k_map, v_map, q_map, do_map, rows_R, tickets_1, items, base, barriers, n_items, n_heads, n_blocks, n_tiles
    ):
        step = uint32(0)
        count = uint32(0)
        item = int32(0)
        while item < n_items:
            slot = uint32((count & uint32(1)) * uint32(8))
            mbarrier.wait(uint32(barriers + uint32(ITEM_EMPTY) + slot), ((count >> uint32(1)) & uint32(1)) ^ uint32(1))
            item = int32(cuda.atomic.add(tickets_1, 0, int32(1)))
            items[count & uint32(1)] = item
            mbarrier.arrive(uint32(barriers + uint32(ITEM_FULL) + slot))
            if item < n_items:
                block = block_of_keys(item, n_blocks)
                plane = integers.divide(item, n_blocks)
                batch = integers.divide(plane, n_heads)
                head = integers.subtract(plane, integers.multiply(batch, n_heads))
                mbarrier.wait(uint32(barriers + uint32(KV_EMPTY)), (count & uint32(1)) ^ uint32(1))
                full = uint32(barriers + uint32(K_FULL))
                mbarrier.arrive_and_expect(full, uint32(kv_bytes))
                load(k_map, uint32(base + uint32(k)), KEYS * ROW_BYTES, full, int32(block * int32(KEYS)), head, batch)
                full = uint32(barriers + uint32(V_FULL))
                mbarrier.arrive_and_expect(full, uint32(kv_bytes))
                load(v_map, uint32(base + uint32(v)), KEYS * ROW_BYTES, full, int32(block * int32(KEYS)), head, batch)
                tile = first_tile(block)
                plane = integers.multiply(plane, n_tiles)
                while tile < n_tiles:
                    stage = step & uint32(1)
                    parity = ((step >> uint32(1)) & uint32(1)) ^ uint32(1)
                    row = int32(tile * int32(queries))
                    mbarrier.wait(uint32(barriers + uint32(Q_EMPTY) + stage * uint32(8)), parity)
                    full = uint32(barriers + uint32(Q_FULL) + stage * uint32(8))
                    mbarrier.arrive_and_expect(full, uint32(q_bytes))
                    place = uint32(base + uint32(q) + stage * uint32(q_bytes))
                    load(q_map, place, queries * ROW_BYTES, full, row, head, batch)
                    mbarrier.wait(uint32(barriers + uint32(DO_EMPTY) + stage * uint32(8)), parity)
                    full = uint32(barriers + uint32(DO_FULL) + stage * uint32(8))
                    mbarrier.arrive_and_expect(full, uint32(q_bytes + rows_bytes))
                    place = uint32(base + uint32(dout) + stage * uint32(q_bytes))
                    load(do_map, place, queries * ROW_BYTES, full, row, head, batch)
                    place = uint32(base + uint32(rows) + stage * uint32(rows_bytes))
                    bulk.load(rows_R, int64(plane + tile) * int64(2 * queries), place, uint32(rows_bytes), full)
                    step = uint32(step + uint32(1))
                    tile = integers.opaque(int32(tile + int32(1)))
            count = uint32(count + uint32(1))

    return produce


@functools.cache
def make_write_dq(tiles: Tiles, causal: bool) -> Any:
    """A writer: one of two threads that take turns at tiles, since an addition takes about as long as a tile."""
    dq = tiles.dq
    next_item, block_of_keys, first_tile, turn_of = make_walk(tiles.queries, causal)
    wait_until_read, wait_until_written = (tma.make_wait(0, reads_only=reads_only) for reads_only in (True, False))

    @device
    def write_dq(dq_E, turns_S, items, base, barriers, writer, n_items, n_blocks, n_tiles):
        source = uint32(base + uint32(dq))
        full = uint32(barriers + uint32(DQ_FULL) + writer * uint32(8))
        empty = uint32(barriers + uint32(DQ_EMPTY) + writer * uint32(8))
        step = uint32(0)
        count = uint32(0)
        item = next_item(items, count, barriers)
        while item < n_items:
            block = block_of_keys(item, n_blocks)
            tile = first_tile(block)
            plane = integers.multiply(integers.divide(item, n_blocks), n_tiles)
            while tile < n_tiles:
                if (step & uint32(1)) == writer:
                    place = int64(plane + tile)
                    turn = turn_of(tile, block, n_blocks)
                    mbarrier.wait(full, (step >> uint32(1)) & uint32(1))
                    if turn == int32(0):
                        bulk.store(dq_E, place * int64(2 * DQ_HALF), source, uint32(2 * DQ_HALF * 4))
                    else:
                        turns.wait_until_equal(turns_S, place, turn)
                        bulk.add_float32(dq_E, place * int64(2 * DQ_HALF), source, uint32(2 * DQ_HALF * 4))
                    tma.commit()
                    wait_until_read()
                    mbarrier.arrive(empty)
                    wait_until_written()
                    turns.set_after(turns_S, place, int32(turn + int32(1)))
                step = uint32(step + uint32(1))
                tile = integers.opaque(int32(tile + int32(1)))
            mbarrier.arrive(uint32(barriers + uint32(ITEM_EMPTY) + (count & uint32(1)) * uint32(8)))
            count = uint32(count + uint32(1))
            item = next_item(items, count, barriers)

    return write_dq
