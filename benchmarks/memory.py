"""What a request for device memory costs, and how much memory the allocator holds beyond what is live.

usage: python -m benchmarks.memory [--json PATH]

Time is host time from the call to the return of the last reference, medians of batches. "held" is the memory reserved
from the device over the most that was live at a time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks import harness
from numstack import memory
from numstack.device import current_device

N_BATCHES = 50
N_REQUESTS = 200

# A training step of a small GPT: rows of B T = 512 tokens, width 256, 8 layers.
N_LAYERS, N_TOKENS, WIDTH = 8, 512, 256


def request_us(run: Callable[[], Any], n_requests: int = 1) -> float:
    """Median microseconds for each of the requests that one call of ``run`` makes."""
    n_calls = max(1, N_REQUESTS // n_requests)
    costs = []
    for _ in range(N_BATCHES):
        start = time.perf_counter()
        for _ in range(n_calls):
            run()
        costs.append((time.perf_counter() - start) / (n_calls * n_requests) * 1e6)
    return statistics.median(costs)


def training_step() -> int:
    """The requests of a forward and a backward pass; how many there were."""
    widths = (WIDTH, 3 * WIDTH, WIDTH, WIDTH, 4 * WIDTH, 4 * WIDTH, WIDTH)
    kept = []
    for _ in range(N_LAYERS):
        for width in widths:
            kept.append(memory.empty((N_TOKENS, width), np.float32, scope="forward"))
            memory.empty((N_TOKENS,), np.float32, scope="workspace")
    gradient = memory.empty((N_TOKENS, WIDTH), np.float32, scope="backward")
    while kept:
        gradient = memory.empty(kept.pop().shape, np.float32, scope="backward")
    del gradient
    return N_LAYERS * len(widths) * 3 + 1


def random_requests(n_live: int) -> Callable[[], None]:
    """Replaces one of ``n_live`` arrays at random with one of a size seldom seen before: nothing is ever cached."""
    rng = np.random.default_rng(0)
    sizes = (2 ** rng.uniform(9, 20, 1 << 14)).astype(int).tolist()
    places = rng.integers(0, n_live, 1 << 14).tolist()
    live: list[Any] = [None] * n_live
    count = 0

    def replace() -> None:
        nonlocal count
        live[places[count % len(places)]] = None
        live[places[count % len(places)]] = memory.empty(sizes[count % len(sizes)], np.uint8, scope="comm")
        count += 1

    for _ in range(8 * n_live):
        replace()
    return replace


def held(scope: str) -> float:
    """Reserved over peak of a scope."""
    figures = memory.statistics().by_scope[scope]
    return figures.reserved / figures.peak


def main() -> None:
    options = harness.parse_options(__doc__)
    device, manager = current_device(), memory.manager()
    shape = (16, 64)
    lease = manager.allocate(4096, "forward")
    dtype = np.dtype(np.float32)
    rows: list[tuple[str, float, float | None]] = [
        ("memory.empty, a size freed before", request_us(lambda: memory.empty(shape, dtype)), None),
        ("  of it: finding a block and taking it back", request_us(lambda: manager.allocate(4096, "forward")), None),
        (
            "  of it: the array over it",
            request_us(lambda: device.view(lease.block.address, shape, dtype, None, lease)),
            None,
        ),
    ]
    training_step()
    rows.append(("a training step's requests", request_us(training_step, training_step()), held("forward")))
    for n_live in (100, 1000):
        replace = random_requests(n_live)
        rows.append((f"random sizes up to 1 MiB, {n_live} live", request_us(replace), held("comm")))
        del replace
        memory.release_unused()
        memory.reset_peak()
    rows.append(("numpy.empty, for comparison", request_us(lambda: np.empty(shape, dtype)), None))
    torch = harness.one_threaded_torch()
    if torch is not None:
        where = "cuda" if device.kind == "cuda" else "cpu"
        rows.append(
            (f"torch.empty on {where}, for comparison", request_us(lambda: torch.empty(shape, device=where)), None)
        )
    harness.report("memory", ("request", "us", "held"), rows, options)


if __name__ == "__main__":
    main()
