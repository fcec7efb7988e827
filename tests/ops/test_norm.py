import numpy as np
import pytest

from numstack import memory, ops
from numstack.autograd import backward, no_grad
from numstack.dtypes import bfloat16
from numstack.errors import ShapeError
from numstack.tensor import tensor
from tests.ops.gradients import check_operation
from tests.support import assert_close


def layernorm(x, weight, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def test_layernorm(rng):
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 37), (37,), (37,))]
    check_operation(ops.layernorm, layernorm, *arrays, rtol=4e-5)


def test_the_result_may_have_another_format(rng):
    """As between a stream in one format and a branch in another; the gradient comes back in that of x."""
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((4, 37), (37,), (37,))]
    x, weight, bias = (tensor(a, requires_grad=True) for a in arrays)
    y = ops.layernorm(x, weight, bias, out=bfloat16)
    assert y.dtype == bfloat16
    assert_close(y.numpy(), layernorm(*arrays), dtype="bfloat16")
    backward(y)
    assert x.grad.dtype == weight.grad.dtype == np.float32
    assert_close(bias.grad.numpy(), np.full(37, 4.0))


def test_a_stream_is_kept_in_the_format_of_its_branch(rng):
    """A float32 x goes as soon as nobody else holds it; its gradient needs half of that until backward."""
    arrays = [rng.standard_normal(shape).astype(np.float32) for shape in ((64, 256), (256,), (256,))]
    leaf, weight, bias = (tensor(a, requires_grad=True) for a in arrays)
    x = ops.scale(leaf, 1.0)
    before = memory.statistics().live
    y = ops.layernorm(x, weight, bias, out=bfloat16)
    kept = memory.statistics().live - before - y.array.nbytes
    assert x.array.nbytes // 2 <= kept < x.array.nbytes  # and the statistics of rows
    freed = x.array.nbytes
    del x
    assert memory.statistics().live == before + y.array.nbytes + kept - freed
    backward(y)
    centred = layernorm(arrays[0].astype(np.float64), 1, 0)
    assert_close(weight.grad.numpy(), centred.sum(0), atol=0.1)  # 64 terms of x rounded to 8 bits


def test_weight_alone_wants_a_gradient(rng):
    x, weight, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 5), (5,), (5,)))
    leaf = tensor(weight, requires_grad=True)
    backward(ops.layernorm(tensor(x), leaf, tensor(bias)))
    assert_close(leaf.grad.numpy(), layernorm(x.astype(np.float64), 1, 0).sum(0))


def test_nothing_is_kept_where_nothing_is_recorded(rng):
    x, weight, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((4, 5), (5,), (5,)))
    inputs = [tensor(a, requires_grad=True) for a in (x, weight, bias)]
    memory.reset_peak()
    before = memory.statistics().live
    with no_grad():
        y = ops.layernorm(*inputs)
    after = memory.statistics()
    assert after.peak == after.live  # y alone: no statistics of rows, even for a while
    assert after.live > before
    assert_close(y.numpy(), layernorm(x, weight, bias))


def test_shape_error_names_both_shapes():
    x, weight, bias = tensor(np.zeros((2, 5))), tensor(np.zeros(5)), tensor(np.zeros((1, 5)))
    with pytest.raises(ShapeError, match=r"x has shape \(2, 5\), so bias needs shape \(5,\), but it has \(1, 5\)"):
        ops.layernorm(x, weight, bias)
