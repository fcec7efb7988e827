"""Policies and loss scaling: what they say, and what they refuse."""

import dataclasses
import json

import pytest

from numstack.dtypes import bfloat16, float16, float32
from numstack.errors import ConfigError
from numstack.precision import NAMES, LossScaling, Policy, Precision


@pytest.mark.parametrize(("name", "low"), [("fp32", None), ("bf16", bfloat16), ("fp16", float16)])
def test_named_policies(name, low):
    policy = Policy.named(name)
    assert policy.low == low
    storage = low or float32
    for part, precision in policy:
        products = part in ("attention", "mlp", "head")
        assert precision.storage == (storage if products else float32), part
        assert precision.computation == (storage if products else float32), part
    assert (policy.loss_scaling is not None) == (name == "fp16")
    assert name in NAMES


def test_parts_can_differ():
    policy = Policy.named("bf16", head="float32", norms="bfloat16", mlp=Precision(float32, float32))
    assert [precision.storage for _, precision in policy].count(bfloat16) == 2
    assert policy.head == policy.mlp == Precision(float32, float32)
    assert policy.norms == Precision(bfloat16, float32)  # stored in 16 bits, computed in float32
    assert Policy.named("fp32", mlp="float16").loss_scaling == LossScaling()
    scaling = LossScaling(initial=8.0, growth=4.0, backoff=0.25, window=10)
    assert Policy.named("bf16", loss_scaling=scaling).loss_scaling is scaling
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.head = policy.attention  # type: ignore[misc]


def test_in_words_and_in_a_manifest():
    assert str(Policy.named("fp32")) == "float32 in all parts"
    assert str(Policy.named("fp16", head="float32", loss_scaling=LossScaling(initial=1024.0))) == (
        "float32 in embedding, softmax, norms, head, reductions, optimiser; float16 in attention, mlp; "
        "loss scale from 1024"
    )
    table = json.loads(json.dumps(Policy.named("bf16").table()))
    assert table["mlp"] == {"storage": "bfloat16", "computation": "bfloat16"}
    assert table["softmax"] == {"storage": "float32", "computation": "float32"}


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"softmax": "bfloat16"}, "softmax=bfloat16; it is always float32: it adds exponentials, and a sum of 16 bits"),
        ({"reductions": "float16"}, "reductions=float16; it is always float32: a sum of 16 bits stops growing"),
        ({"optimiser": "bfloat16"}, "optimiser=bfloat16; it is always float32: updates are thousands of times smaller"),
        ({"mlp": "float8"}, "mlp='float8'; choose one of float32, bfloat16, float16"),
        ({"mlp": "float16"}, "mlp=float16 beside attention=bfloat16; .* choose one 16-bit format for all parts"),
        ({"lm_head": "float32"}, "there is no part 'lm_head'; parts are embedding, attention, softmax"),
        ({"norms": Precision(bfloat16, bfloat16)}, "norms is to compute in bfloat16 what .*; it computes in float32"),
        ({"mlp": Precision(bfloat16, float32)}, "mlp is to compute in float32 what .* products take their operands as"),
    ],
)
def test_what_cannot_work_is_refused(parts, message):
    with pytest.raises(ConfigError, match=f"precision: {message}"):
        Policy.named("bf16", **parts)


def test_unknown_policy():
    with pytest.raises(ConfigError, match="there is no policy 'int8'; choose one of fp32, bf16, fp16"):
        Policy.named("int8")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"initial": 0.0}, r"initial=0.0; expected a number from 2\^-24 to 2\^60"),
        ({"initial": float("inf")}, "initial=inf"),
        ({"initial": float("nan")}, "initial=nan"),
        ({"growth": 1.0}, "growth=1.0; expected a number above 1"),
        ({"backoff": 1.0}, "backoff=1.0; expected a number between 0 and 1"),
        ({"backoff": 0.0}, "backoff=0.0"),
        ({"window": 0}, "window=0; expected an integer of at least 1"),
        ({"window": 2.5}, "window=2.5"),
    ],
)
def test_loss_scaling_that_cannot_work(values, message):
    with pytest.raises(ConfigError, match=f"LossScaling: {message}"):
        LossScaling(**values)
