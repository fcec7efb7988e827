"""Peer: training steps of GPT-2 in PyTorch: bf16 autocast, scaled_dot_product_attention, fused AdamW, clipping.

usage: python -m benchmarks.peers.torch_gpt2 [--mode compile] [--batch 32] ...                     speed, random tokens
       python -m benchmarks.peers.torch_gpt2 --start FILE.npz --learning-rates FILE.npy ...          the losses of a run

The last line of what it prints is JSON: medians and peaks, or losses. ``--start`` holds weights by the names of Hugging
Face's GPT-2, and ``tokens``, (steps, batch, context + 1). Without ``--deterministic`` two such runs differ, after some
40 steps by up to 0.7%.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

N_WARMUP = 5
# Of our linear layers by the names of GPT-2's: those are stored [in, out], PyTorch's [out, in].
LINEAR = {"qkv": "attn.c_attn", "proj": "attn.c_proj", "fc": "mlp.c_fc", "fc2": "mlp.c_proj"}
NORMS = {"ln1": "ln_1", "ln2": "ln_2"}


class Block(nn.Module):
    """Attention and MLP, each on normalised input and added to the residual stream."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.n_heads, -1).transpose(1, 2) for y in self.qkv(self.ln1(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.proj(y)
        return x + self.fc2(F.gelu(self.fc(self.ln2(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 with its tied head."""

    def __init__(self, n_layers: int, width: int, n_heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, n_heads) for _ in range(n_layers))
        self.ln = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, 0, 0.02)
        for block in self.blocks:  # as GPT-2 starts, and so does ours
            for layer in (block.qkv, block.proj, block.fc, block.fc2):
                nn.init.zeros_(layer.bias)
            for branch_end in (block.proj, block.fc2):
                nn.init.normal_(branch_end.weight, 0, 0.02 / math.sqrt(2 * n_layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            h = block(h)
        logits = self.head(self.ln(h))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), y.reshape(-1))

    def load(self, state: dict[str, np.ndarray]) -> None:
        """Take weights that have Hugging Face's names and shapes."""
        named = {"tokens": "wte", "positions": "wpe"}
        ours = {f"{our}.weight": state[f"transformer.{their}.weight"] for our, their in named.items()}
        ours |= {f"ln.{kind}": state[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")}
        for layer in range(len(self.blocks)):
            for our, their in (LINEAR | NORMS).items():
                for kind in ("weight", "bias"):
                    values = state[f"transformer.h.{layer}.{their}.{kind}"]
                    ours[f"blocks.{layer}.{our}.{kind}"] = values.T if values.ndim == 2 else values
        ours["head.weight"] = ours["tokens.weight"]
        self.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in ours.items()})


def main() -> None:
    options = parse_options()
    torch.set_float32_matmul_precision("high")
    if options.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # before cuBLAS starts
        torch.use_deterministic_algorithms(True)
        torch.backends.cuda.enable_cudnn_sdp(False)  # its backward is not; flash attention's is
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        torch.set_num_threads(options.threads)
    model = GPT(options.layers, options.width, options.heads, options.context, options.vocabulary).to(device)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        lr=options.learning_rate,
        betas=(0.9, 0.95),
        fused=True,
    )
    run = torch.compile(model) if options.mode == "compile" else model

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=options.precision == "bf16"):
            loss = run(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    if options.start:
        result = train(model, optimizer, step, options, device)
    else:
        result = measure(step, options, device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(json.dumps({"name": f"PyTorch {torch.__version__} {options.mode}", "device": name} | result))


def measure(step: Any, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The median step on random tokens that are on the device already, and the peaks of memory.

    A loss is read once the next step is submitted: the device waits for the host no more than ours does.
    """
    shape = (options.batch, options.context)
    x, y = (torch.randint(0, options.ids, shape, device=device) for _ in range(2))
    times = []
    last = step(x, y)
    for number in range(N_WARMUP + options.steps):
        start = time.perf_counter()
        before, last = last, step(x, y)
        loss = before.item()
        if number >= N_WARMUP:
            times.append(time.perf_counter() - start)
    memory = {"peak_bytes": 0, "driver_bytes": 0}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info()
        memory = {"peak_bytes": torch.cuda.max_memory_allocated(), "driver_bytes": total - free}
    return {"step_s": statistics.median(times), "loss": loss, **memory}


def train(model: GPT, optimizer: Any, step: Any, options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """The loss of each step on the tokens of a file, from its weights."""
    with np.load(options.start) as file:
        model.load({name: file[name] for name in file.files if name != "tokens"})
        tokens = torch.from_numpy(file["tokens"].astype(np.int64)).to(device)
    losses = []
    for batch, learning_rate in zip(tokens, np.load(options.learning_rates), strict=True):
        for group in optimizer.param_groups:
            group["lr"] = float(learning_rate)
        losses.append(step(batch[:, :-1], batch[:, 1:]).item())
    return {"losses": losses}


def parse_options() -> argparse.Namespace:
    """The command line; the defaults are GPT-2 124M at batch 32."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("eager", "compile"), default="eager")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="bf16", help="of autocast")
    for name, default in (("layers", 12), ("width", 768), ("heads", 12), ("context", 1024), ("batch", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocabulary", type=int, default=50304, help="rows of the table (default: %(default)s)")
    parser.add_argument("--ids", type=int, default=50257, help="random tokens are below this (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument("--deterministic", action="store_true", help="sums in an order that does not change")
    parser.add_argument("--start", metavar="FILE.npz")
    parser.add_argument("--learning-rates", metavar="FILE.npy")
    return parser.parse_args()


if __name__ == "__main__":
    main()
