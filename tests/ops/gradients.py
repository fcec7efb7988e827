"""One check for every differentiable operation: its result, its gradients, and that gradients add up."""

from collections.abc import Callable

import numpy as np

from numstack import ops
from numstack.autograd import backward
from numstack.tensor import Tensor, tensor
from tests.support import assert_close

STEP = 1e-5  # of central differences in float64: their error is about 1e-10


def numeric_gradient(
    function: Callable[..., np.ndarray], inputs: list[np.ndarray], index: int, dout: np.ndarray
) -> np.ndarray:
    """d sum(dout * function(*inputs)) / d inputs[index], by central differences."""
    gradient = np.zeros_like(inputs[index])
    for place in np.ndindex(gradient.shape):
        moved = [x.copy() for x in inputs]
        moved[index][place] += STEP
        above = function(*moved)
        moved[index][place] -= 2 * STEP
        gradient[place] = np.sum(dout * (above - function(*moved))) / (2 * STEP)
    return gradient


def check_operation(
    operation: Callable[..., Tensor], reference: Callable[..., np.ndarray], *inputs: np.ndarray, rtol: float = 2e-5
) -> None:
    """The operation agrees with a float64 reference, and its gradients with finite differences of that reference.

    Gradients are checked at leaves, then where they add to what is there already: at leaves in a second backward, and
    at the result of another operation that is used twice.
    """
    exact = [x.astype(np.float64) for x in inputs]
    leaves = [tensor(x, requires_grad=True) for x in inputs]
    out = operation(*leaves)
    expected = reference(*exact)
    assert_close(out.numpy(), expected, rtol, rtol)
    dout = np.random.default_rng(1).standard_normal(expected.shape).astype(np.float32)
    gradients = [numeric_gradient(reference, exact, index, dout) for index in range(len(inputs))]

    backward(out, gradient=tensor(dout))
    for index, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
        assert_close(leaf.grad.numpy(), gradient, rtol, rtol, what=f"gradient of input {index}")

    shared = [ops.scale(leaf, 1.0) for leaf in leaves]
    twice = ops.add(operation(*shared), operation(*shared))
    backward(twice, gradient=tensor(dout))
    for index, (leaf, gradient) in enumerate(zip(leaves, gradients, strict=True)):
        assert_close(leaf.grad.numpy(), 3 * gradient, 2 * rtol, 2 * rtol, what=f"summed gradient of input {index}")
