import numpy as np
import pytest

from numstack import memory
from numstack.device import current_device
from numstack.errors import CheckpointError, ConfigError
from numstack.nn import LayerNorm, Linear, Module, ParameterStore
from numstack.optim import AdamW
from tests.support import assert_close


class Small(Module):
    def __init__(self):
        self.linear = Linear(5, 70, std=1.0)
        self.norm = LayerNorm(70)


@pytest.fixture
def store():
    return ParameterStore(Small(), seed=0)


def set_gradients(store, seed=0, factor=1.0):
    """Random gradients in the flat buffer; returns them by name."""
    generator = np.random.default_rng(seed)
    gradients = {p.name: factor * generator.standard_normal(p.shape).astype(np.float32) for p in store}
    store.pack(gradients, store.gradients, "gradients")
    return gradients


def reference_step(values, gradients, m, v, step, *, lr, beta1, beta2, eps, weight_decay):
    """In place, in float64: Loshchilov and Hutter 2019, algorithm 2."""
    for name, gradient in gradients.items():
        gradient = gradient.astype(np.float64)
        m[name] = beta1 * m[name] + (1 - beta1) * gradient
        v[name] = beta2 * v[name] + (1 - beta2) * gradient**2
        decay = weight_decay if gradient.ndim > 1 else 0.0
        update = (m[name] / (1 - beta1**step)) / (np.sqrt(v[name] / (1 - beta2**step)) + eps)
        values[name] = values[name] - lr * (update + decay * values[name])


def test_steps_equal_the_reference(store):
    options = {"beta1": 0.8, "beta2": 0.9, "eps": 1e-6, "weight_decay": 0.5}
    optimizer = AdamW(store, lr=0.1, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.5)
    values = {name: array.astype(np.float64) for name, array in store.state_dict().items()}
    m, v = dict.fromkeys(values, 0.0), dict.fromkeys(values, 0.0)
    for step in range(1, 6):
        gradients = set_gradients(store, seed=step)
        lr = None if step < 3 else 0.03
        optimizer.step(lr=lr)
        reference_step(values, gradients, m, v, step, lr=lr or 0.1, **options)
    assert optimizer.n_steps == 5
    for name, got in store.state_dict().items():
        assert_close(got, values[name], what=name)
    flat = memory.to_host(store.values)
    assert all(not flat[p.range[0] + p.size : p.range[1]].any() for p in store)  # padding stays zero


def test_clipping_by_global_norm(store):
    first = store.state_dict()
    gradients = set_gradients(store, factor=100.0)
    norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in gradients.values()))
    optimizer = AdamW(store, eps=1.0, weight_decay=0.0)  # with a large eps the update depends on the size
    optimizer.step(lr=1.0, max_norm=0.5)
    assert_close(optimizer.gradient_norm.item(), norm)
    for name, got in store.state_dict().items():
        clipped = gradients[name].astype(np.float64) * 0.5 / norm
        assert_close(got, first[name] - clipped / (np.abs(clipped) + 1.0), what=name)

    # Gradients below the norm stay as they are, and a step without clipping forgets the factor of the one before.
    for max_norm in (1e9, None):
        other = ParameterStore(Small(), seed=0)
        gradients = set_gradients(other)
        optimizer = AdamW(other, eps=1.0, weight_decay=0.0)
        optimizer.step(lr=0.0, max_norm=1e-3)
        set_gradients(other)
        optimizer.load_state_dict(AdamW(other).state_dict())
        optimizer.step(lr=1.0, max_norm=max_norm)
        for name, got in other.state_dict().items():
            expected = first[name] - gradients[name] / (np.abs(gradients[name].astype(np.float64)) + 1.0)
            assert_close(got, expected, what=name)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_gradients_that_are_not_finite_change_nothing(store, bad):
    gradients = set_gradients(store)
    gradients["norm.bias"][3] = bad
    store.pack(gradients, store.gradients, "gradients")
    first = store.state_dict()
    optimizer = AdamW(store)
    optimizer.step(max_norm=1.0)
    for name, got in store.state_dict().items():
        assert np.array_equal(got, first[name])
    assert not optimizer.state_dict()["m.norm.bias"].any()
    assert not np.isfinite(optimizer.gradient_norm.item())


def test_state_dict_goes_on_bit_for_bit(store):
    def run(store, optimizer, steps):
        for step in steps:
            set_gradients(store, seed=step)
            optimizer.step(max_norm=1.0)

    optimizer = AdamW(store)
    run(store, optimizer, range(3))
    weights, state = store.state_dict(), optimizer.state_dict()
    assert state["n_steps"].tolist() == [3] and state["m.linear.weight"].shape == (5, 70)
    run(store, optimizer, range(3, 6))

    other = ParameterStore(Small(), seed=9)
    resumed = AdamW(other)
    other.load_state_dict(weights)
    resumed.load_state_dict(state)
    run(other, resumed, range(3, 6))
    assert np.array_equal(memory.to_host(other.values), memory.to_host(store.values))


def test_loading_another_state(store):
    optimizer = AdamW(store)
    state = optimizer.state_dict()
    with pytest.raises(CheckpointError, match="no n_steps"):
        optimizer.load_state_dict({})
    with pytest.raises(CheckpointError, match=r"AdamW: v: 1 missing \(norm.bias\)"):
        optimizer.load_state_dict({k: a for k, a in state.items() if k != "v.norm.bias"})
    with pytest.raises(CheckpointError, match=r"AdamW: m: norm.bias has shape \(2,\) but"):
        optimizer.load_state_dict(state | {"m.norm.bias": np.zeros(2)})


def test_no_step_waits_for_the_device(store, monkeypatch):
    set_gradients(store)
    optimizer = AdamW(store)
    device = current_device()
    for name in ("synchronize", "to_host"):
        monkeypatch.setattr(device, name, lambda *_: pytest.fail("the host waited"))
    optimizer.step(lr=0.1, max_norm=1.0)


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": 0.0}, {"weight_decay": -0.1}, {"lr": float("nan")}]
)
def test_bad_options(store, options):
    with pytest.raises(ConfigError, match=f"AdamW: {next(iter(options))}="):
        AdamW(store, **options)
