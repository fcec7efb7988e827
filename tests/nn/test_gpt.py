import dataclasses
import os

import numpy as np
import pytest

from numstack import memory
from numstack.autograd import backward, no_grad
from numstack.errors import ConfigError, DataError, NumstackError, ShapeError
from numstack.nn import GPT, GPTConfig
from tests.golden import make_torch_gpt
from tests.support import assert_close

SMALL = GPTConfig(**make_torch_gpt.SMALL)
oracles = pytest.mark.skipif(os.environ.get("NUMSTACK_ORACLES") != "1", reason="make test ORACLES=1 runs it")


@pytest.fixture(scope="module")
def golden():
    with np.load(make_torch_gpt.FILE, allow_pickle=False) as file:
        return dict(file)


@pytest.fixture
def batch():
    generator = np.random.default_rng(1)
    return generator.integers(0, SMALL.vocab_size, (2, 4, 16))


def loaded(arrays, config=SMALL):
    """A model with the weights of the golden arrays."""
    model = GPT(config)
    model.load_state_dict({k.removeprefix("weight/"): v for k, v in arrays.items() if k.startswith("weight/")})
    return model


def gradients(model):
    return {p.name: p.grad.numpy() for p in model.parameters}


def assert_norms_close(got, expected, rtol):
    """Each parameter's gradient is within ``rtol`` of its norm."""
    for name in expected:
        error = np.linalg.norm(got[name] - expected[name]) / np.linalg.norm(expected[name])
        assert error <= rtol, f"{name}: the gradient is off by {error:.2g} of its norm"


def check_against_torch(arrays, config):
    model = loaded(arrays, config)
    with no_grad():
        assert_close(model(arrays["tokens"]).numpy(), arrays["logits"], rtol=0, atol=1e-4)
    loss = model(arrays["tokens"], arrays["targets"])
    assert_close(loss.item(), arrays["loss"], rtol=1e-6, atol=0)
    backward(loss)
    expected = {k.removeprefix("gradient/"): v for k, v in arrays.items() if k.startswith("gradient/")}
    assert expected.keys() == {p.name for p in model.parameters}
    assert_norms_close(gradients(model), expected, 1e-5)


# against transformers and PyTorch


def test_logits_loss_and_gradients_equal_those_of_torch(golden):
    check_against_torch(golden, SMALL)


@oracles
@pytest.mark.parametrize(
    "config", [make_torch_gpt.SMALL, {"n_layer": 4, "n_head": 3, "n_embd": 96, "block_size": 70, "vocab_size": 301}]
)
def test_gradients_equal_those_of_the_installed_torch(config):
    check_against_torch(make_torch_gpt.collect(config, seed=7), GPTConfig(**config))


# gradients of training


def test_gradients_become_final_from_the_end_of_the_buffer_to_its_start(batch):
    model = GPT(SMALL)
    final = []
    backward(model(*batch), on_final=lambda p: final.append((p.range, p.grad.numpy())))
    assert [where for where, _ in final] == model.parameters.ranges
    assert final[-1][0][0] == 0 and final[0][0][1] == model.parameters.size
    # The tied table comes last, with both of its uses: nothing was added after the report.
    for parameter, (_, gradient) in zip(reversed(list(model.parameters)), final, strict=True):
        assert np.array_equal(parameter.grad.numpy(), gradient)


def test_accumulated_micro_batches_equal_the_whole_batch(batch):
    tokens, targets = batch
    model = GPT(SMALL)
    backward(model(tokens, targets))
    whole = gradients(model)
    model.parameters.zero_gradients()
    for half in (slice(0, 2), slice(2, 4)):
        backward(model(tokens[half], targets[half]), gradient=0.5)
    assert_norms_close(gradients(model), whole, 2e-6)

    # The same where micro-batches count different numbers of targets.
    targets = np.where(np.arange(64).reshape(4, 16) < 20, -1, targets)
    model.parameters.zero_gradients()
    backward(model(tokens, targets))
    whole = gradients(model)
    model.parameters.zero_gradients()
    for half in (slice(0, 2), slice(2, 4)):
        backward(model(tokens[half], targets[half], n_targets=44))
    assert_norms_close(gradients(model), whole, 2e-6)


def test_memory_of_a_step_comes_back(batch):
    model = GPT(SMALL)
    before = memory.statistics()
    for _ in range(2):
        loss = model(*batch)
        backward(loss)
        del loss
        after = memory.statistics()
        assert (after.live, after.n_blocks) == (before.live, before.n_blocks)
    with no_grad():
        model(*batch)
    assert memory.statistics().live == before.live


def test_same_seed_same_bits(batch):
    def run():
        model = GPT(dataclasses.replace(SMALL, dropout=0.2), seed=5)
        model.set_dropout_step(3)
        loss = model(*batch)
        backward(loss)
        return loss.numpy(), memory.to_host(model.parameters.gradients)

    for first, second in zip(run(), run(), strict=True):
        assert np.array_equal(first, second)


# dropout


def test_masks_depend_on_where_training_stands(batch):
    model = GPT(dataclasses.replace(SMALL, dropout=0.2), seed=5)

    def loss():
        with no_grad():
            return model(*batch).item()

    model.set_dropout_step(0)
    first, second = loss(), loss()
    assert first != second  # micro-batches 0 and 1
    model.set_dropout_step(1)
    assert loss() not in (first, second)
    model.set_dropout_step(0, rank=1)
    assert loss() not in (first, second)
    model.set_dropout_step(0)
    assert (loss(), loss()) == (first, second)
    model.eval()
    without = GPT(SMALL, seed=5)
    with no_grad():
        assert loss() == loss() == without(*batch).item()
    model.train()
    assert loss() != first


# initialisation, configuration, sampling, bad input


def test_first_weights():
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=128, block_size=64, vocab_size=100), seed=2)
    state = model.state_dict()
    block = "transformer.h.1."
    for name in ("attn.c_attn.weight", "mlp.c_fc.weight"):
        assert abs(state[block + name].std() / 0.02 - 1) < 0.03
    for name in ("attn.c_proj.weight", "mlp.c_proj.weight"):
        assert abs(state[block + name].std() / 0.01 - 1) < 0.03  # 0.02 / sqrt(2 * 2 layers)
    assert state[block + "attn.c_attn.weight"].shape == (128, 384)
    assert model.n_parameters == sum(values.size for values in state.values())
    assert [p.name for p in model.parameters if not p.decays and "ln_" not in p.name and ".bias" not in p.name] == []
    assert all(p.decays == (len(p.shape) == 2) for p in model.parameters)


def test_gpt2_small_has_124m_parameters():
    config = GPTConfig()
    per_block = 12 * config.n_embd**2 + 13 * config.n_embd
    assert (50257 + 1024) * 768 + 12 * per_block + 2 * 768 == 124_439_808


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"n_layer": 0}, "n_layer=0; expected an integer of at least 1"),
        ({"vocab_size": 1.5}, "vocab_size=1.5; expected an integer"),
        ({"n_embd": 100, "n_head": 3}, "n_embd=100 is not a multiple of n_head=3"),
        ({"dropout": 1.0}, "dropout=1.0; choose at least 0 and below 1"),
        ({"layer_norm_eps": 0.0}, "layer_norm_eps=0.0"),
    ],
)
def test_bad_configuration(values, message):
    with pytest.raises(ConfigError, match=message):
        GPTConfig(**values)


def test_generate(golden):
    model = loaded(golden)
    text = model.generate(golden["tokens"][0, :3], 30, temperature=0.7, top_k=5, seed=1)
    assert text.shape == (1, 33) and text.dtype == np.int32  # longer than block_size: the window slides
    assert np.array_equal(text, model.generate(golden["tokens"][:1, :3], 30, temperature=0.7, top_k=5, seed=1))
    assert not np.array_equal(text, model.generate(golden["tokens"][0, :3], 30, temperature=0.7, top_k=5, seed=2))
    greedy = model.generate(golden["tokens"][:, :4], 1, temperature=0)
    with no_grad():
        expected = model(golden["tokens"][:, :4]).numpy()[:, -1].argmax(-1)
    assert np.array_equal(greedy[:, -1], expected)
    assert np.array_equal(model.generate([1, 2], 3, top_k=1), model.generate([1, 2], 3, temperature=0))


def test_generate_draws_from_the_distribution():
    from numstack.nn.gpt import _choose

    logits = np.log(np.array([[0.1, 0.2, 0.7]]))
    generator = np.random.default_rng(0)
    drawn = [int(_choose(logits, 1.0, None, generator)[0]) for _ in range(2000)]
    assert_close(np.bincount(drawn) / 2000, [0.1, 0.2, 0.7], rtol=0, atol=0.04)
    drawn = [int(_choose(logits, 1.0, 2, generator)[0]) for _ in range(500)]
    assert_close(np.bincount(drawn) / 500, [0, 2 / 9, 7 / 9], rtol=0, atol=0.06)


def test_bad_input(batch):
    model = GPT(SMALL)
    tokens, targets = batch
    with pytest.raises(DataError, match=r"tokens holds 61 at \(0, 2\), but ids go from 0 to 60"):
        model(np.array([[0, 60, 61]]), np.zeros((1, 3), int))
    with pytest.raises(DataError, match="targets holds 99"):
        model(tokens, np.full_like(targets, 99))
    with pytest.raises(ShapeError, match=r"17 tokens in a sequence, but position_table .* has 16 positions"):
        model(np.zeros((1, 17), int))
    with pytest.raises(ShapeError, match=r"targets \(4, 15\); expected targets of shape \(4, 16\)"):
        model(tokens, targets[:, 1:])
    with pytest.raises(DataError, match="start with at least one token"):
        model.generate([], 3)
    with pytest.raises(DataError, match="tokens holds 61"):
        model.generate([61], 3)
    with pytest.raises(ConfigError, match="top_k=0"):
        model.generate([1], 3, top_k=0)
    with pytest.raises(NumstackError, match="depends on no tensor"), no_grad():
        backward(model(tokens, targets))
