"""Attention forward on Hopper: what goes between global and shared memory, and how much of it.

A ring of tiles of K and one of V run on across all tiles of queries of a block. Each stage has a barrier that says that
it is full, and one that says that all consumers have left it.
"""

import functools
from typing import Any

from numba import cuda, int32, uint32

from numstack.device.ptx import mbarrier, tma
from numstack.kernels.attention import hopper, tile_order
from numstack.kernels.attention.hopper import SWIZZLED, device
from numstack.kernels.attention.wgmma_forward_layout import Q_STAGES, Tiles, layout

ROW_BYTES = SWIZZLED * 2


@functools.cache
def make_keys_of(tiles: Tiles) -> tuple[Any, Any]:
    """Device functions ``key_tiles(end, keys, causal)`` and ``keys_of(first, own_row, keys, causal)``."""
    QUERIES, KEYS = tiles.queries, tiles.keys

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
        these_see = key_tiles(uint32(first + own_row + uint32(hopper.ROWS)), keys, causal)
        return uint32(these_see - uint32(1)), uint32(all_see - these_see)

    return key_tiles, keys_of


@functools.cache
def make_produce(tiles: Tiles) -> Any:
    """A device function by which one thread asks for all loads of its block."""
    QUERIES, KEYS = tiles.queries, tiles.keys
    CHUNKS = tiles.width // SWIZZLED
    Q_BYTES, KV_BYTES = QUERIES * tiles.width * 2, KEYS * tiles.width * 2
    at = layout(tiles)
    advance, advance_q = hopper.make_advance(tiles.stages), hopper.make_advance(Q_STAGES)
    key_tiles, _ = make_keys_of(tiles)

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
            load(q_map, place, full, QUERIES * ROW_BYTES, int32(q_tile * uint32(QUERIES)), head, batch)
            q_stage, q_parity = advance_q(q_stage, q_parity)
            left = key_tiles(uint32((q_tile + uint32(1)) * uint32(QUERIES)), keys, causal)
            while left > uint32(0):
                left = uint32(left - uint32(1))
                row = int32(left * uint32(KEYS))
                mbarrier.wait(base + uint32(at.k_empty) + uint32(8) * stage, parity)
                full = uint32(base + uint32(at.k_full) + uint32(8) * stage)
                mbarrier.arrive_and_expect(full, uint32(KV_BYTES))
                load(
                    k_map,
                    uint32(base + uint32(at.k) + stage * uint32(KV_BYTES)),
                    full,
                    KEYS * ROW_BYTES,
                    row,
                    head,
                    batch,
                )
                mbarrier.wait(base + uint32(at.v_empty) + uint32(8) * stage, parity)
                full = uint32(base + uint32(at.v_full) + uint32(8) * stage)
                mbarrier.arrive_and_expect(full, uint32(KV_BYTES))
                load(
                    v_map,
                    uint32(base + uint32(at.v) + stage * uint32(KV_BYTES)),
                    full,
                    KEYS * ROW_BYTES,
                    row,
                    head,
                    batch,
                )
                stage, parity = advance(stage, parity)
            tile, step = uint32(tile + step), tile_order.next_step(step)

    return produce


@functools.cache
def make_skip(tiles: Tiles) -> Any:
    """A device function by which a consumer leaves stages that it does not need."""
    at = layout(tiles)
    advance = hopper.make_advance(tiles.stages)

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

    return skip


@functools.cache
def make_store_out(tiles: Tiles, dtype: str) -> Any:
    """A device function that writes a consumer's 64 rows of the output."""
    CHUNKS, CHUNK_BYTES = tiles.width // SWIZZLED, tiles.queries * ROW_BYTES
    put_tile = hopper.make_put_tile(tiles.width, dtype, tiles.queries)
    meet = hopper.make_meet(tiles.consumers)
    store_read = tma.make_wait(0, reads_only=True)

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
                    place + uint32(chunk * CHUNK_BYTES),
                    int32(SWIZZLED * chunk),
                    int32(first),
                    int32(head),
                    int32(batch),
                )
            tma.commit()

    return store_out
