"""The kernel of sm_80: blocks go from tile to tile, and a ring of stages brings operands in by ``cp.async``.

The block meets at every stage: once behind the wait for its copies nothing else is needed for them to be seen, nor for
the stage before to be overwritten.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint16, uint32

from numstack.device import Kernel, kernel
from numstack.device.ptx import integers, mma
from numstack.kernels.gemm.mma_sync.copies import Operand
from numstack.kernels.gemm.mma_sync.cut import ROWS, Tiles
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
    STEPS,
    TILE,
    WRITING,
    Steps,
    make_lane_starts,
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
    widths : (int, int) or None
        Elements that rows of a, and of b, can be copied by: 1, 2, 4 or 8. None if the copy engine brings them.
    is_wide : bool
        Whether rows of c, and of all that the epilogue takes, can be accessed by 8 elements.
    tiles : Tiles
    """

    spec: Spec
    is_float16: bool
    kinds: tuple[str, str, str]
    widths: tuple[int, int] | None
    is_wide: bool
    tiles: Tiles

    @property
    def a_tile(self) -> Operand:
        return Operand.of(self.tiles.m, self.tiles.k, k_is_down=self.spec.a_is_KM)

    @property
    def b_tile(self) -> Operand:
        return Operand.of(self.tiles.n, self.tiles.k, k_is_down=not self.spec.b_is_NK)


class Parts(NamedTuple):
    """Device functions that the kernels consist of.

    Attributes
    ----------
    steps : Steps
    work_of
        (tile, m, n, k, tiles_m, tiles_n, part_steps): the first row and column of a tile, which part along k it is of,
        the first k, and the steps of k.
    lane_starts
        See :func:`steps.make_lane_starts`.
    store
        (total, bias_8, alpha, i0, j0, part, m, n, c, bias, residual, preactivation): see :func:`epilogue.make_store`.
    """

    steps: Steps
    work_of: Any
    lane_starts: Any
    store: Any


def make_parts(form: Form) -> Parts:
    """Those of a form."""
    tiles = form.tiles
    tile_m, tile_n, tile_k, _, warps_n, _ = tiles
    strip = tiles.strip
    tile_position = make_tile_position(GROUP, is_batch=False)
    store_rows = make_store(form.spec, form.kinds, form.is_wide, tiles)

    @cuda.jit(device=True)
    def work_of(tile, m, n, k, tiles_m, tiles_n, part_steps):
        n_tiles = integers.multiply(tiles_m, tiles_n)
        part = integers.divide(tile, n_tiles)
        row, column, _ = tile_position(integers.subtract(tile, integers.multiply(part, n_tiles)), tiles_m, tiles_n)
        first_k = integers.multiply(integers.multiply(part, part_steps), int32(tile_k))
        steps = min(int32((k - first_k + tile_k - 1) // tile_k), part_steps)
        return integers.multiply(row, int32(tile_m)), integers.multiply(column, int32(tile_n)), part, first_k, steps

    @cuda.jit(device=True)
    def store(total, bias_8, alpha, i0, j0, part, m, n, c, bias, residual, preactivation):
        thread = integers.opaque(int32(cuda.threadIdx.x))  # all that depends on it is computed anew
        i = int32(i0 + (thread >> 5) // warps_n * ROWS)
        j = int32(j0 + (thread >> 5) % warps_n * strip)
        begin = int64(part) * m * n
        lane = thread & 31
        store_rows(total, bias_8, lane, alpha, i, j, begin, m, n, c, bias, residual, preactivation, int64(0))

    steps = make_steps(tiles, form.a_tile, form.b_tile, form.is_float16, form.widths)
    return Parts(steps, work_of, make_lane_starts(tiles, form.a_tile, form.b_tile), store)


@cache
def make_kernel(form: Form) -> Kernel:
    """The kernel; all arrays come as one axis each, all but the bias with 16 bits as uint16."""
    a_is_KM, b_is_NK = form.spec.a_is_KM, form.spec.b_is_NK
    tile_m, tile_n, tile_k, _, _, stages = form.tiles
    stage = (tile_m + tile_n) * tile_k
    ring = stages * stage
    n_a, n_b, n_c = form.tiles.registers
    wait_for_next, wait_for_all = mma.cp_async_wait_group(stages - 2), mma.cp_async_wait_group(0)
    (copy_stage, enter, rest, finish), work_of, lane_starts, store = make_parts(form)

    @cuda.jit(device=True)
    def begin_tile(at, state, tile, m, n, k, tiles_m, tiles_n, parts, part_steps):
        """Go to the first stage of a tile; past the last one there is nothing left to copy."""
        i0, j0, _, first_k, steps = work_of(tile, m, n, k, tiles_m, tiles_n, part_steps)
        state[TILE] = tile
        state[STEPS] = steps
        state[A_EDGE] = int32(0)
        state[B_EDGE] = int32(0)
        if tile < integers.multiply(integers.multiply(tiles_m, tiles_n), parts):
            at[A_AT] = int64(first_k) * m + i0 if a_is_KM else int64(i0) * k + first_k
            at[B_AT] = int64(j0) * k + first_k if b_is_NK else int64(first_k) * n + j0
            state[A_EDGE] = integers.subtract(m, i0)
            state[B_EDGE] = integers.subtract(n, j0)
            state[DEPTH] = integers.subtract(k, first_k)

    @cuda.jit(device=True)
    def next_copies(at, state, m, n, k, tiles_m, tiles_n, parts, part_steps):
        """All copies of a stage are under way: go to the next, which may be the first of the block's next tile."""
        mma.cp_async_commit_group()
        state[WRITING] += int32(stage)
        if state[WRITING] == ring:
            state[WRITING] = int32(0)
        at[A_AT] += tile_k * m if a_is_KM else tile_k
        at[B_AT] += tile_k if b_is_NK else tile_k * n
        state[DEPTH] -= int32(tile_k)
        state[STEPS] -= int32(1)
        if state[STEPS] <= 0:
            tile = int32(state[TILE] + cuda.gridDim.x)
            begin_tile(at, state, tile, m, n, k, tiles_m, tiles_n, parts, part_steps)

    @kernel(name=form.spec.name("mma_sync"))
    def mma_sync(a, b, c, bias, residual, preactivation, alpha, m, n, k, parts, part_steps):
        ring_U = cuda.shared.array(0, uint16)
        total = cuda.local.array(n_c, float32)
        a_fragments = cuda.local.array(n_a, uint32)
        b_fragments = cuda.local.array(n_b, uint32)
        bias_8 = cuda.local.array(8, float32)
        at = cuda.local.array(N_AT, int64)
        state = cuda.local.array(N_STATE, int32)
        zero = int64(0)
        a_lane, b_lane = lane_starts()
        state[WRITING] = int32(0)
        state[A_STRIDE] = m if a_is_KM else k
        state[B_STRIDE] = k if b_is_NK else n
        tiles_m, tiles_n = int32((m + tile_m - 1) // tile_m), int32((n + tile_n - 1) // tile_n)
        n_tiles = integers.multiply(tiles_m, tiles_n)
        begin_tile(at, state, int32(cuda.blockIdx.x), m, n, k, tiles_m, tiles_n, parts, part_steps)
        for _ in range(stages - 1):
            copy_stage(total, a_fragments, b_fragments, ring_U, a, b, at, state, zero, zero)
            next_copies(at, state, m, n, k, tiles_m, tiles_n, parts, part_steps)
        reading = int32(0)
        for tile in range(int32(cuda.blockIdx.x), integers.multiply(n_tiles, parts), int32(cuda.gridDim.x)):
            _, _, _, _, steps = work_of(tile, m, n, k, tiles_m, tiles_n, part_steps)
            for i in range(n_c):
                total[i] = float32(0)
            for step in range(steps):
                wait_for_next()
                cuda.syncthreads()
                state[A_FROM] = int32(reading + a_lane)
                state[B_FROM] = int32(reading + b_lane)
                enter(total, a_fragments, b_fragments, ring_U, a, b, at, state, step, zero)
                rest(total, a_fragments, b_fragments, ring_U, a, b, at, state, zero, zero)
                next_copies(at, state, m, n, k, tiles_m, tiles_n, parts, part_steps)
                reading = int32(reading + stage)
                if reading == ring:
                    reading = int32(0)
            if steps > 0:
                finish(total, a_fragments, b_fragments, ring_U, a, b, at, state, zero, zero)
            # Computed anew: registers are scarce.
            i0, j0, part, _, _ = work_of(integers.opaque(int32(tile)), m, n, k, tiles_m, tiles_n, part_steps)
            store(total, bias_8, alpha, i0, j0, part, m, n, c, bias, residual, preactivation)
        wait_for_all()

    return mma_sync
