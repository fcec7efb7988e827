"""Layer normalisation and RMS normalisation on GPUs, forward: rows in registers.

:mod:`numstack.kernels.layernorm` and :mod:`numstack.kernels.rmsnorm` say what is computed; here ``centred`` is the one
and not the other: without, there is no mean and no bias, and the arrays for them are others that are not looked at.

A row is read once and stays in registers, where mean and variance are taken, by a warp or by a block; a few rows at a
time share what is loaded of weight and bias. Many short blocks do best. Blocks that stay, with the weights in registers
and the next row on its way, took 3 to 8% longer on an H200, as did blocks of 4 to 16 rows a warp; a cache policy by
which what is read leaves first cost 4%.
"""

import functools
from typing import Any, NamedTuple

from numba import cuda, float32, from_dtype, uint16, uint32

from numstack.device import Array, Kernel, Stream, kernel, narrow, ptx, widen
from numstack.device.ptx.packing import high_bf16, low_bf16, pack_bf16
from numstack.kernels.launch import ceil_div, flat
from numstack.kernels.rows import VECTOR, Layout, Row
from numstack.kernels.warp import WARP, warp_sum

MOST_VECTORS = 3  # of a row that a thread keeps
MOST_THREADS = 384  # of a row, and of a block of the backward pass: three warps for each scheduler, 168 registers
MOST_COLUMNS = VECTOR * MOST_THREADS * MOST_VECTORS
BATCH = 2  # rows of a warp, or of a block, that the forward pass has on their way at once


def supports(row: Row) -> bool:
    """Whether rows like this can be kept in registers."""
    return row.is_aligned and row.columns % VECTOR == 0 and 0 < row.columns <= MOST_COLUMNS


def layout_of(columns: int, threads_of_block: int) -> Layout:
    """A row over threads, few of which idle, of blocks of about this many."""
    n = max(1, ceil_div(columns, VECTOR))
    if n <= WARP * MOST_VECTORS:
        threads = WARP
    else:  # the fewest places for the row's vectors; of equals, the fewest threads
        threads = min((WARP * ceil_div(n, WARP * vectors) for vectors in (3, 2)), key=lambda t: t * ceil_div(n, t))
    return Layout(threads, ceil_div(n, threads), max(1, threads_of_block // threads))


class Places(NamedTuple):
    """Where elements of a row lie in the forward pass.

    Attributes
    ----------
    threads : int
        Of a row: a warp, or all of a block.
    width : int
        Elements of a piece: neighbours, which a thread loads by one access.
    pieces : int
        Of a thread.
    rows : int
        Of a block, side by side; one if a row takes more than a warp.
    batch : int
        Rows of a thread, one after the other.
    is_early : bool
        Whether weight and bias are fetched together with the rows, and wait in registers.
    is_full : bool
        Whether no place is past a row's end.
    """

    threads: int
    width: int
    pieces: int
    rows: int
    batch: int
    is_early: bool
    is_full: bool


def places_of(columns: int, centred: bool) -> Places:
    """Few places that idle, and few registers.

    Pieces of 4 elements are 16 bytes of the weights, which most often are float32, so that neighbours load neighbours.
    Without means there are registers for four rows of a thread.
    """
    threads = 2 * WARP
    if columns % (4 * threads) == 0 and columns <= 3 * 4 * threads:
        if not centred and columns > 4 * threads:
            return Places(columns // VECTOR, 4, 2, 1, 2 * BATCH, True, True)
        return Places(threads, 4, columns // (4 * threads), 1, BATCH, True, True)
    threads, vectors, rows = layout_of(columns, 2 * WARP)
    return Places(threads, VECTOR, vectors, rows if threads == WARP else 1, BATCH, False, False)


def launch_forward(arrays: tuple[Array, ...], eps: float, centred: bool, stream: Stream | None) -> None:
    """Launch ``forward`` on (x, weight, bias, y, mean, rstd)."""
    x, weight, bias, y, mean, rstd = arrays
    R, C = x.shape
    places = places_of(C, centred)
    row_in_registers = forward(places, centred)
    row_in_registers[ceil_div(R, places.rows * places.batch), (places.threads, places.rows), stream](
        flat(x), weight, bias, flat(y), mean, rstd, eps, 1 / C, flops=8 * R * C
    )


def launch_forward_residual(arrays: tuple[Array, ...], eps: float, stream: Stream | None) -> None:
    """Launch ``forward_residual`` on (x, residual, weight, bias, sum, y, mean, rstd)."""
    x, residual, weight, bias, total, y, mean, rstd = arrays
    R, C = x.shape
    places = places_of(C, True)
    row_in_registers = forward_residual(places, from_dtype(total.dtype))
    row_in_registers[ceil_div(R, places.rows * places.batch), (places.threads, places.rows), stream](
        flat(x), flat(residual), weight, bias, flat(total), flat(y), mean, rstd, eps, 1 / C, flops=9 * R * C
    )


class _Functions(NamedTuple):
    """Device functions of a forward pass: what they do is said where they are made."""

    first_row: Any
    width_of_row: Any
    fetch: Any
    fetch_weights: Any
    store: Any
    normalise: Any


@functools.cache
def _functions(places: Places, centred: bool) -> _Functions:
    threads, width, pieces, rows, batch, is_early, is_full = places
    n_warps = threads // WARP
    across = width * threads
    elements = width * pieces
    load, store = (ptx.load4, ptx.store4) if width == 4 else (ptx.load8, ptx.store8)

    @cuda.jit(device=True)
    def first_row_of_warp():
        return (cuda.blockIdx.x * rows + cuda.threadIdx.y) * batch

    @cuda.jit(device=True)
    def first_row_of_block():
        return cuda.blockIdx.x * batch

    @cuda.jit(device=True)
    def width_of_row(weight_C):
        return across * pieces if is_full else weight_C.size

    @cuda.jit(device=True)
    def is_always_there(p, C):
        return True

    @cuda.jit(device=True)
    def is_in_row(p, C):
        return p * across + width * cuda.threadIdx.x < C

    is_there = is_always_there if is_full else is_in_row

    @cuda.jit(device=True)
    def fetch(x_N, row, start, R, C, x):
        """The thread's elements of its rows, of which ``row`` is the first; zeros where there is nothing."""
        for b in range(batch):
            for i in range(b * elements, b * elements + elements):
                x[i] = float32(0)
            if row + b < R:
                for p in range(pieces):
                    if is_there(p, C):
                        load(x_N, start + b * C + p * across, x, b * elements + p * width)

    @cuda.jit(device=True)
    def store_rows(y_N, row, start, R, C, y):
        for b in range(batch):
            if row + b < R:
                for p in range(pieces):
                    if is_there(p, C):
                        store(y_N, start + b * C + p * across, y, b * elements + p * width)

    @cuda.jit(device=True)
    def fetch_weights(weight_C, bias_C, weight, bias, C):
        """All of the thread's, if that is what is done early."""
        if is_early:
            for p in range(pieces):
                if is_there(p, C):
                    load(weight_C, p * across + width * cuda.threadIdx.x, weight, p * width)
                    if centred:
                        load(bias_C, p * across + width * cuda.threadIdx.x, bias, p * width)

    @cuda.jit(device=True)
    def totals_of_warp(values, shared, turn):
        for b in range(batch):
            values[b] = warp_sum(values[b])

    @cuda.jit(device=True)
    def totals_of_block(values, shared, turn):
        # Each of the two sums has a place of its own, so that one barrier each is enough.
        for b in range(batch):
            of_warp = warp_sum(values[b])
            if cuda.threadIdx.x % WARP == 0:
                shared[turn, b, cuda.threadIdx.x // WARP] = of_warp
        cuda.syncthreads()
        for b in range(batch):
            values[b] = shared[turn, b, 0]
            for w in range(1, n_warps):
                values[b] += shared[turn, b, w]

    totals = totals_of_warp if threads == WARP else totals_of_block

    @cuda.jit(device=True)
    def normalise(x, row, start, R, C, weight_C, bias_C, weight, bias, y_N, mean_R, rstd_R, eps, inverse_C):
        """Writes y, mean and 1/deviation of the rows in x."""
        shared = cuda.shared.array((2, batch, WARP), float32)
        mean = cuda.local.array(batch, float32)
        rstd = cuda.local.array(batch, float32)
        if centred:
            for b in range(batch):
                mean[b] = float32(0)
                for p in range(pieces):
                    of_piece = float32(0)
                    for i in range(b * elements + p * width, b * elements + p * width + width):
                        of_piece += x[i]
                    mean[b] += of_piece
            totals(mean, shared, 0)
            for b in range(batch):
                mean[b] *= inverse_C
        for b in range(batch):
            rstd[b] = float32(0)
            for p in range(pieces):
                of_piece = float32(0)
                for i in range(b * elements + p * width, b * elements + p * width + width):
                    if centred:
                        x[i] -= mean[b]
                    of_piece += x[i] * x[i]
                rstd[b] += of_piece if is_there(p, C) else float32(0)
        totals(rstd, shared, 1)
        for b in range(batch):
            rstd[b] = ptx.rsqrt(rstd[b] * inverse_C + eps)
        for p in range(pieces):
            if is_there(p, C):
                first = p * width
                if not is_early:
                    first = 0
                    load(weight_C, p * across + width * cuda.threadIdx.x, weight, 0)
                    if centred:
                        load(bias_C, p * across + width * cuda.threadIdx.x, bias, 0)
                for b in range(batch):
                    for k in range(width):
                        i = b * elements + p * width + k
                        x[i] *= rstd[b] * weight[first + k]
                        if centred:
                            x[i] += bias[first + k]
                    if row + b < R:
                        store(y_N, start + b * C + p * across, x, b * elements + p * width)
        if cuda.threadIdx.x == 0:
            for b in range(batch):
                if row + b < R:
                    rstd_R[uint32(row + b)] = rstd[b]
                    if centred:
                        mean_R[uint32(row + b)] = mean[b]

    first_row = first_row_of_warp if threads == WARP else first_row_of_block
    return _Functions(first_row, width_of_row, fetch, fetch_weights, store_rows, normalise)


@functools.cache
def forward(places: Places, centred: bool) -> Kernel:
    """y, 1/deviation and, if ``centred``, mean of x."""
    width = places.width
    n_x = places.batch * width * places.pieces
    n_weights = width * (places.pieces if places.is_early else 1)
    first_row, width_of_row, fetch, fetch_weights, _, normalise = _functions(places, centred)

    @kernel(name=f"{'layernorm' if centred else 'rmsnorm'}.forward row_in_registers")
    def row_in_registers(x_N, weight_C, bias_C, y_N, mean_R, rstd_R, eps, inverse_C):
        x = cuda.local.array(n_x, float32)
        weight = cuda.local.array(n_weights, float32)
        bias = cuda.local.array(n_weights, float32)
        R = rstd_R.size
        C = width_of_row(weight_C)
        row = first_row()
        start = row * C + width * cuda.threadIdx.x
        fetch(x_N, row, start, R, C, x)
        fetch_weights(weight_C, bias_C, weight, bias, C)
        normalise(x, row, start, R, C, weight_C, bias_C, weight, bias, y_N, mean_R, rstd_R, eps, inverse_C)

    return row_in_registers


@functools.cache
def forward_residual(places: Places, storage: Any) -> Kernel:
    """sum = x + residual, and y, mean and 1/deviation of the sum as it is stored, in numba type ``storage``."""
    width = places.width
    n_x = places.batch * width * places.pieces
    n_weights = width * (places.pieces if places.is_early else 1)
    first_row, width_of_row, fetch, fetch_weights, store, normalise = _functions(places, True)

    @cuda.jit(device=True)
    def round_bf16(x, total_N):
        for k in range(0, n_x, 2):  # two at a time: one instruction there, and one for each back
            pair = pack_bf16(x[k], x[k + 1])
            x[k] = low_bf16(pair)
            x[k + 1] = high_bf16(pair)

    @cuda.jit(device=True)
    def round_any(x, total_N):
        for k in range(n_x):
            x[k] = widen(narrow(x[k], total_N.dtype))

    rounded = round_bf16 if storage == uint16 else round_any

    @kernel(name="layernorm_residual.forward row_in_registers")
    def row_in_registers(x_N, residual_N, weight_C, bias_C, total_N, y_N, mean_R, rstd_R, eps, inverse_C):
        x = cuda.local.array(n_x, float32)
        other = cuda.local.array(n_x, float32)
        weight = cuda.local.array(n_weights, float32)
        bias = cuda.local.array(n_weights, float32)
        R = rstd_R.size
        C = width_of_row(weight_C)
        row = first_row()
        start = row * C + width * cuda.threadIdx.x
        fetch(x_N, row, start, R, C, x)
        fetch(residual_N, row, start, R, C, other)
        fetch_weights(weight_C, bias_C, weight, bias, C)
        for i in range(n_x):
            x[i] += other[i]
        rounded(x, total_N)
        store(total_N, row, start, R, C, x)
        normalise(x, row, start, R, C, weight_C, bias_C, weight, bias, y_N, mean_R, rstd_R, eps, inverse_C)

    return row_in_registers
