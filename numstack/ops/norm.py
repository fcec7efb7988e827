"""Normalisation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from numstack import memory
from numstack.autograd import Node, is_recorded, record
from numstack.dtypes import storage
from numstack.errors import ShapeError
from numstack.kernels import layernorm as kernels
from numstack.tensor import Tensor


def layernorm(
    x: Tensor, weight: Tensor, bias: Tensor, *, eps: float = 1e-5, out: np.dtype[Any] | None = None
) -> Tensor:
    """Normalise each row of x to mean 0 and variance 1, then scale and shift.

    Parameters
    ----------
    x : Tensor, shape (..., C)
    weight, bias : Tensor, shape (C,)
    eps : float
        Added to the variance; units of x squared.
    out : dtype, optional
        Of the result and its gradient; that of x by default.

    Raises
    ------
    ShapeError
        If weight or bias does not have C elements.

    Notes
    -----
    The gradient of x is added to what x already has, so a residual stream is read and written once. What that gradient
    needs of x is kept in the result's format: of a residual stream in float32, half its size, until backward.
    """
    n_columns = x.shape[-1]
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter.shape != (n_columns,):
            raise ShapeError(
                f"layernorm: x has shape {x.shape}, so {name} needs shape ({n_columns},), but it has {parameter.shape}"
            )
    n_rows = math.prod(x.shape[:-1])
    shape_RC = (n_rows, n_columns)
    x_RC, weight_C = x.array.reshape(shape_RC), weight.array
    y = memory.empty(x.shape, x_RC.dtype if out is None else storage(out), scope="forward")
    mean_R = rstd_R = copy_RC = None
    if is_recorded(x, weight, bias):
        mean_R, rstd_R = (memory.empty((n_rows,), np.float32, scope="forward") for _ in range(2))
        if y.dtype != x_RC.dtype:
            copy_RC = memory.empty(shape_RC, y.dtype, scope="forward")
    kernels.forward(x_RC, weight_C, bias.array, y.reshape(shape_RC), mean_R, rstd_R, eps=eps, kept_RC=copy_RC)
    kept_RC = x_RC if copy_RC is None else copy_RC  # and nothing else of x by backward

    def backward(node: Node) -> None:
        assert mean_R is not None and rstd_R is not None  # of what is recorded they are kept
        dx, accumulate_dx = node.into(0)
        dweight_C, dbias_C, accumulate = node.into(1, 2)
        workspace = memory.empty((kernels.workspace_size(n_rows, n_columns),), np.float32, scope="workspace")
        kernels.backward(
            node.gradient.reshape(shape_RC),
            kept_RC,
            weight_C,
            mean_R,
            rstd_R,
            dx.reshape(shape_RC),
            dweight_C,
            dbias_C,
            workspace,
            accumulate=accumulate,
            accumulate_dx=accumulate_dx,
        )

    return record("layernorm", y, (x, weight, bias), backward)
