"""Layer normalisation with rows in registers, for GPUs: see :mod:`numstack.kernels.layernorm` for what it computes.

Forward: a row is read once and stays in registers, where mean and variance are taken, by a warp or by a block; weight
and bias come from the cache.

Backward: a grid that stays. Each thread keeps the same columns for all rows that its block goes through, so the sums
over rows, dweight and dbias, grow in its registers; they leave the block once, into its row of ``partial_2GC``. Several
rows are on their way at a time, or the sums along the row that all wait for would leave the memory idle.
"""

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda, float32

from numstack.device import Kernel, kernel, narrow, ptx, widen
from numstack.kernels.rows import VECTOR, Layout, row_functions
from numstack.kernels.warp import WARP


@functools.cache
def forward(layout: Layout) -> Kernel:
    """y, mean and rstd of x."""
    load, _, finish = _forward_parts(layout)
    rows = layout.rows
    elements = VECTOR * layout.vectors

    @kernel(name="layernorm.forward row_in_registers")
    def forward_in_registers(x_RC, weight_C, bias_C, y_RC, mean_R, rstd_R, eps, inverse_C):
        x = cuda.local.array(elements, float32)
        row = cuda.blockIdx.x * rows + cuda.threadIdx.y
        R, C = x_RC.shape
        columns = C if row < R else 0  # a warp past the last row has nothing to read, but joins the shuffles
        load(x_RC, row * C, columns, x, 0, float32(0))
        mean, rstd = finish(x, row * C, columns, weight_C, bias_C, y_RC, eps, inverse_C)
        if cuda.threadIdx.x == 0 and columns > 0:
            mean_R[row] = mean
            rstd_R[row] = rstd

    return forward_in_registers


@functools.cache
def forward_residual(layout: Layout) -> Kernel:
    """sum = x + residual, and y, mean and rstd of the sum as it is stored."""
    load, store, finish = _forward_parts(layout)
    rows = layout.rows
    elements = VECTOR * layout.vectors

    @kernel(name="layernorm_residual.forward row_in_registers")
    def forward_residual_in_registers(
        x_RC, residual_RC, weight_C, bias_C, sum_RC, y_RC, mean_R, rstd_R, eps, inverse_C
    ):
        x = cuda.local.array(elements, float32)
        other = cuda.local.array(elements, float32)
        row = cuda.blockIdx.x * rows + cuda.threadIdx.y
        R, C = x_RC.shape
        columns = C if row < R else 0
        load(x_RC, row * C, columns, x, 0, float32(0))
        load(residual_RC, row * C, columns, other, 0, float32(0))
        for i in range(elements):
            x[i] = widen(narrow(x[i] + other[i], sum_RC.dtype))
        store(sum_RC, row * C, columns, x, 0)
        mean, rstd = finish(x, row * C, columns, weight_C, bias_C, y_RC, eps, inverse_C)
        if cuda.threadIdx.x == 0 and columns > 0:
            mean_R[row] = mean
            rstd_R[row] = rstd

    return forward_residual_in_registers


@functools.cache
def _forward_parts(layout: Layout) -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Device functions: to load and store a row, and all that follows when it is in registers."""
    threads, vectors, _ = layout
    elements = VECTOR * vectors
    row_parts = row_functions(threads, vectors)
    totals = row_parts.totals

    @cuda.jit(device=True)
    def finish(x, start, columns, weight_C, bias_C, y_RC, eps, inverse_C):
        # From a row in registers to y; returns mean and 1/deviation.
        shared = cuda.shared.array((WARP, 1), float32)
        total = cuda.local.array(1, float32)
        scale = cuda.local.array(VECTOR, float32)
        shift = cuda.local.array(VECTOR, float32)
        total[0] = float32(0)
        for i in range(elements):
            total[0] += x[i]
        totals(total, 1, shared)
        mean = total[0] * inverse_C
        total[0] = float32(0)
        for v in range(vectors):
            if VECTOR * (v * threads + cuda.threadIdx.x) < columns:
                for k in range(VECTOR):
                    d = x[VECTOR * v + k] - mean
                    total[0] += d * d
        totals(total, 1, shared)
        rstd = ptx.rsqrt(total[0] * inverse_C + eps)
        for v in range(vectors):
            c = VECTOR * (v * threads + cuda.threadIdx.x)
            if c < columns:
                ptx.load8(weight_C, c, scale, 0)
                ptx.load8(bias_C, c, shift, 0)
                for k in range(VECTOR):
                    x[VECTOR * v + k] = (x[VECTOR * v + k] - mean) * rstd * scale[k] + shift[k]
                ptx.store8(y_RC, start + c, x, VECTOR * v)
        return mean, rstd

    return row_parts.load, row_parts.store, finish


@functools.cache
def backward(layout: Layout, batch: int) -> Kernel:
    """dx, and each block's sums over its rows; a block takes ``batch`` rows, or ``batch`` times ``rows``, at a time."""
    threads, vectors, rows = layout
    elements = VECTOR * vectors
    batch_elements = batch * elements
    n_sums = 2 * batch
    added = elements if rows > 1 else 1
    load, store, totals, _ = row_functions(threads, vectors)

    @kernel(name="layernorm.backward rows_in_registers")
    def backward_in_registers(dy_RC, x_RC, weight_C, mean_R, rstd_R, dx_RC, partial_2GC, accumulate, inverse_C):
        weight = cuda.local.array(elements, float32)
        dweight = cuda.local.array(elements, float32)
        dbias = cuda.local.array(elements, float32)
        g = cuda.local.array(batch_elements, float32)  # dy, then dy weight
        normal = cuda.local.array(batch_elements, float32)  # x, then as normalised
        rstd = cuda.local.array(batch, float32)
        sums = cuda.local.array(n_sums, float32)  # of g and of g normal, of each row
        shared = cuda.shared.array((WARP, n_sums), float32)
        of_rows = cuda.shared.array((2, added, threads), float32)
        R, C = x_RC.shape
        thread = cuda.threadIdx.x
        load(weight_C, 0, C, weight, 0, float32(0))
        for i in range(elements):
            dweight[i] = float32(0)
            dbias[i] = float32(0)

        row0 = cuda.blockIdx.x * rows * batch
        while row0 < R:
            for b in range(batch):
                row = row0 + b * rows + cuda.threadIdx.y
                columns = C if row < R else 0
                load(dy_RC, row * C, columns, g, b * elements, float32(0))
                load(x_RC, row * C, columns, normal, b * elements, float32(0))
            for b in range(batch):
                row = row0 + b * rows + cuda.threadIdx.y
                mean = float32(0)
                rstd[b] = float32(0)
                if row < R:
                    mean = mean_R[row]
                    rstd[b] = rstd_R[row]
                sums[2 * b] = float32(0)
                sums[2 * b + 1] = float32(0)
                for i in range(elements):
                    j = b * elements + i
                    dy = g[j]
                    normal[j] = (normal[j] - mean) * rstd[b]
                    dweight[i] += dy * normal[j]
                    dbias[i] += dy
                    g[j] = dy * weight[i]
                    sums[2 * b] += g[j]
                    sums[2 * b + 1] += g[j] * normal[j]
            totals(sums, n_sums, shared)
            for b in range(batch):
                row = row0 + b * rows + cuda.threadIdx.y
                columns = C if row < R else 0
                mean_g = sums[2 * b] * inverse_C
                mean_gn = sums[2 * b + 1] * inverse_C
                for i in range(elements):
                    j = b * elements + i
                    g[j] = rstd[b] * (g[j] - mean_g - normal[j] * mean_gn)
                if accumulate:
                    load(dx_RC, row * C, columns, normal, b * elements, float32(0))
                    for i in range(elements):
                        g[b * elements + i] += normal[b * elements + i]
                store(dx_RC, row * C, columns, g, b * elements)
            row0 += cuda.gridDim.x * rows * batch

        # The block's warps add their sums up, one after the other.
        for y in range(rows - 1):
            if cuda.threadIdx.y == y:
                for i in range(elements):
                    of_rows[0, i, thread] = dweight[i]
                    of_rows[1, i, thread] = dbias[i]
            cuda.syncthreads()
            if cuda.threadIdx.y == y + 1:
                for i in range(elements):
                    dweight[i] += of_rows[0, i, thread]
                    dbias[i] += of_rows[1, i, thread]
            cuda.syncthreads()
        if cuda.threadIdx.y == rows - 1:
            G = partial_2GC.shape[1]
            store(partial_2GC, cuda.blockIdx.x * C, C, dweight, 0)
            store(partial_2GC, (G + cuda.blockIdx.x) * C, C, dbias, 0)

    return backward_in_registers
