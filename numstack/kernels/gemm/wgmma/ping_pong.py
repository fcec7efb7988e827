"""The kernel whose two warpgroups take turns: one multiplies a tile of its own while the other stores its last one.

Where k is short, storing a tile takes as long as several steps of k; here the tensor cores work on meanwhile. They are
handed over when the last step of a tile is on its way. The ring of stages belongs to both: each warpgroup passes over
those of the other's tiles.
"""

from functools import cache

from numba import cuda, float32, int32, uint8, uint32

from numstack.device import Kernel, kernel
from numstack.device.places import PAIR
from numstack.device.ptx import cluster, integers, mbarrier, sync, tma
from numstack.kernels.gemm.wgmma.config import CONSUMERS, NARROW, Config
from numstack.kernels.gemm.wgmma.epilogue import make_epilogue
from numstack.kernels.gemm.wgmma.mainloop import Form, give_registers, make_add_up, make_ring, take_registers
from numstack.kernels.gemm.wgmma.schedule import make_tile_position


@cache
def make_ping_pong_kernel(form: Form, config: Config) -> Kernel:
    """The kernel of a form of product, cut as ``config`` says, in tiles of 128 rows."""
    outputs = form.outputs
    tile_m, tile_n, stages = config.tile_m, config.tile_n, config.stages
    n_registers = tile_n // 2
    tile_position = make_tile_position(config.group, outputs.is_batch)
    pairs, blocks, flags_nonfinite = config.pairs, PAIR if config.pairs else 1, outputs.flags_nonfinite
    lay_out, init, fill = make_ring(form, config)
    places, acquire, begin, store, store_below, finish, flips = make_epilogue(outputs, config)

    @cuda.jit(device=True)
    def corner_of(tile, tiles_m, tiles_n, grouped, block):
        """First row and column, and the matrix, of a block's tile: of all, or of those of pairs.

        Tiles beyond those worked through in groups are a narrow last column.
        """
        row, column, matrix = tile_position(tile, tiles_m, tiles_n)
        if tile >= grouped:
            row = integers.subtract(tile, grouped)
            column = tiles_n
            matrix = int32(0)
        return int32(row * tile_m), int32((column * blocks + block) * tile_n), matrix

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
    def advance(stage, phase):
        return passed(stage, phase, uint32(1), uint32(0))

    add_up, add_up_narrow = (make_add_up(form, config, advance, columns) for columns in (tile_n, NARROW))

    @kernel(name=form.name, cluster=blocks)
    def product(
        a, b, c, kept, extra, bias_N, sums, flag, places_W, n, tiles_m, tiles_n, grouped, tiles, k_steps, alpha
    ):  # fmt: skip
        base = integers.shared_address(cuda.shared.array(0, uint8))
        ring, staging, turns = lay_out(base)
        loaded = uint32(turns + uint32(8 * CONSUMERS))
        thread = int32(cuda.threadIdx.x)
        uniform_warp = sync.uniform(uint32(thread) >> uint32(5))
        group = uint32(uniform_warp >> uint32(2))
        if thread == 0:
            init(base)
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
                    corner = corner_of(tile, tiles_m, tiles_n, grouped, block)
                    for k in range(k_steps):
                        fill(a, b, ring, stage, phase, corner, k, block)
                        stage, phase = advance(stage, phase)
                    tile = integers.add(tile, workers)
        else:
            take_registers()
            consumer = int32(group - uint32(1))
            mine = int32(thread & 127)
            if mine == 0:
                acquire(c, kept, extra)
            room = places(base, staging, loaded, consumer)
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
            rounds = integers.divide(k_steps, int32(stages))
            their_stages = uint32(integers.subtract(k_steps, integers.multiply(rounds, int32(stages))))
            their_rounds = uint32(rounds & 1)
            turn = uint32(1)  # its parity; the first warpgroup begins
            if consumer == 1:
                tile = integers.add(tile, workers)
                stage, phase = passed(stage, phase, their_stages, their_rounds)
                turn = uint32(0)
            while tile < tiles:
                corner = corner_of(tile, tiles_m, tiles_n, grouped, block)
                bias_pair = begin(extra, bias_N, corner, room, mine)
                mbarrier.wait(my_turn, turn)
                turn = uint32(turn ^ uint32(1))
                # What is left over from another tile could be taken for an overflow.
                if not flags_nonfinite and integers.subtract(n, corner[1]) <= int32(NARROW):
                    stage, phase = add_up_narrow(acc, below, ring, stage, phase, k_steps, their_turn, mine)
                else:
                    stage, phase = add_up(acc, below, ring, stage, phase, k_steps, their_turn, mine)
                stage, phase = passed(stage, phase, their_stages, their_rounds)
                store(acc, c, kept, extra, sums, corner, room, parity, mine, consumer, alpha, worst, bias_pair)
                store_below(below, c, kept, extra, sums, corner, room, parity, mine, consumer, alpha, worst)
                parity = uint32(parity ^ uint32(flips))
                tile = integers.add(tile, integers.add(workers, workers))
            finish(flag, worst, mine)
        if pairs:  # until the other block neither sends nor gives back anything
            cuda.syncthreads()
            cluster.barrier()

    return product
