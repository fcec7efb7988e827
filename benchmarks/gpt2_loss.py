"""Loss curves of GPT-2 124M on Shakespeare, ours beside PyTorch's, from the same weights on the same batches.

usage: python -m benchmarks.gpt2_loss [--steps 200] [--batch 32] [--peak 3e-4] [--residual bfloat16] [--json PATH]
       python -m benchmarks.gpt2_loss --smoke                      a tiny model, on any device

bf16 on both sides, all in deterministic algorithms. Rounding alone moves a curve, the higher the learning rate the
further: PyTorch runs several times, each with the rows of each batch in another order, which in exact arithmetic would
change nothing. Ours is compared with their median in each step, and each of them with the median of the others.
PyTorch's autocast keeps the residual stream in float32, as our policies do; ``--residual bfloat16`` shows what rounding
it costs. The table has every tenth part of the run; the JSON all curves.
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
from numpy.typing import ArrayLike

from benchmarks import harness
from benchmarks.gpt2 import torch_gpt2
from numstack.data import Sampler, shakespeare
from numstack.nn import GPT, GPTConfig
from numstack.optim import AdamW, schedules
from numstack.precision import Policy
from numstack.train import train_step

SMOKE = {
    "layers": 2,
    "width": 64,
    "heads": 2,
    "context": 32,
    "batch": 4,
    "steps": 20,
    "peers": 2,
    "tokenizer": "characters",
}
WINDOW = 5  # steps, of the running means


def main() -> None:
    options = harness.parse_options(__doc__, add_options)
    if options.smoke:
        vars(options).update(SMOKE)
    if importlib.util.find_spec("torch") is None:
        sys.exit("gpt2_loss: PyTorch is not installed, so there is nothing to compare with; install it first")
    if options.peers < 2:
        sys.exit(f"gpt2_loss: --peers {options.peers}; a run of PyTorch is compared with the others: at least 2")
    dataset = shakespeare(options.tokenizer)
    config = GPTConfig(options.layers, options.heads, options.width, options.context, dataset.tokenizer.vocabulary_size)
    sampler = Sampler(dataset.train, batch=options.batch, context=options.context, seed=0)
    batches = [next(sampler.micro_batches(step)) for step in range(options.steps)]
    rates = np.array([learning_rate(step, options.steps, options.peak) for step in range(options.steps)], np.float32)
    parts = {"embedding": options.residual} if options.residual else {}
    model = GPT(config, seed=0, precision=Policy.named(options.precision, **parts))
    with tempfile.TemporaryDirectory() as folder:
        turns = [run * options.batch // options.peers for run in range(options.peers)]
        theirs = np.array([torch_losses(Path(folder), model, turned(batches, by), rates, options) for by in turns])
    ours = our_losses(model, batches, rates)
    median = np.median(theirs, axis=0)
    off = percent_apart(ours, median)
    lowest, highest = (percent_apart(of_step, median) for of_step in (theirs.min(axis=0), theirs.max(axis=0)))
    every = max(1, options.steps // 10)
    rows = [
        (step + 1, ours[step], median[step], off[step], lowest[step], highest[step])
        for step in [0, *range(every - 1, options.steps, every)]
    ]
    columns = ("step", "numstack", f"PyTorch, median of {options.peers}", "% apart", "its lowest, %", "its highest, %")
    harness.report("gpt2_loss", columns, rows, options)
    print("numstack from PyTorch's median:", in_words(off))
    print("numstack from each of PyTorch's:", *(f"{np.abs(percent_apart(ours, run)).max():.3g}%" for run in theirs))
    for number, run in enumerate(theirs, start=1):
        others = np.median(np.delete(theirs, number - 1, axis=0), axis=0)
        print(f"PyTorch's run {number} from the median of the others:", in_words(percent_apart(run, others)))
    if options.json is not None:
        figures = json.loads(options.json.read_text())
        figures["curves"] = {"numstack": ours, "torch": theirs.tolist(), "learning_rate": rates.tolist()}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of this benchmark; the defaults are GPT-2 124M."""
    sizes = (("layers", 12), ("width", 768), ("heads", 12), ("context", 1024), ("batch", 32), ("steps", 200))
    for name, default in sizes:
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
    parser.add_argument(
        "--peak", type=float, default=3e-4, help="learning rate after the warm-up (default: %(default)s)"
    )
    parser.add_argument("--peers", type=int, default=5, help="runs of PyTorch, at least 2 (default: %(default)s)")
    parser.add_argument("--precision", default="bf16", help="(default: %(default)s)")
    parser.add_argument("--residual", metavar="FORMAT", help="what the residual stream is stored in, if not that")
    parser.add_argument("--tokenizer", choices=("gpt2", "characters"), default="gpt2", help="(default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few steps, to see that it runs")


def percent_apart(losses: ArrayLike, reference: np.ndarray) -> np.ndarray:
    """How much higher each loss is than the reference's, in percent."""
    return 100 * (np.asarray(losses) / reference - 1)


def in_words(percent: np.ndarray) -> str:
    """How far apart two curves are."""
    means = np.convolve(percent, np.full(WINDOW, 1 / WINDOW), "valid")
    size = np.abs(percent)
    return (
        f"{size.mean():.3g}% on average, {size.max():.3g}% at most, in step {size.argmax() + 1}; "
        f"means of {WINDOW} steps at most {np.abs(means).max():.3g}%"
    )


def turned(batches: list[tuple[np.ndarray, np.ndarray]], by: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The batches, the rows of each moved down by this many."""
    return [(np.roll(inputs, by, axis=0), np.roll(targets, by, axis=0)) for inputs, targets in batches]


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
    result = torch_gpt2(given | {"learning-rates": folder / "rates.npy"}, "--deterministic")
    losses: list[float] = result["losses"]
    return losses


if __name__ == "__main__":
    main()
