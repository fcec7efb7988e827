"""RMS normalisation: each row of x_RC divided by its root mean square, then scaled.

Forward, for every row r and column c::

    rstd_r = 1 / sqrt(sum_c x_rc^2 / C + eps)
    n_rc   = x_rc rstd_r
    y_rc   = n_rc weight_c

Backward, with g_rc = dy_rc weight_c::

    dx_rc     = rstd_r (g_rc - n_rc sum_c (g_rc n_rc) / C)
    dweight_c = sum_r dy_rc n_rc

Forward ladder: ``warp_per_row`` reads coalesced and sums by shuffles; ``row_in_registers``, for GPUs, reads a row once,
16 bytes a lane. Backward ladder: ``rows_then_columns`` makes dx by rows and dweight by columns, and so reads dy and x
twice; ``staged_rows``, for GPUs, makes both in one pass. Those for GPUs are in ``norm_rows.py``
and ``norm_rows_backward.py``.

Sums are float32 whatever the arrays hold. Source: Zhang, Sennrich 2019, "Root Mean Square Layer Normalization".
"""

import math

import numpy as np
from numba import cuda, float32

from numstack.device import Array, Stream, kernel, narrow, widen
from numstack.kernels import norm_arrays, norm_rows, norm_rows_backward
from numstack.kernels.launch import ceil_div, check_workspace
from numstack.kernels.rows import row_of
from numstack.kernels.variants import Variant, Variants
from numstack.kernels.warp import WARP, warp_sum

BLOCK = 128  # threads of the one-dimensional blocks
ROWS = 4  # rows of a block where a warp takes a row


def reference(x_RC: np.ndarray, weight_C: np.ndarray, eps: float) -> tuple[np.ndarray, np.ndarray]:
    """``(y_RC, rstd_R)`` in float64."""
    x, weight = (np.asarray(a, np.float64) for a in (x_RC, weight_C))
    rstd = 1 / np.sqrt(np.square(x).mean(axis=1) + eps)
    return x * rstd[:, None] * weight, rstd


def reference_backward(
    dy_RC: np.ndarray, x_RC: np.ndarray, weight_C: np.ndarray, eps: float
) -> tuple[np.ndarray, np.ndarray]:
    """``(dx_RC, dweight_C)`` in float64."""
    dy, x, weight = (np.asarray(a, np.float64) for a in (dy_RC, x_RC, weight_C))
    rstd = 1 / np.sqrt(np.square(x).mean(axis=1, keepdims=True) + eps)
    normal = x * rstd
    g = dy * weight
    return rstd * (g - normal * (g * normal).mean(axis=1, keepdims=True)), (dy * normal).sum(axis=0)


# --- forward kernels -------------------------------------------------------------------------------------------------


@kernel
def _forward_warp_per_row(x_RC, weight_C, y_RC, rstd_R, eps):
    lane = cuda.threadIdx.x
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.y
    C = x_RC.shape[1]
    columns = C if row < x_RC.shape[0] else 0  # a warp past the last row has nothing to read, but joins the shuffles
    squares = float32(0)
    for c0 in range(0, C, WARP):
        c = c0 + lane
        if c < columns:
            x = widen(x_RC[row, c])
            squares += x * x
    rstd = float32(1) / math.sqrt(warp_sum(squares) / float32(C) + eps)
    for c0 in range(0, C, WARP):
        c = c0 + lane
        if c < columns:
            y_RC[row, c] = narrow(widen(x_RC[row, c]) * rstd * widen(weight_C[c]), y_RC.dtype)
    if lane == 0 and row < rstd_R.size:
        rstd_R[row] = rstd


# --- backward kernels ------------------------------------------------------------------------------------------------


@kernel
def _dx_warp_per_row(dy_RC, x_RC, weight_C, rstd_R, dx_RC, accumulate):
    lane = cuda.threadIdx.x
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.y
    C = x_RC.shape[1]
    columns = C if row < x_RC.shape[0] else 0
    rstd = float32(0)
    if columns > 0:
        rstd = rstd_R[row]
    dot = float32(0)
    for c0 in range(0, C, WARP):
        c = c0 + lane
        if c < columns:
            dot += widen(dy_RC[row, c]) * widen(weight_C[c]) * widen(x_RC[row, c]) * rstd
    mean = warp_sum(dot) / float32(C)
    for c0 in range(0, C, WARP):
        c = c0 + lane
        if c < columns:
            g = widen(dy_RC[row, c]) * widen(weight_C[c])
            dx = rstd * (g - widen(x_RC[row, c]) * rstd * mean)
            if accumulate:
                dx += widen(dx_RC[row, c])
            dx_RC[row, c] = narrow(dx, dx_RC.dtype)


@kernel
def _dweight_thread_per_column(dy_RC, x_RC, rstd_R, dweight_C, accumulate):
    c = cuda.grid(1)
    if c < x_RC.shape[1]:
        dweight = float32(0)
        for row in range(x_RC.shape[0]):
            dweight += widen(dy_RC[row, c]) * widen(x_RC[row, c]) * rstd_R[row]
        if accumulate:
            dweight += widen(dweight_C[c])
        dweight_C[c] = narrow(dweight, dweight_C.dtype)


# --- launchers -------------------------------------------------------------------------------------------------------


def workspace_size(R: int, C: int) -> int:
    """Float32 elements of workspace that :func:`backward` needs for x of shape (R, C)."""
    return norm_rows_backward.n_blocks(R, C) * C or 1


def _forward_by_warps(arrays: tuple[Array, ...], eps: float, stream: Stream | None) -> None:
    x = arrays[0]
    _forward_warp_per_row[ceil_div(x.shape[0], ROWS), (WARP, ROWS), stream](*arrays, eps, flops=4 * x.size)


def _forward_by_registers(arrays: tuple[Array, ...], eps: float, stream: Stream | None) -> None:
    x, weight, y, rstd = arrays
    # For bias and means, which there are none of, arrays that are not looked at.
    norm_rows.launch((x, weight, weight, y, rstd, rstd), eps, False, stream)


def _backward_by_rows_and_columns(
    arrays: tuple[Array, ...], workspace: Array, accumulate: bool, accumulate_dx: bool, stream: Stream | None
) -> None:
    dy, x, weight, rstd, dx, dweight = arrays
    R, C = x.shape
    # dx may be dy: it goes last.
    _dweight_thread_per_column[ceil_div(C, BLOCK), BLOCK, stream](dy, x, rstd, dweight, accumulate, flops=3 * x.size)
    grid = ceil_div(R, ROWS)
    _dx_warp_per_row[grid, (WARP, ROWS), stream](dy, x, weight, rstd, dx, accumulate_dx, flops=8 * x.size)


def _backward_by_stages(
    arrays: tuple[Array, ...], workspace: Array, accumulate: bool, accumulate_dx: bool, stream: Stream | None
) -> None:
    dy, x, weight, rstd, dx, dweight = arrays
    norm_rows_backward.launch((dy, x, weight, rstd, rstd, dx), (dweight,), workspace, accumulate, accumulate_dx, stream)


FORWARD = Variants(
    "rmsnorm.forward",
    [
        Variant("warp_per_row", _forward_by_warps, note="A warp reads a row twice: for its sum, and for the result."),
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
    "rmsnorm.backward",
    [
        Variant("rows_then_columns", _backward_by_rows_and_columns, note="dx by rows, dweight by columns."),
        Variant(
            "staged_rows",
            _backward_by_stages,
            note="dy and x come from memory once, always on their way; the sums over rows grow in registers.",
            supports=norm_rows_backward.supports_backward,
            made_for="gpu",
        ),
    ],
)


def forward(
    x_RC: Array,
    weight_C: Array,
    y_RC: Array,
    rstd_R: Array | None = None,
    *,
    eps: float,
    variant: str | None = None,
    stream: Stream | None = None,
) -> None:
    """Divide each row of x by its root mean square, then scale; keep the inverse of that, if wanted.

    Parameters
    ----------
    x_RC, y_RC : array, shape (R, C), floating, C-contiguous
        y may be x.
    weight_C : array, shape (C,), floating
    rstd_R : array, shape (R,), float32, or None
        1 / root mean square, for :func:`backward`; None where there will be no gradient.
    eps : float
        Added to the mean square; units of x squared.
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
    statistics = norm_arrays.given("rmsnorm", rstd_R=rstd_R)
    norm_arrays.check("rmsnorm", {"x_RC": x_RC, "y_RC": y_RC}, {"weight_C": weight_C}, statistics)
    chosen = FORWARD.pick(variant, row_of(x_RC.shape[1], x_RC, weight_C, y_RC))
    rstd = norm_arrays.nothing(x_RC) if rstd_R is None else rstd_R
    chosen.launch((x_RC, weight_C, y_RC, rstd), float(eps), stream)


def backward(
    dy_RC: Array,
    x_RC: Array,
    weight_C: Array,
    rstd_R: Array,
    dx_RC: Array,
    dweight_C: Array,
    workspace: Array,
    *,
    accumulate: bool = False,
    accumulate_dx: bool = False,
    variant: str | None = None,
    stream: Stream | None = None,
) -> None:
    """Gradients of :func:`forward` with respect to x and weight.

    Parameters
    ----------
    dy_RC, x_RC, dx_RC : array, shape (R, C), floating, C-contiguous
        dx may be dy. Fastest: dy and x of one dtype, dx of that or float32.
    weight_C : array, shape (C,), floating
    rstd_R : array, shape (R,), float32
        What the forward pass kept.
    dweight_C : array, shape (C,), floating
    workspace : array, one axis, float32
        At least ``workspace_size(R, C)`` elements; left with partial sums.
    accumulate : bool
        Add to dweight instead of setting it.
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
    Deterministic: yes. Sums over rows are made in an order that depends on the shape alone; no atomics.
    """
    norm_arrays.check(
        "rmsnorm",
        {"x_RC": x_RC, "dy_RC": dy_RC, "dx_RC": dx_RC},
        {"weight_C": weight_C, "dweight_C": dweight_C},
        {"rstd_R": rstd_R},
    )
    R, C = x_RC.shape
    check_workspace("rmsnorm", workspace, workspace_size(R, C))
    chosen = BACKWARD.pick(variant, row_of(C, dy_RC, x_RC, weight_C, workspace), dx_RC)
    arrays = (dy_RC, x_RC, weight_C, rstd_R, dx_RC, dweight_C)
    chosen.launch(arrays, workspace, bool(accumulate), bool(accumulate_dx), stream)
