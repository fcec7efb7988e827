"""The rung for tensor cores from sm_80 on: ``mma.sync`` on tiles that ``cp.async`` brings in ahead of time.

A block computes one tile of c. Its operands come through a ring of stages in shared memory: while the warps multiply
one stage, the copies of the following ones are under way, and registers already hold the fragments of the next 16
steps of k::

    global --cp.async--> stage 0 | stage 1 | stage 2 | stage 3 --ldmatrix--> fragments --mma.sync--> accumulators

Tiles lie in shared memory as they do in global memory, in rows of 16-byte chunks whose order is turned from row to row
(:func:`_make_swizzle`), so that the eight rows that ``ldmatrix`` reads at once lie in different banks; where an operand
lies the other way round than fragments do, ``ldmatrix.trans`` transposes 8 x 8 blocks on the way. At the end each warp
passes its accumulators through shared memory, 16 rows at a time, so that epilogue, loads and stores of c work on rows,
16 bytes a lane.

Sources: NVIDIA CUTLASS, "Efficient GEMM in CUDA" and its multistage pipeline; the swizzle is CUTLASS's for sm_75.
"""

from functools import cache, reduce
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint16, uint32

from numstack.device import Kernel, Stream, current_device, kernel, narrow, widen
from numstack.device.ptx import mma, vectors
from numstack.kernels import gelu
from numstack.kernels.gemm.problem import Problem, Spec
from numstack.kernels.launch import are_aligned, ceil_div, flat
from numstack.kernels.variants import Variant

_CHUNK = 8  # elements of 16 bits in 16 bytes: what one cp.async copies, and one row of a block of ldmatrix
_GROUP = 8  # rows of tiles that run together, column by column, so that what they share stays in the L2 cache


class Tiles(NamedTuple):
    """How a product is cut.

    Attributes
    ----------
    m, n, k : int
        A block's tile of c, and how deep a stage is.
    warp_m, warp_n : int
        A warp's part of the tile.
    stages : int
        Of the ring.
    """

    m: int
    n: int
    k: int
    warp_m: int
    warp_n: int
    stages: int

    @property
    def threads(self) -> int:
        return 32 * (self.m // self.warp_m) * (self.n // self.warp_n)

    @property
    def shared_bytes(self) -> int:
        return 2 * self.stages * (self.m + self.n) * self.k


# The first that fits shared memory; and for rows that are not whole 16 bytes: many small copies take registers.
TILES = (Tiles(256, 128, 64, 64, 64, 3), Tiles(256, 128, 32, 64, 64, 4), Tiles(128, 128, 32, 64, 64, 3))
TILES_IN_PIECES = Tiles(128, 64, 32, 32, 64, 3)
A_EDGE, A_DEPTH, B_EDGE, B_DEPTH = range(4)  # what is left to copy: see _Loader
# On a CPU the kernel shows that it is right, not that it is fast: small parts compile in less time.
TILES_ON_CPU = Tiles(32, 32, 32, 16, 16, 3)


class Form(NamedTuple):
    """What a kernel is specialised for; constants in its source.

    Attributes
    ----------
    spec : Spec
    is_float16 : bool
        What 16 bits of a and b mean; else bfloat16.
    a_width, b_width : {1, 2, 4, 8}
        Elements that rows of a and b can be copied by.
    has_wide_rows : bool
        Whether rows of c, and of all that the epilogue takes, can be accessed by 8 elements.
    tiles : Tiles
    """

    spec: Spec
    is_float16: bool
    a_width: int
    b_width: int
    has_wide_rows: bool
    tiles: Tiles


def _make_swizzle(columns: int) -> Any:
    """A device function: by what the chunks of a row are turned (xor), for a tile with rows of ``columns`` elements.

    All 32 banks are 128 bytes wide: eight rows of 64 elements need eight turns, two rows of 32 share a line.
    """
    shift, turns = (0, 7) if columns >= 64 else (1, 3)

    @cuda.jit(device=True)
    def swizzle(row):
        return (row >> shift) & turns

    return swizzle


class _Loader(NamedTuple):
    """How a block copies tiles of an operand: device functions.

    ``begin(first, extent, k) -> at, edge, depth``: where this thread begins, in an operand of which ``extent`` rows or
    columns are ours and the other axis is k; how many of its rows or columns are left from there, and how much of k.

    ``load(tile, start, source, at, stride, edge, depth)``: a tile to ``tile[start]`` and on.
    """

    begin: Any
    load: Any
    step: int  # rows between what one thread copies


def _make_loader(rows: int, columns: int, width: int, threads: int, *, k_is_down: bool) -> _Loader:
    chunks = columns // width
    step = threads // chunks
    passes = rows // step
    assert step * chunks == threads and passes * step == rows, "a block must load a tile in whole passes"
    # Then what a thread copies lies in the same turned column in all passes, and its addresses differ by constants.
    is_regular = step % 8 == 0
    swizzle = _make_swizzle(columns)
    copy: Any = {8: mma.cp_async_16, 4: mma.cp_async_8, 2: mma.cp_async_4}.get(width)
    nbytes = 2 * width

    @cuda.jit(device=True)
    def begin(first, extent, k):
        row = cuda.threadIdx.x // chunks
        column = cuda.threadIdx.x % chunks * width
        if k_is_down:
            at, edge, depth = row * extent + first + column, extent - first - column, k - row
        else:
            at, edge, depth = (first + row) * k + column, extent - first - row, k - column
        return at, edge, depth

    @cuda.jit(device=True)
    def place_of(row, column):
        return row * columns + (((column >> 3) ^ swizzle(row)) << 3) + (column & 7)

    @cuda.jit(device=True)
    def load(tile, start, source, at, stride, edge, depth):
        row = cuda.threadIdx.x // chunks
        column = cuda.threadIdx.x % chunks * width
        for p in range(passes):
            if k_is_down:
                is_inside = p * step < depth and edge > 0
            else:
                is_inside = p * step < edge and depth > 0
            if is_regular:
                place = start + place_of(row, column) + p * step * columns
            else:
                place = start + place_of(row + p * step, column)
            if width == 1:
                tile[place] = source[at + p * stride] if is_inside else uint16(0)
            else:
                copy(tile, place, source, at + p * stride, nbytes if is_inside else 0)

    return _Loader(begin, load, step)


def _make_finish(spec: Spec) -> Any:
    """Two device functions: the epilogue on 8 neighbours in a row of c, and on one element; ``bias_8`` is loaded."""
    has_bias, has_gelu, has_residual = spec.has_bias, spec.has_gelu, spec.has_residual
    has_gelu_backward, keeps_preactivation = spec.has_gelu_backward, spec.keeps_preactivation
    gelu_tanh, gelu_slope = gelu.gelu_tanh_approximate, gelu.gelu_tanh_slope_approximate

    @cuda.jit(device=True)
    def finish_wide(values, more, bias_8, place, c, residual, preactivation):
        if has_bias:
            for x in range(8):
                values[x] += bias_8[x]
        if keeps_preactivation:
            vectors.store8(preactivation, place, values, 0)
        if has_gelu:
            for x in range(8):
                values[x] = gelu_tanh(values[x])
        if has_gelu_backward:
            vectors.load8(preactivation, place, more, 0)
            for x in range(8):
                values[x] *= gelu_slope(more[x])
        if has_residual:
            vectors.load8(residual, place, more, 0)
            for x in range(8):
                values[x] += more[x]
        vectors.store8(c, place, values, 0)

    @cuda.jit(device=True)
    def finish_narrow(value, bias_8, x, place, c, residual, preactivation):
        if has_bias:
            value += bias_8[x]
        if keeps_preactivation:
            preactivation[place] = narrow(value, preactivation.dtype)
        if has_gelu:
            value = gelu_tanh(value)
        if has_gelu_backward:
            value *= gelu_slope(widen(preactivation[place]))
        if has_residual:
            value += widen(residual[place])
        c[place] = narrow(value, c.dtype)

    return finish_wide, finish_narrow


def _make_store(form: Form) -> Any:
    """A device function: what a warp has accumulated, through ``staged`` in shared memory and the epilogue, to c.

    16 rows at a time, in float32; they lie a little apart, so that neighbours are in different banks.
    """
    tiles, has_wide_rows, has_bias = form.tiles, form.has_wide_rows, form.spec.has_bias
    blocks_n = tiles.warp_n // 8
    pitch, row_lanes = tiles.warp_n + 8, tiles.warp_n // 8
    passes, pass_rows = 16 * row_lanes // 32, 32 // row_lanes
    warp_size = 16 * pitch
    finish_wide, finish_narrow = _make_finish(form.spec)

    def make_store_16(i: int) -> Any:
        @cuda.jit(device=True)
        def store_16(total, staged, bias_8, warp, lane, alpha, i0, j, m, n, c, residual, preactivation):
            for block in range(blocks_n):
                at = warp * warp_size + (lane >> 2) * pitch + block * 8 + (lane & 3) * 2
                first = (i * blocks_n + block) * 4
                staged[at] = total[first] * alpha
                staged[at + 1] = total[first + 1] * alpha
                staged[at + 8 * pitch] = total[first + 2] * alpha
                staged[at + 8 * pitch + 1] = total[first + 3] * alpha
            cuda.syncwarp()
            values = cuda.local.array(8, float32)
            more = cuda.local.array(8, float32)
            for p in range(passes):
                row = p * pass_rows + lane // row_lanes
                i_row = i0 + i * 16 + row
                at = warp * warp_size + row * pitch + lane % row_lanes * 8
                if has_wide_rows:
                    if i_row < m and j < n:
                        vectors.load8(staged, at, values, 0)
                        finish_wide(values, more, bias_8, i_row * n + j, c, residual, preactivation)
                elif i_row < m:
                    for x in range(8):
                        if j + x < n:
                            finish_narrow(staged[at + x], bias_8, x, i_row * n + j + x, c, residual, preactivation)
            cuda.syncwarp()

        return store_16

    def in_turn(first: Any, second: Any) -> Any:
        # A loop over rows would do, if compilers could be relied on to unroll it: registers are numbered by constants.
        @cuda.jit(device=True)
        def both(total, staged, bias_8, warp, lane, alpha, i0, j, m, n, c, residual, preactivation):
            first(total, staged, bias_8, warp, lane, alpha, i0, j, m, n, c, residual, preactivation)
            second(total, staged, bias_8, warp, lane, alpha, i0, j, m, n, c, residual, preactivation)

        return both

    store_all = reduce(in_turn, [make_store_16(i) for i in range(tiles.warp_m // 16)])

    @cuda.jit(device=True)
    def store(total, staged, warp, lane, alpha, i0, j0, m, n, c, bias, residual, preactivation):
        j = j0 + lane % row_lanes * 8
        bias_8 = cuda.local.array(8, float32)
        if has_bias:
            for x in range(8):
                bias_8[x] = widen(bias[j + x]) if j + x < n else float32(0)
        store_all(total, staged, bias_8, warp, lane, alpha, i0, j, m, n, c, residual, preactivation)

    return store


@cache
def make_kernel(form: Form) -> Kernel:
    """The kernel; a, b, c, residual and preactivation come as one axis each, blocks as :func:`launch` lays them out."""
    spec, is_float16, a_width, b_width, _, tiles = form
    a_is_KM, b_is_NK = spec.a_is_KM, spec.b_is_NK
    tile_m, tile_n, tile_k, warp_m, warp_n, stages = tiles
    blocks_m, blocks_n, steps_k = warp_m // 16, warp_n // 8, tile_k // 16  # blocks of one mma.sync in a warp's part
    a_columns, b_columns = tile_m if a_is_KM else tile_k, tile_k if b_is_NK else tile_n
    a_size, b_size = tile_m * tile_k, tile_n * tile_k
    stage, ring = a_size + b_size, stages * (a_size + b_size)
    a_part, b_part, c_part = blocks_m * 4, blocks_n * 2, blocks_m * blocks_n * 4  # registers
    a_registers, b_registers = 2 * a_part, 2 * b_part
    b_loads = blocks_n // 2 // blocks_m
    begin_a, load_a, a_step = _make_loader(a_size // a_columns, a_columns, a_width, tiles.threads, k_is_down=a_is_KM)
    begin_b, load_b, b_step = _make_loader(
        b_size // b_columns, b_columns, b_width, tiles.threads, k_is_down=not b_is_NK
    )
    swizzle_a, swizzle_b = _make_swizzle(a_columns), _make_swizzle(b_columns)
    load_a_block = mma.ldmatrix_x4_trans if a_is_KM else mma.ldmatrix_x4
    load_b_block = mma.ldmatrix_x4 if b_is_NK else mma.ldmatrix_x4_trans
    multiply = mma.mma_m16n8k16_f16 if is_float16 else mma.mma_m16n8k16_bf16
    wait_for_next, wait_for_all = mma.cp_async_wait_group(stages - 2), mma.cp_async_wait_group(0)
    warps_n = tile_n // warp_n
    store = _make_store(form)

    @cuda.jit(device=True)
    def load_row(a_fragments, b_fragments, half, ring_U, a_from, b_from, s, i):
        """Of the s-th 16 steps of k of a stage, the i-th 16 rows of a and as large a part of b, into a half."""
        at = (a_from ^ (i * 16)) + s * 16 * a_columns if a_is_KM else (a_from ^ (s * 16)) + i * 16 * a_columns
        load_a_block(a_fragments, half * a_part + i * 4, ring_U, at)
        for part in range(b_loads):
            j = i * b_loads + part
            at = (b_from ^ (s * 16)) + j * 16 * b_columns if b_is_NK else (b_from ^ (j * 16)) + s * 16 * b_columns
            load_b_block(b_fragments, half * b_part + j * 4, ring_U, at)

    @cuda.jit(device=True)
    def multiply_row(total, a_fragments, b_fragments, half, i):
        for j in range(blocks_n):
            a_first, b_first = half * a_part + i * 4, half * b_part + j * 2
            multiply(total, (i * blocks_n + j) * 4, a_fragments, a_first, b_fragments, b_first)

    @cuda.jit(device=True)
    def copy_stage(ring_U, start, a, b, at, left, m, n, k):
        """Start copying a stage, and go to the next."""
        load_a(ring_U, start, a, at[0], a_step * (m if a_is_KM else k), left[A_EDGE], left[A_DEPTH])
        load_b(ring_U, start + a_size, b, at[1], b_step * (k if b_is_NK else n), left[B_EDGE], left[B_DEPTH])
        mma.cp_async_commit_group()
        at[0] += tile_k * m if a_is_KM else tile_k
        at[1] += tile_k if b_is_NK else tile_k * n
        left[A_DEPTH] -= int32(tile_k)
        left[B_DEPTH] -= int32(tile_k)

    @kernel(name=spec.name("mma_sync"))
    def mma_sync(a, b, c, bias, residual, preactivation, alpha, m, n, k):
        ring_U = cuda.shared.array(0, uint16)
        staged = cuda.shared.array(0, float32)
        total = cuda.local.array(c_part, float32)
        a_fragments = cuda.local.array(a_registers, uint32)
        b_fragments = cuda.local.array(b_registers, uint32)
        at = cuda.local.array(2, int64)
        left = cuda.local.array(4, int32)
        i0 = (cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x) * tile_m
        j0 = cuda.blockIdx.y * tile_n
        if i0 >= m:
            return
        lane = cuda.threadIdx.x & 31
        warp = cuda.threadIdx.x >> 5
        warp_i = (warp // warps_n) * warp_m
        warp_j = (warp % warps_n) * warp_n

        # Where, in a stage, the row begins that this lane names to ldmatrix: of the first block of its warp's part.
        # For other blocks a constant is added along columns of chunks, and flips bits of the chunk along a row.
        low = lane & 15
        high = lane >> 4
        near = (lane & 7) + (high << 3)
        far = (lane >> 3) & 1
        if a_is_KM:
            a_lane = int32(near * a_columns + ((((warp_i >> 3) + far) ^ swizzle_a(near)) << 3))
        else:
            a_lane = int32((warp_i + low) * a_columns + ((high ^ swizzle_a(low)) << 3))
        if b_is_NK:
            b_lane = int32(a_size + (warp_j + near) * b_columns + ((far ^ swizzle_b(near)) << 3))
        else:
            b_lane = int32(a_size + low * b_columns + ((((warp_j >> 3) + high) ^ swizzle_b(low)) << 3))

        at[0], left[A_EDGE], left[A_DEPTH] = begin_a(i0, m, k)
        at[1], left[B_EDGE], left[B_DEPTH] = begin_b(j0, n, k)
        for s in range(stages - 1):
            copy_stage(ring_U, s * stage, a, b, at, left, m, n, k)
        for i in range(c_part):
            total[i] = float32(0)
        reading = int32(0)
        writing = int32((stages - 1) * stage)
        for step in range(int32((k + tile_k - 1) // tile_k)):
            wait_for_next()
            cuda.syncthreads()
            a_from, b_from = reading + a_lane, reading + b_lane
            # Loads of the next fragments stand between products. The first are those of the last 16 steps of the stage
            # before: compilers cannot move them to before the barrier.
            for i in range(blocks_m):
                load_row(a_fragments, b_fragments, 0, ring_U, a_from, b_from, 0, i)
                if step > 0:
                    multiply_row(total, a_fragments, b_fragments, 1, i)
            # Into the stage that all have read before the barrier.
            copy_stage(ring_U, writing, a, b, at, left, m, n, k)
            writing = int32(writing + stage)
            if writing == ring:
                writing = int32(0)
            for s in range(steps_k - 1):
                for i in range(blocks_m):
                    load_row(a_fragments, b_fragments, (s + 1) & 1, ring_U, a_from, b_from, s + 1, i)
                    multiply_row(total, a_fragments, b_fragments, s & 1, i)
            reading = int32(reading + stage)
            if reading == ring:
                reading = int32(0)
        if k > 0:
            for i in range(blocks_m):
                multiply_row(total, a_fragments, b_fragments, 1, i)
        wait_for_all()
        cuda.syncthreads()
        i_warp = i0 + warp_i
        j_warp = j0 + warp_j
        store(total, staged, warp, lane, alpha, i_warp, j_warp, m, n, c, bias, residual, preactivation)

    return mma_sync


def launch(problem: Problem, stream: Stream | None, tiles: Tiles | None = None) -> None:
    """Run the product, cut into ``tiles``: blocks go down ``_GROUP`` rows of them, then to the next column."""
    m, n, k, a, b, c = problem.m, problem.n, problem.k, problem.a, problem.b, problem.c
    extras = (problem.bias, problem.residual, problem.preactivation)
    given = [x for x in extras if x is not None]
    widths = _width(a), _width(b)
    tiles = tiles or _tiles_for(min(widths))
    form = Form(
        spec=problem.spec,
        is_float16=a.dtype == np.float16,
        a_width=widths[0],
        b_width=widths[1],
        has_wide_rows=n % _CHUNK == 0 and are_aligned(c, *given),
        tiles=tiles,
    )
    # c stands in for what is not given; the kernel does not touch it.
    a, b = (flat(x if x.dtype == np.uint16 else x.view(np.uint16)) for x in (a, b))
    others = [flat(c if x is None else x) for x in (c, *extras)]
    rows = ceil_div(m, tiles.m)
    group = min(_GROUP, max(rows, 1))
    grid = (group, ceil_div(n, tiles.n), ceil_div(rows, group))
    make_kernel(form)[grid, tiles.threads, stream, tiles.shared_bytes](
        a, b, *others, problem.alpha, m, n, k, flops=problem.flops
    )


def _tiles_for(width: int) -> Tiles:
    device = current_device()
    if device.kind == "cpu":
        return TILES_ON_CPU
    if width < _CHUNK:
        return TILES_IN_PIECES
    return next(tiles for tiles in TILES if tiles.shared_bytes <= device.properties.shared_bytes_per_block)


def _width(x: Any) -> int:
    """How many elements of a row cp.async can copy at once, by the address and the length of rows."""
    together = current_device().address(x) // x.itemsize | x.shape[1]
    return next(width for width in (8, 4, 2, 1) if together % width == 0)


def supports(problem: Problem) -> bool:
    """Whether both operands are of one 16-bit format."""
    return problem.a.dtype == problem.b.dtype and problem.a.dtype.itemsize == 2


VARIANT = Variant(
    "mma_sync",
    launch,
    "Multiplies on tensor cores, a warp 64 x 64 x 16 at a time, on operands copied in while it multiplies.",
    supports,
    made_for="sm_80",
    by_default=False,  # as it stands it has run on a CPU only; its products in another order were right on an H200
)
