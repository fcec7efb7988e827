"""The kernel: blocks go from tile to tile, a ring of stages brings operands in, and each warp goes its own pace.

Warps meet nowhere. Each stage has two mbarriers: *full*, on which all threads arrive by their copies, and *empty*, on
which each warp arrives when it has loaded its last fragment. So warps run up to a stage apart, and where a tile ends
some store while others still multiply. On a CPU, which has no mbarriers, the block meets at every stage instead.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint16, uint32

from numstack.device import Kernel, kernel
from numstack.device.ptx import integers, mbarrier, mma
from numstack.kernels.gemm.mma_sync.copies import PANEL, Operand, make_swizzle
from numstack.kernels.gemm.mma_sync.cut import Tiles
from numstack.kernels.gemm.mma_sync.epilogue import make_store
from numstack.kernels.gemm.mma_sync.steps import (
    A_AT,
    A_EDGE,
    A_FROM,
    A_STRIDE,
    B_AT,
    B_EDGE,
    B_FROM,
    B_STRIDE,
    DEPTH,
    N_AT,
    N_STATE,
    READ_BARRIER,
    STEPS,
    TILE,
    WRITE_BARRIER,
    WRITE_PARITY,
    WRITING,
    make_steps,
)
from numstack.kernels.gemm.problem import Spec
from numstack.kernels.gemm.wgmma.schedule import make_tile_position

GROUP = 8  # rows of tiles that run together, column by column, so that what they share stays in the L2 cache


class Form(NamedTuple):
    """What a kernel is specialised for; constants in its source.

    Attributes
    ----------
    spec : Spec
    is_float16 : bool
        What 16 bits of a and b mean; else bfloat16.
    kinds : (str, str, str)
        bf16, f16 or f32: of c, the residual and the pre-activation.
    widths : (int, int)
        Elements that rows of a, and of b, can be copied by: 1, 2, 4 or 8.
    is_wide : bool
        Whether rows of c, and of all that the epilogue takes, can be accessed by 8 elements.
    tiles : Tiles
    has_barriers : bool
        Whether warps go their own pace.
    """

    spec: Spec
    is_float16: bool
    kinds: tuple[str, str, str]
    widths: tuple[int, int]
    is_wide: bool
    tiles: Tiles
    has_barriers: bool


def _make_meeting(tiles: Tiles, has_barriers: bool) -> tuple[Any, Any, Any]:
    """Device functions: make what warps meet at, say that a stage's copies are started, wait for those of another."""
    stages, threads = tiles.stages, tiles.threads
    ring = stages * (tiles.m + tiles.n) * tiles.k
    wait_for_next = mma.cp_async_wait_group(stages - 2)

    @cuda.jit(device=True)
    def make_mbarriers(ring_U):
        """Where they begin: two a stage, full and empty, behind the ring."""
        barriers = int32(integers.shared_address(ring_U) + uint32(2 * ring))
        if cuda.threadIdx.x < stages:
            full = uint32(barriers + 16 * cuda.threadIdx.x)
            mbarrier.init(full, uint32(threads))
            mbarrier.init(uint32(full + uint32(8)), uint32(threads // 32))
        cuda.syncthreads()
        return barriers

    @cuda.jit(device=True)
    def arrive(state):
        mbarrier.arrive_when_copied(uint32(state[WRITE_BARRIER]))

    @cuda.jit(device=True)
    def wait(state, parity):
        mbarrier.wait(uint32(state[READ_BARRIER]), uint32(parity))

    @cuda.jit(device=True)
    def make_nothing(ring_U):
        return int32(0)

    @cuda.jit(device=True)
    def commit(state):
        mma.cp_async_commit_group()

    @cuda.jit(device=True)
    def meet(state, parity):
        wait_for_next()
        cuda.syncthreads()

    return (make_mbarriers, arrive, wait) if has_barriers else (make_nothing, commit, meet)


@cache
def make_kernel(form: Form) -> Kernel:
    """The kernel; all arrays come as one axis each, all but the bias with 16 bits as uint16."""
    spec, is_float16, kinds, widths, is_wide, tiles, has_barriers = form
    a_is_KM, b_is_NK = spec.a_is_KM, spec.b_is_NK
    tile_m, tile_n, tile_k, _, warps_n, stages = tiles
    warp_m, strip = tiles.warp_m, tiles.strip
    a_tile, b_tile = Operand.of(tile_m, tile_k, k_is_down=a_is_KM), Operand.of(tile_n, tile_k, k_is_down=not b_is_NK)
    a_columns, b_columns, a_panel, b_panel = a_tile.columns, b_tile.columns, a_tile.panel, b_tile.panel
    a_size, stage = tile_m * tile_k, (tile_m + tile_n) * tile_k
    ring = stages * stage
    swizzle_a, swizzle_b = make_swizzle(a_columns), make_swizzle(b_columns)
    a_registers, b_registers, c_registers = 8, tiles.warp_n // 4, warp_m * tiles.warp_n // 32
    wait_for_all = mma.cp_async_wait_group(0)
    make_barriers, end_copies, await_copies = _make_meeting(tiles, has_barriers)
    tile_position = make_tile_position(GROUP, is_batch=False)
    store = make_store(spec, kinds, is_wide, tiles)
    copy_stage, load_first, begin, rest, finish = make_steps(tiles, a_tile, b_tile, widths, is_float16, has_barriers)

    @cuda.jit(device=True)
    def begin_tile(at, state, tile, m, n, k, tiles_m, tiles_n, parts, part_steps):
        """Go to the first stage of a tile; past the last one there is nothing left to copy."""
        n_tiles = integers.multiply(tiles_m, tiles_n)
        part = integers.divide(tile, n_tiles)
        first_k = integers.multiply(integers.multiply(part, part_steps), int32(tile_k))
        state[TILE] = tile
        state[STEPS] = min(int32((k - first_k + tile_k - 1) // tile_k), part_steps)
        state[A_EDGE] = int32(0)
        state[B_EDGE] = int32(0)
        if tile < integers.multiply(n_tiles, parts):
            row, column, _ = tile_position(integers.subtract(tile, integers.multiply(part, n_tiles)), tiles_m, tiles_n)
            i0, j0 = integers.multiply(row, int32(tile_m)), integers.multiply(column, int32(tile_n))
            at[A_AT] = int64(first_k) * m + i0 if a_is_KM else int64(i0) * k + first_k
            at[B_AT] = int64(j0) * k + first_k if b_is_NK else int64(first_k) * n + j0
            state[A_EDGE] = integers.subtract(m, i0)
            state[B_EDGE] = integers.subtract(n, j0)
            state[DEPTH] = integers.subtract(k, first_k)

    @cuda.jit(device=True)
    def next_copies(at, state, barriers, m, n, k, tiles_m, tiles_n, parts, part_steps):
        """All copies of a stage are under way: go to the next, which may be the first of the block's next tile."""
        end_copies(state)
        state[WRITING] += int32(stage)
        state[WRITE_BARRIER] += int32(16)
        if state[WRITING] == ring:
            state[WRITING] = int32(0)
            state[WRITE_BARRIER] = barriers
            state[WRITE_PARITY] ^= int32(1)
        at[A_AT] += tile_k * m if a_is_KM else tile_k
        at[B_AT] += tile_k if b_is_NK else tile_k * n
        state[DEPTH] -= int32(tile_k)
        state[STEPS] -= int32(1)
        if state[STEPS] <= 0:
            tile = int32(state[TILE] + cuda.gridDim.x)
            begin_tile(at, state, tile, m, n, k, tiles_m, tiles_n, parts, part_steps)

    @cuda.jit(device=True)
    def enter(state, reading, parity, a_lane, b_lane):
        """Wait until the stage to read is there."""
        await_copies(state, parity)
        state[A_FROM] = int32(reading + a_lane)
        state[B_FROM] = int32(reading + b_lane)

    @cuda.jit(device=True)
    def leave(state, reading, parity, barriers):
        """Go to the next stage to read."""
        reading = int32(reading + stage)
        state[READ_BARRIER] += int32(16)
        if reading == ring:
            reading = int32(0)
            parity ^= int32(1)
            state[READ_BARRIER] = barriers
        return reading, parity

    @kernel(name=spec.name("mma_sync"))
    def mma_sync(a, b, c, bias, residual, preactivation, alpha, m, n, k, parts, part_steps):
        ring_U = cuda.shared.array(0, uint16)
        total = cuda.local.array(c_registers, float32)
        a_fragments = cuda.local.array(a_registers, uint32)
        b_fragments = cuda.local.array(b_registers, uint32)
        bias_8 = cuda.local.array(8, float32)
        at = cuda.local.array(N_AT, int64)
        state = cuda.local.array(N_STATE, int32)

        zero = int64(0)

        # Where, in a stage, the row begins that this lane names to ldmatrix: of the first block of its warp's part.
        lane = cuda.threadIdx.x & 31
        warp_i = (cuda.threadIdx.x >> 5) // warps_n * warp_m
        warp_j = (cuda.threadIdx.x >> 5) % warps_n * strip
        low = lane & 15
        high = lane >> 4
        near = (lane & 7) + (high << 3)
        far = (lane >> 3) & 1
        if a_is_KM:
            chunk = (warp_i % a_columns >> 3) + far
            a_lane = int32(warp_i // a_columns * a_panel + near * a_columns + ((chunk ^ swizzle_a(near)) << 3))
        else:
            a_lane = int32((warp_i + low) * a_columns + ((high ^ swizzle_a(low)) << 3))
        if b_is_NK:
            b_lane = int32(a_size + (warp_j + near) * b_columns + ((far ^ swizzle_b(near)) << 3))
        else:
            chunk = (warp_j % PANEL >> 3) + high
            b_lane = int32(a_size + warp_j // PANEL * b_panel + low * b_columns + ((chunk ^ swizzle_b(low)) << 3))

        barriers = make_barriers(ring_U)
        state[READ_BARRIER] = barriers
        state[WRITE_BARRIER] = barriers
        state[WRITE_PARITY] = int32(0)
        state[WRITING] = int32(0)
        state[A_STRIDE] = m if a_is_KM else k
        state[B_STRIDE] = k if b_is_NK else n
        tiles_m, tiles_n = int32((m + tile_m - 1) // tile_m), int32((n + tile_n - 1) // tile_n)
        n_tiles = integers.multiply(tiles_m, tiles_n)
        begin_tile(at, state, int32(cuda.blockIdx.x), m, n, k, tiles_m, tiles_n, parts, part_steps)
        for _ in range(stages - 1):
            copy_stage(total, a_fragments, b_fragments, ring_U, a, b, at, state, zero, zero)
            next_copies(at, state, barriers, m, n, k, tiles_m, tiles_n, parts, part_steps)
        state[WRITE_PARITY] = int32(1)  # the last stage is empty from the start
        reading, parity = int32(0), int32(0)
        for tile in range(int32(cuda.blockIdx.x), integers.multiply(n_tiles, parts), int32(cuda.gridDim.x)):
            part = integers.divide(tile, n_tiles)
            first_k = integers.multiply(integers.multiply(part, part_steps), int32(tile_k))
            steps = min(int32((k - first_k + tile_k - 1) // tile_k), part_steps)
            for i in range(c_registers):
                total[i] = float32(0)
            for step in range(steps):
                enter(state, reading, parity, a_lane, b_lane)
                if step > 0:
                    begin(total, a_fragments, b_fragments, ring_U, a, b, at, state, zero, zero)
                else:
                    load_first(total, a_fragments, b_fragments, ring_U, a, b, at, state, zero, zero)
                rest(total, a_fragments, b_fragments, ring_U, a, b, at, state, zero, zero)
                next_copies(at, state, barriers, m, n, k, tiles_m, tiles_n, parts, part_steps)
                reading, parity = leave(state, reading, parity, barriers)
            if steps > 0:
                finish(total, a_fragments, b_fragments, ring_U, a, b, at, state, zero, zero)
            row, column, _ = tile_position(integers.subtract(tile, integers.multiply(part, n_tiles)), tiles_m, tiles_n)
            thread = integers.opaque(int32(cuda.threadIdx.x))  # all that depends on it is computed anew
            i0 = int32(row * tile_m + (thread >> 5) // warps_n * warp_m)
            j0 = int32(column * tile_n + (thread >> 5) % warps_n * strip)
            begin_c = int64(part) * m * n
            store(total, bias_8, thread & 31, alpha, i0, j0, begin_c, m, n, c, bias, residual, preactivation, zero)
        wait_for_all()

    return mma_sync
