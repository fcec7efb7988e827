"""Matrix products with a weight, and what is fused into them.

A weight is stored ``[in, out]`` (layout ``"NN"``: GPT-2's convention) or ``[out, in]`` (layout ``"NT"``: an embedding
table used as the output head). The three operations differ in what happens to the product before it is written:

=================== ========================================
linear              x W + b
linear_gelu         gelu(x W + b)
linear_residual     dropout(x W + b) + residual
=================== ========================================
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from numstack import memory
from numstack.autograd import Node, record
from numstack.errors import ConfigError, ShapeError
from numstack.kernels import dropout as dropout_kernels
from numstack.kernels import elementwise, gelu, reduce
from numstack.kernels.gemm import gemm
from numstack.ops.dropout import Dropout
from numstack.tensor import Tensor

# By the layout of the forward product: that of dx = dy op(W), whether dW = x^T dy (else dy^T x).
_LAYOUTS = {"NN": ("NT", True), "NT": ("NN", False)}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, layout: str = "NN") -> Tensor:
    """x W + b, for each row of x.

    Parameters
    ----------
    x : Tensor, shape (..., K)
    weight : Tensor, shape (K, N), or (N, K) with layout "NT"
    bias : Tensor, shape (N,), optional
    layout : {"NN", "NT"}

    Returns
    -------
    Tensor, shape (..., N)

    Raises
    ------
    ShapeError
        If the shapes do not fit.
    """
    n_out = _checked("linear", x, weight, bias, layout)
    x_RK, weight_array = _rows(x), weight.array
    y = memory.empty((*x.shape[:-1], n_out), x_RK.dtype, scope="forward")
    y_RN = y.reshape(x_RK.shape[0], n_out)
    if bias is None:
        gemm(x_RK, weight_array, y_RN, layout=layout)
    else:
        gemm(x_RK, weight_array, y_RN, layout=layout, epilogue="bias", bias=bias.array)

    def backward(node: Node) -> None:
        _backward(node, node.gradient.reshape(x_RK.shape[0], n_out), x_RK, weight_array, layout)

    return record("linear", y, (x, weight, bias), backward)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """gelu(x W + b), tanh form, for each row of x.

    Parameters
    ----------
    x : Tensor, shape (..., K)
    weight : Tensor, shape (K, N)
    bias : Tensor, shape (N,)

    Returns
    -------
    Tensor, shape (..., N)

    Raises
    ------
    ShapeError
        If the shapes do not fit.
    """
    n_out = _checked("linear_gelu", x, weight, bias, "NN")
    x_RK, weight_array = _rows(x), weight.array
    y = memory.empty((*x.shape[:-1], n_out), x_RK.dtype, scope="forward")
    shape_RN = (x_RK.shape[0], n_out)
    before_RN = memory.empty(shape_RN, x_RK.dtype, scope="forward")
    gemm(x_RK, weight_array, y.reshape(shape_RN), epilogue="bias_gelu", bias=bias.array, preactivation=before_RN)

    def backward(node: Node) -> None:
        dy_RN = node.gradient.reshape(shape_RN)
        gelu.backward(dy_RN, before_RN, dy_RN)
        _backward(node, dy_RN, x_RK, weight_array, "NN")

    return record("linear_gelu", y, (x, weight, bias), backward)


def linear_residual(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor, *, dropout: Dropout | None = None
) -> Tensor:
    """residual + dropout(x W + b): the end of a branch of a residual network.

    Parameters
    ----------
    x : Tensor, shape (..., K)
    weight : Tensor, shape (K, N)
    bias : Tensor, shape (N,)
    residual : Tensor, shape (..., N)
    dropout : Dropout, optional

    Returns
    -------
    Tensor, shape (..., N)
        In the format of the residual, whatever x has.

    Raises
    ------
    ShapeError
        If the shapes do not fit.
    """
    n_out = _checked("linear_residual", x, weight, bias, "NN")
    if residual.shape != (*x.shape[:-1], n_out):
        raise ShapeError(
            f"linear_residual: residual has shape {residual.shape} but x {x.shape} times weight {weight.shape} "
            f"has {(*x.shape[:-1], n_out)}; make them equal"
        )
    x_RK, weight_array = _rows(x), weight.array
    y = memory.empty(residual.shape, residual.array.dtype, scope="forward")
    shape_RN = (x_RK.shape[0], n_out)
    y_RN, residual_RN = y.reshape(shape_RN), residual.array.reshape(shape_RN)
    if dropout is None:
        gemm(x_RK, weight_array, y_RN, epilogue="residual", bias=bias.array, residual=residual_RN)
    else:
        gemm(x_RK, weight_array, y_RN, epilogue="bias", bias=bias.array)
        dropout_kernels.forward(y_RN, y_RN, p=dropout.p, seed=dropout.seed, offset=0)
        elementwise.add(y_RN, residual_RN, y_RN)

    def backward(node: Node) -> None:
        dy_RN = node.gradient.reshape(shape_RN)
        if dropout is not None:
            dropped_RN = memory.empty(shape_RN, dy_RN.dtype, scope="workspace")
            dropout_kernels.backward(dy_RN, dropped_RN, p=dropout.p, seed=dropout.seed, offset=0)
            dy_RN = dropped_RN
        _backward(node, dy_RN, x_RK, weight_array, "NN")
        node.give(3, node.gradient)  # last: from here on the residual stream adds into it

    return record("linear_residual", y, (x, weight, bias, residual), backward)


def _checked(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, layout: str) -> int:
    """The number of outputs, once everything fits."""
    if layout not in _LAYOUTS:
        raise ConfigError(f"{name}: layout {layout!r}; choose NN (weight [in, out]) or NT (weight [out, in])")
    if weight.ndim != 2 or x.ndim < 1:
        raise ShapeError(f"{name}: x has shape {x.shape} and weight {weight.shape}; expected (..., K) and two axes")
    n_in, n_out = weight.shape if layout == "NN" else weight.shape[::-1]
    if x.shape[-1] != n_in:
        raise ShapeError(
            f"{name}: x has shape {x.shape}, so K={x.shape[-1]}, but weight {weight.shape} with layout {layout} has "
            f"K={n_in}; fix the shape or choose the other layout"
        )
    if bias is not None and bias.shape != (n_out,):
        raise ShapeError(f"{name}: weight {weight.shape} gives {n_out} outputs, but bias has shape {bias.shape}")
    return n_out


def _rows(x: Tensor) -> Any:
    """x as a matrix of rows."""
    return x.array.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _backward(node: Node, dy_RN: Any, x_RK: Any, weight: Any, layout: str) -> None:
    """Gradients of x, weight and bias: inputs 0, 1 and 2 of the node."""
    layout_dx, x_first = _LAYOUTS[layout]
    if node.wanted(2):
        dbias_N, accumulate = node.into(2)
        workspace = memory.empty((reduce.sum_rows_workspace_size(*dy_RN.shape),), np.float32, scope="workspace")
        reduce.sum_rows(dy_RN, dbias_N, workspace, accumulate=accumulate)
    if node.wanted(1):
        dweight, accumulate = node.into(1)
        a, b = (x_RK, dy_RN) if x_first else (dy_RN, x_RK)
        gemm(a, b, dweight, layout="TN", accumulate=accumulate)
    if node.wanted(0):
        dx, accumulate = node.into(0)
        gemm(dy_RN, weight, dx.reshape(x_RK.shape), layout=layout_dx, accumulate=accumulate)
