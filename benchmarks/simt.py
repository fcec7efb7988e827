"""numba.cuda kernels on one CPU core: speed of compiled kernels, against numba's simulator, and time to compile.

usage: python -m benchmarks.simt [--json PATH] [--kernels N] [--no-simulator]

Kernels run on one thread. Compile times are medians over N kernels of numstack/kernels (spread evenly over them all),
cold into an empty cache, then loaded from it. The simulator (NUMBA_ENABLE_CUDASIM=1) takes seconds for 64 x 64 x 64.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import typeof

from benchmarks import harness
from benchmarks.simt_kernels import TILE, TM, TN, layernorm, register_tile, shared_tile
from numstack import simt
from numstack.device import current_device
from numstack.device.launch_types import numba_types
from numstack.kernels import catalogue


def compiled(kernel: Callable[..., None], grid: tuple[int, int, int], block: tuple[int, int, int], *args: Any) -> Any:
    """A call of a compiled kernel over a whole grid, on this thread."""
    run = simt.compile_kernel(kernel, tuple(typeof(arg) for arg in args), block)
    n_blocks = grid[0] * grid[1] * grid[2]
    return lambda: run(grid, 0, n_blocks, 0, *args)


def product(kernel: Callable[..., None], n: int, tile: tuple[int, int], block: tuple[int, int, int]) -> float:
    """Seconds for c = a b with n x n x n, checked."""
    a, b = (np.random.default_rng(i).standard_normal((n, n), dtype=np.float32) for i in range(2))
    c = np.full((n, n), np.nan, np.float32)
    run = compiled(kernel, (n // tile[1], n // tile[0], 1), block, a, b, c)
    seconds = harness.median_s(run)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b, rtol=1e-4, atol=1e-3)
    return seconds


SIMULATED = """
import sys
import time
import numpy as np
from benchmarks.simt_kernels import TILE, shared_tile
from numba import cuda
n = int(sys.argv[1])
a, b = (np.random.default_rng(i).standard_normal((n, n), dtype=np.float32) for i in range(2))
c = np.zeros((n, n), np.float32)
start = time.perf_counter()
cuda.jit(shared_tile)[(n // TILE, n // TILE), (TILE, TILE)](a, b, c)
print(time.perf_counter() - start)
np.testing.assert_allclose(c, a @ b, rtol=1e-4, atol=1e-3)
"""


def simulator_s(n: int) -> float:
    """Seconds that numba's simulator takes for n x n x n."""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", SIMULATED, str(n)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    return float(ran.stdout)


def kernels_of_numstack() -> list[tuple[Any, Any, Any]]:
    """Function, argument types and block of each distinct launch that the catalogue makes, in float32; none runs."""
    device = current_device()
    found: dict[Any, tuple[Any, Any, Any]] = {}

    def record(kernel: Any, grid: Any, block: Any, shared_bytes: int, args: Any) -> Callable[[Any], None]:
        types = numba_types(kernel, args)
        found[kernel, types, block] = (kernel.py_func, types, block)
        return lambda stream: None

    bind, device.bind = device.bind, record  # type: ignore[method-assign]
    try:
        for launch in catalogue.launches(lambda shape, dtype: np.empty(shape, dtype), np.float32):
            launch.run()
    finally:
        device.bind = bind  # type: ignore[method-assign]
    return list(found.values())


def compile_times(n_kernels: int) -> tuple[int, float, float]:
    """Number of kernels, and median seconds to compile one and to load it again."""
    every = kernels_of_numstack()
    chosen = every[:: max(1, len(every) // n_kernels)]
    cold, warm = [], []
    with tempfile.TemporaryDirectory() as directory:
        before = os.environ.get("NUMSTACK_CACHE")
        os.environ["NUMSTACK_CACHE"] = directory
        try:
            for times in (cold, warm):
                for function, types, block in chosen:
                    start = time.perf_counter()
                    simt.compile_kernel(function, types, block)
                    times.append(time.perf_counter() - start)
        finally:
            os.environ.pop("NUMSTACK_CACHE")
            if before is not None:
                os.environ["NUMSTACK_CACHE"] = before
    return len(chosen), statistics.median(cold), statistics.median(warm)


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of this benchmark."""
    parser.add_argument("--kernels", type=int, default=20, metavar="N", help="how many kernels to compile (20)")
    parser.add_argument("--no-simulator", action="store_true", help="leave numba's simulator out")


def main() -> None:
    """Measure, and print a table."""
    options = harness.parse_options(__doc__, add_options)
    rows: list[tuple[str, float, str]] = []
    seconds = product(shared_tile, 512, (TILE, TILE), (TILE, TILE, 1))
    rows.append(("GEMM 512^3, 16 x 16 shared tiles", 2e-9 * 512**3 / seconds, "GFLOP/s"))
    seconds = product(register_tile, 512, (8 * TM, 16 * TN), (16, 8, 1))
    rows.append(("GEMM 512^3, register tiles", 2e-9 * 512**3 / seconds, "GFLOP/s"))
    x, out = np.random.default_rng(0).standard_normal((4096, 768), dtype=np.float32), np.empty((4096, 768), np.float32)
    weight = bias = np.ones(768, np.float32)
    run = compiled(layernorm, (4096, 1, 1), (128, 1, 1), x, weight, bias, out, np.float32(1e-5))
    rows.append(("LayerNorm 4096 x 768 by shuffles", 2e-9 * x.nbytes / harness.median_s(run), "GB/s"))
    seconds = product(shared_tile, 64, (TILE, TILE), (TILE, TILE, 1))
    rows.append(("GEMM 64^3, 16 x 16 shared tiles", 1e6 * seconds, "us"))
    if not options.no_simulator:
        simulated = simulator_s(64)
        rows.append(("  numba's simulator", simulated, "s"))
        rows.append(("  times as fast as that", simulated / seconds, "x"))
    n_kernels, cold, warm = compile_times(options.kernels)
    rows.append((f"compiling a kernel, median of {n_kernels}", cold, "s"))
    rows.append(("loading it from the cache", 1e3 * warm, "ms"))
    harness.report("simt", ("what", "figure", "unit"), rows, options)


if __name__ == "__main__":
    main()
