"""The kernel of Hopper: the same products, on tiles that the copy engine brings; each warp goes its own pace.

A warpgroup of its own asks for boxes, one thread of it, so that warps that multiply have nothing else to do: of 250
instructions of a step, 192 are ``mma.sync`` and 40 ``ldmatrix``. Each stage has two mbarriers: *full*, on which its
bytes arrive, and *empty*, on which each warp arrives when it has loaded its last fragment; warps meet nowhere else.
The engine's swizzle is the one that ``copies`` writes, and it fills with zeros what lies beyond an operand's edges.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint16, uint32

from numstack.device import Kernel, kernel
from numstack.device.ptx import integers, mbarrier, sync, tma
from numstack.kernels.gemm.mma_sync.copies import Operand
from numstack.kernels.gemm.mma_sync.kernel import Form, make_parts
from numstack.kernels.gemm.mma_sync.steps import A_FROM, B_FROM, EMPTY, N_AT, N_STATE

PRODUCERS = 128  # threads: registers change hands by warpgroups
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 24, 240  # of the 168 that each of 384 threads starts with
BOX_ROWS = 256  # at most


def box_of(tile: Operand) -> tuple[int, int]:
    """Rows and columns of the boxes in which a tile is brought."""
    return tile.rows // -(-tile.rows // BOX_ROWS), tile.columns


def _make_load(tile: Operand) -> Any:
    """A device function: the boxes of a tile, from a place along m or n and one along k, to shared memory."""
    rows, columns = box_of(tile)
    n_boxes, nbytes, k_is_down = tile.rows // rows * tile.panels, 2 * rows * columns, tile.k_is_down

    @cuda.jit(device=True)
    def load(array, to, barrier, across, depth):
        for box in range(n_boxes):
            if k_is_down:
                tma.load_2d(array, uint32(to + uint32(box * nbytes)), barrier, int32(across + box * columns), depth)
            else:
                tma.load_2d(array, uint32(to + uint32(box * nbytes)), barrier, depth, int32(across + box * rows))

    return load


@cache
def make_engine_kernel(form: Form) -> Kernel:
    """The kernel; a and b come as tensor maps, all other arrays as one axis each, with 16 bits as uint16."""
    tile_m, tile_n, tile_k, _, _, stages = form.tiles
    consumers = form.tiles.threads // 32
    a_bytes, stage = 2 * tile_m * tile_k, (tile_m + tile_n) * tile_k
    ring = stages * stage
    n_a, n_b, n_c = form.tiles.registers
    load_a, load_b = _make_load(form.a_tile), _make_load(form.b_tile)
    give_registers = sync.make_set_registers("dec", PRODUCER_REGISTERS)
    take_registers = sync.make_set_registers("inc", CONSUMER_REGISTERS)
    (_, enter, rest, finish), work_of, lane_starts, store = make_parts(form)

    @kernel(name=form.spec.name("mma_sync"))
    def mma_sync(a, b, c, bias, residual, preactivation, alpha, m, n, k, parts, part_steps):
        ring_U = cuda.shared.array(0, uint16)
        first_stage = uint32(integers.shared_address(ring_U))
        barriers = uint32(first_stage + uint32(2 * ring))  # two a stage, full and empty
        if cuda.threadIdx.x == 0:
            for stage_number in range(stages):
                mbarrier.init(uint32(barriers + uint32(16 * stage_number)), uint32(1))
                mbarrier.init(uint32(barriers + uint32(16 * stage_number + 8)), uint32(consumers))
            mbarrier.fence_init()
        cuda.syncthreads()
        tiles_m, tiles_n = int32((m + tile_m - 1) // tile_m), int32((n + tile_n - 1) // tile_n)
        n_tiles = integers.multiply(integers.multiply(tiles_m, tiles_n), parts)
        full = barriers
        warp = sync.uniform(uint32(cuda.threadIdx.x) >> uint32(5))
        if warp >= uint32(consumers):
            give_registers()
            if warp == uint32(consumers) and sync.elect():
                tma.acquire_map(a)
                tma.acquire_map(b)
                writing = first_stage
                phase = uint32(1)
                for tile in range(int32(cuda.blockIdx.x), n_tiles, int32(cuda.gridDim.x)):
                    i0, j0, _, first_k, steps = work_of(tile, m, n, k, tiles_m, tiles_n, part_steps)
                    for _ in range(steps):
                        mbarrier.wait(full + uint32(8), phase)
                        mbarrier.arrive_and_expect(full, uint32(2 * stage))
                        load_a(a, writing, full, i0, first_k)
                        load_b(b, uint32(writing + uint32(a_bytes)), full, j0, first_k)
                        first_k = integers.add(first_k, int32(tile_k))
                        writing = uint32(writing + uint32(2 * stage))
                        full = uint32(full + uint32(16))
                        if full == uint32(barriers + uint32(16 * stages)):
                            full = barriers
                            writing = first_stage
                            phase = uint32(phase ^ uint32(1))
        else:
            take_registers()
            total = cuda.local.array(n_c, float32)
            a_fragments = cuda.local.array(n_a, uint32)
            b_fragments = cuda.local.array(n_b, uint32)
            bias_8 = cuda.local.array(8, float32)
            at = cuda.local.array(N_AT, int64)
            state = cuda.local.array(N_STATE, int32)
            zero = int64(0)
            a_lane, b_lane = lane_starts()
            reading = int32(0)
            phase = uint32(0)
            for tile in range(int32(cuda.blockIdx.x), n_tiles, int32(cuda.gridDim.x)):
                _, _, _, _, steps = work_of(tile, m, n, k, tiles_m, tiles_n, part_steps)
                for i in range(n_c):
                    total[i] = float32(0)
                for step in range(steps):
                    mbarrier.wait(full, phase)
                    state[EMPTY] = int32(full + uint32(8))
                    state[A_FROM] = int32(reading + a_lane)
                    state[B_FROM] = int32(reading + b_lane)
                    enter(total, a_fragments, b_fragments, ring_U, a, b, at, state, step, zero)
                    rest(total, a_fragments, b_fragments, ring_U, a, b, at, state, zero, zero)
                    reading = int32(reading + stage)
                    full = uint32(full + uint32(16))
                    if reading == ring:
                        full = barriers
                        reading = int32(0)
                        phase = uint32(phase ^ uint32(1))
                if steps > 0:
                    finish(total, a_fragments, b_fragments, ring_U, a, b, at, state, zero, zero)
                # Computed anew: registers are scarce.
                i0, j0, part, _, _ = work_of(integers.opaque(int32(tile)), m, n, k, tiles_m, tiles_n, part_steps)
                store(total, bias_8, alpha, i0, j0, part, m, n, c, bias, residual, preactivation)

    return mma_sync
