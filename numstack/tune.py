"""``numstack tune``: time the ways to cut matrix products on this GPU, and keep the fastest for every later run.

A product is TOKENSxINxOUT, of a linear layer: its forward pass with each epilogue, the gradient of its input and, in
float32, that of its weight. The launcher has a table for what was never tuned.
"""

from __future__ import annotations

import argparse
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from numstack import memory
from numstack.device import Array, current_device
from numstack.errors import ConfigError, DeviceError
from numstack.kernels.gemm import problem as problems
from numstack.kernels.gemm import tune, wgmma, workspace_size
from numstack.kernels.gemm.problem import Problem
from numstack.kernels.gemm.wgmma.choice import GROUPS
from numstack.kernels.gemm.wgmma.config import Config

DTYPES = {"bf16": np.dtype(np.uint16), "fp16": np.dtype(np.float16)}
RUNS = 12
N_TILES = 3  # that are tried in other orders too
# Enough for numbers that differ, few enough to draw on the host.
N_RANDOM = 1 << 20


class Layer(NamedTuple):
    """A linear layer: y = x w, w of [in, out] (layout NN), or [out, in] (NT)."""

    tokens: int
    n_in: int
    n_out: int
    layout: str

    @staticmethod
    def parse(text: str, layout: str) -> Layer:
        """From TOKENSxINxOUT.

        Raises
        ------
        ConfigError
            If it is anything else.
        """
        if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
            raise ConfigError(f"{text!r} is no product; give TOKENSxINxOUT, such as 65536x768x3072")
        tokens, n_in, n_out = map(int, text.split("x"))
        return Layer(tokens, n_in, n_out, layout)

    def products(self, dtype: np.dtype) -> Iterator[tuple[str, Problem]]:
        """What a training step asks gemm for, with arrays of random numbers."""
        tokens, n_in, n_out, layout = self
        weight_shape = (n_in, n_out) if layout == "NN" else (n_out, n_in)
        x, dy, weight = random((tokens, n_in), dtype), random((tokens, n_out), dtype), random(weight_shape, dtype)
        y, kept, dx = (memory.empty(shape, dtype) for shape in ((tokens, n_out), (tokens, n_out), (tokens, n_in)))
        bias, dweight, sums = (
            random((n_out,), dtype),
            memory.empty(weight_shape, np.float32),
            random((n_in,), np.float32),
        )
        forward = partial(problems.make, x, weight, y, layout=layout)
        yield "forward", forward()
        yield "forward, bias", forward(bias=bias)
        yield "forward, bias and GeLU", forward(bias=bias, has_gelu=True, preactivation=kept)
        yield "forward, bias and residual", forward(bias=bias, residual=dy)
        backward = partial(problems.make, dy, weight, dx, layout="NT" if layout == "NN" else "NN")
        yield "gradient of x", backward()
        yield "gradient of x through a GeLU, and its bias's", backward(preactivation=x, column_sums=sums)
        a, b = (x, dy) if layout == "NN" else (dy, x)
        yield "gradient of w", problems.make(a, b, dweight, layout="TN")
        yield "gradient of w, added", problems.make(a, b, dweight, layout="TN", residual=dweight)


def random(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Normal numbers in device memory, a million of them again and again."""
    dtype = np.dtype(dtype)
    values = np.random.default_rng(0).standard_normal(N_RANDOM, dtype=np.float32)
    block = (values.view(np.uint32) >> 16).astype(np.uint16) if dtype == np.uint16 else values.astype(dtype)
    array = memory.empty(shape, dtype)
    flat = array.reshape(array.size)
    for start in range(0, array.size, N_RANDOM):
        piece = flat[start : start + N_RANDOM]
        current_device().copy(piece, block[: piece.size])
    return array


def time_on_gpu(calls: dict[Config, Callable[[], None]]) -> dict[Config, float]:
    """Median seconds of each, between events, in turns, after one run that is not counted."""
    device = current_device()
    stream = device.default_stream
    for call in calls.values():
        call()
    events: dict[Config, list[Any]] = {config: [] for config in calls}
    for _ in range(RUNS):
        for config, call in calls.items():
            start = stream.record()
            call()
            events[config].append((start, stream.record()))
    device.synchronize()
    return {config: statistics.median(a.elapsed_s(b) for a, b in pairs) for config, pairs in events.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Raises
    ------
    ConfigError
        If a product is none.
    DeviceError
        If there is no Hopper GPU.
    """
    parser = argparse.ArgumentParser(
        prog="numstack tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("products", nargs="+", metavar="TOKENSxINxOUT")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="of all but dw (default: %(default)s)")
    parser.add_argument("--layout", choices=["NN", "NT"], default="NN", help="weights [in, out] (default) or [out, in]")
    parser.add_argument("--only", default="", metavar="WORDS", help='those products, such as "gradient of w"')
    options = parser.parse_args(arguments)
    layers = [Layer.parse(text, options.layout) for text in options.products]
    device = current_device()
    if device.kind != "cuda" or device.properties.compute_capability != (9, 0):
        raise DeviceError(f"this device is {device.name}; the kernel that is tuned runs on Hopper GPUs (H100, H200)")
    for layer in layers:
        for what, problem in layer.products(DTYPES[options.dtype]):
            if options.only in what:
                print(describe(what, problem, tuned(problem)), flush=True)
    return 0


def tuned(problem: Problem) -> list[tune.Timing]:
    """Time ways to cut a product that need no more workspace than launchers are given; the fastest is kept.

    Compiling takes longer than running: first all tiles are tried, then other orders of the best of them.
    """
    layout = "TN" if problem.spec.a_is_KM else "NT" if problem.spec.b_is_NK else "NN"
    sums_columns = problem.column_sums is not None
    most = workspace_size(problem.m, problem.n, problem.k, layout=layout, column_sums=sums_columns)
    problem = problem._replace(workspace=memory.empty((most,), np.float32, scope="workspace"))
    if not wgmma.supports(problem):
        raise ConfigError(f"the kernel that is tuned does not support {problem}; give multiples of 8")
    fitting = [c for c in wgmma.candidates(problem) if wgmma.workspace_size(problem, c) <= most]
    time_all = partial(tune.tune, problem, run=run, time_s=time_on_gpu)
    timings = time_all([c for c in fitting if c.group == GROUPS[0]])
    best = {timing.config for timing in timings[:N_TILES]}
    return time_all([c for c in fitting if c._replace(group=GROUPS[0]) in best])


def run(problem: Problem, config: Config) -> None:
    """Launch a product with a Config."""
    wgmma.launch(problem, None, config, problem.workspace)


def describe(what: str, problem: Problem, timings: list[tune.Timing]) -> str:
    """A line: the product, the fastest Config, its rate, and how much faster it is than what the table says."""
    best = timings[0]
    by_table = next((t.seconds for t in timings if t.config == wgmma.default_config(problem)), None)
    gain = "" if by_table is None else f", {by_table / best.seconds:.2f}x of the table's"
    chosen = " ".join(f"{name}={value}" for name, value in best.config._asdict().items())
    rate = problem.flops / best.seconds / 1e12
    return f"{what} {problem.m}x{problem.n}x{problem.k}: {rate:.0f} TFLOP/s{gain} ({chosen})"
