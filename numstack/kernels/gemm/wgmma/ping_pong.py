"""The kernel whose two warpgroups take turns: one multiplies a tile of its own while the other stores its last one.

Where k is short, storing a tile takes as long as several steps of k; here the tensor cores work on meanwhile. They are
handed over when the last step of a tile is on its way. The ring of stages belongs to both: each warpgroup passes over
those of the other's tiles.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int32, uint8, uint32, uint64

from numstack.device import Kernel, kernel, widen
from numstack.device.places import PAIR
from numstack.device.ptx import cluster, integers, mbarrier, nonfinite, shared, sync, tma, wgmma
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
from numstack.kernels.gemm.wgmma.epilogue import make_load_extra, make_store_rows
from numstack.kernels.gemm.wgmma.kernel import CONSUMER_REGISTERS, PRODUCER_REGISTERS, Form
from numstack.kernels.gemm.wgmma.schedule import make_tile_position


@cache
def make_ping_pong_kernel(form: Form, config: Config) -> Kernel:
    """The kernel of a form of product, cut as ``config`` says, in tiles of 128 rows."""
    a_is_KM, b_is_NK, outputs = form.a_is_KM, form.b_is_NK, form.outputs
    tile_m, tile_n, stages, buffers = config.tile_m, config.tile_n, config.stages, config.buffers
    a_bytes, b_bytes = config.a_bytes, config.b_bytes(b_is_NK)
    head_bytes = config.head_bytes(outputs.has_bias, outputs.sums_columns)
    staging_bytes = buffers * CHUNK_ROWS * config.row_bytes(outputs.itemsize)
    n_registers = tile_n // 2
    box_columns = config.b_box_columns
    n_boxes_a, n_boxes_b, box_bytes = tile_m // 64, -(-tile_n // box_columns), TILE_K * box_columns * 2
    a_descriptor = wgmma.make_mn_major(TILE_K) if a_is_KM else wgmma.k_major
    b_descriptor = wgmma.k_major if b_is_NK else wgmma.make_mn_major(TILE_K, box_columns)
    a_step = 128 if a_is_KM else 2
    b_step = 2 if b_is_NK else 2 * box_columns
    a_below = 64 * 128 // 16
    wait_previous, wait_last = wgmma.make_wait(1), wgmma.make_wait(0, n_registers)
    give_registers = sync.make_set_registers("dec", PRODUCER_REGISTERS)
    take_registers = sync.make_set_registers("inc", CONSUMER_REGISTERS)
    wait_all_read = tma.make_wait(0, reads_only=True)
    in_groups = make_tile_position(config.group, outputs.is_batch)
    load, load_for_pair, *_ = make_boxes(outputs.is_batch)
    pairs, blocks = config.pairs, PAIR if config.pairs else 1
    has_bias, reads_extra = outputs.has_bias, outputs.reads_extra
    keeps_preactivation, flags_nonfinite = outputs.keeps_preactivation, outputs.flags_nonfinite
    is_nonfinite = {
        "bf16": nonfinite.is_nonfinite_bf16, "f16": nonfinite.is_nonfinite_f16, "f32": nonfinite.is_nonfinite_f32
    }[outputs.dtype]  # fmt: skip
    # A warpgroup stores 128 rows, as it does where it has half of a tile of 256.
    as_half = config._replace(tile_m=2 * tile_m)
    load_extra = make_load_extra(outputs, as_half)
    store_rows, store_rows_below = make_store_rows(outputs, as_half, 0), make_store_rows(outputs, as_half, 1)
    chunks = 2 * tile_n // outputs.chunk_columns(config)
    loads_a_tile = chunks // buffers  # of each buffer
    first_loads = min(chunks, buffers)

    @cuda.jit(device=True)
    def load_a(a, target, barrier, row, depth, matrix, block):
        if pairs:
            half = uint32(target + uint32(block) * uint32(a_bytes // PAIR))
            if a_is_KM:
                load_for_pair(a, half, barrier, int32(row + block * 64), depth, matrix)
            else:
                load_for_pair(a, half, barrier, depth, int32(row + block * 64), matrix)
        elif a_is_KM:
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

    @cuda.jit(device=True)
    def tile_position(number, tiles_m, tiles_n, grouped):
        """Of a tile, or of a pair of them. Tiles beyond those worked through in groups are a narrow last column."""
        row, column, matrix = in_groups(number, tiles_m, tiles_n)
        if number >= grouped:
            row = integers.subtract(number, grouped)
            column = tiles_n
            matrix = int32(0)
        return row, column, matrix

    @cuda.jit(device=True)
    def passed(stage, phase, n_stages, n_rounds):
        """Where in the ring, after so many stages and whole rounds."""
        next_stage = uint32(stage + n_stages)
        next_phase = uint32(phase ^ n_rounds)
        if next_stage >= uint32(stages):
            next_stage = uint32(next_stage - uint32(stages))
            next_phase = uint32(next_phase ^ uint32(1))
        return next_stage, next_phase

    @cuda.jit(device=True)
    def give_back(barrier, block):
        """Let the producer of a block of the pair fill a stage again."""
        if pairs:
            cluster.arrive(barrier, uint32(block))
        else:
            mbarrier.arrive(barrier)

    def make_add_up(columns: int) -> Any:
        """A device function that multiplies tiles of a and ``columns`` of b as they arrive, and sums them.

        Accumulators of other columns keep what they had: it is not stored.
        """
        multiply = wgmma.make_multiply(columns, form.dtype, a_is_KM, not b_is_NK)

        @cuda.jit(device=True)
        def add_up(acc, below, tiles_of_a, tiles_of_b, full, empty, stage_now, phase_now, steps, their_turn, mine):
            stage = stage_now
            phase = phase_now
            previous = stage
            for k in range(steps):
                mbarrier.wait(full + uint32(8) * stage, phase)
                from_a = a_descriptor(uint32(tiles_of_a + stage * uint32(a_bytes)))
                from_b = b_descriptor(uint32(tiles_of_b + stage * uint32(b_bytes)))
                wgmma.fence()
                keep = int32(k != 0)
                for sixteen in range(4):
                    left_16 = from_a + uint64(a_step * sixteen)
                    right_16 = from_b + uint64(b_step * sixteen)
                    multiply(acc, left_16, right_16, keep)
                    multiply(below, left_16 + uint64(a_below), right_16, keep)
                    keep = int32(1)
                wgmma.commit()
                wait_previous()
                if k != 0 and mine < blocks:
                    give_back(empty + uint32(8) * previous, mine)
                previous = stage
                stage, phase = passed(stage, phase, uint32(1), uint32(0))
            if mine == 0:
                mbarrier.arrive(their_turn)
            wait_last(acc)
            wait_last(below)
            if mine < blocks:
                give_back(empty + uint32(8) * previous, mine)
            return stage, phase

        return add_up

    add_up, add_up_narrow = make_add_up(tile_n), make_add_up(NARROW)

    @kernel(name=form.name, cluster=blocks)
    def product(
        a, b, c, kept, extra, bias_N, sums, flag, places_W, n, tiles_m, tiles_n, grouped, tiles, k_steps, alpha
    ):  # fmt: skip
        base = integers.shared_address(cuda.shared.array(0, uint8))
        tiles_of_a = uint32(base + uint32(head_bytes))
        tiles_of_b = uint32(tiles_of_a + uint32(stages * a_bytes))
        staging = uint32(tiles_of_b + uint32(stages * b_bytes))
        full = base
        empty = uint32(full + uint32(8 * stages))
        turns = uint32(empty + uint32(8 * stages))
        loaded = uint32(turns + uint32(8 * CONSUMERS))
        thread = int32(cuda.threadIdx.x)
        uniform_warp = sync.uniform(uint32(thread) >> uint32(5))
        group = uint32(uniform_warp >> uint32(2))
        if thread == 0:
            for stage in range(stages):
                mbarrier.init(full + uint32(8 * stage), uint32(1))
                mbarrier.init(empty + uint32(8 * stage), uint32(blocks))
            for other in range(CONSUMERS + CONSUMERS * buffers):
                mbarrier.init(turns + uint32(8 * other), uint32(1))
            mbarrier.fence_init()
        block = int32(0)
        tile = int32(cuda.blockIdx.x)
        workers = int32(cuda.gridDim.x)
        if pairs:
            cluster.barrier()
            block = int32(tile & 1)
            workers = int32(workers >> 1)
            tile = int32(places_W[tile >> 1])
        else:
            cuda.syncthreads()
        stage = uint32(0)
        phase = uint32(0)
        if group == 0:
            give_registers()
            if uniform_warp == uint32(0) and sync.elect():
                tma.acquire_map(a)
                tma.acquire_map(b)
                while tile < tiles:
                    row_of_tiles, column_of_tiles, matrix = tile_position(tile, tiles_m, tiles_n, grouped)
                    row = int32(row_of_tiles * tile_m)
                    column = int32((column_of_tiles * blocks + block) * tile_n)
                    for k in range(k_steps):
                        barrier = uint32(full + uint32(8) * stage)
                        mbarrier.wait(empty + uint32(8) * stage, phase ^ uint32(1))
                        mbarrier.arrive_and_expect(barrier, uint32(a_bytes + b_bytes))
                        depth = int32(k * TILE_K)
                        load_a(a, uint32(tiles_of_a + stage * uint32(a_bytes)), barrier, row, depth, matrix, block)
                        load_b(b, uint32(tiles_of_b + stage * uint32(b_bytes)), barrier, column, depth, matrix)
                        stage, phase = passed(stage, phase, uint32(1), uint32(0))
                    tile = integers.add(tile, workers)
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
            my_turn = uint32(turns + uint32(8) * uint32(consumer))
            their_turn = uint32(turns + uint32(8) * uint32(consumer ^ 1))
            acc = cuda.local.array(n_registers, float32)
            below = cuda.local.array(n_registers, float32)
            for i in range(n_registers):
                acc[i] = float32(0)
                below[i] = float32(0)
            worst = cuda.local.array(1, uint32)
            worst[0] = uint32(0)
            parity = uint32(0)
            bias_left = float32(0)
            bias_right = float32(0)
            rounds = integers.divide(k_steps, int32(stages))
            their_stages = uint32(integers.subtract(k_steps, integers.multiply(rounds, int32(stages))))
            their_rounds = uint32(rounds & 1)
            turn = uint32(1)  # its parity; the first warpgroup begins
            if consumer == 1:
                tile = integers.add(tile, workers)
                stage, phase = passed(stage, phase, their_stages, their_rounds)
                turn = uint32(0)
            while tile < tiles:
                row_of_tiles, column_of_tiles, matrix = tile_position(tile, tiles_m, tiles_n, grouped)
                row = int32(row_of_tiles * tile_m)
                column = int32((column_of_tiles * blocks + block) * tile_n)
                if reads_extra and mine == 0:
                    wait_all_read()
                    for first in range(first_loads):
                        load_extra(extra, column, row, matrix, my_staging, my_loaded, first)
                if has_bias:
                    at = int32(column + 2 * mine)
                    bias_left = widen(bias_N[at]) if at < bias_N.shape[0] else float32(0)
                    bias_right = widen(bias_N[at + 1]) if at + 1 < bias_N.shape[0] else float32(0)
                mbarrier.wait(my_turn, turn)
                turn = uint32(turn ^ uint32(1))
                # What is left over from another tile could be taken for an overflow.
                if not flags_nonfinite and integers.subtract(n, column) <= int32(NARROW):
                    stage, phase = add_up_narrow(
                        acc, below, tiles_of_a, tiles_of_b, full, empty, stage, phase, k_steps, their_turn, mine
                    )
                else:
                    stage, phase = add_up(
                        acc, below, tiles_of_a, tiles_of_b, full, empty, stage, phase, k_steps, their_turn, mine
                    )
                stage, phase = passed(stage, phase, their_stages, their_rounds)
                if has_bias and 2 * mine < tile_n:
                    shared.store2(uint32(my_bias + uint32(8 * mine)), bias_left, bias_right)
                store_rows(
                    acc, c, kept, extra, column, row, matrix, my_staging, my_loaded, parity, mine, consumer, my_bias,
                    alpha, my_sums, sums, worst,
                )  # fmt: skip
                store_rows_below(
                    below, c, kept, extra, column, int32(row + 64), matrix, my_staging, my_loaded, parity, mine,
                    consumer, my_bias, alpha, my_sums, sums, worst,
                )  # fmt: skip
                parity = uint32(parity ^ uint32(loads_a_tile & 1))
                tile = integers.add(tile, integers.add(workers, workers))
            if flags_nonfinite and is_nonfinite(worst[0]):
                cuda.atomic.or_(flag, 0, 1)
            if mine == 0:
                wait_all_read()
        if pairs:  # until the other block neither sends nor gives back anything
            cuda.syncthreads()
            cluster.barrier()

    return product
