"""The kernel: one warpgroup loads tiles with the copy engine, two multiply them and store c, block after block of c."""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, uint8, uint32, uint64

from numstack.device import Kernel, kernel, widen
from numstack.device.ptx import integers, mbarrier, nonfinite, shared, sync, tma, vectors, wgmma
from numstack.kernels.gemm.wgmma.boxes import make_boxes
from numstack.kernels.gemm.wgmma.config import (
    BARRIER_BYTES,
    CHUNK_ROWS,
    CONSUMERS,
    NARROW,
    SUMS_BYTES,
    TILE_K,
    Config,
)
from numstack.kernels.gemm.wgmma.epilogue import Outputs, make_load_extra, make_store_rows
from numstack.kernels.gemm.wgmma.schedule import make_piece, make_tile_position

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232


class Form(NamedTuple):
    """What the kernel computes; with a Config, all that is constant in its source."""

    name: str
    a_is_KM: bool
    b_is_NK: bool
    dtype: str  # of a and b: "bf16" or "f16"
    outputs: Outputs


@cache
def make_kernel(form: Form, config: Config) -> Kernel:
    """The kernel of a form of product, cut as ``config`` says."""
    a_is_KM, b_is_NK, outputs = form.a_is_KM, form.b_is_NK, form.outputs
    tile_m, tile_n, stages, buffers = config.tile_m, config.tile_n, config.stages, config.buffers
    spread, stretch = config.spread, config.stretch
    a_bytes, b_bytes = config.a_bytes, config.b_bytes(b_is_NK)
    head_bytes = config.head_bytes(outputs.has_bias, outputs.sums_columns)
    rows = tile_m // CONSUMERS  # of a consumer: one or two accumulators of 64
    is_tall, row_blocks = rows == 128, rows // 64
    n_registers = tile_n // 2
    n_registers_below = n_registers if is_tall else 4
    staging_bytes = buffers * CHUNK_ROWS * config.row_bytes(outputs.itemsize)
    a_part = rows * 128  # from one consumer's rows of a's tile to the other's, either way it lies
    a_descriptor = wgmma.make_mn_major(TILE_K) if a_is_KM else wgmma.k_major
    box_columns = config.b_box_columns
    b_descriptor = wgmma.k_major if b_is_NK else wgmma.make_mn_major(TILE_K, box_columns)
    a_step = 128 if a_is_KM else 2
    b_step = 2 if b_is_NK else 2 * box_columns
    a_below = 64 * 128 // 16
    wait_previous = wgmma.make_wait(1)
    wait_last = wgmma.make_wait(0, n_registers)
    give_registers = sync.make_set_registers("dec", PRODUCER_REGISTERS)
    take_registers = sync.make_set_registers("inc", CONSUMER_REGISTERS)
    wait_all_read = tma.make_wait(0, reads_only=True)
    piece = make_piece(spread)
    tile_position = make_tile_position(config.group, outputs.is_batch)
    load = make_boxes(outputs.is_batch).load
    has_bias, reads_extra = outputs.has_bias, outputs.reads_extra
    keeps_preactivation, flags_nonfinite = outputs.keeps_preactivation, outputs.flags_nonfinite
    is_nonfinite = {
        "bf16": nonfinite.is_nonfinite_bf16, "f16": nonfinite.is_nonfinite_f16, "f32": nonfinite.is_nonfinite_f32
    }[outputs.dtype]  # fmt: skip
    chunks = tile_n // outputs.chunk_columns(config) * row_blocks
    loads_a_tile = chunks // buffers  # of each buffer
    first_loads = min(chunks, buffers)
    load_extra = make_load_extra(outputs, config)
    store_rows, store_rows_below = make_store_rows(outputs, config, 0), make_store_rows(outputs, config, 1)
    n_boxes_a, n_boxes_b, box_bytes = tile_m // 64, tile_n // box_columns, TILE_K * box_columns * 2

    @cuda.jit(device=True)
    def advance(stage, phase):
        next_stage = uint32(stage + uint32(1))
        if next_stage == uint32(stages):
            return uint32(0), uint32(phase ^ uint32(1))
        return next_stage, phase

    @cuda.jit(device=True)
    def load_a(a, target, barrier, row, depth, matrix):
        if a_is_KM:
            for box in range(n_boxes_a):
                load(a, uint32(target + uint32(box * 8192)), barrier, int32(row + box * 64), depth, matrix)
        else:
            load(a, target, barrier, depth, row, matrix)

    @cuda.jit(device=True)
    def load_b(b, target, barrier, column, depth, matrix):
        if b_is_NK:
            load(b, target, barrier, depth, column, matrix)
        else:
            for box in range(n_boxes_b):
                at = uint32(target + uint32(box * box_bytes))
                load(b, at, barrier, int32(column + box * box_columns), depth, matrix)

    def make_add_up(columns: int) -> Any:
        """A device function that multiplies tiles of a and ``columns`` of b as they arrive, and sums them in acc.

        Accumulators of other columns keep what they had: it is not stored.
        """
        multiply = wgmma.make_multiply(columns or 8, form.dtype, a_is_KM, not b_is_NK)

        @cuda.jit(device=True)
        def add_up(acc, below, rows_of_a, tiles_of_b, full, empty, first_stage, first_phase, steps, mine):
            stage = first_stage
            phase = first_phase
            previous = stage
            for k in range(steps):
                mbarrier.wait(full + uint32(8) * stage, phase)
                if columns > 0:
                    from_a = a_descriptor(uint32(rows_of_a + stage * uint32(a_bytes)))
                    from_b = b_descriptor(uint32(tiles_of_b + stage * uint32(b_bytes)))
                    wgmma.fence()
                    keep = int32(1) if stretch > 0 else int32(k != 0)
                    for sixteen in range(4):
                        left_16 = from_a + uint64(a_step * sixteen)
                        right_16 = from_b + uint64(b_step * sixteen)
                        multiply(acc, left_16, right_16, keep)
                        if is_tall:
                            multiply(below, left_16 + uint64(a_below), right_16, keep)
                        keep = int32(1)
                    wgmma.commit()
                    wait_previous()
                if k != 0 and mine == 0:
                    mbarrier.arrive(empty + uint32(8) * previous)
                previous = stage
                stage, phase = advance(stage, phase)
            wait_last(acc)
            if is_tall:
                wait_last(below)
            if mine == 0:
                mbarrier.arrive(empty + uint32(8) * previous)
            return stage, phase

        return add_up

    # What is left over from another tile could be taken for an overflow; and where parts of tiles are stored as well,
    # ptxas does not see that accumulators are complete (C7514).
    skips_edges = not flags_nonfinite and not spread and not stretch
    add_up, add_up_narrow, add_up_nothing = make_add_up(tile_n), make_add_up(NARROW), make_add_up(0)

    @cuda.jit(device=True)
    def add_up_stretches(acc, below, rows_of_a, tiles_of_b, full, empty, first_stage, first_phase, steps, mine):
        """The same in stretches of some steps, whose sums are added in float32."""
        total = cuda.local.array(n_registers, float32)
        for i in range(n_registers):
            total[i] = float32(0)
        stage = first_stage
        phase = first_phase
        left = steps
        while left > 0:
            now = int32(min(left, stretch))
            left = integers.subtract(left, now)
            for i in range(n_registers):
                acc[i] = float32(0)
            stage, phase = add_up(acc, below, rows_of_a, tiles_of_b, full, empty, stage, phase, now, mine)
            for i in range(n_registers):
                total[i] += acc[i]
        for i in range(n_registers):
            acc[i] = total[i]
        return stage, phase

    @kernel(name=form.name)
    def product(
        a, b, c, kept, extra, bias_N, partials, sums, flag, m, n,
        tiles_m, tiles_n, whole, steps, rest, heads, head, tails, slots, alpha,
    ):  # fmt: skip
        base = integers.shared_address(cuda.shared.array(0, uint8))
        tiles_of_a = uint32(base + uint32(head_bytes))
        tiles_of_b = uint32(tiles_of_a + uint32(stages * a_bytes))
        staging = uint32(tiles_of_b + uint32(stages * b_bytes))
        full = base
        empty = uint32(full + uint32(8 * stages))
        loaded = uint32(empty + uint32(8 * stages))
        thread = int32(cuda.threadIdx.x)
        uniform_warp = sync.uniform(uint32(thread) >> uint32(5))
        group = uint32(uniform_warp >> uint32(2))
        number = int32(cuda.blockIdx.x)
        n_blocks = int32(cuda.gridDim.x)
        if thread == 0:
            for stage in range(stages):
                mbarrier.init(full + uint32(8 * stage), uint32(1))
                mbarrier.init(empty + uint32(8 * stage), uint32(CONSUMERS))
            for slot in range(CONSUMERS * buffers):
                mbarrier.init(loaded + uint32(8 * slot), uint32(1))
            mbarrier.fence_init()
        cuda.syncthreads()
        if spread:
            sync.let_next_kernel_start()

        stage = uint32(0)
        phase = uint32(0)
        if group == 0:
            give_registers()
            if uniform_warp == uint32(0) and sync.elect():
                tma.acquire_map(a)
                tma.acquire_map(b)
                turn = int32(0)
                while True:
                    tile, k_begin, k_end, _ = piece(
                        turn, number, n_blocks, whole, steps, rest, heads, head, tails, slots
                    )
                    if tile < 0:
                        break
                    row_of_tiles, column_of_tiles, matrix = tile_position(tile, tiles_m, tiles_n)
                    row = int32(row_of_tiles * tile_m)
                    column = int32(column_of_tiles * tile_n)
                    for k in range(k_begin, k_end):
                        barrier = uint32(full + uint32(8) * stage)
                        mbarrier.wait(empty + uint32(8) * stage, phase ^ uint32(1))
                        mbarrier.arrive_and_expect(barrier, uint32(a_bytes + b_bytes))
                        depth = int32(k * TILE_K)
                        load_a(a, uint32(tiles_of_a + stage * uint32(a_bytes)), barrier, row, depth, matrix)
                        load_b(b, uint32(tiles_of_b + stage * uint32(b_bytes)), barrier, column, depth, matrix)
                        stage, phase = advance(stage, phase)
                    turn = integers.add(turn, int32(1))
        else:
            take_registers()
            consumer = int32(group - uint32(1))
            mine = int32(thread & 127)
            if mine == 0:
                tma.acquire_map(c)
                if keeps_preactivation:
                    tma.acquire_map(kept)
                if reads_extra:
                    tma.acquire_map(extra)
            my_staging = uint32(staging + uint32(consumer) * uint32(staging_bytes))
            my_loaded = uint32(loaded + uint32(consumer) * uint32(8 * buffers))
            my_bias = uint32(base + uint32(BARRIER_BYTES) + uint32(consumer * (4 * tile_n)))
            my_sums = uint32(base + uint32(BARRIER_BYTES) + uint32(consumer * SUMS_BYTES))
            my_rows_of_a = uint32(tiles_of_a + uint32(consumer) * uint32(a_part))
            acc = cuda.local.array(n_registers, float32)
            below = cuda.local.array(n_registers_below, float32)
            for i in range(n_registers):
                acc[i] = float32(0)
            for i in range(n_registers_below):
                below[i] = float32(0)
            worst = cuda.local.array(1, uint32)
            worst[0] = uint32(0)
            parity = uint32(0)
            bias_left = float32(0)
            bias_right = float32(0)
            turn = int32(0)
            while True:
                tile, k_begin, k_end, place = piece(
                    turn, number, n_blocks, whole, steps, rest, heads, head, tails, slots
                )
                if tile < 0:
                    break
                row_of_tiles, column_of_tiles, matrix = tile_position(tile, tiles_m, tiles_n)
                row = int32(row_of_tiles * tile_m + consumer * rows)
                column = int32(column_of_tiles * tile_n)
                if reads_extra and mine == 0:
                    wait_all_read()
                    for first in range(first_loads):
                        load_extra(extra, column, row, matrix, my_staging, my_loaded, first)
                if has_bias:
                    at = int32(column + 2 * mine)
                    bias_left = widen(bias_N[at]) if at < bias_N.shape[0] else float32(0)
                    bias_right = widen(bias_N[at + 1]) if at + 1 < bias_N.shape[0] else float32(0)
                n_steps = integers.subtract(k_end, k_begin)
                # What hangs over c's edges is not multiplied: no tile ends earlier, but the others have more power.
                if skips_edges and row >= m:
                    stage, phase = add_up_nothing(
                        acc, below, my_rows_of_a, tiles_of_b, full, empty, stage, phase, n_steps, mine
                    )
                elif skips_edges and integers.subtract(n, column) <= int32(NARROW):
                    stage, phase = add_up_narrow(
                        acc, below, my_rows_of_a, tiles_of_b, full, empty, stage, phase, n_steps, mine
                    )
                elif stretch > 0:
                    stage, phase = add_up_stretches(
                        acc, below, my_rows_of_a, tiles_of_b, full, empty, stage, phase, n_steps, mine
                    )
                else:
                    stage, phase = add_up(
                        acc, below, my_rows_of_a, tiles_of_b, full, empty, stage, phase, n_steps, mine
                    )
                if has_bias and 2 * mine < tile_n:
                    shared.store2(uint32(my_bias + uint32(8 * mine)), bias_left, bias_right)
                if spread and place >= 0:
                    at = integers.add(integers.multiply(place, int32(CONSUMERS)), consumer)
                    at = integers.multiply(at, int32(row_blocks))
                    for i in range(n_registers // 4):
                        vectors.store4(partials, ((at * (n_registers // 4) + i) * 128 + mine) * 4, acc, 4 * i)
                    if is_tall:
                        at = integers.add(at, int32(1))
                        for i in range(n_registers // 4):
                            vectors.store4(partials, ((at * (n_registers // 4) + i) * 128 + mine) * 4, below, 4 * i)
                else:
                    store_rows(
                        acc, c, kept, extra, column, row, matrix, my_staging, my_loaded, parity, mine, consumer,
                        my_bias, alpha, my_sums, sums, worst,
                    )  # fmt: skip
                    if is_tall:
                        store_rows_below(
                            below, c, kept, extra, column, int32(row + 64), matrix, my_staging, my_loaded, parity, mine,
                            consumer, my_bias, alpha, my_sums, sums, worst,
                        )  # fmt: skip
                    parity = uint32(parity ^ uint32(loads_a_tile & 1))
                turn = integers.add(turn, int32(1))
            if flags_nonfinite and is_nonfinite(worst[0]):
                cuda.atomic.or_(flag, 0, 1)
            if mine == 0:
                wait_all_read()

    return product
