"""Training of GPT-2 124M on one GPU beside PyTorch: step, tokens/s, memory, and where the time of our step goes.

usage: python -m benchmarks.gpt2 [--batch 32] [--peer eager|compile|none] [--json PATH]
       python -m benchmarks.gpt2 --smoke                            a tiny model, on any device
       python -m benchmarks.gpt2 --plan                             what a step launches on an H200, without one

T=1024, bf16, AdamW, gradient clipping, random tokens. Each step of ours starts from tokens on the host and ends with
the loss there; the peer's tokens are on the GPU from the start. The peer runs first, in a process of its own. The last
losses are of weights and tokens that each draws for itself; ``benchmarks.gpt2_loss`` compares losses from the same.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import harness
from benchmarks.step_profile import StepProfile
from numstack import memory
from numstack.autograd import backward
from numstack.device import current_device, offline
from numstack.nn import GPT, GPTConfig
from numstack.optim import AdamW
from numstack.train import train_step

GIB = 2**30
N_WARMUP = 5
SMOKE = {"layers": 2, "width": 64, "heads": 2, "context": 32, "batch": 2, "vocabulary": 300, "steps": 2}
COLUMNS = ("", "ms a step", "tokens/s", "ratio to PyTorch", "peak GiB", "driver GiB", "last loss")


def main() -> None:
    options = harness.parse_options(__doc__, add_options)
    if options.smoke:
        vars(options).update(SMOKE)
    if options.plan:
        with offline.device("sm_90a", compiles=False):
            report_plan(options)
        return
    peer = run_peer(options)
    training = Training(options)
    ours = training.measure()
    rows = [_row("numstack eager", ours, peer, options)]
    if peer is not None:
        rows.append(_row(peer["name"], peer, peer, options))
    harness.report("gpt2", COLUMNS, rows, options)
    print()
    report_operations(training, 1e3 * ours["step_s"], options)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Of this benchmark; the defaults are GPT-2 124M."""
    for name, default in (("layers", 12), ("width", 768), ("heads", 12), ("context", 1024), ("batch", 32)):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"(default: {default})")
    parser.add_argument("--vocabulary", type=int, default=50257, help="ids (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, help="steps to time, after five (default: %(default)s)")
    parser.add_argument("--precision", default="bf16", help="(default: %(default)s)")
    parser.add_argument("--peer", choices=("eager", "compile", "none"), default="eager", help="(default: %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a tiny model and few steps, to see that it runs")
    parser.add_argument("--plan", action="store_true", help="list the launches of a step and its memory; nothing runs")


def _row(name: str, result: dict[str, Any], peer: dict[str, Any] | None, options: argparse.Namespace) -> list[Any]:
    rate = options.batch * options.context / result["step_s"]
    ratio = "" if peer is None else peer["step_s"] / result["step_s"]
    sizes = [result[key] / GIB for key in ("peak_bytes", "driver_bytes")]
    return [name, 1e3 * result["step_s"], round(rate), ratio, *sizes, result["loss"]]


def run_peer(options: argparse.Namespace) -> dict[str, Any] | None:
    """What ``benchmarks.peers.torch_gpt2`` measures; None where PyTorch is not installed or not wanted."""
    if options.peer == "none":
        return None
    if importlib.util.find_spec("torch") is None:
        print("PyTorch is not installed, so nothing is compared; install it: make .venv/installed-oracles")
        return None
    config = _config(options)
    given = {name: getattr(options, name) for name in ("layers", "width", "heads", "context", "batch", "steps")}
    given |= {"vocabulary": config.padded_vocab_size, "ids": config.vocab_size, "mode": options.peer}
    given["precision"] = options.precision
    return torch_gpt2(given)


def torch_gpt2(given: dict[str, Any], *flags: str) -> dict[str, Any]:
    """Run the peer with these options in a process of its own; what its last line says."""
    command = [sys.executable, "-m", "benchmarks.peers.torch_gpt2", *flags]
    command += [word for name, value in given.items() for word in ("--" + name.replace("_", "-"), str(value))]
    root = Path(__file__).resolve().parent.parent
    run = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(run.stdout.splitlines()[-1]))


def _config(options: argparse.Namespace) -> GPTConfig:
    return GPTConfig(options.layers, options.heads, options.width, options.context, options.vocabulary)


class Training:
    """A model, its optimiser, and one batch of random tokens on the host."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._n_steps = options.steps
        self.model = GPT(_config(options), precision=options.precision)
        self.optimizer = AdamW(self.model.parameters, lr=3e-4)
        tokens = np.random.default_rng(0).integers(0, options.vocabulary, (2, options.batch, options.context), np.int32)
        self.batch = (tokens[0], tokens[1])

    def step(self) -> float:
        """One step; the loss."""
        return train_step(self.model, self.optimizer, [self.batch], learning_rate=3e-4, max_norm=1.0)

    def measure(self) -> dict[str, Any]:
        """The median step and the peaks of memory."""
        for _ in range(N_WARMUP):
            self.step()
        memory.reset_peak()
        times = []
        for _ in range(self._n_steps):
            start = time.perf_counter()
            loss = self.step()
            times.append(time.perf_counter() - start)
        peak = memory.statistics().peak
        return {"step_s": statistics.median(times), "loss": loss, "peak_bytes": peak, "driver_bytes": _driver_bytes()}

    def submit_s(self) -> float:
        """Seconds that the host takes to submit a step, when it does not wait for the device."""
        times = []
        for _ in range(3):
            current_device().synchronize()
            start = time.perf_counter()
            self.submit()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def profile(self) -> StepProfile:
        """Times of the works of a step, submitted behind another so that the device never waits for the host."""
        profile = StepProfile()
        self.submit()
        self.submit(profile)
        current_device().synchronize()
        return profile

    def submit(self, profile: StepProfile | None = None) -> None:
        """What :func:`numstack.train.train_step` does, phase by phase, without waiting for the loss."""
        phase = contextlib.nullcontext if profile is None else profile.phase
        model, optimizer = self.model, self.optimizer
        with phase("optimiser"):
            model.parameters.zero_gradients()
        with phase("forward"):
            loss = model(*self.batch, gradient=optimizer.loss_gradient(1.0))
        with phase("backward"):
            backward(loss)
        with phase("optimiser"):
            optimizer.step(lr=3e-4, max_norm=1.0)


def report_plan(options: argparse.Namespace) -> None:
    """What a step launches, in order, like works together; and the peak of memory by scope."""
    training = Training(options)
    training.submit()
    memory.reset_peak()
    profile = StepProfile()
    training.submit(profile)
    statistics = memory.statistics()
    columns = ("operation", "work", "times", "MiB", "GFLOP", "arrays")
    rows = [
        (row.group, row.name, row.n_works, round(1e9 * row.gbytes / 2**20), round(row.gflop), row.arrays)
        for row in profile.by_shapes()
    ]
    harness.report("gpt2-plan", columns, rows, options)
    print(f"\n{sum(row[2] for row in rows)} works\n{statistics}")
    if options.json is not None:
        _append(options.json, peak_bytes=statistics.peak)


def _driver_bytes() -> int:
    """Device memory in use by anyone, as the driver has it; 0 on a CPU."""
    if current_device().kind != "cuda":
        return 0
    from cuda.bindings import driver

    _, free, total = driver.cuMemGetInfo()
    return int(total - free)


def report_operations(training: Training, step_ms: float, options: argparse.Namespace) -> None:
    """The table of where the time of a step goes; a second JSON, beside the first."""
    profile = training.profile()
    rows = profile.by_operation()
    busy_ms = sum(row.ms for row in rows)
    table = [[row.group, row.n_works, row.ms, 100 * row.ms / step_ms, row.rate] for row in rows]
    table.append(["all works", sum(row.n_works for row in rows), busy_ms, 100 * busy_ms / step_ms, ""])
    gap_ms = step_ms - busy_ms
    table.append(["the device waits", 0, gap_ms, 100 * gap_ms / step_ms, ""])
    table.append(["(the host submits)", 0, 1e3 * training.submit_s(), "", ""])
    beside = None if options.json is None else options.json.with_stem(options.json.stem + "-operations")
    harness.report(
        "gpt2-operations", ("operation", "works", "ms", "% of the step", "rate"), table, argparse.Namespace(json=beside)
    )
    if beside is not None:
        _append(beside, works=[row._asdict() for row in profile.by_work()])


def _append(path: Path, **figures: Any) -> None:
    """Add figures to a JSON."""
    path.write_text(json.dumps(json.loads(path.read_text()) | figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
