"""GPT-2 models in the files of Hugging Face's ``transformers``: ``config.json`` and ``model.safetensors``.

``GPT2LMHeadModel.from_pretrained(folder)`` reads what :func:`save_pretrained` writes, and :func:`from_pretrained` reads
what ``model.save_pretrained(folder)`` writes. Of the rates of dropout ``resid_pdrop`` is taken for embeddings too, and
``attn_pdrop`` is ignored: attention probabilities are never dropped here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from numstack.errors import CheckpointError
from numstack.files import write_atomically
from numstack.nn.gpt import GPT, GPTConfig
from numstack.precision import Policy

_PREFIX = "transformer."
_HEAD, _TOKENS = "lm_head.weight", "transformer.wte.weight"
# Causal masks, which old files hold as if they were weights.
_BUFFERS = (".attn.bias", ".attn.masked_bias")
# What the model computes, in the words of GPT2Config; another value would be another model.
_FIXED = {
    "activation_function": "gelu_new",
    "model_type": "gpt2",
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "tie_word_embeddings": True,
}


def save_pretrained(model: GPT, folder: str | Path) -> None:
    """Write ``config.json`` and ``model.safetensors`` into ``folder``, made if need be.

    Each file is written beside its final name and renamed when it is complete.
    """
    config = model.config
    described = _FIXED | {
        "architectures": ["GPT2LMHeadModel"],
        "attn_pdrop": 0.0,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "initializer_range": 0.02,
        "layer_norm_epsilon": config.layer_norm_eps,
        "n_embd": config.n_embd,
        "n_head": config.n_head,
        "n_inner": None,
        "n_layer": config.n_layer,
        "n_positions": config.block_size,
        "torch_dtype": "float32",
        "vocab_size": config.vocab_size,
    }
    folder = Path(folder)
    write_atomically(folder / "config.json", json.dumps(described, indent=2, sort_keys=True).encode() + b"\n")
    # transformers refuses a file that does not say which framework its layout is of.
    write_atomically(folder / "model.safetensors", save(model.state_dict(), metadata={"format": "pt"}))


def from_pretrained(folder: str | Path, *, precision: str | Policy = "fp32") -> GPT:
    """The model in ``folder``.

    Parameters
    ----------
    folder : path
    precision : str or Policy
        As for :class:`GPT`; the files hold float32 in any case.

    Raises
    ------
    CheckpointError
        If a file is missing or damaged, or describes another kind of model.
    """
    folder = Path(folder)
    try:
        described = json.loads((folder / "config.json").read_text())
        state = load_file(folder / "model.safetensors")
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"from_pretrained: {folder} has no readable config.json and model.safetensors ({error})"
        ) from None
    model = GPT(_config(described, folder), precision=precision)
    model.load_state_dict(_canonical(state))
    return model


def _config(described: dict[str, Any], folder: Path) -> GPTConfig:
    for key, expected in _FIXED.items():
        if described.get(key, expected) != expected:
            raise CheckpointError(
                f"from_pretrained: {folder}/config.json says {key}={described[key]!r}; only {expected!r} is supported"
            )
    if described.get("n_inner") not in (None, 4 * described["n_embd"]):
        raise CheckpointError(
            f"from_pretrained: {folder}/config.json says n_inner={described['n_inner']}; only 4 * n_embd is supported"
        )
    return GPTConfig(
        n_layer=described["n_layer"],
        n_head=described["n_head"],
        n_embd=described["n_embd"],
        block_size=described["n_positions"],
        vocab_size=described["vocab_size"],
        dropout=described.get("resid_pdrop", 0.1),
        layer_norm_eps=described.get("layer_norm_epsilon", 1e-5),
    )


def _canonical(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The state with our names: the prefix on all of them, no masks, no second copy of the tied head."""
    named = {
        name if name.startswith((_PREFIX, _HEAD)) else _PREFIX + name: values
        for name, values in state.items()
        if not name.endswith(_BUFFERS)
    }
    head = named.pop(_HEAD, None)
    if head is not None and not np.array_equal(head, named.get(_TOKENS, head)):
        raise CheckpointError(f"from_pretrained: {_HEAD} differs from {_TOKENS}; only a tied head is supported")
    return named
