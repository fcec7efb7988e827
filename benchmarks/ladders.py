"""Every rung of every ladder on a GPU: what each variant of an operation takes, at the sizes of GPT-2 124M's training.

usage: python -m benchmarks.ladders [--json PATH] [--operations WORD ...] [--batch N]

bfloat16, batch 64 of 1024 tokens: 65536 rows of 768, logits of 50304, attention of 12 heads 64 wide. Each variant of an
operation runs on the same random arrays; "step" is how much faster it is than the one before it in its ladder. docs/
kernels.md tells what each step is about, and its tables are made of this program's JSON.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import harness
from numstack import memory
from numstack.device import current_device
from numstack.device.work import Work
from numstack.kernels import catalogue

BFLOAT16 = np.dtype(np.uint16)
N_RANDOM = 1 << 20
# A rung that takes longer than this is timed a few times only.
SLOW_S = 0.01


class Counted:
    """Observes one call: how much arithmetic it does."""

    def __init__(self) -> None:
        self.flops = 0

    def before(self, work: Work) -> None:
        """Nothing."""

    def after(self, work: Work) -> None:
        """Add what the launch says that it computes."""
        self.flops += work.flops


def random_array(shape: tuple[int, ...], dtype: Any) -> Any:
    """Normal numbers, or indices below the vocabulary, a million of them again and again."""
    dtype = np.dtype(dtype)
    rng = np.random.default_rng(0)
    if dtype == np.int32:
        block = rng.integers(0, 50257, N_RANDOM, dtype=np.int32)
    else:
        values = rng.standard_normal(N_RANDOM, dtype=np.float32)
        block = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == np.uint16 else values.astype(dtype)
    array = memory.empty(shape, dtype)
    flat = array.reshape(array.size)
    for start in range(0, array.size, N_RANDOM):
        piece = flat[start : start + N_RANDOM]
        current_device().copy(piece, block[: piece.size])
    return array


def timed(run: Callable[[], None]) -> tuple[float, int]:
    """Median seconds between events, and floating-point operations."""
    counted = Counted()
    with current_device().observe(counted):
        run()
    once = harness.interleaved_s({"once": run}, runs=1, warm=0)["once"]
    return harness.interleaved_s({"it": run}, runs=3 if once > SLOW_S else 20, warm=1)["it"], counted.flops


def main() -> None:
    options = harness.parse_options(__doc__, add_options)
    if current_device().kind != "cuda":
        raise SystemExit(
            "benchmarks.ladders needs a GPU; the other benchmarks time the ladders' portable rungs on a CPU"
        )
    catalogue.B = options.batch
    catalogue.R = options.batch * catalogue.T
    rows: list[list[Any]] = []
    before: dict[str, float] = {}
    done: set[tuple[str, str]] = set()
    for launch in catalogue.launches(random_array, BFLOAT16):
        operation, variant, run = launch
        wanted = not options.operations or any(word in operation for word in options.operations)
        if not variant or (operation, variant) in done or not wanted:
            continue  # of several forms of a variant the first, which is the plainest
        done.add((operation, variant))
        seconds, flops = timed(run)
        step = before[operation] / seconds if operation in before else ""
        before[operation] = seconds
        rows.append([operation, variant, 1e3 * seconds, step, 1e-12 * flops / seconds if flops else ""])
        print(f"{operation} {variant}: {1e3 * seconds:.3f} ms", flush=True)
    harness.report("ladders", ("operation", "variant", "ms", "step", "TFLOP/s"), rows, options)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--operations", nargs="+", metavar="WORD", help="those with one of these words (default: all)")
    parser.add_argument("--batch", type=int, default=64, help="sequences of 1024 tokens (default: %(default)s)")


if __name__ == "__main__":
    main()
