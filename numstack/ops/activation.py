"""Functions applied to each element or each row."""

from __future__ import annotations

import math

from numstack import memory
from numstack.autograd import Node, record
from numstack.kernels import gelu as gelu_kernels
from numstack.kernels import softmax as softmax_kernels
from numstack.tensor import Tensor


def gelu(x: Tensor, *, form: str = "tanh") -> Tensor:
    """Gaussian error linear unit of each element.

    Parameters
    ----------
    x : Tensor
    form : str
        ``"tanh"`` (GPT-2's), ``"erf"`` (exact) or an approximation that ``numstack.kernels.gelu`` lists.
    """
    x_array = x.array
    y = memory.empty(x.shape, x_array.dtype, scope="forward")
    gelu_kernels.forward(x_array, y, form=form)

    def backward(node: Node) -> None:
        gelu_kernels.backward(node.gradient, x_array, node.gradient, form=form)
        node.give(0, node.gradient)

    return record("gelu", y, (x,), backward)


def softmax(x: Tensor) -> Tensor:
    """Exponentials of each row (the last axis), divided by their sum."""
    n_columns = x.shape[-1]
    shape_RC = (math.prod(x.shape[:-1]), n_columns)
    y = memory.empty(x.shape, x.array.dtype, scope="forward")
    softmax_kernels.forward(x.array.reshape(shape_RC), y.reshape(shape_RC))

    def backward(node: Node) -> None:
        dx = memory.empty(y.shape, y.dtype, scope="backward")
        softmax_kernels.backward(node.gradient.reshape(shape_RC), y.reshape(shape_RC), dx.reshape(shape_RC))
        node.give(0, dx)

    return record("softmax", y, (x,), backward)
