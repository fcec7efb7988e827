"""Loss curves of GPT-2 124M on Shakespeare, ours beside PyTorch's, from the same weights on the same batches.

usage: python -m benchmarks.gpt2_loss [--steps 200] [--batch 8] [--peak 3e-4] [--residual float32] [--json PATH]
       python -m benchmarks.gpt2_loss --smoke                      a tiny model, on any device

bf16 on both sides. Rounding alone moves a curve: "PyTorch again" has the rows of each batch in the other order, which
in exact arithmetic would change nothing; the higher the learning rate, the further. PyTorch's autocast keeps the
residual stream in float32, as we do with ``--residual float32``: on a CPU, four layers of 128, context 128, characters,
peak 1e-3, that takes us from 0.0056% to 0.0040% on average, where PyTorch again is at 0.0039%. The table has every
tenth part of the run; the JSON all three curves.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.gpt2 import torch_gpt2
from numstack.data import Sampler, shakespeare
from numstack.nn import GPT, GPTConfig
from numstack.optim import AdamW, schedules
from numstack.precision import Policy
from numstack.train import train_step

SMOKE = {"layers": 2, "width": 64, "heads": 2, "context": 32, "batch": 4, "steps": 20, "tokenizer": "characters"}
WINDOW = 5  # steps, of the running means


def main() -> None:
    options = harness.parse_options(__doc__, add_options)
    if options.smoke:
        vars(options).update(SMOKE)
    if importlib.util.find_spec("torch") is None:
        sys.exit("gpt2_loss: PyTorch is not installed, so there is nothing to compare with; install it first")
    dataset = shakespeare(options.tokenizer)
    config = GPTConfig(options.layers, options.heads, options.width, options.context, dataset.tokenizer.vocabulary_size)
    sampler = Sampler(dataset.train, batch=options.batch, context=options.context, seed=0)
    batches = [next(sampler.micro_batches(step)) for step in range(options.steps)]
    rates = np.array([learning_rate(step, options.steps, options.peak) for step in range(options.steps)], np.float32)
    parts = {"embedding": options.residual} if options.residual else {}
    model = GPT(config, seed=0, precision=Policy.named(options.precision, **parts))
    with tempfile.TemporaryDirectory() as folder:
        theirs = torch_losses(Path(folder), model, batches, rates, options)
        turned = [(inputs[::-1], targets[::-1]) for inputs, targets in batches]
        again = torch_losses(Path(folder), model, turned, rates, options)
    ours = our_losses(model, batches, rates)
    off, floor = percent_apart(ours, theirs), percent_apart(again, theirs)
    every = max(1, options.steps // 10)
    rows = [
        (step + 1, ours[step], theirs[step], off[step], again[step], floor[step])
        for step in [0, *range(every - 1, options.steps, every)]
    ]
    columns = ("step", "numstack", "PyTorch", "% apart", "PyTorch again", "% apart from itself")
    harness.report("gpt2_loss", columns, rows, options)
    for name, percent in (("numstack", off), ("PyTorch again", floor)):
        means = np.convolve(percent, np.full(WINDOW, 1 / WINDOW), "valid")
        size = np.abs(percent)
        print(
            f"{name}: {size.mean():.3g}% from PyTorch on average, {size.max():.3g}% at most, in step "
            f"{size.argmax() + 1}; means of {WINDOW} steps at most {np.abs(means).max():.3g}%"
        )
    if options.json is not None:
        figures = json.loads(options.json.read_text())
        figures["curves"] = {"numstack": ours, "torch": theirs, "torch again": again, "learning_rate": rates.tolist()}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of this benchmark; the defaults are GPT-2 124M."""
    sizes = (("layers", 12), ("width", 768), ("heads", 12), ("context", 1024), ("batch", 8), ("steps", 200))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
    parser.add_argument(
        "--peak", type=float, default=3e-4, help="learning rate after the warm-up (default: %(default)s)"
    )
    parser.add_argument("--precision", default="bf16", help="(default: %(default)s)")
    parser.add_argument("--residual", metavar="FORMAT", help="what the residual stream is stored in, if not that")
    parser.add_argument("--tokenizer", choices=("gpt2", "characters"), default="gpt2", help="(default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few steps, to see that it runs")


def percent_apart(losses: list[float], reference: list[float]) -> np.ndarray:
    """How much higher each loss is than the reference's, in percent."""
    return 100 * (np.array(losses) / reference - 1)


def learning_rate(step: int, n_steps: int, peak: float) -> float:
    """A warm-up over a tenth of the run, then half a cosine."""
    return schedules.cosine(step, peak=peak, n_steps=n_steps, n_warmup=n_steps // 10, final=peak / 10)


def our_losses(model: GPT, batches: list[tuple[np.ndarray, np.ndarray]], rates: np.ndarray) -> list[float]:
    """The loss of every step."""
    optimizer = AdamW(model.parameters)
    return [
        train_step(model, optimizer, [batch], learning_rate=float(rate), max_norm=1.0)
        for batch, rate in zip(batches, rates, strict=True)
    ]


def torch_losses(
    folder: Path,
    model: GPT,
    batches: list[tuple[np.ndarray, np.ndarray]],
    rates: np.ndarray,
    options: argparse.Namespace,
) -> list[float]:
    """The loss of every step of the peer, which gets the model's weights and the batches in a file."""
    tokens = np.stack([np.concatenate([inputs, targets[:, -1:]], axis=1) for inputs, targets in batches])
    arrays: dict[str, Any] = model.state_dict() | {"tokens": tokens}
    np.savez(folder / "start.npz", **arrays)
    np.save(folder / "rates.npy", rates)
    given = {name: getattr(options, name) for name in ("layers", "width", "heads", "context", "batch", "precision")}
    # Without padding: the peer would take columns of padding for classes.
    given |= {"vocabulary": model.config.vocab_size, "start": folder / "start.npz"}
    losses: list[float] = torch_gpt2(given | {"learning-rates": folder / "rates.npy"})["losses"]
    return losses


if __name__ == "__main__":
    main()
