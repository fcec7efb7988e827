import math

import numpy as np
import pytest

from numstack import ops
from numstack.autograd import backward
from numstack.dtypes import bfloat16
from numstack.errors import ConfigError, ShapeError
from numstack.kernels import dropout as dropout_kernels
from numstack.tensor import tensor
from tests.ops.gradients import check_operation
from tests.support import assert_close


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.fixture
def arrays(rng):
    """x of two leading axes, a weight [in, out], a bias, a residual: all sizes different, none a multiple of a tile."""
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 5), (5, 7), (7,), (2, 3, 7))]


def test_linear(arrays):
    check_operation(ops.linear, lambda x, w, b: x @ w + b, *arrays[:3])


def test_linear_without_bias(arrays):
    check_operation(ops.linear, lambda x, w: x @ w, *arrays[:2])


def test_linear_with_an_embedding_table_as_weight(arrays):
    x, weight, _, _ = arrays
    check_operation(lambda x, w: ops.linear(x, w, layout="NT"), lambda x, w: x @ w.T, x, np.ascontiguousarray(weight.T))


@pytest.mark.parametrize("p", [0, 0.4])
def test_mlp(arrays, rng, p):
    x, weight, bias, _ = arrays
    weight_out, bias_out, residual = (rng.standard_normal(s).astype(np.float32) for s in ((7, 6), (6,), (2, 3, 6)))
    mask = ops.Dropout(p, seed=5) if p else None
    keep = dropout_kernels.reference_mask(2 * 3 * 6, p=p, seed=5, offset=0).reshape(2, 3, 6) / (1 - p)
    check_operation(
        lambda *inputs: ops.mlp(*inputs, dropout=mask),
        lambda x, w1, b1, w2, b2, r: (gelu(x @ w1 + b1) @ w2 + b2) * keep + r,
        *(x, weight, bias, weight_out, bias_out, residual),
    )


def test_linear_residual(arrays):
    check_operation(ops.linear_residual, lambda x, w, b, r: x @ w + b + r, *arrays)


def test_a_branch_of_16_bits_beside_a_float32_residual(arrays, rng):
    """What comes back is rounded for the products alone: not for the bias, nor on its way along the residual."""
    branch = [a.astype(bfloat16) for a in arrays[:2]]
    x, weight, bias, residual = (tensor(a, requires_grad=True) for a in (*branch, *arrays[2:]))
    out = ops.linear_residual(x, weight, bias, residual)
    assert out.dtype == np.float32
    exact = [a.astype(np.float64) for a in (*branch, *arrays[2:])]
    assert_close(out.numpy(), exact[0] @ exact[1] + exact[2] + exact[3])
    dout = rng.standard_normal(out.shape).astype(np.float32)
    backward(out, gradient=tensor(dout))
    np.testing.assert_array_equal(residual.grad.numpy(), dout)
    assert_close(bias.grad.numpy(), dout.sum((0, 1), dtype=np.float64))
    rounded = dout.astype(bfloat16).astype(np.float64)
    assert_close(x.grad.numpy(), rounded @ exact[1].T, dtype="bfloat16")
    assert_close(weight.grad.numpy(), np.einsum("btk,btn->kn", exact[0], rounded), dtype="bfloat16")


def test_linear_residual_drops_the_branch_but_not_the_residual(arrays):
    mask = ops.Dropout(0.4, seed=2**63 + 5)
    keep = dropout_kernels.reference_mask(2 * 3 * 7, p=mask.p, seed=mask.seed, offset=0).reshape(2, 3, 7)
    assert 0 < keep.sum() < keep.size
    check_operation(
        lambda *inputs: ops.linear_residual(*inputs, dropout=mask),
        lambda x, w, b, r: (x @ w + b) * keep / (1 - mask.p) + r,
        *arrays,
    )


def test_gradients_that_nobody_wants_are_not_computed(arrays):
    x, weight, bias, residual = (tensor(a, requires_grad=i == 3) for i, a in enumerate(arrays))
    out = ops.linear_residual(x, weight, bias, residual)
    backward(out, gradient=2.0)
    assert_close(residual.grad.numpy(), np.full(residual.shape, 2.0))
    assert x.grad is None and weight.grad is None and bias.grad is None


def test_linear_of_no_rows_has_zero_weight_gradient(arrays):
    x, weight = tensor(np.zeros((0, 5), np.float32), requires_grad=True), tensor(arrays[1], requires_grad=True)
    out = ops.linear(x, weight)
    assert out.shape == (0, 7)
    backward(out)
    assert_close(weight.grad.numpy(), np.zeros((5, 7)))


def test_errors_name_both_shapes():
    x, weight, bias = tensor(np.zeros((2, 5))), tensor(np.zeros((6, 7))), tensor(np.zeros(7))
    with pytest.raises(ShapeError, match=r"x has shape \(2, 5\), so K=5, but weight \(6, 7\) with layout NN has K=6"):
        ops.linear(x, weight)
    with pytest.raises(ShapeError, match=r"weight \(5, 6\) gives 6 outputs, but bias has shape \(7,\)"):
        ops.mlp(x, tensor(np.zeros((5, 6))), bias, weight, bias, x)
    with pytest.raises(ShapeError, match=r"mlp: x has shape \(2, 7\), so K=7, but weight \(6, 7\) .* has K=6"):
        ops.mlp(x, tensor(np.zeros((5, 7))), bias, weight, bias, x)
    with pytest.raises(
        ShapeError, match=r"residual has shape \(2, 6\) but the branch that is added to it has \(2, 7\)"
    ):
        ops.linear_residual(x, tensor(np.zeros((5, 7))), bias, tensor(np.zeros((2, 6))))
    with pytest.raises(ShapeError, match=r"expected .* two axes"):
        ops.linear(x, bias)
    with pytest.raises(ConfigError, match="layout 'TN'; choose NN"):
        ops.linear(x, weight, layout="TN")
