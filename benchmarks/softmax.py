"""Softmax, forward and backward: every variant, beside PyTorch where it is installed.

usage: NUMSTACK_THREADS=1 python -m benchmarks.softmax [--json PATH]

The table is in GB/s, float32, of the least bytes the operation can move: forward reads x and writes y, backward reads
dy and y and writes dx. PyTorch runs on one CPU thread.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from numstack import memory
from numstack.kernels import softmax
from numstack.kernels.rows import row_of

SHAPES = [(3072, 64), (1024, 1024)]


def main() -> None:
    options = harness.parse_options(__doc__)
    torch = harness.one_threaded_torch()
    rows: list[list[Any]] = []
    for shape in SHAPES:
        rng = np.random.default_rng(0)
        host_x, host_dy = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
        x, dy = memory.from_host(host_x), memory.from_host(host_dy)
        y, dx = (memory.empty(shape, np.float32) for _ in range(2))
        what = f"{shape[0]} x {shape[1]}"
        for variant in softmax.FORWARD.defaults(row_of(shape[1], x)):
            run = partial(softmax.forward, x, y, variant=variant)
            rows.append([f"forward {variant}", what, gb_per_s(run, 2 * x.nbytes)])
        for variant in softmax.BACKWARD.defaults(row_of(shape[1], x)):
            run = partial(softmax.backward, dy, y, dx, variant=variant)
            rows.append([f"backward {variant}", what, gb_per_s(run, 3 * x.nbytes)])
        if torch is not None:
            peer_x, peer_dy = torch.from_numpy(host_x), torch.from_numpy(host_dy)
            peer_y = torch.softmax(peer_x, 1)
            rows.append(["forward torch", what, gb_per_s(partial(torch.softmax, peer_x, 1), 2 * x.nbytes)])
            run = partial(torch.ops.aten._softmax_backward_data, peer_dy, peer_y, 1, torch.float32)
            rows.append(["backward torch", what, gb_per_s(run, 3 * x.nbytes)])
    harness.report("softmax", ("pass and variant", "shape", "GB/s"), rows, options)


def gb_per_s(run: Any, nbytes: int) -> float:
    return 1e-9 * nbytes / harness.median_s(run)


if __name__ == "__main__":
    main()
