"""Reductions: sum, maximum, norm, count of non-finite values, and sums of columns, beside NumPy.

usage: NUMSTACK_THREADS=1 python -m benchmarks.reduce [--json PATH]

The table is in GB/s read, float32.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from numstack import memory
from numstack.kernels import reduce

N = 1 << 22
MATRICES = [(768, 512), (4096, 768)]


def main() -> None:
    options = harness.parse_options(__doc__)
    rng = np.random.default_rng(0)
    rows: list[list[Any]] = []
    x = rng.standard_normal(N, dtype=np.float32)
    device_x = memory.from_host(x)
    workspace = memory.empty(reduce.workspace_size(N), np.float32)
    for name, dtype, operation, peer in (
        ("sum", np.float32, reduce.sum, np.sum),
        ("max", np.float32, reduce.max, np.max),
        ("norm", np.float32, reduce.norm, np.linalg.norm),
        ("count_nonfinite", np.int32, reduce.count_nonfinite, lambda x: x.size - np.count_nonzero(np.isfinite(x))),
    ):
        run = partial(operation, device_x, memory.empty(1, dtype), workspace)
        rows.append([name, N, gb_per_s(run, x), gb_per_s(partial(peer, x), x)])
    for shape in MATRICES:
        matrix = rng.standard_normal(shape, dtype=np.float32)
        device_matrix, out = memory.from_host(matrix), memory.empty(shape[1], np.float32)
        workspace = memory.empty(reduce.sum_rows_workspace_size(*shape), np.float32)
        peer_rate = gb_per_s(partial(np.sum, matrix, axis=0), matrix)
        for variant in reduce.SUM_ROWS_VARIANTS.defaults(shape[1], True):
            run = partial(reduce.sum_rows, device_matrix, out, workspace, variant=variant)
            rows.append([f"sum_rows, {variant}", f"{shape[0]} x {shape[1]}", gb_per_s(run, matrix), peer_rate])
    harness.report("reduce", ("operation", "elements", "numstack", "numpy"), rows, options)


def gb_per_s(run: Any, x: np.ndarray) -> float:
    """Median rate at which ``x`` is read."""
    return 1e-9 * x.nbytes / harness.median_s(run)


if __name__ == "__main__":
    main()
