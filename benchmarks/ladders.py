"""Every rung of the ladders that docs/kernels.md tells, on a GPU, at the sizes of GPT-2 124M's training.

usage: python -m benchmarks.ladders [--json PATH] [--operations WORD ...] [--compile]

bfloat16, batch 64 of 1024 tokens: 65536 rows of 768, logits of 50304, attention of 12 heads 64 wide, AdamW of all
parameters. Each variant of an operation runs on the same random arrays, in turns with the other fast ones; "step" is
how much faster it is than the one before it in its ladder. Last come steps within one variant: GEMM's Hopper kernel,
8192^3, cut in ways that each take up one more idea.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from numstack import memory
from numstack.device import current_device, offline
from numstack.device.work import Work
from numstack.kernels import catalogue
from numstack.kernels.gemm import problem, wgmma
from numstack.kernels.gemm.wgmma.config import Config

BFLOAT16 = np.dtype(np.uint16)
BATCH = 64  # sequences of 1024 tokens
N_PARAMETERS = 124_475_904
N_RANDOM = 1 << 20
# Operations whose ladders are told in docs/kernels.md; of a GELU the form that training uses.
TOLD = (
    *("gemm NN", "gemm NN wgmma steps", "attention.forward D=64", "attention.backward D=64", "attention.forward D=128"),
    *("attention.backward D=128", "layernorm.forward", "layernorm.backward", "softmax.forward"),
    *("cross_entropy.forward_backward", "embedding.forward", "embedding.backward", "reduce.sum_rows"),
    *("elementwise.transpose", "gelu.forward", "adamw.step"),
)
GELU_FORM = " tanh"
# Made for shorter rows than the other rungs of its ladder get here.
LEFT_OUT = {("cross_entropy.forward_backward", "rows_in_turn")}
# Ways to cut the Hopper GEMM, each with one idea more than the one before.
SMALLEST = Config(tile_m=128, tile_n=64, stages=2, buffers=2, group=1)
WGMMA_STEPS = {
    "128 x 64 tiles, 2 stages": SMALLEST,
    "128 x 128 tiles": SMALLEST._replace(tile_n=128),
    "128 x 256 tiles": SMALLEST._replace(tile_n=256),
    "4 stages": SMALLEST._replace(tile_n=256, stages=4),
    "16 rows of tiles together": SMALLEST._replace(tile_n=256, stages=4, group=16),
    "a tile of 128 x 192 for each warpgroup": SMALLEST._replace(tile_n=192, stages=4, group=16, ping_pong=True),
}
STEPS_SIZE = 8192
# A rung that takes longer than this is timed once.
SLOW_S = 0.02


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


def timed(calls: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median seconds of each call between events: slow ones once, the others in turns."""
    once = {name: harness.interleaved_s({name: call}, runs=1, warm=1)[name] for name, call in calls.items()}
    fast = {name: call for name, call in calls.items() if once[name] <= SLOW_S}
    return once | (harness.interleaved_s(fast) if fast else {})


def flops_of(call: Callable[[], None]) -> int:
    """What its launches say that they compute."""
    counted = Counted()
    with current_device().observe(counted):
        call()
    return counted.flops


def wgmma_steps(array: catalogue.MakeArray) -> Iterator[catalogue.Launch]:
    """The Hopper GEMM in steps, as if they were variants."""
    a, b, c = (array((STEPS_SIZE, STEPS_SIZE), BFLOAT16) for _ in range(3))
    product = problem.make(a, b, c, layout="NN")
    for name, config in WGMMA_STEPS.items():
        yield catalogue.Launch("gemm NN wgmma steps", name, partial(wgmma.launch, product, None, config))


def launches(array: catalogue.MakeArray, words: list[str]) -> Iterator[catalogue.Launch]:
    """What is measured: of several launches of a variant the first, which is the plainest."""
    done: set[tuple[str, str]] = set()
    catalogue.B, catalogue.R, catalogue.N = BATCH, BATCH * catalogue.T, N_PARAMETERS
    families = [family(array, BFLOAT16) for family in catalogue.FAMILIES]
    if current_device().properties.compute_capability == (9, 0):
        families.append(wgmma_steps(array))
    for launch in itertools.chain.from_iterable(families):
        operation, variant, *_ = launch
        if operation not in TOLD or (words and not any(word in operation for word in words)):
            continue
        if operation.startswith("gelu") and not variant.endswith(GELU_FORM):
            continue
        variant = variant.removesuffix(GELU_FORM)
        if (operation, variant) not in done | LEFT_OUT:
            done.add((operation, variant))
            yield launch._replace(variant=variant)


def main() -> None:
    options = harness.parse_options(__doc__, add_options)
    if options.compile:
        with offline.device("sm_90a") as device:
            for launch in launches(device.array, options.operations):
                launch.prepare()
                launch.run()
        return
    if current_device().kind != "cuda":
        raise SystemExit("benchmarks.ladders needs a GPU; the other benchmarks time the portable rungs on a CPU")
    rows: list[list[Any]] = []
    for operation, rungs in itertools.groupby(launches(random_array, options.operations), lambda rung: rung.operation):
        calls = {}
        for rung in rungs:
            rung.prepare()
            calls[rung.variant] = rung.run
        before = None
        for variant, seconds in timed(calls).items():
            flops = flops_of(calls[variant])
            rate = 1e-12 * flops / seconds if flops else ""
            rows.append([operation, variant, 1e3 * seconds, before / seconds if before else "", rate])
            before = seconds
            print(f"{operation} {variant}: {1e3 * seconds:.3f} ms", flush=True)
    harness.report("ladders", ("operation", "variant", "ms", "step", "TFLOP/s"), rows, options)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--operations", nargs="+", default=[], metavar="WORD", help="those with one of these words")
    parser.add_argument("--compile", action="store_true", help="fill the cache for sm_90a and measure nothing")


if __name__ == "__main__":
    main()
