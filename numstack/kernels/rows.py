"""A row in registers: what kernels that normalise or reduce rows share.

``threads`` threads take a row. Each holds ``vectors`` vectors of 8 neighbouring elements as float32 in a
``cuda.local.array``, so that a row comes from memory once, by accesses of 16 bytes a lane, all of them on their way
before the first is waited for::

    threads = 32, vectors = 3       lane 0        lane 1         ...  lane 31
    row of 768 elements             x[0:8]        x[8:16]             x[248:256]
                                    x[256:264]    x[264:272]          x[504:512]
                                    x[512:520]    x[520:528]          x[760:768]

A short row is a warp's: its sums are shuffles. A longer one is a block's, whose warps meet in shared memory. Vectors
past the row's end are not read, and count as the neutral element.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda

from numstack.device import Array, ptx
from numstack.kernels.launch import are_aligned, ceil_div
from numstack.kernels.warp import WARP, block_max, warp_max, warp_sum

VECTOR = 8  # elements of a vector: 16 bytes of a 16-bit format
ROWS = 4  # most rows of a block where a warp takes a row
MAX_THREADS = 1024


class Row(NamedTuple):
    """What a variant must know of its arrays to say whether it supports them.

    Attributes
    ----------
    columns : int
        Elements of a row.
    is_aligned : bool
        Whether each array begins at a multiple of 16 bytes.
    itemsize : int
        Of the arrays of rows, those of two axes; 0 if their dtypes differ.
    """

    columns: int
    is_aligned: bool
    itemsize: int


def row_of(columns: int, *arrays: Array) -> Row:
    """A row of these arrays."""
    dtypes = {array.dtype for array in arrays if array.ndim == 2}
    return Row(columns, are_aligned(*arrays), next(iter(dtypes)).itemsize if len(dtypes) == 1 else 0)


class Layout(NamedTuple):
    """How rows lie over threads.

    Attributes
    ----------
    threads : int
        Those that share a row: a warp or a block.
    vectors : int
        Vectors that each of them holds.
    rows : int
        Rows of a block: more than one if a warp takes a row.
    """

    threads: int
    vectors: int
    rows: int

    @property
    def block(self) -> tuple[int, int]:
        return self.threads, self.rows

    def is_full(self, columns: int) -> bool:
        """Whether no vector is past the end of a row of this many columns."""
        return self.threads * self.vectors * VECTOR == columns


def layout(columns: int, most_vectors: int) -> Layout:
    """A layout for rows of this many columns, a multiple of VECTOR, of at most ``most_vectors`` vectors a thread."""
    n = ceil_div(columns, VECTOR)
    if n <= WARP * most_vectors:  # short blocks: there is always one that starts while others compute or end
        return Layout(WARP, ceil_div(n, WARP), min(ROWS, WARP * most_vectors // n))
    # Few threads idle past the end of the row: of 200 vectors 7 warps hold 1 each, or 4 warps 2.
    threads = WARP * ceil_div(n, WARP * most_vectors)
    return Layout(threads, ceil_div(n, threads), 1)


def fits(row: Row, most_vectors: int) -> bool:
    """Whether there is a layout for it."""
    return row.is_aligned and row.columns % VECTOR == 0 and 0 < row.columns <= VECTOR * MAX_THREADS * most_vectors


class RowFunctions(NamedTuple):
    """Device functions of a layout.

    Attributes
    ----------
    load : callable
        ``load(x, start, columns, values, first, neutral)``: the thread's elements of the row that begins at element
        ``start`` of x, into ``values`` from ``first`` on.
    store : callable
        ``store(y, start, columns, values, first)``.
    totals : callable
        ``totals(values, n, shared)``: each of n values summed over all threads of the row, in each of them. ``shared``:
        ``(32, n)`` float32, free again on return.
    largest : callable
        ``largest(x, shared)``: the largest x of the row's threads. ``shared``: 32 float32.
    """

    load: Callable[..., Any]
    store: Callable[..., Any]
    totals: Callable[..., Any]
    largest: Callable[..., Any]


@functools.cache
def row_functions(threads: int, vectors: int, is_full: bool = False) -> RowFunctions:
    """The device functions of a layout; ``is_full``: no vector is past the row's end."""
    n_warps = threads // WARP

    @cuda.jit(device=True)
    def load(x, start, columns, values, first, neutral):
        for v in range(vectors):
            c = VECTOR * (v * threads + cuda.threadIdx.x)
            if is_full or c < columns:
                ptx.load8(x, start + c, values, first + VECTOR * v)
            else:
                for k in range(VECTOR):
                    values[first + VECTOR * v + k] = neutral

    @cuda.jit(device=True)
    def store(y, start, columns, values, first):
        for v in range(vectors):
            c = VECTOR * (v * threads + cuda.threadIdx.x)
            if is_full or c < columns:
                ptx.store8(y, start + c, values, first + VECTOR * v)

    @cuda.jit(device=True)
    def warp_totals(values, n, shared):
        for k in range(n):
            values[k] = warp_sum(values[k])

    @cuda.jit(device=True)
    def block_totals(values, n, shared):
        warp = cuda.threadIdx.x // WARP
        for k in range(n):
            of_warp = warp_sum(values[k])
            if cuda.threadIdx.x % WARP == 0:
                shared[warp, k] = of_warp
        cuda.syncthreads()
        for k in range(n):
            total = shared[0, k]
            for w in range(1, n_warps):
                total += shared[w, k]
            values[k] = total
        cuda.syncthreads()

    @cuda.jit(device=True)
    def warp_largest(x, shared):
        return warp_max(x)

    if threads == WARP:
        return RowFunctions(load, store, warp_totals, warp_largest)
    return RowFunctions(load, store, block_totals, block_max)
