"""Training speed on the CPU: the example on two ranks beside PyTorch with two threads, on the same model and batches.

usage: python -m benchmarks.cpu_gpt [--steps N] [--ranks N] [--json PATH]

Both start from the same weights, so their losses show that they do the same work. Tokens/s are medians over the steps
after the first ten. PyTorch (eager, scaled_dot_product_attention, fused AdamW) is optional.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from numstack import launch
from numstack.data import Sampler, shakespeare
from numstack.nn import GPT, GPTConfig
from numstack.optim import schedules
from numstack.train import Options, metrics

ROOT = Path(__file__).resolve().parent.parent
N_WARMUP = 10


def main() -> None:
    given = harness.parse_options(__doc__, add_options)
    options = Options(steps=given.steps)
    rows = [(f"numstack, {given.ranks} ranks", *train_numstack(options, given.ranks))]
    try:
        import torch
    except ImportError:
        print("PyTorch is not installed, so nothing is compared; install it: make .venv/installed-oracles")
    else:
        rows.append((f"PyTorch {torch.__version__}, {given.ranks} threads", *train_torch(options, given.ranks)))
    ratio = [(name, tokens_per_s, tokens_per_s / rows[-1][1], loss) for name, tokens_per_s, loss in rows]
    harness.report("cpu_gpt", ("", "tokens/s", "ratio to the last row", f"loss in step {given.steps}"), ratio, given)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of this benchmark."""
    parser.add_argument("--steps", type=int, default=60, help="steps to train (default: 60)")
    parser.add_argument("--ranks", type=int, default=2, help="ranks of numstack and threads of PyTorch (default: 2)")


def train_numstack(options: Options, n_ranks: int) -> tuple[float, float]:
    """Tokens/s and the last loss of the example under mpirun."""
    with tempfile.TemporaryDirectory() as folder:
        program = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), "--out", f"{folder}/run"]
        program += ["--steps", str(options.steps), "--sample", "0", "--evaluate-windows", "1"]
        if launch.run(program, n_ranks=n_ranks) != 0:
            raise SystemExit("the example failed; its message is above")
        rows = [row for row in metrics.read(Path(folder) / "run" / "metrics.jsonl") if "loss" in row]
    return statistics.median(row["tokens_per_s"] for row in rows[N_WARMUP:]), rows[-1]["loss"]


def train_torch(options: Options, n_threads: int) -> tuple[float, float]:
    """Tokens/s and the last loss of the same training in PyTorch."""
    import torch

    torch.set_num_threads(n_threads)
    dataset = shakespeare()
    config = GPTConfig(options.layers, options.heads, options.width, options.context, dataset.tokenizer.vocabulary_size)
    weights = {
        name: torch.nn.Parameter(torch.from_numpy(values))
        for name, values in GPT(config, seed=options.seed).state_dict().items()
    }
    optimizer = torch.optim.AdamW(
        [
            {"params": [w for w in weights.values() if w.dim() > 1], "weight_decay": options.weight_decay},
            {"params": [w for w in weights.values() if w.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(options.beta1, options.beta2),
        fused=True,
    )
    learning_rate = schedules.create(
        options.schedule,
        peak=options.learning_rate,
        final=options.final_learning_rate,
        n_steps=options.steps,
        n_warmup=min(options.warmup, options.steps),
    )
    sampler = Sampler(dataset.train, batch=options.batch, context=options.context, seed=options.seed)
    rates = []
    for step in range(options.steps):
        began_s = time.perf_counter()
        [(inputs_BT, targets_BT)] = sampler.micro_batches(step)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss = torch_loss(weights, config, inputs_BT, targets_BT)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), options.clip or math.inf)
        optimizer.step()
        value = loss.item()
        rates.append(inputs_BT.size / (time.perf_counter() - began_s))
    return statistics.median(rates[N_WARMUP:]), value


def torch_loss(weights: dict[str, Any], config: GPTConfig, inputs_BT: np.ndarray, targets_BT: np.ndarray) -> Any:
    """GPT-2's loss from weights with Hugging Face's names."""
    import torch
    from torch.nn import functional as F

    def of(name: str) -> tuple[Any, Any]:
        return weights[f"transformer.{name}.weight"], weights[f"transformer.{name}.bias"]

    def linear(x: Any, name: str) -> Any:
        weight, bias = of(name)
        return torch.addmm(bias, x.reshape(-1, weight.shape[0]), weight).view(*x.shape[:-1], -1)

    def norm(x: Any, name: str) -> Any:
        return F.layer_norm(x, (config.n_embd,), *of(name), config.layer_norm_eps)

    n_batch, n_time = inputs_BT.shape
    table = weights["transformer.wte.weight"]
    x = F.embedding(torch.from_numpy(inputs_BT).long(), table) + weights["transformer.wpe.weight"][:n_time]
    for layer in range(config.n_layer):
        block = f"h.{layer}"
        qkv = linear(norm(x, f"{block}.ln_1"), f"{block}.attn.c_attn")
        q, k, v = (part.view(n_batch, n_time, config.n_head, -1).transpose(1, 2) for part in qkv.chunk(3, dim=-1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(y.transpose(1, 2).reshape(x.shape), f"{block}.attn.c_proj")
        y = F.gelu(linear(norm(x, f"{block}.ln_2"), f"{block}.mlp.c_fc"), approximate="tanh")
        x = x + linear(y, f"{block}.mlp.c_proj")
    logits = norm(x, "ln_f") @ table.T
    return F.cross_entropy(logits.view(-1, config.vocab_size), torch.from_numpy(targets_BT).long().view(-1))


if __name__ == "__main__":
    main()
