"""Layer normalisation and RMS normalisation on GPUs: rows in registers, or on their way to them.

:mod:`numstack.kernels.layernorm` and :mod:`numstack.kernels.rmsnorm` say what is computed; here ``centred`` is the one
and not the other: without, there is no mean and no bias, and the arrays for them are others that are not looked at.

``forward`` reads a row once and keeps it in registers, where mean and variance are taken, by a warp or by a block. Two
rows at a time share what is loaded of weight and bias.

``backward`` is a grid that stays. A thread keeps to its columns through all rows that its block takes, so the sums over
rows, dweight and dbias, grow in its registers, and leave the block once. The sums along a row, which all its threads
wait for, would leave the memory idle meanwhile; so the next rows are always on their way to shared memory
(``cp.async``). Each thread fetches what it will take itself, and needs nobody's leave to take it.
"""

import functools
from typing import Any, NamedTuple

from numba import cuda, float32, from_dtype, uint32

from numstack.device import Array, Kernel, Stream, current_device, kernel, narrow, ptx, widen
from numstack.kernels.launch import ceil_div, flat
from numstack.kernels.rows import VECTOR, Layout, Row, row_functions
from numstack.kernels.warp import WARP, warp_sum

MOST_VECTORS = 3  # of a row that a thread keeps
MOST_THREADS = 384  # of a row, and of a block of the backward pass: three warps for each scheduler, 168 registers
MOST_THREADS_32_BIT = 256  # two warps for each, since rows of float32 take some more registers
MOST_COLUMNS = VECTOR * MOST_THREADS * MOST_VECTORS
BATCH = 2  # rows of a warp, or of a block, that the forward pass has on their way at once
FORWARD_THREADS = 64  # of a block of the forward pass, if a row's are fewer
STAGES = 3  # rows of a thread that are on their way or in use
BOTH, ALSO_OLD = 2, 3  # rows that are fetched: dy and x, and what dx holds if it is added to


def supports(row: Row) -> bool:
    """Whether rows like this can be kept in registers."""
    return row.is_aligned and row.columns % VECTOR == 0 and 0 < row.columns <= MOST_COLUMNS


def supports_backward(row: Row) -> bool:
    """Whether the backward pass can take rows like this, all of one dtype, and shared memory hold them."""
    return supports(row) and row.itemsize > 0 and _most_rows(row.columns, ALSO_OLD, row.itemsize) > 0


def layout_of(columns: int, threads_of_block: int) -> Layout:
    """A row over threads, few of which idle, of blocks of about this many."""
    n = max(1, ceil_div(columns, VECTOR))
    if n <= WARP * MOST_VECTORS:
        threads = WARP
    else:  # the fewest places for the row's vectors; of equals, the fewest threads
        threads = min((WARP * ceil_div(n, WARP * vectors) for vectors in (3, 2)), key=lambda t: t * ceil_div(n, t))
    return Layout(threads, ceil_div(n, threads), max(1, threads_of_block // threads))


def _most_rows(columns: int, n_arrays: int, itemsize: int) -> int:
    """Rows of a block of the backward pass whose threads, and two stages in shared memory, there is room for."""
    most_threads = MOST_THREADS if itemsize == 2 else MOST_THREADS_32_BIT
    threads, vectors, _ = layout_of(columns, most_threads)
    return min(
        most_threads // threads, _shared_bytes() // (2 * stage_bytes(Layout(threads, vectors, 1), n_arrays, itemsize))
    )


def _shared_bytes() -> int:
    """What of a block's shared memory may hold rows."""
    return current_device().properties.shared_bytes_per_block * 15 // 16


class Plan(NamedTuple):
    """How the grid of the backward pass, which stays, goes through the rows.

    Attributes
    ----------
    layout : Layout
        Of a block: ``rows`` rows at a time.
    stages : int
        Rows of a thread that are on their way or in use.
    blocks : int
        Of the grid.
    stretch : int
        Rows of a block in all: blocks have the same to a row.
    """

    layout: Layout
    stages: int
    blocks: int
    stretch: int


def plan_backward(n_rows: int, columns: int, n_arrays: int = BOTH, itemsize: int = 2) -> Plan:
    """A grid for rows of a floating dtype of ``itemsize`` bytes, of which ``n_arrays`` are fetched."""
    threads, vectors, _ = layout_of(columns, MOST_THREADS)
    layout = Layout(threads, vectors, max(1, _most_rows(columns, n_arrays, itemsize)))
    stages = min(STAGES, _shared_bytes() // stage_bytes(layout, n_arrays, itemsize))
    stretch = max(1, ceil_div(n_rows, current_device().properties.multiprocessors))
    return Plan(layout, stages, max(1, ceil_div(n_rows, stretch)), stretch)


def stage_bytes(layout: Layout, n_arrays: int, itemsize: int) -> int:
    """Shared memory of a block for one stage."""
    return layout.rows * n_arrays * layout.vectors * layout.threads * VECTOR * itemsize


def n_blocks(n_rows: int, columns: int) -> int:
    """Blocks of the backward pass: as many rows of partial sums does it leave."""
    return plan_backward(n_rows, columns).blocks


def launch_forward(arrays: tuple[Array, ...], eps: float, centred: bool, stream: Stream | None) -> None:
    """Launch ``forward`` on (x, weight, bias, y, mean, rstd)."""
    R, C = arrays[0].shape
    layout = layout_of(C, FORWARD_THREADS)
    row_in_registers = forward(layout, BATCH, centred)
    grid = ceil_div(R, layout.rows * BATCH)
    row_in_registers[grid, layout.block, stream](*arrays, eps, 1 / C, flops=8 * R * C)


def launch_backward(
    arrays: tuple[Array, ...], workspace: Array, centred: bool, accumulate: bool, stream: Stream | None
) -> int:
    """Launch ``backward`` on (dy, x, weight, mean, rstd, dx); returns how many rows of partial sums it leaves."""
    dy, x, weight, mean, rstd, dx = arrays
    R, C = x.shape
    if R == 0:  # nothing lies where arrays without elements are, so nothing is fetched from there
        current_device().fill(workspace[: (2 if centred else 1) * C], 0.0, stream)
        return 1
    n_arrays = ALSO_OLD if accumulate else BOTH
    layout, stages, blocks, stretch = plan_backward(R, C, n_arrays, x.itemsize)
    staged_rows = backward(layout, stages, centred, accumulate, from_dtype(x.dtype))
    shared_bytes = stages * stage_bytes(layout, n_arrays, x.itemsize)
    staged_rows[blocks, layout.block, stream, shared_bytes](
        flat(dy), flat(x), weight, mean, rstd, flat(dx), workspace, stretch, 1 / C, flops=16 * R * C
    )
    return blocks


# --- forward ---------------------------------------------------------------------------------------------------------


@functools.cache
def _normalise(layout: Layout, batch: int, centred: bool) -> Any:
    """The device function for when rows are in registers: writes y, leaves mean and 1/deviation of each row."""
    threads, vectors, _ = layout
    elements = VECTOR * vectors
    totals = row_functions(threads, vectors).totals

    @cuda.jit(device=True)
    def normalise(x, row0, R, C, weight_C, bias_C, y_RC, mean, rstd, eps, inverse_C):
        shared = cuda.shared.array((WARP, batch), float32)
        scale = cuda.local.array(VECTOR, float32)
        shift = cuda.local.array(VECTOR, float32)
        for b in range(batch):
            mean[b] = float32(0)
        if centred:
            for b in range(batch):
                for i in range(b * elements, b * elements + elements):
                    mean[b] += x[i]
            totals(mean, batch, shared)
        for b in range(batch):
            mean[b] *= inverse_C
            rstd[b] = float32(0)
            for v in range(vectors):
                if VECTOR * (v * threads + cuda.threadIdx.x) < C:
                    for i in range(b * elements + VECTOR * v, b * elements + VECTOR * v + VECTOR):
                        if centred:
                            x[i] -= mean[b]
                        rstd[b] += x[i] * x[i]
        totals(rstd, batch, shared)
        for b in range(batch):
            rstd[b] = ptx.rsqrt(rstd[b] * inverse_C + eps)
        for v in range(vectors):
            c = VECTOR * (v * threads + cuda.threadIdx.x)
            if c < C:
                ptx.load8(weight_C, c, scale, 0)
                if centred:
                    ptx.load8(bias_C, c, shift, 0)
                for b in range(batch):
                    if row0 + b < R:
                        first = b * elements + VECTOR * v
                        for k in range(VECTOR):
                            x[first + k] *= rstd[b] * scale[k]
                            if centred:
                                x[first + k] += shift[k]
                        ptx.store8(y_RC, (row0 + b) * C + c, x, first)

    return normalise


@functools.cache
def forward(layout: Layout, batch: int, centred: bool) -> Kernel:
    """y, 1/deviation and, if ``centred``, mean of x; ``batch`` rows share what is loaded of weight and bias."""
    threads, vectors, rows = layout
    elements = VECTOR * vectors
    batch_elements = batch * elements
    load, _, _, _ = row_functions(threads, vectors)
    normalise = _normalise(layout, batch, centred)

    @kernel(name=f"{'layernorm' if centred else 'rmsnorm'}.forward row_in_registers")
    def row_in_registers(x_RC, weight_C, bias_C, y_RC, mean_R, rstd_R, eps, inverse_C):
        x = cuda.local.array(batch_elements, float32)
        mean = cuda.local.array(batch, float32)
        rstd = cuda.local.array(batch, float32)
        R, C = x_RC.shape
        row0 = (cuda.blockIdx.x * rows + cuda.threadIdx.y) * batch
        for b in range(batch):  # a row past the last has nothing to read, but takes part in the sums
            load(x_RC, (row0 + b) * C, C if row0 + b < R else 0, x, b * elements, float32(0))
        normalise(x, row0, R, C, weight_C, bias_C, y_RC, mean, rstd, eps, inverse_C)
        if cuda.threadIdx.x == 0:
            for b in range(batch):
                if row0 + b < R:
                    rstd_R[row0 + b] = rstd[b]
                    if centred:
                        mean_R[row0 + b] = mean[b]

    return row_in_registers


@functools.cache
def forward_residual(layout: Layout) -> Kernel:
    """sum = x + residual, and y, mean and 1/deviation of the sum as it is stored."""
    threads, vectors, rows = layout
    elements = VECTOR * vectors
    load, store, _, _ = row_functions(threads, vectors)
    normalise = _normalise(layout, 1, True)

    @kernel(name="layernorm_residual.forward row_in_registers")
    def row_in_registers(x_RC, residual_RC, weight_C, bias_C, sum_RC, y_RC, mean_R, rstd_R, eps, inverse_C):
        x = cuda.local.array(elements, float32)
        other = cuda.local.array(elements, float32)
        mean = cuda.local.array(1, float32)
        rstd = cuda.local.array(1, float32)
        row = cuda.blockIdx.x * rows + cuda.threadIdx.y
        R, C = x_RC.shape
        columns = C if row < R else 0
        load(x_RC, row * C, columns, x, 0, float32(0))
        load(residual_RC, row * C, columns, other, 0, float32(0))
        for i in range(elements):
            x[i] = widen(narrow(x[i] + other[i], sum_RC.dtype))
        store(sum_RC, row * C, columns, x, 0)
        normalise(x, row, R, C, weight_C, bias_C, y_RC, mean, rstd, eps, inverse_C)
        if cuda.threadIdx.x == 0 and columns > 0:
            mean_R[row] = mean[0]
            rstd_R[row] = rstd[0]

    return row_in_registers


# --- backward --------------------------------------------------------------------------------------------------------


@functools.cache
def _sums_of_row(threads: int, centred: bool) -> Any:
    """``sums(a, b, shared, parity)``: a and b, each summed over the threads of a row, in each of them.

    Of two sums, half of the lanes of a warp go on with the one and half with the other: six shuffles instead of ten.
    Without ``centred`` there is no b. ``shared``: (2, 32, 2) float32; calls take turns between its halves, so that one
    barrier is enough.
    """
    n_warps = threads // WARP

    @cuda.jit(device=True)
    def both_of_warp(a, b):
        # The sum of a in the lower 16 lanes, that of b in the upper.
        is_low = cuda.threadIdx.x % WARP < 16
        mine = a if is_low else b
        mine += cuda.shfl_xor_sync(0xFFFFFFFF, b if is_low else a, 16)
        mine += cuda.shfl_xor_sync(0xFFFFFFFF, mine, 8)
        mine += cuda.shfl_xor_sync(0xFFFFFFFF, mine, 4)
        mine += cuda.shfl_xor_sync(0xFFFFFFFF, mine, 2)
        mine += cuda.shfl_xor_sync(0xFFFFFFFF, mine, 1)
        return mine

    @cuda.jit(device=True)
    def by_warp(a, b, shared, parity):
        if centred:
            mine = both_of_warp(a, b)
            other = cuda.shfl_xor_sync(0xFFFFFFFF, mine, 16)
            is_low = cuda.threadIdx.x % WARP < 16
            return (mine if is_low else other), (other if is_low else mine)
        return warp_sum(a), b

    @cuda.jit(device=True)
    def by_block(a, b, shared, parity):
        mine = both_of_warp(a, b) if centred else warp_sum(a)
        lane = cuda.threadIdx.x % WARP
        first = cuda.threadIdx.y * n_warps
        if lane % 16 == 0:
            shared[parity, first + cuda.threadIdx.x // WARP, lane // 16] = mine
        cuda.syncthreads()
        a = shared[parity, first, 0]
        b = shared[parity, first, 1]
        for w in range(1, n_warps):
            a += shared[parity, first + w, 0]
            b += shared[parity, first + w, 1]
        return a, b

    return by_warp if threads == WARP else by_block


@functools.cache
def backward(layout: Layout, stages: int, centred: bool, accumulate: bool, storage: Any) -> Kernel:
    """dx, and each block's sums over its rows: dweight, and if ``centred`` dbias, in ``partial_N``, shape (2, G, C).

    ``storage`` is the numba type of what dy, x and dx hold; ``accumulate``: dx is added to. A block takes ``stretch``
    rows.
    """
    threads, vectors, rows = layout
    elements = VECTOR * vectors
    centred_elements = elements if centred else 1
    n_sums = 2 if centred else 1
    n_arrays = ALSO_OLD if accumulate else BOTH
    across = VECTOR * threads  # elements from one vector of a thread to its next
    of_row = elements * threads
    of_stage = rows * n_arrays * of_row
    of_all = stages * of_stage
    per_copy = 128 // storage.bitwidth
    copies = VECTOR // per_copy
    sums_of_row = _sums_of_row(threads, centred)
    load, _, _, _ = row_functions(threads, vectors)
    wait_for_oldest = ptx.cp_async_wait_group(stages - 1)
    wait_for_all = ptx.cp_async_wait_group(0)

    @cuda.jit(device=True)
    def fetch(staged, to, x_N, start, columns):
        for v in range(vectors):
            is_there = v * across + VECTOR * cuda.threadIdx.x < columns
            at = start + v * across if is_there else 0
            nbytes = 16 if is_there else 0  # of none, zeros are fetched
            for k in range(copies):
                ptx.cp_async_16(staged, to + v * across + k * per_copy, x_N, at + k * per_copy, nbytes)

    @cuda.jit(device=True)
    def fetch_row(staged, to, dy_N, x_N, dx_N, start, columns):
        fetch(staged, to, dy_N, start, columns)
        fetch(staged, to + of_row, x_N, start, columns)
        if accumulate:
            fetch(staged, to + 2 * of_row, dx_N, start, columns)
        ptx.cp_async_commit_group()

    @cuda.jit(device=True)
    def take(staged, at, values):
        for v in range(vectors):
            ptx.load8(staged, at + v * across, values, VECTOR * v)

    @kernel(name=f"{'layernorm' if centred else 'rmsnorm'}.backward staged_rows")
    def staged_rows(dy_N, x_N, weight_C, mean_R, rstd_R, dx_N, partial_N, stretch, inverse_C):
        weight = cuda.local.array(elements, float32)
        dweight = cuda.local.array(elements, float32)
        dbias = cuda.local.array(centred_elements, float32)
        g = cuda.local.array(elements, float32)  # dy, then dy weight, then dx
        normal = cuda.local.array(elements, float32)  # x, then as normalised
        shared = cuda.shared.array((2, WARP, 2), float32)
        staged = cuda.shared.array(0, storage)
        C = weight_C.size
        row0 = cuda.blockIdx.x * stretch
        stop = min(row0 + stretch, rstd_R.size)
        row = row0 + cuda.threadIdx.y
        further = rows * C
        start = row * C + VECTOR * cuda.threadIdx.x
        ahead = start
        place = cuda.threadIdx.y * n_arrays * of_row + VECTOR * cuda.threadIdx.x
        for stage in range(stages - 1):
            fetch_row(staged, place + stage * of_stage, dy_N, x_N, dx_N, ahead, C if row + stage * rows < stop else 0)
            ahead += further
        load(weight_C, 0, C, weight, 0, float32(0))
        for i in range(elements):
            dweight[i] = float32(0)
            if centred:
                dbias[i] = float32(0)
        mean = float32(0)
        rstd = float32(0)
        if row < stop:
            rstd = rstd_R[uint32(row)]
            if centred:
                mean = mean_R[uint32(row)]

        taken = place
        filled = place + (stages - 1) * of_stage
        parity = 0
        while row0 < stop:
            fetch_row(staged, filled, dy_N, x_N, dx_N, ahead, C if row + (stages - 1) * rows < stop else 0)
            next_mean = float32(0)
            next_rstd = float32(0)
            if row + rows < stop:
                next_rstd = rstd_R[uint32(row + rows)]
                if centred:
                    next_mean = mean_R[uint32(row + rows)]
            wait_for_oldest()
            take(staged, taken, g)
            take(staged, taken + of_row, normal)
            offset = -mean * rstd
            sum_gn = float32(0)
            sum_g = float32(0)
            for v in range(vectors):
                of_vector_gn = float32(0)
                of_vector_g = float32(0)
                for i in range(VECTOR * v, VECTOR * v + VECTOR):
                    normal[i] = normal[i] * rstd + offset
                    dweight[i] += g[i] * normal[i]
                    if centred:
                        dbias[i] += g[i]
                    g[i] *= weight[i]
                    of_vector_gn += g[i] * normal[i]
                    of_vector_g += g[i]
                sum_gn += of_vector_gn
                sum_g += of_vector_g
            sum_gn, sum_g = sums_of_row(sum_gn, sum_g, shared, parity)
            slope = -rstd * (sum_gn * inverse_C)
            shift = -rstd * (sum_g * inverse_C) if centred else float32(0)
            for i in range(elements):
                g[i] = g[i] * rstd + (normal[i] * slope + shift)
            if accumulate:
                take(staged, taken + 2 * of_row, normal)
                for i in range(elements):
                    g[i] += normal[i]
            for v in range(vectors):
                if row < stop and v * across + VECTOR * cuda.threadIdx.x < C:
                    ptx.store8(dx_N, start + v * across, g, VECTOR * v)
            mean = next_mean
            rstd = next_rstd
            row += rows
            row0 += rows
            start += further
            ahead += further
            taken += of_stage
            if taken >= of_all:
                taken -= of_all
            filled += of_stage
            if filled >= of_all:
                filled -= of_all
            parity = 1 - parity

        # The sums of the block's rows meet in the memory that the rows passed through.
        wait_for_all()
        cuda.syncthreads()
        of_rows = cuda.shared.array(0, float32)
        mine = cuda.threadIdx.y * n_sums * of_row + VECTOR * cuda.threadIdx.x
        for v in range(vectors):
            ptx.store8(of_rows, mine + v * across, dweight, VECTOR * v)
            if centred:
                ptx.store8(of_rows, mine + of_row + v * across, dbias, VECTOR * v)
        cuda.syncthreads()
        for j in range(cuda.threadIdx.y * threads + cuda.threadIdx.x, n_sums * of_row, threads * rows):
            total = of_rows[uint32(j)]
            for y in range(1, rows):
                total += of_rows[uint32(y * n_sums * of_row + j)]
            which = 1 if j >= of_row else 0
            c = j - which * of_row
            if c < C:
                partial_N[(which * cuda.gridDim.x + cuda.blockIdx.x) * C + c] = total

    return staged_rows
