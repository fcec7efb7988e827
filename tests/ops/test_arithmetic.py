import numpy as np
import pytest

from numstack import ops
from numstack.autograd import backward
from numstack.dtypes import bfloat16
from numstack.errors import ShapeError
from numstack.tensor import tensor
from tests.ops.gradients import check_operation
from tests.support import assert_close


def test_add(rng):
    a, b = rng.standard_normal((2, 3, 5)).astype(np.float32)
    check_operation(ops.add, lambda a, b: a + b, a, b)


def test_add_of_a_tensor_to_itself_and_to_a_constant(rng):
    x = tensor(rng.standard_normal((3, 5)), requires_grad=True)
    backward(ops.add(tensor(np.ones((3, 5))), ops.add(x, x)))
    assert_close(x.grad.numpy(), np.full((3, 5), 2.0))


def test_scale(rng):
    check_operation(lambda x: ops.scale(x, -2.5), lambda x: -2.5 * x, rng.standard_normal((3, 5)).astype(np.float32))


def test_leading(rng):
    x = rng.standard_normal((2, 3, 5)).astype(np.float32)
    check_operation(lambda x: ops.leading(x, 3), lambda x: x[..., :3].copy(), x)
    check_operation(lambda x: ops.leading(x, 5), lambda x: x.copy(), x[0])
    with pytest.raises(ShapeError, match=r"leading: x has shape \(2, 3, 5\); its last axis does not have 6 elements"):
        ops.leading(tensor(x), 6)


def test_gradients_come_in_the_format_of_their_leaf():
    """Whatever the operation computed in: written first, then added to."""
    leaf, low = tensor(np.ones(4), requires_grad=True), tensor(np.full(4, 2.0), dtype=bfloat16, requires_grad=True)
    for times in (1, 2):
        backward(ops.add(low, leaf), gradient=3.0)
        assert leaf.grad.dtype == np.float32 and low.grad.dtype == bfloat16
        assert_close(leaf.grad.numpy(), np.full(4, 3.0 * times))
        assert_close(low.grad.numpy(), np.full(4, 3.0 * times))


def test_nothing_is_broadcast():
    with pytest.raises(ShapeError, match=r"a has shape \(3, 5\) but b has \(5,\); nothing is broadcast"):
        ops.add(tensor(np.zeros((3, 5))), tensor(np.zeros(5)))
