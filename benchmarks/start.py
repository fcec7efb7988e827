"""Seconds from the start of Python to the end of the first training step of GPT-2 124M, cold and warm.

usage: python -m benchmarks.start [--layers N] [--width N] [--json PATH]

Cold compiles every kernel, into an empty cache; warm finds them there and compiles nothing. Each is a new process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

from benchmarks import harness


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=50257)
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--child", type=float, help=argparse.SUPPRESS)  # when this process was started


def first_step(options: argparse.Namespace) -> dict[str, float]:
    """Seconds since the process started: after the imports, with the model in memory, after the step."""
    import numpy as np

    from numstack.autograd import backward
    from numstack.device import current_device
    from numstack.nn import GPT, GPTConfig
    from numstack.optim import AdamW

    marks = {"imported": time.time() - options.child}
    config = GPTConfig(
        n_layer=options.layers,
        n_head=options.width // 64,
        n_embd=options.width,
        block_size=options.context,
        vocab_size=options.vocabulary,
    )
    model = GPT(config, seed=0, precision=options.precision)
    optimizer = AdamW(model.parameters)
    marks["model made"] = time.time() - options.child
    tokens = np.random.default_rng(0).integers(0, options.vocabulary, (1, options.context + 1), dtype=np.int32)
    model.set_dropout_step(0)
    backward(model(tokens[:, :-1], tokens[:, 1:]))
    optimizer.step(lr=1e-4, max_norm=1.0)
    current_device().synchronize()
    marks["first step done"] = time.time() - options.child
    return marks


def measure(options: argparse.Namespace, cache: str) -> dict[str, float]:
    """``first_step`` in a process of its own."""
    shape = ["--layers", options.layers, "--width", options.width, "--context", options.context]
    rest = ["--vocabulary", options.vocabulary, "--precision", options.precision, "--child", time.time()]
    command = [sys.executable, "-m", "benchmarks.start", *map(str, shape + rest)]
    run = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "NUMSTACK_CACHE": cache}
    )
    return dict(json.loads(run.stdout.splitlines()[-1]))


def main() -> None:
    options = harness.parse_options(__doc__, add_options)
    if options.child:
        print(json.dumps(first_step(options)))
        return
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = measure(options, cache), measure(options, cache)
    rows = [(name, cold[name], warm[name]) for name in cold]
    harness.report("start", ("seconds until", "cold", "warm"), rows, options)


if __name__ == "__main__":
    main()
