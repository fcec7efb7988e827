"""Layer normalisation: each row of x_RC brought to mean 0 and variance 1, then scaled and shifted.

Forward, for every row r and column c::

    mean_r = sum_c x_rc / C
    rstd_r = 1 / sqrt(sum_c (x_rc - mean_r)^2 / C + eps)
    n_rc   = (x_rc - mean_r) rstd_r
    y_rc   = n_rc weight_c + bias_c

Backward, with g_rc = dy_rc weight_c::

    dx_rc     = rstd_r (g_rc - sum_c g_rc / C - n_rc sum_c (g_rc n_rc) / C)
    dweight_c = sum_r dy_rc n_rc
    dbias_c   = sum_r dy_rc

Forward ladder: ``thread_per_row`` is the formula; ``block_per_row`` reads coalesced and reduces by a tree in shared
memory; ``warp_per_row`` reduces by shuffles, without a barrier; ``row_in_registers``, for GPUs, reads a row once, by
16 bytes a lane. Backward ladder: ``thread_per_row`` has a thread for each row of dx and for each column of dweight and
dbias, and reads dy and x twice; ``row_groups`` makes all in one pass; ``staged_rows``, for GPUs, keeps the sums over
rows in registers, and the next rows on their way. Those for GPUs are in ``norm_rows.py``
and ``norm_rows_backward.py``.

Sums are float32 whatever the arrays hold. The variance is taken about the mean (two passes over a row that is in cache
by then), not as E[x^2] - E[x]^2, which cancels. Source: Ba, Kiros, Hinton 2016, "Layer Normalization", eq. 3-4.
"""

import math

import numpy as np
from numba import cuda, float32

from numstack.device import Array, Stream, kernel, narrow, widen
from numstack.kernels import elementwise, norm_arrays, norm_rows, norm_rows_backward
from numstack.kernels.launch import ceil_div, check_workspace
from numstack.kernels.reduce_vectors import ODD
from numstack.kernels.rows import row_of
from numstack.kernels.variants import Variant, Variants
from numstack.kernels.warp import WARP, warp_sum

BLOCK = 128  # threads of the one-dimensional blocks
ROWS = 4  # rows of a block where a warp takes a row
GROUPS = 528  # most blocks of the backward pass, and so rows of partial sums: four a multiprocessor on an H200


def reference(x_RC: np.ndarray, weight_C: np.ndarray, bias_C: np.ndarray, eps: float) -> tuple[np.ndarray, ...]:
    """``(y_RC, mean_R, rstd_R)`` in float64."""
    x, weight, bias = (np.asarray(a, np.float64) for a in (x_RC, weight_C, bias_C))
    mean = x.mean(axis=1)
    rstd = 1 / np.sqrt(x.var(axis=1) + eps)
    return (x - mean[:, None]) * rstd[:, None] * weight + bias, mean, rstd


def reference_backward(
    dy_RC: np.ndarray, x_RC: np.ndarray, weight_C: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``(dx_RC, dweight_C, dbias_C)`` in float64."""
    dy, x, weight = (np.asarray(a, np.float64) for a in (dy_RC, x_RC, weight_C))
    rstd = 1 / np.sqrt(x.var(axis=1, keepdims=True) + eps)
    normal = (x - x.mean(axis=1, keepdims=True)) * rstd
    g = dy * weight
    dx = rstd * (g - g.mean(axis=1, keepdims=True) - normal * (g * normal).mean(axis=1, keepdims=True))
    return dx, (dy * normal).sum(axis=0), dy.sum(axis=0)


# --- forward kernels -------------------------------------------------------------------------------------------------


@kernel
def _forward_thread_per_row(x_RC, weight_C, bias_C, y_RC, mean_R, rstd_R, eps):
    row = cuda.grid(1)
    C = x_RC.shape[1]
    if row < x_RC.shape[0]:
        total = float32(0)
        for c in range(C):
            total += widen(x_RC[row, c])
        mean = total / float32(C)
        squares = float32(0)
        for c in range(C):
            d = widen(x_RC[row, c]) - mean
            squares += d * d
        rstd = float32(1) / math.sqrt(squares / float32(C) + eps)
        for c in range(C):
            normal = (widen(x_RC[row, c]) - mean) * rstd
            y_RC[row, c] = narrow(normal * widen(weight_C[c]) + widen(bias_C[c]), y_RC.dtype)
        if row < rstd_R.size:
            mean_R[row] = mean
            rstd_R[row] = rstd


@cuda.jit(device=True)
def _tree_sum(x, partial):
    """The sum of x over the block: half the threads add the other half's values, until one value is left."""
    thread = cuda.threadIdx.x
    partial[thread] = x
    cuda.syncthreads()
    half = cuda.blockDim.x // 2
    while half > 0:
        if thread < half:
            partial[thread] += partial[thread + half]
        cuda.syncthreads()
        half //= 2
    total = partial[0]
    cuda.syncthreads()
    return total


@kernel
def _forward_block_per_row(x_RC, weight_C, bias_C, y_RC, mean_R, rstd_R, eps):
    partial = cuda.shared.array(BLOCK, float32)
    row = cuda.blockIdx.x
    thread = cuda.threadIdx.x
    C = x_RC.shape[1]
    total = float32(0)
    for c0 in range(0, C, BLOCK):
        c = c0 + thread
        if c < C:
            total += widen(x_RC[row, c])
    mean = _tree_sum(total, partial) / float32(C)
    squares = float32(0)
    for c0 in range(0, C, BLOCK):
        c = c0 + thread
        if c < C:
            d = widen(x_RC[row, c]) - mean
            squares += d * d
    rstd = float32(1) / math.sqrt(_tree_sum(squares, partial) / float32(C) + eps)
    for c0 in range(0, C, BLOCK):
        c = c0 + thread
        if c < C:
            normal = (widen(x_RC[row, c]) - mean) * rstd
            y_RC[row, c] = narrow(normal * widen(weight_C[c]) + widen(bias_C[c]), y_RC.dtype)
    if thread == 0 and row < rstd_R.size:
        mean_R[row] = mean
        rstd_R[row] = rstd


@kernel
def _forward_warp_per_row(x_RC, weight_C, bias_C, y_RC, mean_R, rstd_R, eps):
    lane = cuda.threadIdx.x
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.y
    C = x_RC.shape[1]
    columns = C if row < x_RC.shape[0] else 0  # a warp past the last row has nothing to read, but joins the shuffles
    total = float32(0)
    for c0 in range(0, C, WARP):
        c = c0 + lane
        if c < columns:
            total += widen(x_RC[row, c])
    mean = warp_sum(total) / float32(C)
    squares = float32(0)
    for c0 in range(0, C, WARP):
        c = c0 + lane
        if c < columns:
            d = widen(x_RC[row, c]) - mean
            squares += d * d
    rstd = float32(1) / math.sqrt(warp_sum(squares) / float32(C) + eps)
    for c0 in range(0, C, WARP):
        c = c0 + lane
        if c < columns:
            normal = (widen(x_RC[row, c]) - mean) * rstd
            y_RC[row, c] = narrow(normal * widen(weight_C[c]) + widen(bias_C[c]), y_RC.dtype)
    if lane == 0 and row < rstd_R.size:
        mean_R[row] = mean
        rstd_R[row] = rstd


# --- backward kernels ------------------------------------------------------------------------------------------------


@kernel
def _dx_thread_per_row(dy_RC, x_RC, weight_C, mean_R, rstd_R, dx_RC, accumulate):
    row = cuda.grid(1)
    C = x_RC.shape[1]
    if row < x_RC.shape[0]:
        mean = mean_R[row]
        rstd = rstd_R[row]
        sum_g = float32(0)
        sum_gn = float32(0)
        for c in range(C):
            g = widen(dy_RC[row, c]) * widen(weight_C[c])
            sum_g += g
            sum_gn += g * (widen(x_RC[row, c]) - mean) * rstd
        mean_g = sum_g / float32(C)
        mean_gn = sum_gn / float32(C)
        for c in range(C):
            g = widen(dy_RC[row, c]) * widen(weight_C[c])
            normal = (widen(x_RC[row, c]) - mean) * rstd
            dx = rstd * (g - mean_g - normal * mean_gn)
            if accumulate:
                dx += widen(dx_RC[row, c])
            dx_RC[row, c] = narrow(dx, dx_RC.dtype)


@kernel
def _dweight_thread_per_column(dy_RC, x_RC, mean_R, rstd_R, dweight_C, dbias_C, accumulate):
    c = cuda.grid(1)
    if c < x_RC.shape[1]:
        dweight = float32(0)
        dbias = float32(0)
        for row in range(x_RC.shape[0]):
            dy = widen(dy_RC[row, c])
            dweight += dy * (widen(x_RC[row, c]) - mean_R[row]) * rstd_R[row]
            dbias += dy
        if accumulate:
            dweight += widen(dweight_C[c])
            dbias += widen(dbias_C[c])
        dweight_C[c] = narrow(dweight, dweight_C.dtype)
        dbias_C[c] = narrow(dbias, dbias_C.dtype)


@kernel
def _backward_row_groups(dy_RC, x_RC, weight_C, mean_R, rstd_R, dx_RC, partial_2GC, accumulate):
    """Block (32, ROWS) walks over groups of ROWS rows: a warp a row for the means, then a thread a column for the rest.

    The sums over the block's rows grow in its own row of ``partial_2GC`` (dweight, dbias), which stays in cache.
    """
    mean_g = cuda.shared.array(ROWS, float32)
    mean_gn = cuda.shared.array(ROWS, float32)
    lane = cuda.threadIdx.x
    warp = cuda.threadIdx.y
    group = cuda.blockIdx.x
    R, C = x_RC.shape
    for c0 in range(0, C, WARP * ROWS):
        c = c0 + warp * WARP + lane
        if c < C:
            partial_2GC[0, group, c] = float32(0)
            partial_2GC[1, group, c] = float32(0)

    for row0 in range(group * ROWS, R, cuda.gridDim.x * ROWS):
        row = row0 + warp
        columns = C if row < R else 0
        mean = float32(0)
        rstd = float32(0)
        if columns > 0:
            mean = mean_R[row]
            rstd = rstd_R[row]
        sum_g = float32(0)
        sum_gn = float32(0)
        for c0 in range(0, C, WARP):
            c = c0 + lane
            if c < columns:
                g = widen(dy_RC[row, c]) * widen(weight_C[c])
                sum_g += g
                sum_gn += g * (widen(x_RC[row, c]) - mean) * rstd
        sum_g = warp_sum(sum_g)
        sum_gn = warp_sum(sum_gn)
        if lane == 0:
            mean_g[warp] = sum_g / float32(C)
            mean_gn[warp] = sum_gn / float32(C)
        cuda.syncthreads()

        for c0 in range(0, C, WARP * ROWS):
            c = c0 + warp * WARP + lane
            dweight = float32(0)
            dbias = float32(0)
            for r in range(min(ROWS, R - row0)):
                row = row0 + r
                mean = mean_R[row]
                rstd = rstd_R[row]
                row_mean_g = mean_g[r]
                row_mean_gn = mean_gn[r]
                if c < C:
                    dy = widen(dy_RC[row, c])
                    normal = (widen(x_RC[row, c]) - mean) * rstd
                    dx = rstd * (dy * widen(weight_C[c]) - row_mean_g - normal * row_mean_gn)
                    if accumulate:
                        dx += widen(dx_RC[row, c])
                    dx_RC[row, c] = narrow(dx, dx_RC.dtype)
                    dweight += dy * normal
                    dbias += dy
            if c < C:
                partial_2GC[0, group, c] += dweight
                partial_2GC[1, group, c] += dbias
        cuda.syncthreads()


@kernel
def _sum_groups(partial_2GC, dweight_C, dbias_C, accumulate):
    """Block (32, 32), of 32 columns: warp y adds groups y, y + 32, ..., then, by shuffles, the 32 sums of column y."""
    sums = cuda.shared.array((2, WARP, ODD), float32)
    lane = cuda.threadIdx.x
    warp = cuda.threadIdx.y
    c = cuda.blockIdx.x * WARP + lane
    G = partial_2GC.shape[1]
    C = partial_2GC.shape[2]
    dweight = float32(0)
    dbias = float32(0)
    for g0 in range(0, G, WARP):
        g = g0 + warp
        if g < G and c < C:
            dweight += partial_2GC[0, g, c]
            dbias += partial_2GC[1, g, c]
    sums[0, warp, lane] = dweight
    sums[1, warp, lane] = dbias
    cuda.syncthreads()
    dweight = warp_sum(sums[0, lane, warp])
    dbias = warp_sum(sums[1, lane, warp])
    c = cuda.blockIdx.x * WARP + warp
    if lane == 0 and c < C:
        if accumulate:
            dweight += widen(dweight_C[c])
            dbias += widen(dbias_C[c])
        dweight_C[c] = narrow(dweight, dweight_C.dtype)
        dbias_C[c] = narrow(dbias, dbias_C.dtype)


# --- launchers -------------------------------------------------------------------------------------------------------


def _n_groups(R: int) -> int:
    """Blocks of the backward pass. Each takes several groups of rows, so that the partial sums stay a small part."""
    return min(GROUPS, ceil_div(R, 4 * ROWS))


def workspace_size(R: int, C: int) -> int:
    """Float32 elements of workspace that :func:`backward` needs for x of shape (R, C)."""
    return 2 * max(_n_groups(R), norm_rows_backward.n_blocks(R, C)) * C


def _forward_by_threads(arrays: tuple[Array, ...], kept: Array | None, eps: float, stream: Stream | None) -> None:
    elementwise.keep(arrays[0], kept, stream)
    _forward_thread_per_row[ceil_div(arrays[0].shape[0], BLOCK), BLOCK, stream](*arrays, eps)


def _forward_by_blocks(arrays: tuple[Array, ...], kept: Array | None, eps: float, stream: Stream | None) -> None:
    elementwise.keep(arrays[0], kept, stream)
    _forward_block_per_row[arrays[0].shape[0], BLOCK, stream](*arrays, eps)


def _forward_by_warps(arrays: tuple[Array, ...], kept: Array | None, eps: float, stream: Stream | None) -> None:
    elementwise.keep(arrays[0], kept, stream)
    x = arrays[0]
    _forward_warp_per_row[ceil_div(x.shape[0], ROWS), (WARP, ROWS), stream](*arrays, eps, flops=8 * x.size)


def _forward_by_registers(arrays: tuple[Array, ...], kept: Array | None, eps: float, stream: Stream | None) -> None:
    norm_rows.launch(arrays, eps, True, stream, kept=kept)


def _backward_by_threads(
    arrays: tuple[Array, ...], workspace: Array, accumulate: bool, accumulate_dx: bool, stream: Stream | None
) -> None:
    dy, x, weight, mean, rstd, dx, dweight, dbias = arrays
    R, C = x.shape
    # dx may be dy: it goes last.
    _dweight_thread_per_column[ceil_div(C, BLOCK), BLOCK, stream](dy, x, mean, rstd, dweight, dbias, accumulate)
    _dx_thread_per_row[ceil_div(R, BLOCK), BLOCK, stream](dy, x, weight, mean, rstd, dx, accumulate_dx)


def _backward_by_groups(
    arrays: tuple[Array, ...], workspace: Array, accumulate: bool, accumulate_dx: bool, stream: Stream | None
) -> None:
    dy, x, weight, mean, rstd, dx, dweight, dbias = arrays
    R, C = x.shape
    groups = _n_groups(R)
    partial = workspace[: 2 * groups * C].reshape(2, groups, C)
    _backward_row_groups[groups, (WARP, ROWS), stream](
        dy, x, weight, mean, rstd, dx, partial, accumulate_dx, flops=16 * x.size
    )
    _sum_groups[ceil_div(C, WARP), (WARP, WARP), stream](partial, dweight, dbias, accumulate)


def _backward_by_stages(
    arrays: tuple[Array, ...], workspace: Array, accumulate: bool, accumulate_dx: bool, stream: Stream | None
) -> None:
    norm_rows_backward.launch(arrays[:6], arrays[6:], workspace, accumulate, accumulate_dx, stream)


FORWARD = Variants(
    "layernorm.forward",
    [
        Variant("thread_per_row", _forward_by_threads, note="The formula: one thread walks over a row three times."),
        Variant(
            "block_per_row",
            _forward_by_blocks,
            note="Neighbouring threads read neighbouring elements; the sums are made by a tree in shared memory.",
        ),
        Variant("warp_per_row", _forward_by_warps, note="Shuffles instead of shared memory: no barrier, no idle tree."),
        Variant(
            "row_in_registers",
            _forward_by_registers,
            note="One read of the row, 16 bytes a lane and all on their way at once.",
            supports=norm_rows.supports,
            made_for="gpu",
        ),
    ],
)

BACKWARD = Variants(
    "layernorm.backward",
    [
        Variant("thread_per_row", _backward_by_threads, note="dx by row, then dweight and dbias by column."),
        Variant(
            "row_groups",
            _backward_by_groups,
            note="dy and x come from memory once: a block makes dx of a few rows and adds to its sums of columns.",
        ),
        Variant(
            "staged_rows",
            _backward_by_stages,
            note="Rows are always on their way, 16 bytes a lane; sums over rows grow in registers.",
            supports=norm_rows_backward.supports_backward,
            made_for="gpu",
        ),
    ],
)


def forward(
    x_RC: Array,
    weight_C: Array,
    bias_C: Array,
    y_RC: Array,
    mean_R: Array | None = None,
    rstd_R: Array | None = None,
    *,
    eps: float,
    kept_RC: Array | None = None,
    variant: str | None = None,
    stream: Stream | None = None,
) -> None:
    """Normalise each row of x, then scale and shift; keep mean and 1/deviation for :func:`backward`, if wanted.

    Parameters
    ----------
    x_RC, y_RC : array, shape (R, C), floating, C-contiguous
        y may be x.
    weight_C, bias_C : array, shape (C,), floating
    mean_R, rstd_R : array, shape (R,), float32, or both None
        None where there will be no gradient.
    eps : float
        Added to the variance; units of x squared.
    kept_RC : array, shape (R, C), floating, C-contiguous, optional
        Gets x, in another format: what :func:`backward` reads of a residual stream in float32 may have 16 bits.
    variant : str, optional
        A name of ``FORWARD``.

    Raises
    ------
    ShapeError, DTypeError
        If an array does not fit x.

    Notes
    -----
    Workspace: none. Deterministic: yes.
    """
    statistics = norm_arrays.given("layernorm", mean_R=mean_R, rstd_R=rstd_R)
    rows = {"x_RC": x_RC, "y_RC": y_RC} | ({} if kept_RC is None else {"kept_RC": kept_RC})
    norm_arrays.check("layernorm", rows, {"weight_C": weight_C, "bias_C": bias_C}, statistics)
    mean, rstd = statistics.values() or [norm_arrays.nothing(x_RC)] * 2
    chosen = FORWARD.pick(variant, row_of(x_RC.shape[1], weight_C, bias_C, *rows.values()))
    chosen.launch((x_RC, weight_C, bias_C, y_RC, mean, rstd), kept_RC, float(eps), stream)


def backward(
    dy_RC: Array,
    x_RC: Array,
    weight_C: Array,
    mean_R: Array,
    rstd_R: Array,
    dx_RC: Array,
    dweight_C: Array,
    dbias_C: Array,
    workspace: Array,
    *,
    accumulate: bool = False,
    accumulate_dx: bool = False,
    variant: str | None = None,
    stream: Stream | None = None,
) -> None:
    """Gradients of :func:`forward` with respect to x, weight and bias.

    Parameters
    ----------
    dy_RC, x_RC, dx_RC : array, shape (R, C), floating, C-contiguous
        dx may be dy. Fastest: dy and x of one dtype, dx of that or float32.
    weight_C : array, shape (C,), floating
    mean_R, rstd_R : array, shape (R,), float32
        What the forward pass kept.
    dweight_C, dbias_C : array, shape (C,), floating
    workspace : array, one axis, float32
        At least ``workspace_size(R, C)`` elements; left with partial sums.
    accumulate : bool
        Add to dweight and dbias instead of setting them.
    accumulate_dx : bool
        Add to dx instead of setting it: the other branch of a residual connection has put its gradient there.
    variant : str, optional
        A name of ``BACKWARD``.

    Raises
    ------
    ShapeError, DTypeError
        If an array does not fit x, or the workspace is too small.

    Notes
    -----
    Deterministic: yes. Sums over rows are made by block, then over the blocks in order; no atomics.
    """
    norm_arrays.check(
        "layernorm",
        {"x_RC": x_RC, "dy_RC": dy_RC, "dx_RC": dx_RC},
        {"weight_C": weight_C, "dweight_C": dweight_C, "dbias_C": dbias_C},
        {"mean_R": mean_R, "rstd_R": rstd_R},
    )
    R, C = x_RC.shape
    check_workspace("layernorm", workspace, workspace_size(R, C))
    arrays = (dy_RC, x_RC, weight_C, mean_R, rstd_R, dx_RC, dweight_C, dbias_C)
    chosen = BACKWARD.pick(variant, row_of(C, dy_RC, x_RC, weight_C, workspace), dx_RC)
    chosen.launch(arrays, workspace, accumulate, accumulate_dx, stream)
