"""The kernel: one warpgroup loads tiles with the copy engine, two multiply them and store c, block after block of c."""

from functools import cache

from numba import cuda, float32, int32, uint8, uint32

from numstack.device import Kernel, kernel
from numstack.device.ptx import integers, sync, tma, vectors
from numstack.kernels.gemm.wgmma.config import CONSUMERS, NARROW, Config
from numstack.kernels.gemm.wgmma.epilogue import make_epilogue
from numstack.kernels.gemm.wgmma.mainloop import Form, give_registers, make_add_up, make_ring, take_registers
from numstack.kernels.gemm.wgmma.schedule import make_piece, make_tile_position


@cache
def make_kernel(form: Form, config: Config) -> Kernel:
    """The kernel of a form of product, cut as ``config`` says."""
    outputs = form.outputs
    tile_m, tile_n, stages = config.tile_m, config.tile_n, config.stages
    spread, stretch, rows = config.spread, config.stretch, config.rows
    is_tall, row_blocks = rows == 128, rows // 64
    n_registers = tile_n // 2
    n_registers_below = n_registers if is_tall else 4
    a_part = rows * 128  # from one consumer's rows of a's tile to the other's, either way it lies
    piece = make_piece(spread)
    tile_position = make_tile_position(config.group, outputs.is_batch)
    lay_out, init, fill = make_ring(form, config)
    places, acquire, begin, store, store_below, finish, flips = make_epilogue(outputs, config)

    @cuda.jit(device=True)
    def advance(stage, phase):
        next_stage = uint32(stage + uint32(1))
        if next_stage == uint32(stages):
            return uint32(0), uint32(phase ^ uint32(1))
        return next_stage, phase

    # What is left over from another tile could be taken for an overflow; and where parts of tiles are stored as well,
    # ptxas does not see that accumulators are complete (C7514).
    skips_edges = not outputs.flags_nonfinite and not spread and not stretch
    add_up, add_up_narrow, add_up_nothing = (
        make_add_up(form, config, advance, columns) for columns in (tile_n, NARROW, 0)
    )

    @cuda.jit(device=True)
    def add_up_stretches(acc, below, ring, first_stage, first_phase, steps, their_turn, mine):
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
            stage, phase = add_up(acc, below, ring, stage, phase, now, their_turn, mine)
            for i in range(n_registers):
                total[i] += acc[i]
        for i in range(n_registers):
            acc[i] = total[i]
        return stage, phase

    @cuda.jit(device=True)
    def store_part(partials, values, place, mine):
        """64 rows of a part of a tile, as ``gather`` wants them."""
        for i in range(n_registers // 4):
            vectors.store4(partials, ((place * (n_registers // 4) + i) * 128 + mine) * 4, values, 4 * i)

    @kernel(name=form.name)
    def product(
        a, b, c, kept, extra, bias_N, partials, sums, flag, m, n,
        tiles_m, tiles_n, whole, steps, rest, heads, head, tails, slots, alpha,
    ):  # fmt: skip
        base = integers.shared_address(cuda.shared.array(0, uint8))
        ring, staging, loaded = lay_out(base)
        thread = int32(cuda.threadIdx.x)
        uniform_warp = sync.uniform(uint32(thread) >> uint32(5))
        group = uint32(uniform_warp >> uint32(2))
        number = int32(cuda.blockIdx.x)
        n_blocks = int32(cuda.gridDim.x)
        if thread == 0:
            init(base)
        cuda.syncthreads()

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
                    corner = int32(row_of_tiles * tile_m), int32(column_of_tiles * tile_n), matrix
                    for k in range(k_begin, k_end):
                        fill(a, b, ring, stage, phase, corner, k, int32(0))
                        stage, phase = advance(stage, phase)
                    turn = integers.add(turn, int32(1))
        else:
            take_registers()
            consumer = int32(group - uint32(1))
            mine = int32(thread & 127)
            if mine == 0:
                acquire(c, kept, extra)
            room = places(base, staging, loaded, consumer)
            tiles_of_a, tiles_of_b, full, empty = ring
            my_ring = uint32(tiles_of_a + uint32(consumer) * uint32(a_part)), tiles_of_b, full, empty
            acc = cuda.local.array(n_registers, float32)
            below = cuda.local.array(n_registers_below, float32)
            for i in range(n_registers):
                acc[i] = float32(0)
            for i in range(n_registers_below):
                below[i] = float32(0)
            worst = cuda.local.array(1, uint32)
            worst[0] = uint32(0)
            parity = uint32(0)
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
                corner = row, column, matrix
                bias_pair = begin(extra, bias_N, corner, room, mine)
                n_steps = integers.subtract(k_end, k_begin)
                # What hangs over c's edges is not multiplied: no tile ends earlier, but the others have more power.
                if skips_edges and row >= m:
                    stage, phase = add_up_nothing(acc, below, my_ring, stage, phase, n_steps, empty, mine)
                elif skips_edges and integers.subtract(n, column) <= int32(NARROW):
                    stage, phase = add_up_narrow(acc, below, my_ring, stage, phase, n_steps, empty, mine)
                elif stretch > 0:
                    stage, phase = add_up_stretches(acc, below, my_ring, stage, phase, n_steps, empty, mine)
                else:
                    stage, phase = add_up(acc, below, my_ring, stage, phase, n_steps, empty, mine)
                if spread and place >= 0:
                    at = integers.add(integers.multiply(place, int32(CONSUMERS)), consumer)
                    at = integers.multiply(at, int32(row_blocks))
                    store_part(partials, acc, at, mine)
                    if is_tall:
                        store_part(partials, below, integers.add(at, int32(1)), mine)
                else:
                    store(acc, c, kept, extra, sums, corner, room, parity, mine, consumer, alpha, worst, bias_pair)
                    if is_tall:
                        store_below(below, c, kept, extra, sums, corner, room, parity, mine, consumer, alpha, worst)
                    parity = uint32(parity ^ uint32(flips))
                turn = integers.add(turn, int32(1))
            finish(flag, worst, mine)

    return product
