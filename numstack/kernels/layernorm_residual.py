"""Layer normalisation of a sum: sum = x + residual, and y, mean and rstd of sum, in one pass.

That is what a residual stream needs between two blocks: the sum goes on, its normalised rows into the next block. Two
passes move five arrays, one moves four. What is normalised is the sum as it is stored, so that ``layernorm.backward``
of it is the gradient.

Ladder: ``warp_per_row`` reads its sum again from the cache; ``row_in_registers``, for GPUs, keeps it in registers.
"""

import math

from numba import cuda, float32

from numstack.device import Array, Stream, kernel, narrow, widen
from numstack.kernels import norm_arrays, norm_rows
from numstack.kernels.launch import ceil_div
from numstack.kernels.rows import row_of
from numstack.kernels.variants import Variant, Variants
from numstack.kernels.warp import WARP, warp_sum

ROWS = 4  # rows of a block where a warp takes a row


@kernel
def _forward_warp_per_row(x_RC, residual_RC, weight_C, bias_C, sum_RC, y_RC, mean_R, rstd_R, eps):
    lane = cuda.threadIdx.x
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.y
    C = x_RC.shape[1]
    columns = C if row < x_RC.shape[0] else 0
    total = float32(0)
    for c0 in range(0, C, WARP):
        c = c0 + lane
        if c < columns:
            sum_RC[row, c] = narrow(widen(x_RC[row, c]) + widen(residual_RC[row, c]), sum_RC.dtype)
            total += widen(sum_RC[row, c])
    mean = warp_sum(total) / float32(C)
    squares = float32(0)
    for c0 in range(0, C, WARP):
        c = c0 + lane
        if c < columns:
            d = widen(sum_RC[row, c]) - mean
            squares += d * d
    rstd = float32(1) / math.sqrt(warp_sum(squares) / float32(C) + eps)
    for c0 in range(0, C, WARP):
        c = c0 + lane
        if c < columns:
            normal = (widen(sum_RC[row, c]) - mean) * rstd
            y_RC[row, c] = narrow(normal * widen(weight_C[c]) + widen(bias_C[c]), y_RC.dtype)
    if lane == 0 and row < rstd_R.size:
        mean_R[row] = mean
        rstd_R[row] = rstd


def _forward_by_warps(arrays: tuple[Array, ...], eps: float, stream: Stream | None) -> None:
    x = arrays[0]
    _forward_warp_per_row[ceil_div(x.shape[0], ROWS), (WARP, ROWS), stream](*arrays, eps, flops=9 * x.size)


def _forward_by_registers(arrays: tuple[Array, ...], eps: float, stream: Stream | None) -> None:
    x, residual, weight, bias, total, y, mean, rstd = arrays
    norm_rows.launch((x, weight, bias, y, mean, rstd), eps, True, stream, of_sum=(residual, total))


FORWARD = Variants(
    "layernorm_residual.forward",
    [
        Variant("warp_per_row", _forward_by_warps, note="A warp a row; the sum is read again from the cache."),
        Variant(
            "row_in_registers",
            _forward_by_registers,
            note="One read of both rows, 16 bytes a lane; the sum stays in registers.",
            supports=norm_rows.supports,
            made_for="gpu",
        ),
    ],
)


def forward(
    x_RC: Array,
    residual_RC: Array,
    weight_C: Array,
    bias_C: Array,
    sum_RC: Array,
    y_RC: Array,
    mean_R: Array | None = None,
    rstd_R: Array | None = None,
    *,
    eps: float,
    variant: str | None = None,
    stream: Stream | None = None,
) -> None:
    """sum = x + residual, and its normalised rows: four arrays moved instead of five.

    Parameters
    ----------
    x_RC, residual_RC, sum_RC, y_RC : array, shape (R, C), floating, C-contiguous
        sum may be x or residual.
    weight_C, bias_C : array, shape (C,), floating
    mean_R, rstd_R : array, shape (R,), float32, or both None
        Of the sum, for ``layernorm.backward``, which takes the sum for its x; None where there will be no gradient.
    eps : float
        Added to the variance; units of x squared.
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
    statistics = norm_arrays.given("layernorm_residual", mean_R=mean_R, rstd_R=rstd_R)
    rows = {"x_RC": x_RC, "residual_RC": residual_RC, "sum_RC": sum_RC, "y_RC": y_RC}
    norm_arrays.check("layernorm_residual", rows, {"weight_C": weight_C, "bias_C": bias_C}, statistics)
    mean, rstd = statistics.values() or [norm_arrays.nothing(x_RC)] * 2
    arrays = (x_RC, residual_RC, weight_C, bias_C, sum_RC, y_RC, mean, rstd)
    FORWARD.pick(variant, row_of(x_RC.shape[1], *arrays[:6])).launch(arrays, float(eps), stream)
