"""AdamW over a flat buffer, beside PyTorch's fused and plain ones where it is installed.

usage: NUMSTACK_THREADS=1 python -m benchmarks.adamw [--json PATH]

The table is in GB/s of 28 bytes a parameter: parameter and two moments read and written, gradient read, all float32.
PyTorch runs on one CPU thread.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from numstack import memory
from numstack.kernels import adamw

SIZES = [800_000, 8_000_000]
BYTES = 28


def main() -> None:
    options = harness.parse_options(__doc__)
    torch = harness.one_threaded_torch()
    rows: list[list[Any]] = []
    for size in SIZES:
        n = size // adamw.SEGMENT * adamw.SEGMENT
        host_grad = np.random.default_rng(0).standard_normal(n, dtype=np.float32)
        param, m, v = (memory.from_host(np.zeros(n, np.float32)) for _ in range(3))
        decay = memory.from_host(np.full(n // adamw.SEGMENT, 0.1, np.float32))
        step = partial(
            adamw.step,
            param,
            memory.from_host(host_grad),
            m,
            v,
            decay,
            lr=1e-3,
            beta1=0.9,
            beta2=0.95,
            eps=1e-8,
            step=1,
            grad_scale_1=memory.from_host(np.ones(1, np.float32)),
        )
        rows.append(["numstack", n, gb_per_s(step, n)])
        if torch is not None:
            for kind in ("fused", "foreach"):
                parameter = torch.zeros(n, requires_grad=True)
                parameter.grad = torch.from_numpy(host_grad)
                optimizer = torch.optim.AdamW([parameter], lr=1e-3, weight_decay=0.1, **{kind: True})
                rows.append([f"torch {kind}", n, gb_per_s(optimizer.step, n)])
    harness.report("adamw", ("who", "parameters", "GB/s"), rows, options)


def gb_per_s(run: Any, n: int) -> float:
    return 1e-9 * BYTES * n / harness.median_s(run)


if __name__ == "__main__":
    main()
