"""Layer normalisation and RMS normalisation on GPUs, forward: rows in registers.

:mod:`numstack.kernels.layernorm` and :mod:`numstack.kernels.rmsnorm` say what is computed; here ``centred`` is the one
and not the other: without, there is no mean and no bias, and the arrays for them are others that are not looked at.

A row is read once and stays in registers, where mean and variance are taken, by a warp or by a block; a few rows at a
time share what is loaded of weight and bias, and one access stores their statistics. Many short blocks do best. On an
H200 blocks that stay, with the weights in registers and the next row on its way, took 3 to 8% longer, as did blocks of
4 to 16 rows a warp; the copy engine (``ptx.bulk``) 5 to 20%, in short blocks and in ones that stay; loads that leave
nothing in the first cache 2 to 8%; a policy by which what is read leaves the second cache first 4%.

Of a sum, 65536 x 768 in bfloat16, beside today's rate: the sum stored together with y 0.999 to 1.002, both by bulk
copies 0.989 to 0.997, 32 bytes a lane 0.85 to 0.94, later rows asked for ahead 0.82 to 0.99; addresses for arguments in
place of arrays 1.002 to 1.004 singly, 1.001 in a row; the first rows asked for before the kernel ahead is over 0.998 to
1.005 in a row, 0.998 to 1.000 singly.
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
MOST_THREADS = 384  # of a row
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


def places_of(columns: int, centred: bool, is_sum: bool) -> Places:
    """Few places that idle, and few registers: as measured fastest of some twenty on an H200, within 1 to 2%.

    Pieces of 4 elements are 16 bytes of the weights, which most often are float32, so that neighbours load neighbours.
    """
    threads = 2 * WARP
    if columns % (4 * threads) == 0 and columns <= 3 * 4 * threads:
        if columns > 4 * threads and (is_sum or not centred):
            return Places(columns // VECTOR, 4, 2, 1, BATCH if is_sum else 2 * BATCH, True, True)
        return Places(threads, 4, columns // (4 * threads), 1, BATCH if is_sum else 2 * BATCH, True, True)
    threads, vectors, rows = layout_of(columns, 2 * WARP)
    is_full = threads * vectors * VECTOR == columns
    return Places(threads, VECTOR, vectors, rows if threads == WARP else 1, BATCH, False, is_full)


def launch(
    arrays: tuple[Array, ...],
    eps: float,
    centred: bool,
    stream: Stream | None,
    *,
    of_sum: tuple[Array, ...] = (),
    kept: Array | None = None,
) -> None:
    """Launch ``forward`` on (x, weight, bias, y, mean, rstd), or on x + residual if ``of_sum`` is (residual, sum).

    ``kept`` is for a copy of x.
    """
    x, weight, bias, y, mean, rstd = arrays
    R, C = x.shape
    places = places_of(C, centred, bool(of_sum))
    residual, total = of_sum or (x, y if kept is None else kept)
    row_in_registers = forward(places, centred, from_dtype(total.dtype) if of_sum else None, kept is not None)
    row_in_registers[ceil_div(R, places.rows * places.batch), (places.threads, places.rows), stream](
        flat(x), flat(residual), weight, bias, flat(total), flat(y), mean, rstd, R, eps, 1 / C,
        flops=(9 if of_sum else 8) * R * C,
    )  # fmt: skip


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
    def fetch(x_N, row, R, C, x):
        """The thread's elements of its rows, of which ``row`` is the first; for rows past the last, that one again."""
        for b in range(batch):
            start = min(row + b, R - 1) * C + width * cuda.threadIdx.x
            for p in range(pieces):
                first = b * elements + p * width
                if is_there(p, C):
                    load(x_N, start + p * across, x, first)
                else:
                    for k in range(first, first + width):
                        x[k] = float32(0)

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
    def of_thread(values, place):
        """values[place], which is in a register whose number must not depend on the thread."""
        mine = values[0]
        for b in range(1, batch):
            value = values[b]
            mine = value if place == b else mine
        return mine

    @cuda.jit(device=True)
    def normalise(x, row, start, R, C, weight_C, bias_C, weight, bias, y_N, mean_R, rstd_R, eps, inverse_C):
        """Writes y of the rows in x; mean and 1/deviation if there is room for them."""
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
        # The statistics of all rows leave by one access: thread b has those of row b.
        place = cuda.threadIdx.x
        if place < batch and row + place < rstd_R.size:
            rstd_R[uint32(row + place)] = of_thread(rstd, place)
            if centred:
                mean_R[uint32(row + place)] = of_thread(mean, place)

    first_row = first_row_of_warp if threads == WARP else first_row_of_block
    return _Functions(first_row, width_of_row, fetch, fetch_weights, store_rows, normalise)


@functools.cache
def forward(places: Places, centred: bool, storage: Any, keeps: bool = False) -> Kernel:
    """y, 1/deviation and, if ``centred``, mean of x.

    With ``storage``, a numba type: of x + residual as it is stored in an array of that type, ``total_N``. If it
    ``keeps``, x is stored there. Otherwise nothing looks at residual and total. Nor does it at statistics that have no
    elements.
    """
    width = places.width
    n_x = places.batch * width * places.pieces
    n_weights = width * (places.pieces if places.is_early else 1)
    is_sum = storage is not None
    n_other = n_x if is_sum else 1
    first_row, width_of_row, fetch, fetch_weights, store, normalise = _functions(places, centred)

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
    operation = "layernorm_residual" if is_sum else "layernorm" if centred else "rmsnorm"

    @kernel(name=f"{operation}.forward row_in_registers", starts_early=True)
    def row_in_registers(x_N, residual_N, weight_C, bias_C, total_N, y_N, mean_R, rstd_R, R, eps, inverse_C):
        x = cuda.local.array(n_x, float32)
        other = cuda.local.array(n_other, float32)
        weight = cuda.local.array(n_weights, float32)
        bias = cuda.local.array(n_weights, float32)
        C = width_of_row(weight_C)
        row = first_row()
        start = row * C + width * cuda.threadIdx.x
        fetch(x_N, row, R, C, x)
        if is_sum:
            fetch(residual_N, row, R, C, other)
        fetch_weights(weight_C, bias_C, weight, bias, C)
        if is_sum:
            for i in range(n_x):
                x[i] += other[i]
            rounded(x, total_N)
        if is_sum or keeps:
            store(total_N, row, start, R, C, x)
        normalise(x, row, start, R, C, weight_C, bias_C, weight, bias, y_N, mean_R, rstd_R, eps, inverse_C)

    return row_in_registers
