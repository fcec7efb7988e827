"""Dropout, in place and not, beside PyTorch where it is installed.

usage: NUMSTACK_THREADS=1 python -m benchmarks.dropout [--json PATH]

The table is in GB/s of the least bytes the operation can move, x read and y written. PyTorch, which also writes its
mask, runs on one CPU thread.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from numstack import memory
from numstack.kernels import dropout

N = 1 << 21
FORMATS = {"float32": np.float32, "bfloat16": np.uint16}  # as stored
OPTIONS: dict[str, Any] = {"p": 0.1, "seed": 1, "offset": 0}


def main() -> None:
    options = harness.parse_options(__doc__)
    rows: list[list[Any]] = []
    for name, dtype in FORMATS.items():
        x, y = (memory.from_host(np.zeros(N, dtype)) for _ in range(2))
        nbytes = 2 * x.nbytes
        rows.append([f"{name}", N, gb_per_s(partial(dropout.forward, x, y, **OPTIONS), nbytes)])
        rows.append([f"{name} in place", N, gb_per_s(partial(dropout.forward, x, x, **OPTIONS), nbytes)])
    torch = harness.one_threaded_torch()
    if torch is not None:
        tensor = torch.zeros(N)
        rows.append(["torch float32", N, gb_per_s(partial(torch.nn.functional.dropout, tensor, OPTIONS["p"]), 8 * N)])
    harness.report("dropout", ("what", "elements", "GB/s"), rows, options)


def gb_per_s(run: Any, nbytes: int) -> float:
    return 1e-9 * nbytes / harness.median_s(run)


if __name__ == "__main__":
    main()
