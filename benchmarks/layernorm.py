"""LayerNorm, forward and backward: every variant, beside PyTorch where it is installed.

usage: NUMSTACK_THREADS=1 python -m benchmarks.layernorm [--json PATH]

The table is in GB/s, float32, of the least bytes the operation can move: forward reads x and writes y, backward reads
dy and x and writes dx. PyTorch runs on one CPU thread.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from numstack import memory
from numstack.kernels import layernorm
from numstack.kernels.rows import row_of

SHAPES = [(768, 128), (4096, 768)]  # a small model's on a CPU; GPT-2's


def main() -> None:
    options = harness.parse_options(__doc__)
    torch = harness.one_threaded_torch()
    rows: list[list[Any]] = []
    for R, C in SHAPES:
        rng = np.random.default_rng(0)
        x, dy = (rng.standard_normal((R, C), dtype=np.float32) for _ in range(2))
        weight, bias = (rng.standard_normal(C, dtype=np.float32) for _ in range(2))
        device_x, device_weight, device_bias, device_dy = (memory.from_host(a) for a in (x, weight, bias, dy))
        y, dx = (memory.empty((R, C), np.float32) for _ in range(2))
        dweight, dbias = (memory.empty(C, np.float32) for _ in range(2))
        mean, rstd = (memory.empty(R, np.float32) for _ in range(2))
        workspace = memory.empty(layernorm.workspace_size(R, C), np.float32)
        for variant in layernorm.FORWARD.defaults(row_of(C, device_x)):
            arrays: tuple[Any, ...] = (device_x, device_weight, device_bias, y, mean, rstd)
            run = partial(layernorm.forward, *arrays, eps=1e-5, variant=variant)
            rows.append([f"forward {variant}", f"{R} x {C}", gb_per_s(run, 2 * x.nbytes)])
        for variant in layernorm.BACKWARD.defaults(row_of(C, device_x)):
            arrays = (device_dy, device_x, device_weight, mean, rstd, dx, dweight, dbias, workspace)
            run = partial(layernorm.backward, *arrays, variant=variant)
            rows.append([f"backward {variant}", f"{R} x {C}", gb_per_s(run, 3 * x.nbytes)])
        if torch is not None:
            rows += torch_rows(torch, x, weight, bias, dy)
    harness.report("layernorm", ("pass and variant", "shape", "GB/s"), rows, options)


def gb_per_s(run: Any, nbytes: int) -> float:
    return 1e-9 * nbytes / harness.median_s(run)


def torch_rows(torch: Any, *arrays: np.ndarray) -> list[list[Any]]:
    x, weight, bias, dy = (torch.from_numpy(a) for a in arrays)
    R, C = x.shape
    _, mean, rstd = torch.native_layer_norm(x, (C,), weight, bias, 1e-5)
    forward = partial(torch.native_layer_norm, x, (C,), weight, bias, 1e-5)
    backward = partial(
        torch.ops.aten.native_layer_norm_backward, dy, x, (C,), mean, rstd, weight, bias, [True, True, True]
    )
    return [
        ["forward torch", f"{R} x {C}", gb_per_s(forward, 2 * arrays[0].nbytes)],
        ["backward torch", f"{R} x {C}", gb_per_s(backward, 3 * arrays[0].nbytes)],
    ]


if __name__ == "__main__":
    main()
