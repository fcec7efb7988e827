"""Sums, multiples and parts of tensors."""

from __future__ import annotations

import math

from numstack import memory
from numstack.autograd import Node, record
from numstack.device import current_device
from numstack.errors import ShapeError
from numstack.kernels import elementwise
from numstack.tensor import Tensor


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b, element by element.

    Parameters
    ----------
    a, b : Tensor
        Of one shape: nothing is broadcast.

    Raises
    ------
    ShapeError
        If the shapes differ.
    """
    if a.shape != b.shape:
        raise ShapeError(f"add: a has shape {a.shape} but b has {b.shape}; nothing is broadcast: make them equal")
    out = memory.empty(a.shape, a.array.dtype, scope="forward")
    elementwise.add(a.array, b.array, out)

    def backward(node: Node) -> None:
        if node.wanted(0) and node.wanted(1):  # each needs an array of its own: the gradients go different ways
            copy = memory.empty(node.gradient.shape, node.gradient.dtype, scope="backward")
            elementwise.copy(node.gradient, copy)
            node.give(1, copy)
            node.give(0, node.gradient)
        else:
            node.give(0 if node.wanted(0) else 1, node.gradient)

    return record("add", out, (a, b), backward)


def leading(x: Tensor, n: int) -> Tensor:
    """The first ``n`` of the last axis, copied: what is left of padded rows without their padding.

    Parameters
    ----------
    x : Tensor, shape (..., C)
    n : int
        At most C.

    Returns
    -------
    Tensor, shape (..., n)

    Raises
    ------
    ShapeError
        If there are not so many.
    """
    if x.ndim < 1 or not 0 <= n <= x.shape[-1]:
        raise ShapeError(f"leading: x has shape {x.shape}; its last axis does not have {n} elements to take")
    shape_RC = (math.prod(x.shape[:-1]), x.shape[-1])
    out = memory.empty((*x.shape[:-1], n), x.array.dtype, scope="forward")
    elementwise.copy(x.array.reshape(shape_RC)[:, :n], out.reshape(shape_RC[0], n))

    def backward(node: Node) -> None:
        dx = memory.empty((*out.shape[:-1], shape_RC[1]), out.dtype, scope="backward")
        current_device().fill(dx, 0.0)
        elementwise.copy(node.gradient.reshape(shape_RC[0], n), dx.reshape(shape_RC)[:, :n])
        node.give(0, dx)

    return record("leading", out, (x,), backward)


def scale(x: Tensor, factor: float) -> Tensor:
    """``factor`` times x."""
    out = memory.empty(x.shape, x.array.dtype, scope="forward")
    elementwise.scale(x.array, out, factor)

    def backward(node: Node) -> None:
        elementwise.scale(node.gradient, node.gradient, factor)
        node.give(0, node.gradient)

    return record("scale", out, (x,), backward)
