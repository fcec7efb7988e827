"""Loss scaling: an overflow skips exactly one step and lowers the scale, good steps raise it, nothing waits."""

import numpy as np
import pytest

from numstack import memory, ops
from numstack.autograd import backward
from numstack.device import current_device
from numstack.dtypes import bfloat16
from numstack.nn import LayerNorm, Linear, Module, ParameterStore
from numstack.optim import AdamW
from numstack.precision import LossScaling
from numstack.tensor import tensor
from tests.support import assert_close


class Small(Module):
    def __init__(self):
        self.linear = Linear(5, 70, std=1.0)
        self.norm = LayerNorm(70)


SCALING = LossScaling(initial=2.0**16, growth=4.0, backoff=0.5, window=3)


@pytest.fixture
def store():
    return ParameterStore(Small(), seed=0, low=bfloat16)


def set_gradients(store, seed, factor=1.0, planted=None):
    """Random gradients times a factor, one of them planted."""
    generator = np.random.default_rng(seed)
    gradients = {p.name: np.float32(factor) * generator.standard_normal(p.shape).astype(np.float32) for p in store}
    if planted is not None:
        gradients["norm.bias"][3] = planted
    store.pack(gradients, store.gradients, "gradients")


def changed_by_a_step(store, optimizer):
    """Everything that a step changes, except the loss scale."""
    state = {k: v for k, v in optimizer.state_dict().items() if not k.startswith("loss_scale")}
    return [a.tobytes() for a in (*state.values(), memory.to_host(store.values), memory.to_host(store.rounded))]


@pytest.mark.parametrize("planted", [np.inf, -np.inf, np.nan, 3e38])  # the square of the last is infinite
@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_a_planted_overflow(store, planted, max_norm):
    optimizer = AdamW(store, loss_scaling=SCALING)
    scaler = optimizer.loss_scaler
    scale = SCALING.initial
    for step in range(2):
        set_gradients(store, step, scale)
        optimizer.step(max_norm=max_norm)
    assert (optimizer.n_steps, scaler.scale.item()) == (2, scale)

    before = changed_by_a_step(store, optimizer)
    for n_skipped in (1, 2):
        set_gradients(store, 9, scale, planted)
        optimizer.step(max_norm=max_norm)
        scale *= SCALING.backoff
        assert scaler.scale.item() == scale
        assert scaler.n_steps() == (2, n_skipped)
        assert changed_by_a_step(store, optimizer) == before
        assert not np.isfinite(optimizer.gradient_norm.item())

    for step in range(2, 2 + SCALING.window):
        assert scaler.scale.item() == scale  # good steps are counted anew
        set_gradients(store, step, scale)
        optimizer.step(max_norm=max_norm)
    assert scaler.scale.item() == scale * SCALING.growth
    assert scaler.n_steps() == (5, 2) and optimizer.n_steps == 5

    # The skipped steps left no trace: the same gradients without any scale give the same weights.
    other = ParameterStore(Small(), seed=0)
    unscaled = AdamW(other)
    for step in range(5):
        set_gradients(other, step)
        unscaled.step(max_norm=max_norm)
    if max_norm is not None:
        assert_close(optimizer.gradient_norm.item(), unscaled.gradient_norm.item())
    for (name, got), expected in zip(store.state_dict().items(), other.state_dict().values(), strict=True):
        assert_close(got, expected, rtol=1e-6, atol=1e-6, what=name)


def test_backward_starts_from_the_scale(store):
    optimizer = AdamW(store, loss_scaling=SCALING)
    assert AdamW(store).loss_gradient(0.25) == 0.25
    x, ones = tensor([1.0, 2.0], requires_grad=True), tensor([[1.0], [1.0]])
    for weight in (0.25, 0.75):
        backward(ops.linear(x, ones), optimizer.loss_gradient(weight))
    assert_close(x.grad.numpy(), [2.0**16, 2.0**16])


def test_no_step_waits_for_the_device(store, monkeypatch):
    set_gradients(store, 0)
    optimizer = AdamW(store, loss_scaling=SCALING)
    device = current_device()
    for name in ("synchronize", "to_host"):
        monkeypatch.setattr(device, name, lambda *_: pytest.fail("the host waited"))
    optimizer.loss_gradient(0.5)
    optimizer.step(lr=0.1, max_norm=1.0)
