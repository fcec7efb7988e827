import json
import os

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from numstack.errors import CheckpointError
from numstack.nn import GPT, GPTConfig, huggingface
from tests.golden import make_torch_gpt

SMALL = GPTConfig(**make_torch_gpt.SMALL, dropout=0.1)
oracles = pytest.mark.skipif(os.environ.get("NUMSTACK_ORACLES") != "1", reason="make test ORACLES=1 runs it")


@pytest.fixture
def model():
    return GPT(SMALL, seed=1)


@pytest.fixture
def folder(model, tmp_path):
    huggingface.save_pretrained(model, tmp_path / "deep" / "gpt")
    return tmp_path / "deep" / "gpt"


def assert_same_weights(got, expected):
    assert got.keys() == expected.keys()
    for name in got:
        assert np.array_equal(got[name], expected[name]), name


def rewrite(folder, change):
    """Write the weights again with other names."""
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file)


def test_round_trip(model, folder):
    again = huggingface.from_pretrained(folder)
    assert again.config == SMALL
    assert_same_weights(again.state_dict(), model.state_dict())


def test_files_of_the_hub(model, folder):
    """GPT-2's own files have no prefix, and the causal masks among the weights."""
    masks = {f"h.{i}.attn.bias": np.ones((1, 1, 16, 16), np.float32) for i in range(2)}
    rewrite(folder, lambda state: {k.removeprefix("transformer."): v for k, v in state.items()} | masks)
    assert_same_weights(huggingface.from_pretrained(folder).state_dict(), model.state_dict())


def test_head_must_be_tied(model, folder):
    table = model.state_dict()["transformer.wte.weight"]
    rewrite(folder, lambda state: state | {"lm_head.weight": table})
    assert_same_weights(huggingface.from_pretrained(folder).state_dict(), model.state_dict())
    rewrite(folder, lambda state: state | {"lm_head.weight": table + 1})
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs from transformer\.wte\.weight"):
        huggingface.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type='llama'; only 'gpt2' is supported"),
        ({"activation_function": "relu"}, "activation_function='relu'; only 'gelu_new'"),
        ({"n_inner": 100}, "n_inner=100; only 4"),
        ({"n_layer": 3}, r"12 missing \(transformer.h.2.attn.c_attn.bias"),
        ({"vocab_size": 62}, r"wte.weight has shape \(61, 32\) but the model's has \(62, 32\)"),
    ],
)
def test_other_models(folder, change, message):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=message):
        huggingface.from_pretrained(folder)


def test_missing_and_damaged_files(folder, tmp_path):
    with pytest.raises(CheckpointError, match=r"has no readable config\.json and model\.safetensors"):
        huggingface.from_pretrained(tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="has no readable"):
        huggingface.from_pretrained(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="has no readable"):
        huggingface.from_pretrained(folder)


@oracles
def test_transformers_reads_what_we_write_and_we_read_what_it_writes(model, folder, tmp_path):
    from transformers import GPT2LMHeadModel

    theirs, report = GPT2LMHeadModel.from_pretrained(folder, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert_same_weights({k: p.detach().numpy() for k, p in theirs.named_parameters()}, model.state_dict())
    assert (theirs.config.resid_pdrop, theirs.config.attn_pdrop) == (0.1, 0.0)

    other = make_torch_gpt.torch_model(make_torch_gpt.SMALL, seed=3)
    other.save_pretrained(tmp_path / "theirs")
    ours = huggingface.from_pretrained(tmp_path / "theirs")
    assert_same_weights(ours.state_dict(), {k: p.detach().numpy() for k, p in other.named_parameters()})
