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
from numba import cuda, float32, typeof

from benchmarks import harness
from numstack import simt
from numstack.device import current_device
from numstack.device.launch_types import numba_types
from numstack.kernels import catalogue

TILE = 16
TM, TN, BK = 8, 2, 32
FULL = 0xFFFFFFFF


def shared_tile(a, b, c):  # type: ignore[no-untyped-def]
    """16 x 16 threads, one element of c each; whole tiles only."""
    a_tile = cuda.shared.array((TILE, TILE), float32)
    b_tile = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    i, j = cuda.blockIdx.y * TILE + y, cuda.blockIdx.x * TILE + x
    total = float32(0)
    for k0 in range(0, a.shape[1], TILE):
        a_tile[y, x] = a[i, k0 + x]
        b_tile[y, x] = b[k0 + y, j]
        cuda.syncthreads()
        for k in range(TILE):
            total += a_tile[y, k] * b_tile[k, x]
        cuda.syncthreads()
    c[i, j] = total


def register_tile(a, b, c):  # type: ignore[no-untyped-def]
    """16 x 8 threads, 8 x 2 elements of c each."""
    a_tile = cuda.shared.array((BK, 8 * TM), float32)
    b_tile = cuda.shared.array((BK, 16 * TN), float32)
    total = cuda.local.array((TM, TN), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    i0, j0 = cuda.blockIdx.y * 8 * TM, cuda.blockIdx.x * 16 * TN
    for m in range(TM):
        for n in range(TN):
            total[m, n] = float32(0)
    for k0 in range(0, a.shape[1], BK):
        for row in range(y, 8 * TM, 8):
            for k in range(x, BK, 16):
                a_tile[k, row] = a[i0 + row, k0 + k]
        for k in range(y, BK, 8):
            for n in range(TN):
                b_tile[k, n * 16 + x] = b[k0 + k, j0 + n * 16 + x]
        cuda.syncthreads()
        for k in range(BK):
            for m in range(TM):
                value = a_tile[k, y * TM + m]
                for n in range(TN):
                    total[m, n] += value * b_tile[k, n * 16 + x]
        cuda.syncthreads()
    for m in range(TM):
        for n in range(TN):
            c[i0 + y * TM + m, j0 + n * 16 + x] = total[m, n]


@cuda.jit(device=True)
def warp_sum(value):  # type: ignore[no-untyped-def]
    """The sum over the lanes of a warp, in every lane."""
    for offset in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(FULL, value, offset)
    return value


@cuda.jit(device=True)
def block_sum(value, sums):  # type: ignore[no-untyped-def]
    """The sum over the threads of a block, in every thread."""
    value = warp_sum(value)
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    if lane == 0:
        sums[warp] = value
    cuda.syncthreads()
    value = warp_sum(sums[lane] if lane < cuda.blockDim.x // 32 else float32(0))
    cuda.syncthreads()
    return value


def layernorm(x, weight, bias, out, eps):  # type: ignore[no-untyped-def]
    """A block of 128 threads for each row, reduced by shuffles."""
    sums = cuda.shared.array(32, float32)
    row, columns = cuda.blockIdx.x, x.shape[1]
    total = float32(0)
    for c in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        total += x[row, c]
    mean = block_sum(total, sums) / float32(columns)
    total = float32(0)
    for c in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        total += (x[row, c] - mean) ** 2
    rstd = float32(1) / (block_sum(total, sums) / float32(columns) + eps) ** float32(0.5)
    for c in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        out[row, c] = (x[row, c] - mean) * rstd * weight[c] + bias[c]


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
import time
import numpy as np
from benchmarks.simt import shared_tile, TILE
from numba import cuda
a, b = (np.random.default_rng(i).standard_normal((64, 64), dtype=np.float32) for i in range(2))
c = np.zeros((64, 64), np.float32)
start = time.perf_counter()
cuda.jit(shared_tile)[(4, 4), (TILE, TILE)](a, b, c)
print(time.perf_counter() - start)
np.testing.assert_allclose(c, a @ b, rtol=1e-4, atol=1e-3)
"""


def simulator_s() -> float:
    """Seconds that numba's simulator takes for 64 x 64 x 64."""
    environment = {**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}
    ran = subprocess.run(
        [sys.executable, "-c", SIMULATED], env=environment, capture_output=True, text=True, check=True, timeout=600
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
        simulated = simulator_s()
        rows.append(("  numba's simulator", simulated, "s"))
        rows.append(("  times as fast as that", simulated / seconds, "x"))
    n_kernels, cold, warm = compile_times(options.kernels)
    rows.append((f"compiling a kernel, median of {n_kernels}", cold, "s"))
    rows.append(("loading it from the cache", 1e3 * warm, "ms"))
    harness.report("simt", ("what", "figure", "unit"), rows, options)


if __name__ == "__main__":
    main()
