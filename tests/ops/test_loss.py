import numpy as np
import pytest

from numstack import ops
from numstack.autograd import backward, no_grad
from numstack.errors import DataError, NumstackError, ShapeError
from numstack.tensor import tensor
from tests.support import assert_close

TARGETS = np.array([[0, 6, -1], [3, -1, 3]])


@pytest.fixture
def logits(rng):
    return 2 * rng.standard_normal((2, 3, 7)).astype(np.float32)


def reference(logits, n_targets):
    """Sum over the targets that count / n_targets, and its gradient, in float64."""
    exponentials = np.exp(logits.astype(np.float64))
    p = exponentials / exponentials.sum(-1, keepdims=True)
    counts = TARGETS >= 0
    of_target = np.take_along_axis(p, np.maximum(TARGETS, 0)[..., None], -1)[..., 0]
    gradient = (p - np.eye(7)[np.maximum(TARGETS, 0)]) * counts[..., None]
    return -np.log(of_target)[counts].sum() / n_targets, gradient / n_targets


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("n_targets", [None, 12])
def test_mean_and_gradient(logits, on_device, n_targets):
    targets = tensor(TARGETS) if on_device else TARGETS
    expected, gradient = reference(logits, n_targets or 4)
    x = tensor(logits, requires_grad=True)
    loss = ops.cross_entropy(x, targets, n_targets=n_targets)
    assert loss.shape == (1,)
    assert_close(loss.item(), expected)
    backward(loss)
    assert_close(x.grad.numpy(), gradient)
    assert_close(x.numpy(), gradient, what="logits, which the gradient replaces")


@pytest.mark.parametrize("on_device", [False, True])
def test_gradient_known_in_the_forward_pass(logits, on_device):
    """It replaces the logits at once; the loss is the same."""
    expected, slope = reference(logits, 4)
    x = tensor(np.concatenate([logits, np.full((2, 3, 2), 9.0, np.float32)], -1), requires_grad=True)
    loss = ops.cross_entropy(x, TARGETS, n_classes=7, gradient=tensor([0.5]) if on_device else 0.5)
    slope = np.concatenate([0.5 * slope, np.zeros((2, 3, 2))], -1)
    assert_close(loss.item(), expected)
    assert_close(x.numpy(), slope)
    with pytest.raises(NumstackError, match="cross_entropy was given its gradient in the forward pass; leave"):
        backward(loss, gradient=1.0)
    with pytest.raises(NumstackError, match="so backward must start from its result, not from what was computed"):
        backward(ops.scale(loss, 2.0))
    backward(loss)
    assert_close(x.grad.numpy(), slope)


def test_a_gradient_that_nobody_wants_leaves_the_logits_alone(logits):
    x = tensor(logits, requires_grad=True)
    with no_grad():
        assert_close(ops.cross_entropy(x, TARGETS, gradient=1.0).item(), reference(logits, 4)[0])
    assert_close(x.numpy(), logits)


def test_gradient_is_scaled_by_what_follows_the_loss(logits):
    x = tensor(logits, requires_grad=True)
    y = ops.scale(x, 2.0)
    backward(ops.scale(ops.cross_entropy(y, TARGETS), 3.0), gradient=0.5)
    gradient = 1.5 * reference(2 * logits, 4)[1]
    assert_close(x.grad.numpy(), 2 * gradient)


def test_padded_rows(logits):
    expected, gradient = reference(logits, 4)
    x = tensor(np.concatenate([logits, np.full((2, 3, 2), 9.0, np.float32)], -1), requires_grad=True)
    loss = ops.cross_entropy(x, TARGETS, n_classes=7)
    assert_close(loss.item(), expected)
    backward(loss)
    assert_close(x.grad.numpy(), np.concatenate([gradient, np.zeros((2, 3, 2))], -1))


def test_bad_targets(logits):
    x = tensor(logits)
    with pytest.raises(DataError, match=r"targets holds 6 at \(0, 1\), but ids go from 0 to 5"):
        ops.cross_entropy(x, TARGETS, n_classes=6)
    with pytest.raises(ShapeError, match=r"n_classes=8 but logits_RV has shape \(6, 7\): 1 to 7 fit"):
        ops.cross_entropy(x, TARGETS, n_classes=8)
    with pytest.raises(DataError, match=r"targets holds 7 at \(1, 2\), but ids go from 0 to 6"):
        ops.cross_entropy(x, np.array([[0, 6, -1], [3, -1, 7]]))
    with pytest.raises(DataError, match=r"targets holds -2"):
        ops.cross_entropy(x, np.full((2, 3), -2))
    with pytest.raises(DataError, match=r"no target of \(2, 3\) counts"):
        ops.cross_entropy(x, np.full((2, 3), -1))
    with pytest.raises(ShapeError, match=r"logits have shape \(2, 3, 7\) but targets \(3, 2\); expected .* \(2, 3\)"):
        ops.cross_entropy(x, np.zeros((3, 2), int))
