"""First phases of :mod:`numstack.kernels.reduce` for GPUs: 16 bytes a lane, several vectors on their way at once.

A whole array is cut into tiles, which the blocks of a grid that stays take in turns; what is left of the last tile goes
by elements. Columns are summed by blocks of 256 columns and a stretch of rows, a warp a row at a time.
"""

from collections.abc import Callable
from typing import Any

from numba import cuda, float32

from numstack.device import Kernel, kernel, narrow, ptx, widen
from numstack.kernels.launch import ceil_div
from numstack.kernels.warp import WARP, warp_sum

BLOCK = 256
VECTOR = 8
VECTORS = 4  # of a thread on their way at once
TILE = BLOCK * VECTOR * VECTORS
BLOCKS = 528  # four a multiprocessor on an H200

WARPS = 8  # sum_rows: warps of a block, each with rows of its own
ROWS = 8  # of a warp on their way at once
ROW_ELEMENTS = ROWS * VECTOR
COLUMNS = WARP * VECTOR  # of a block
ODD = WARP + 1  # the width of a square in shared memory, or all of a column were in one memory bank


def make_first_phase(
    name: str,
    element: Callable[..., Any],
    combine: Callable[..., Any],
    neutral: Callable[..., Any],
    over_block: Callable[..., Any],
    dtype: Any,
    vectors: int = VECTORS,
) -> Kernel:
    """The first phase of a reduction of a whole array, one partial result a block.

    ``element``, ``combine`` and ``neutral`` are as for the portable first phase; ``over_block(value, shared)`` combines
    the values of a block's threads.
    """
    elements = VECTOR * vectors
    tile = BLOCK * elements

    @kernel(name=f"reduce.{name} first phase vectors")
    def first_phase(x_N, partial_P):
        x = cuda.local.array(elements, float32)
        shared = cuda.shared.array(BLOCK, dtype)
        value = neutral(x_N)
        first = cuda.blockIdx.x * tile
        while first + tile <= x_N.size:
            for v in range(vectors):
                ptx.load8(x_N, first + VECTOR * (v * BLOCK + cuda.threadIdx.x), x, VECTOR * v)
            for k in range(elements):
                value = combine(value, element(x[k]))
            first += cuda.gridDim.x * tile
        for i in range(first + cuda.threadIdx.x, x_N.size, BLOCK):
            value = combine(value, element(x_N[i]))
        value = over_block(value, shared)
        if cuda.threadIdx.x == 0:
            partial_P[cuda.blockIdx.x] = value

    return first_phase


def n_tiles_and_stretches(n_rows: int, n_columns: int) -> tuple[int, int, int]:
    """Blocks side by side and one below the other that sum rows, and the rows that each takes."""
    n_tiles = ceil_div(n_columns, COLUMNS)
    most = max(1, BLOCKS // max(1, n_tiles))
    stretch = WARPS * ROWS * max(1, ceil_div(n_rows, most * WARPS * ROWS))
    return n_tiles, ceil_div(n_rows, stretch), stretch


@kernel
def sum_rows_first_phase(x_RC, partial_SC, stretch):
    """Sums of 256 columns over ``stretch`` rows; a warp has ROWS of its rows on their way at once."""
    x = cuda.local.array(ROW_ELEMENTS, float32)
    total = cuda.local.array(VECTOR, float32)
    shared = cuda.shared.array((WARPS, VECTOR, WARP), float32)
    R, C = x_RC.shape
    lane = cuda.threadIdx.x
    warp = cuda.threadIdx.y
    c = cuda.blockIdx.x * COLUMNS + lane * VECTOR
    start = cuda.blockIdx.y * stretch
    stop = min(start + stretch, R) if c < C else 0
    for k in range(VECTOR):
        total[k] = float32(0)
    for r0 in range(start, start + stretch, WARPS * ROWS):
        for j in range(ROWS):
            r = r0 + j * WARPS + warp
            if r < stop:
                ptx.load8(x_RC, r * C + c, x, VECTOR * j)
            else:
                for k in range(VECTOR):
                    x[VECTOR * j + k] = float32(0)
        for j in range(ROWS):
            for k in range(VECTOR):
                total[k] += x[VECTOR * j + k]
    for k in range(VECTOR):
        shared[warp, k, lane] = total[k]
    cuda.syncthreads()
    # Each warp adds one of the eight columns of each lane; together they write all 256.
    whole = shared[0, warp, lane]
    for w in range(1, WARPS):
        whole += shared[w, warp, lane]
    if c < C:
        partial_SC[cuda.blockIdx.y * C + c + warp] = whole


@kernel
def sum_partials(partial_SC, out_C, n_partials, accumulate):
    """out = sums of columns of the first ``n_partials`` rows, by blocks of 32 x 32 threads.

    Of 32 columns, warp y adds rows y, y + 32, ...; then it adds up, by shuffles, the 32 sums of column y.
    """
    shared = cuda.shared.array((WARP, ODD), float32)
    lane = cuda.threadIdx.x
    warp = cuda.threadIdx.y
    C = out_C.size
    c = cuda.blockIdx.x * WARP + lane
    total = float32(0)
    for s0 in range(0, n_partials, WARP):
        s = s0 + warp
        if s < n_partials and c < C:
            total += partial_SC[s * C + c]
    shared[warp, lane] = total
    cuda.syncthreads()
    total = warp_sum(shared[lane, warp])
    c = cuda.blockIdx.x * WARP + warp
    if lane == 0 and c < C:
        if accumulate:
            total += widen(out_C[c])
        out_C[c] = narrow(total, out_C.dtype)
