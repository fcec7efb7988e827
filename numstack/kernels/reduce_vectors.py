"""First phases of :mod:`numstack.kernels.reduce` for GPUs: 16 bytes a lane, several vectors on their way at once.

A whole array is cut into tiles, which the blocks of a grid that stays take in turns; what is left of the last tile goes
by elements. Columns are summed by blocks of 256 columns and a stretch of rows, a warp a row at a time: two blocks a
multiprocessor, and a second kernel whose blocks are there when the first is over (65536 x 3072 bfloat16 on an H200, ten
in a row: 4.35 TB/s, 4.28 if the first does not start early, PyTorch's compiled sum 4.30; four blocks of half as many
warps 1% less). One that also writes a copy does best with fewer reads at once, half as many blocks and rows
(65536 x 768, float32 to bfloat16: 0.94 of the rate of an equal copy, not 0.91).
"""

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda, float32, uint32

from numstack.device import Kernel, current_device, kernel, narrow, ptx, widen
from numstack.device.ptx.words import WORDS, words_of
from numstack.kernels.launch import ceil_div
from numstack.kernels.warp import WARP, warp_sum

BLOCK = 256
VECTOR = 8
VECTORS = 4  # of a thread on their way at once
TILE = BLOCK * VECTOR * VECTORS
BLOCKS = 528  # four a multiprocessor on an H200

WARPS = 16  # sum_rows: warps of a block, each with rows of its own
ROWS = 4  # of a warp on their way at once
SUM_BLOCKS = 264  # two a multiprocessor on an H200, one of those that also copy
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


def n_tiles_and_stretches(n_rows: int, n_columns: int, copies: bool) -> tuple[int, int, int]:
    """Blocks side by side and one below the other that sum rows, or also copy them, and the rows that each takes."""
    n_tiles = ceil_div(n_columns, COLUMNS)
    most = max(1, (SUM_BLOCKS // 2 if copies else SUM_BLOCKS) // max(1, n_tiles))
    stretch = WARPS * ROWS * max(1, ceil_div(n_rows, most * WARPS * ROWS))
    return n_tiles, ceil_div(n_rows, stretch), stretch


def shared_bytes(copies: bool) -> int:
    """So much that no more blocks of ``sum_rows`` fit on a multiprocessor than are meant to share it.

    They start before the kernel ahead is over, where there is room first, and stay: without this, 3.71 for 4.35 TB/s.
    """
    blocks = 1 if copies else 2
    return current_device().properties.shared_bytes_per_block // (blocks + 1)


@functools.cache
def sum_rows_phases(dtype: Any, copies: bool) -> tuple[Kernel, Kernel]:
    """Both kernels of ``sum_rows`` of a numba ``dtype``.

    If it ``copies``, the first stores each row in ``copy_N`` as well; if not, nothing looks at that.

    Words stay as they are until they are added: of elements that are widened at once the compiler loads fewer at once.
    """
    of = words_of(dtype)
    load, low, high, elements = of.load, of.low, of.high, of.elements
    words_of_row = VECTOR // elements
    rows = ROWS // 2 if copies else ROWS
    n_words = rows * words_of_row

    @cuda.jit(device=True)
    def load_row(x_N, at, words, first):
        for w in range(0, words_of_row, WORDS):
            load(x_N, at + w * elements, words, first + w)

    @cuda.jit(device=True)
    def add_row(words, first, total):
        for w in range(words_of_row):
            total[elements * w] += low(words[first + w])
            if elements == 2:
                total[2 * w + 1] += high(words[first + w])

    @cuda.jit(device=True)
    def store_row(copy_N, at, words, first, row):
        for w in range(words_of_row):
            row[elements * w] = low(words[first + w])
            if elements == 2:
                row[2 * w + 1] = high(words[first + w])
        ptx.store8(copy_N, at, row, 0)

    @kernel(name="reduce.sum_rows first phase vectors", starts_early=True)
    def first_phase(x_N, copy_N, partial_SC, R, C, stretch):
        """Sums of 256 columns over ``stretch`` rows; a warp has ``rows`` of its own on their way at once."""
        words = cuda.local.array(n_words, uint32)
        row = cuda.local.array(VECTOR, float32)
        total = cuda.local.array(VECTOR, float32)
        shared = cuda.shared.array((WARPS, VECTOR, WARP), float32)
        lane = cuda.threadIdx.x
        warp = cuda.threadIdx.y
        c = cuda.blockIdx.x * COLUMNS + lane * VECTOR
        start = cuda.blockIdx.y * stretch
        stop = min(start + stretch, R) if c < C else 0
        for k in range(VECTOR):
            total[k] = float32(0)
        r = start + warp
        while r + (rows - 1) * WARPS < stop:
            for j in range(rows):
                load_row(x_N, (r + j * WARPS) * C + c, words, words_of_row * j)
            for j in range(rows):
                add_row(words, words_of_row * j, total)
                if copies:
                    store_row(copy_N, (r + j * WARPS) * C + c, words, words_of_row * j, row)
            r += rows * WARPS
        while r < stop:
            load_row(x_N, r * C + c, words, 0)
            add_row(words, 0, total)
            if copies:
                store_row(copy_N, r * C + c, words, 0, row)
            r += WARPS
        for k in range(VECTOR):
            shared[warp, k, lane] = total[k]
        cuda.syncthreads()
        # Half of the warps add one each of the eight columns of each lane; together they write all 256.
        if warp < VECTOR and c < C:
            whole = shared[0, warp, lane]
            for w in range(1, WARPS):
                whole += shared[w, warp, lane]
            partial_SC[cuda.blockIdx.y * C + c + warp] = whole

    @kernel(name="reduce.sum_rows second phase vectors", starts_early=True)
    def second_phase(partial_SC, out_C, n_partials, accumulate):
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

    return first_phase, second_phase
