"""Host cost of one eager launch: ours, numba's own launcher, and a PyTorch operator, in one run.

usage: python -m benchmarks.launch [--json PATH]

The kernel takes six arrays and two scalars and does almost nothing, so that the queue never fills; what is timed is the
host, from the call to its return. Medians of batches.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda

from benchmarks import harness
from numstack import memory
from numstack.device import current_device, kernel

N_BATCHES = 50
N_LAUNCHES = 200


@kernel
def _six(a, b, c, d, e, f, n, s):
    i = cuda.grid(1)
    if i < n:
        a[i, 0] = b[i, 0] + c[i, 0] + d[i, 0] + e[i, 0] + f[i, 0] * s


def host_us(launch: Callable[[], Any], synchronize: Callable[[], Any]) -> float:
    """Median microseconds of host time for a launch."""
    for _ in range(N_LAUNCHES):
        launch()
    synchronize()
    costs = []
    for _ in range(N_BATCHES):
        start = time.perf_counter()
        for _ in range(N_LAUNCHES):
            launch()
        costs.append((time.perf_counter() - start) / N_LAUNCHES * 1e6)
        synchronize()
    return statistics.median(costs)


def main() -> None:
    options = harness.parse_options(__doc__)
    device = current_device()
    arrays = [memory.from_host(np.ones((64, 64), np.float32)) for _ in range(6)]
    wait = device.synchronize
    rows = [("numstack, six arrays, through the door", host_us(lambda: _six[1, 64](*arrays, 64, 2.0), wait))]
    run = device.bind(_six, (1, 1, 1), (64, 1, 1), 0, (*arrays, 64, 2.0))
    rows.append(("numstack, bound once and run again", host_us(lambda: run(device.default_stream), wait)))
    if device.kind == "cuda":
        rows += peers(arrays)
    harness.report("launch", ("launcher", "us"), rows, options)


def peers(arrays: list[Any]) -> list[tuple[str, float]]:
    """numba's launcher with the same kernel and arrays, and the cheapest operator of PyTorch."""
    theirs = [cuda.as_cuda_array(a) for a in arrays]
    jitted = cuda.jit(_six.py_func)
    rows = [("numba, six arrays", host_us(lambda: jitted[1, 64](*theirs, 64, 2.0), cuda.synchronize))]
    try:
        import torch
    except ImportError:
        return rows
    x, y, out = (torch.ones(64, 64, device="cuda") for _ in range(3))
    cost = host_us(lambda: torch.add(x, y, out=out), torch.cuda.synchronize)
    rows.append(("PyTorch, torch.add(x, y, out=out)", cost))
    return rows


if __name__ == "__main__":
    main()
