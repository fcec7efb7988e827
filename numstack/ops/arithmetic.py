"""Sums and multiples of tensors."""

from __future__ import annotations

from numstack import memory
from numstack.autograd import Node, record
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


def scale(x: Tensor, factor: float) -> Tensor:
    """``factor`` times x."""
    out = memory.empty(x.shape, x.array.dtype, scope="forward")
    elementwise.scale(x.array, out, factor)

    def backward(node: Node) -> None:
        elementwise.scale(node.gradient, node.gradient, factor)
        node.give(0, node.gradient)

    return record("scale", out, (x,), backward)
