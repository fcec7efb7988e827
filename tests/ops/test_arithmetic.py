import numpy as np
import pytest

from numstack import ops
from numstack.autograd import backward
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


def test_nothing_is_broadcast():
    with pytest.raises(ShapeError, match=r"a has shape \(3, 5\) but b has \(5,\); nothing is broadcast"):
        ops.add(tensor(np.zeros((3, 5))), tensor(np.zeros(5)))
