"""Write torch_gpt.npz: a small GPT-2 with what ``transformers`` and PyTorch's autograd make of it.

Run it with torch and transformers installed::

    pip install torch transformers
    python -m tests.golden.make_torch_gpt

The weights are drawn anew, wider than a training would start with, so that every nonlinearity is far from linear.
Logits are in float32, as ``GPT2LMHeadModel`` computes them; loss and gradients come from the same model in float64.
How far PyTorch's own gradients are from those in bfloat16 and float16 is what ours are measured by there.
"""

import copy
from pathlib import Path
from typing import Any

import numpy as np

FILE = Path(__file__).with_name("torch_gpt.npz")
SMALL = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 16, "vocab_size": 61}


def torch_model(config: dict[str, int], seed: int) -> Any:
    """A GPT2LMHeadModel without dropout, with random weights."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    model = GPT2LMHeadModel(
        GPT2Config(
            n_layer=config["n_layer"],
            n_head=config["n_head"],
            n_embd=config["n_embd"],
            n_positions=config["block_size"],
            vocab_size=config["vocab_size"],
            attn_pdrop=0.0,
            embd_pdrop=0.0,
            resid_pdrop=0.0,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            center = 1.0 if ".ln_" in name and name.endswith("weight") else 0.0
            parameter.normal_(center, 0.1)
    return model


def collect(config: dict[str, int], seed: int = 0, n_sequences: int = 3) -> dict[str, np.ndarray]:
    """Weights, tokens, targets (-1: ignored), and what the model makes of them.

    Returns
    -------
    dict
        ``tokens``, ``targets``, ``logits``, ``loss``, and of each parameter ``weight/<name>``, ``gradient/<name>`` and,
        for each 16-bit format, ``<format>_error/<name>``: what its gradient is off by, relative to its norm.
    """
    import torch

    model = torch_model(config, seed)
    generator = np.random.default_rng(seed)
    shape = (n_sequences, config["block_size"])
    tokens, targets = (generator.integers(0, config["vocab_size"], shape, dtype=np.int32) for _ in range(2))
    targets[0, : shape[1] // 2] = -1
    with torch.no_grad():
        logits = model(torch.from_numpy(tokens).long()).logits.numpy()
    arrays = {f"weight/{name}": p.detach().numpy().copy() for name, p in model.named_parameters()}
    loss, gradients = _gradients(model.double(), tokens, targets)
    arrays |= {f"gradient/{name}": gradient for name, gradient in gradients.items()}
    for dtype in (torch.bfloat16, torch.float16):
        _, rounded = _gradients(copy.deepcopy(model).to(dtype), tokens, targets, scale=1024.0)
        for name, gradient in gradients.items():
            error = np.linalg.norm(rounded[name] - gradient) / np.linalg.norm(gradient)
            arrays[f"{str(dtype).removeprefix('torch.')}_error/{name}"] = np.array(error)
    return arrays | {"tokens": tokens, "targets": targets, "logits": logits, "loss": np.array(loss)}


def _gradients(
    model: Any, tokens: np.ndarray, targets: np.ndarray, *, scale: float = 1.0
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss, and its gradients by parameter in float64; ``scale``: of the loss while gradients are computed."""
    import torch

    model.zero_grad()
    output = model(torch.from_numpy(tokens).long()).logits
    loss = torch.nn.functional.cross_entropy(
        output.reshape(-1, output.shape[-1]), torch.from_numpy(targets).long().reshape(-1), ignore_index=-1
    )
    (loss * scale).backward()
    return loss.item(), {name: p.grad.double().numpy() / scale for name, p in model.named_parameters()}


if __name__ == "__main__":
    np.savez_compressed(FILE, **collect(SMALL))  # type: ignore[arg-type]
    print(f"{FILE}: {FILE.stat().st_size} bytes")
