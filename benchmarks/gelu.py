"""GELU: what each form costs, forward, backward, and both in one pass.

usage: NUMSTACK_THREADS=1 python -m benchmarks.gelu [--json PATH]

The table is in ns per element over 768 x 3072 elements, float32; the largest errors are those of
``numstack.kernels.gelu.LARGEST_ERROR``. Below are NumPy and, where it is installed, PyTorch on one thread.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from numstack import memory
from numstack.kernels import gelu

SHAPE = (768, 3072)


def main() -> None:
    options = harness.parse_options(__doc__)
    rng = np.random.default_rng(0)
    x, dy = (rng.standard_normal(SHAPE, dtype=np.float32) for _ in range(2))
    device_x, device_dy = memory.from_host(x), memory.from_host(dy)
    y, dx = (memory.empty(SHAPE, np.float32) for _ in range(2))
    rows: list[list[Any]] = []
    for form in gelu.FORMS:
        passes = (
            partial(gelu.forward, device_x, y, form=form),
            partial(gelu.backward, device_dy, device_x, dx, form=form),
            partial(gelu.forward_backward, device_x, device_dy, y, dx, form=form),
        )
        rows.append([form, *(ns(run) for run in passes), *gelu.LARGEST_ERROR[form]])
    rows.append(["numpy, tanh", ns(partial(numpy_forward, x)), *[""] * 4])
    torch = harness.one_threaded_torch()
    if torch is not None:
        rows += [torch_row(torch, x, dy, approximate) for approximate in ("none", "tanh")]
    columns = ("form", "forward ns", "backward ns", "one pass ns", "error of y", "error of slope")
    harness.report("gelu", columns, rows, options)


def ns(run: Any) -> float:
    """Median nanoseconds per element."""
    return 1e9 * harness.median_s(run) / (SHAPE[0] * SHAPE[1])


def numpy_forward(x: np.ndarray) -> Any:
    u = np.float32(0.7978846) * (x + np.float32(0.044715) * x * x * x)
    return np.float32(0.5) * x * (np.float32(1) + np.tanh(u))


def torch_row(torch: Any, x: np.ndarray, dy: np.ndarray, approximate: str) -> list[Any]:
    tensor_x, tensor_dy = torch.from_numpy(x), torch.from_numpy(dy)
    forward = partial(torch.nn.functional.gelu, tensor_x, approximate=approximate)
    backward = partial(torch.ops.aten.gelu_backward, tensor_dy, tensor_x, approximate=approximate)
    return [f"torch, approximate={approximate}", ns(forward), ns(backward), "", "", ""]


if __name__ == "__main__":
    main()
