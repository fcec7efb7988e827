"""Matrix products with a weight, and what is fused into them.

A weight is stored ``[in, out]`` (layout ``"NN"``: GPT-2's convention) or ``[out, in]`` (layout ``"NT"``: an embedding
table used as the output head). In all three operations what follows a product is done before it is written:

=================== =======================================================
linear              x W + b
linear_residual     dropout(x W + b) + residual
mlp                 dropout(gelu(x W1 + b1) W2 + b2) + residual
=================== =======================================================
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from numstack import memory
from numstack.autograd import Node, record
from numstack.device import Array
from numstack.errors import ConfigError, ShapeError
from numstack.kernels import dropout as dropout_kernels
from numstack.kernels import elementwise, reduce
from numstack.kernels.gemm import gemm, workspace_size
from numstack.ops.dropout import Dropout
from numstack.tensor import Tensor


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
    n_out = _checked("linear", x.shape, weight, bias, layout)
    x_RK, weight_array = _rows(x), weight.array
    y = memory.empty((*x.shape[:-1], n_out), x_RK.dtype, scope="forward")
    y_RN = y.reshape(x_RK.shape[0], n_out)
    if bias is None:
        _product(x_RK, weight_array, y_RN, layout=layout)
    else:
        _product(x_RK, weight_array, y_RN, layout=layout, epilogue="bias", bias=bias.array)

    def backward(node: Node) -> None:
        dy_RN = node.gradient.reshape(x_RK.shape[0], n_out)
        _bias_backward(node, 2, dy_RN)
        _weight_backward(node, 1, x_RK, dy_RN, layout)
        _input_backward(node, 0, dy_RN, weight_array, layout)

    return record("linear", y, (x, weight, bias), backward)


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
    n_out = _checked("linear_residual", x.shape, weight, bias, "NN")
    _check_residual("linear_residual", residual, (*x.shape[:-1], n_out))
    x_RK, weight_array = _rows(x), weight.array
    y = _end_of_branch(x_RK, weight, bias, residual, dropout)

    def backward(node: Node) -> None:
        dy_RN = _branch_backward(node, 2, n_out, x_RK.dtype, dropout)
        _weight_backward(node, 1, x_RK, dy_RN, "NN")
        _input_backward(node, 0, dy_RN, weight_array, "NN")
        node.give(3, node.gradient)  # last: from here on the residual stream adds into it

    return record("linear_residual", y, (x, weight, bias, residual), backward)


def mlp(
    x: Tensor,
    weight_in: Tensor,
    bias_in: Tensor,
    weight_out: Tensor,
    bias_out: Tensor,
    residual: Tensor,
    *,
    dropout: Dropout | None = None,
) -> Tensor:
    """residual + dropout(gelu(x W1 + b1) W2 + b2), tanh form: the branch of a transformer that has no attention.

    Parameters
    ----------
    x : Tensor, shape (..., K)
    weight_in, bias_in : Tensor, shape (K, H) and (H,)
    weight_out, bias_out : Tensor, shape (H, N) and (N,)
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
    n_hidden = _checked("mlp", x.shape, weight_in, bias_in, "NN")
    n_out = _checked("mlp", (*x.shape[:-1], n_hidden), weight_out, bias_out, "NN")
    _check_residual("mlp", residual, (*x.shape[:-1], n_out))
    x_RK = _rows(x)
    hidden_RH, before_RH = (memory.empty((x_RK.shape[0], n_hidden), x_RK.dtype, scope="forward") for _ in range(2))
    in_array, out_array = weight_in.array, weight_out.array
    _product(x_RK, in_array, hidden_RH, epilogue="bias_gelu", bias=bias_in.array, preactivation=before_RH)
    y = _end_of_branch(hidden_RH, weight_out, bias_out, residual, dropout)

    def backward(node: Node) -> None:
        dy_RN = _branch_backward(node, 4, n_out, x_RK.dtype, dropout)
        _weight_backward(node, 3, hidden_RH, dy_RN, "NN")
        dbefore_RH = memory.empty(before_RH.shape, before_RH.dtype, scope="backward")
        sums: dict[str, Any] = {}
        if node.wanted(2):  # the gradient of the bias is summed as dbefore is made
            dbias_H, accumulate = node.into(2)
            sums = {"column_sums": dbias_H, "accumulate_sums": accumulate}
        _product(dy_RN, out_array, dbefore_RH, layout="NT", epilogue="gelu_backward", preactivation=before_RH, **sums)
        _weight_backward(node, 1, x_RK, dbefore_RH, "NN")
        _input_backward(node, 0, dbefore_RH, in_array, "NN")
        node.give(5, node.gradient)  # last: from here on the residual stream adds into it

    return record("mlp", y, (x, weight_in, bias_in, weight_out, bias_out, residual), backward)


def _checked(name: str, shape: tuple[int, ...], weight: Tensor, bias: Tensor | None, layout: str) -> int:
    """The number of outputs, once everything fits."""
    if layout not in ("NN", "NT"):
        raise ConfigError(f"{name}: layout {layout!r}; choose NN (weight [in, out]) or NT (weight [out, in])")
    if weight.ndim != 2 or len(shape) < 1:
        raise ShapeError(f"{name}: x has shape {shape} and weight {weight.shape}; expected (..., K) and two axes")
    n_in, n_out = weight.shape if layout == "NN" else weight.shape[::-1]
    if shape[-1] != n_in:
        raise ShapeError(
            f"{name}: x has shape {shape}, so K={shape[-1]}, but weight {weight.shape} with layout {layout} has "
            f"K={n_in}; fix the shape or choose the other layout"
        )
    if bias is not None and bias.shape != (n_out,):
        raise ShapeError(f"{name}: weight {weight.shape} gives {n_out} outputs, but bias has shape {bias.shape}")
    return n_out


def _check_residual(name: str, residual: Tensor, shape: tuple[int, ...]) -> None:
    if residual.shape != shape:
        raise ShapeError(
            f"{name}: residual has shape {residual.shape} but the branch that is added to it has {shape}; make them "
            "equal"
        )


def _rows(x: Tensor) -> Any:
    """x as a matrix of rows."""
    return x.array.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _end_of_branch(x_RK: Array, weight: Tensor, bias: Tensor, residual: Tensor, dropout: Dropout | None) -> Array:
    """residual + dropout(x W + b), in the format of the residual."""
    y = memory.empty(residual.shape, residual.array.dtype, scope="forward")
    shape_RN = (x_RK.shape[0], residual.shape[-1])
    y_RN, residual_RN = y.reshape(shape_RN), residual.array.reshape(shape_RN)
    if dropout is None:
        _product(x_RK, weight.array, y_RN, epilogue="residual", bias=bias.array, residual=residual_RN)
    else:
        _product(x_RK, weight.array, y_RN, epilogue="bias", bias=bias.array)
        dropout_kernels.forward(y_RN, y_RN, p=dropout.p, seed=dropout.seed, offset=0)
        elementwise.add(y_RN, residual_RN, y_RN)
    return y


def _branch_backward(node: Node, bias: int, n_out: int, dtype: Any, dropout: Dropout | None) -> Array:
    """The gradient of x W + b in a branch that ends in the node's result, in the branch's format; not to be changed.

    That of its bias, input ``bias`` of the node, is summed meanwhile.
    """
    dy_RN: Array = node.gradient.reshape(-1, n_out)
    if dropout is None and dy_RN.dtype == dtype:
        _bias_backward(node, bias, dy_RN)
        return dy_RN
    of_branch_RN = memory.empty(dy_RN.shape, dtype, scope="workspace")
    if dropout is not None:
        dropout_kernels.backward(dy_RN, of_branch_RN, p=dropout.p, seed=dropout.seed, offset=0)
        _bias_backward(node, bias, of_branch_RN)
    elif node.wanted(bias):
        _bias_backward(node, bias, dy_RN, copy_RN=of_branch_RN)
    else:
        elementwise.cast(dy_RN, of_branch_RN)
    return of_branch_RN


def _bias_backward(node: Node, index: int, dy_RN: Array, copy_RN: Array | None = None) -> None:
    """The gradient of a bias, which is input ``index`` of the node; and a copy of dy, in another format."""
    if node.wanted(index):
        dbias_N, accumulate = node.into(index)
        workspace = memory.empty((reduce.sum_rows_workspace_size(*dy_RN.shape),), np.float32, scope="workspace")
        reduce.sum_rows(dy_RN, dbias_N, workspace, accumulate=accumulate, copy_RC=copy_RN)


def _weight_backward(node: Node, index: int, x_RK: Array, dy_RN: Array, layout: str) -> None:
    """The gradient of a weight, which is input ``index`` of the node."""
    if node.wanted(index):
        dweight, accumulate = node.into(index)
        a, b = (x_RK, dy_RN) if layout == "NN" else (dy_RN, x_RK)
        _product(a, b, dweight, layout="TN", accumulate=accumulate)


def _input_backward(node: Node, index: int, dy_RN: Array, weight: Array, layout: str) -> None:
    """The gradient of what was multiplied with the weight, which is input ``index`` of the node."""
    if node.wanted(index):
        dx, accumulate = node.into(index)
        dx_RK = dx.reshape(dy_RN.shape[0], dx.shape[-1])
        _product(dy_RN, weight, dx_RK, layout="NT" if layout == "NN" else "NN", accumulate=accumulate)


def _product(a: Array, b: Array, c: Array, *, layout: str = "NN", **options: Any) -> None:
    """``gemm`` with the workspace that it is fastest with."""
    n_rows, n_columns = c.shape
    n_terms = a.shape[0] if layout == "TN" else a.shape[1]
    sums_columns = "column_sums" in options
    size = workspace_size(n_rows, n_columns, n_terms, layout=layout, column_sums=sums_columns)
    workspace = memory.empty((size,), np.float32, scope="workspace") if size > 1 else None
    gemm(a, b, c, layout=layout, workspace=workspace, **options)
