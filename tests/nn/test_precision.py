"""GPT in 16 bits: gradients beside PyTorch's, training beside float32's, what is kept in which format."""

import numpy as np
import pytest

from numstack import memory, nn
from numstack.autograd import backward, no_grad
from numstack.dtypes import bfloat16, float16, float32, storage
from numstack.errors import DataError, DTypeError
from numstack.nn import GPT, GPTConfig, huggingface
from numstack.optim import AdamW
from numstack.precision import LossScaling, Policy
from tests.golden import make_torch_gpt
from tests.support import assert_close

SMALL = GPTConfig(**make_torch_gpt.SMALL)
LOW = [("bf16", bfloat16), ("fp16", float16)]
PADDED = GPTConfig(n_layer=1, n_head=1, n_embd=4, block_size=4, vocab_size=8195)


@pytest.fixture(scope="module")
def golden():
    with np.load(make_torch_gpt.FILE, allow_pickle=False) as file:
        return dict(file)


def train(precision, n_steps=30, model=None, optimizer=None, first=0):
    """Losses of training on sequences that count up by 3, and the model and its optimizer."""
    model = model or GPT(SMALL, seed=3, precision=precision)
    optimizer = optimizer or AdamW(model.parameters, lr=3e-3, loss_scaling=model.precision.loss_scaling)
    losses = []
    for step in range(first, first + n_steps):
        start = np.random.default_rng(step).integers(0, 61, (4, 1))
        sequences = (start + 3 * np.arange(17)) % 61
        model.parameters.zero_gradients()
        for part in (slice(0, 2), slice(2, 4)):
            loss = model(sequences[part, :-1], sequences[part, 1:])
            backward(loss, optimizer.loss_gradient(0.5))
        optimizer.step(max_norm=1.0)
        losses.append(loss.item())
    return losses, model, optimizer


def bits(model, optimizer):
    state = optimizer.state_dict() | model.state_dict()
    rounded = [] if model.parameters.rounded is None else [memory.to_host(model.parameters.rounded).tobytes()]
    return [array.tobytes() for array in state.values()] + rounded


# numbers


@pytest.mark.parametrize(("name", "dtype"), LOW)
def test_gradients_are_at_most_twice_as_far_off_as_those_of_torch(golden, name, dtype):
    model = GPT(SMALL, precision=name)
    model.load_state_dict({k.removeprefix("weight/"): v for k, v in golden.items() if k.startswith("weight/")})
    with no_grad():
        logits = model(golden["tokens"])
    assert logits.dtype == dtype
    loss = model(golden["tokens"], golden["targets"])
    assert loss.dtype == float32
    assert_close(loss.item(), golden["loss"], rtol=float(np.finfo(float16).eps if name == "fp16" else 2**-8), atol=0)
    backward(loss, gradient=1024.0)
    for parameter in model.parameters:
        expected = golden[f"gradient/{parameter.name}"]
        got = parameter.grad.numpy().astype(np.float64) / 1024
        error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
        allowed = 2 * golden[f"{dtype.name}_error/{parameter.name}"]
        assert error <= allowed, f"{parameter.name}: the gradient is off by {error:.2g} of its norm"


@pytest.fixture(scope="module")
def losses_fp32():
    return train("fp32")[0]


@pytest.mark.parametrize(("name", "dtype"), LOW)
def test_training_follows_float32(losses_fp32, name, dtype):
    losses, model, optimizer = train(name)
    assert losses[-1] < 0.8 * losses[0]
    np.testing.assert_allclose(losses, losses_fp32, rtol=0.02)
    # What the parts read is the masters, rounded: the optimiser's launch keeps it so.
    values, rounded = (memory.to_host(a) for a in (model.parameters.values, model.parameters.rounded))
    assert values.dtype == np.float32 and rounded.dtype == storage(dtype)
    assert np.array_equal(rounded.view(dtype), values.astype(dtype))
    assert optimizer.n_steps == 30


def test_parts_in_different_formats(losses_fp32):
    """A 16-bit stream between 16-bit attention and a float32 MLP, under 16-bit norms and head."""
    policy = Policy.named("bf16", embedding="bfloat16", mlp="float32", norms="bfloat16")
    losses, model, _ = train(policy, n_steps=5)
    np.testing.assert_allclose(losses, losses_fp32[:5], rtol=0.02)
    with no_grad():
        assert model(np.zeros((1, 2), int)).dtype == bfloat16


# what is kept


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_checkpoint_goes_on_bit_for_bit_in_its_precision_and_on_purpose_in_another(name):
    precision = Policy.named(name, loss_scaling=LossScaling(initial=2.0**10, window=2) if name == "fp16" else None)
    _, model, optimizer = train(precision, 3)
    weights, state = model.state_dict(), optimizer.state_dict()
    assert all(array.dtype == np.float32 for array in weights.values())
    train(precision, 3, model, optimizer, first=3)

    resumed = GPT(SMALL, seed=9, precision=precision)
    again = AdamW(resumed.parameters, lr=3e-3, loss_scaling=precision.loss_scaling)
    resumed.load_state_dict(weights)
    again.load_state_dict(state)
    train(precision, 3, resumed, again, first=3)
    assert bits(resumed, again) == bits(model, optimizer)

    for other in {"fp32", "fp16"} - {name}:
        changed = GPT(SMALL, precision=other)
        scaling = changed.precision.loss_scaling
        optimizer = AdamW(changed.parameters, loss_scaling=scaling)
        changed.load_state_dict(weights)
        optimizer.load_state_dict(state)
        assert optimizer.n_steps == 3
        assert all(np.array_equal(array, weights[key]) for key, array in changed.state_dict().items())
        if scaling is not None:  # starts to scale
            assert optimizer.loss_scaler.scale.item() == scaling.initial


def test_hugging_face_files_are_float32(tmp_path):
    model = GPT(SMALL, seed=1, precision="bf16")
    huggingface.save_pretrained(model, tmp_path)
    again = huggingface.from_pretrained(tmp_path, precision="bf16")
    assert bits(model, AdamW(model.parameters)) == bits(again, AdamW(again.parameters))


def test_a_copy_that_is_not_kept():
    linear = nn.Linear(2, 3, dtype=bfloat16)
    nn.ParameterStore(linear, seed=0)
    with pytest.raises(DTypeError, match="weight is to be read in bfloat16, but no such copy is kept"):
        linear.weight.stored_as(bfloat16)


# padding of the vocabulary


@pytest.mark.parametrize(
    ("vocab_size", "rows"), [(50257, 50304), (50304, 50304), (8192, 8192), (8193, 8320), (8191, 8191), (84, 84)]
)
def test_rows_of_the_token_table(vocab_size, rows):
    config = GPTConfig(vocab_size=vocab_size)
    assert config.padded_vocab_size == rows
    assert rows - vocab_size <= vocab_size / 64


def test_padding_wins_nothing_learns_nothing_and_is_not_saved():
    model = GPT(PADDED, seed=2)
    state = model.state_dict()
    assert state["transformer.wte.weight"].shape == (8195, 4)
    assert model.n_parameters == sum(values.size for values in state.values())
    wte = model.parameters["transformer.wte.weight"]
    assert wte.shape == wte.grad.shape == (8320, 4)
    # With large negative logits, the zeros of padding would win.
    state = {name: -np.abs(values) - 1 if "wte" in name else values for name, values in state.items()}
    state["transformer.ln_f.bias"] += 5
    model.load_state_dict(state)
    tokens = np.array([[0, 8194, 5, 7], [1, 2, 8194, 4]])
    with no_grad():
        logits = model(tokens).numpy()
    assert logits.shape == (2, 4, 8195) and logits.max() < -1
    assert model.generate(tokens, 3, temperature=2.0).max() < 8195

    optimizer = AdamW(model.parameters, lr=0.1)
    loss = model(tokens, tokens)
    largest = logits.max(-1, keepdims=True)
    log_sum = largest[..., 0] + np.log(np.exp(logits.astype(np.float64) - largest).sum(-1))
    assert_close(loss.item(), (log_sum - np.take_along_axis(logits, tokens[..., None], -1)[..., 0]).mean())
    backward(loss)
    assert not wte.grad.numpy()[8195:].any() and wte.grad.numpy()[:8195].any()
    optimizer.step(max_norm=1.0)
    assert not memory.to_host(wte.array)[8195:].any()
    for tokens, targets in (([[8195]], None), ([[0]], [[8195]])):
        with pytest.raises(DataError, match=r"holds 8195 at .* ids go from 0 to 8194"):
            model(np.array(tokens), None if targets is None else np.array(targets))


def test_gradients_flow_through_logits_without_their_padding():
    model = GPT(PADDED, seed=2)
    backward(model(np.array([[3, 8194]])), gradient=1e-3)
    gradient = model.parameters["transformer.wte.weight"].grad.numpy()
    assert gradient[:8195].all() and not gradient[8195:].any()
