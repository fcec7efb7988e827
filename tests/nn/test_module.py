import numpy as np
import pytest

from numstack import nn
from numstack.errors import CheckpointError, ConfigError, NumstackError
from numstack.kernels.adamw import SEGMENT
from numstack.nn import init
from tests.support import assert_close


class Pair(nn.Module):
    """Two layers in a list, a matrix of its own, and one parameter under two names."""

    def __init__(self):
        self.table = nn.Parameter((3, SEGMENT), init.normal(0.5))
        self.layers = [nn.Linear(5, 7), nn.LayerNorm(7)]
        self.again = self.table


@pytest.fixture
def store():
    return nn.ParameterStore(Pair(), seed=3)


def test_names_follow_the_attributes_and_shared_parameters_appear_once():
    names = [name for name, _ in Pair().named_parameters()]
    assert names == ["table", "layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias"]


def test_layout(store):
    assert [p.range for p in store] == [(0, 768), (768, 1024), (1024, 1280), (1280, 1536), (1536, 1792)]
    assert store.ranges == [p.range for p in reversed(list(store))]
    assert store.size == 1792 and store.values.shape == store.gradients.shape == (1792,)
    assert store.n_parameters == 768 + 35 + 7 + 7 + 7
    assert [p.decays for p in store] == [True, True, False, False, False]
    assert len(store) == 5 and store["table"].name == "table"


def test_parameters_and_gradients_are_views_of_the_flat_buffers(store):
    host = nn.ParameterStore.slice(np.arange(1792, dtype=np.float32), store["layers.0.weight"])
    assert host[0, 0] == 768 and host[-1, -1] == 768 + 34
    store.load_state_dict({p.name: np.full(p.shape, i + 1.0) for i, p in enumerate(store)})
    from numstack import memory

    flat = memory.to_host(store.values)
    assert [flat[p.range[0]] for p in store] == [1, 2, 3, 4, 5]
    assert flat[768 + 35 : 1024].any() == 0  # padding stays zero
    assert all(p.grad.shape == p.shape for p in store)


def test_first_values_depend_on_seed_and_name_only():
    first, again, other = (nn.ParameterStore(Pair(), seed=seed).state_dict() for seed in (3, 3, 4))
    alone = nn.ParameterStore(
        type(
            "Alone",
            (nn.Module,),
            {"__init__": lambda self: setattr(self, "table", nn.Parameter((3, SEGMENT), init.normal(0.5)))},
        )(),
        seed=3,
    )
    for name in first:
        assert np.array_equal(first[name], again[name])
    assert not np.array_equal(first["table"], other["table"])
    assert np.array_equal(first["table"], alone.state_dict()["table"])
    assert abs(first["table"].std() - 0.5) < 0.05
    assert np.all(first["layers.1.weight"] == 1) and np.all(first["layers.0.bias"] == 0)


def test_state_dict_round_trip(store):
    state = store.state_dict()
    other = nn.ParameterStore(Pair(), seed=9)
    other.load_state_dict(state)
    for name, values in other.state_dict().items():
        assert np.array_equal(values, state[name])


def test_loading_what_does_not_fit_changes_nothing(store):
    state = store.state_dict()
    for wrong, message in (
        ({k: v for k, v in state.items() if k != "table"}, r"1 missing \(table\)"),
        (state | {"x": state["table"]}, r"1 unknown \(x\)"),
        (
            {k: v + 1 for k, v in state.items()} | {"table": np.zeros((3, 2))},
            r"table has shape \(3, 2\) but the model's has \(3, 256\)",
        ),
    ):
        with pytest.raises(CheckpointError, match=message):
            store.load_state_dict(wrong)
    for name, values in store.state_dict().items():
        assert np.array_equal(values, state[name])


def test_zero_gradients(store):
    from numstack.device import current_device

    current_device().fill(store.gradients, 5.0)
    store.zero_gradients()
    for p in store:
        assert_close(p.grad.numpy(), np.zeros(p.shape))
        assert p.overwrite_grad


def test_store_errors():
    with pytest.raises(ConfigError, match="Module has no parameters"):
        nn.ParameterStore(nn.Module(), seed=0)
    model = Pair()
    nn.ParameterStore(model, seed=0)
    with pytest.raises(ConfigError, match="table already has memory, as table of another store"):
        nn.ParameterStore(model, seed=0)


def test_module_without_computation():
    with pytest.raises(NumstackError, match="Pair does not say what it computes: define __call__"):
        Pair()()


def test_repr(store):
    assert repr(store["layers.0.bias"]) == "<Parameter layers.0.bias (7,)>"
    assert repr(nn.Parameter((2,), init.zeros)) == "<Parameter without memory (2,)>"
