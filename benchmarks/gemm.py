"""Matrix products: each variant of numstack.kernels.gemm beside NumPy's BLAS (and PyTorch, where it is installed).

usage: NUMSTACK_THREADS=1 OPENBLAS_NUM_THREADS=1 python -m benchmarks.gemm [--json PATH]

The shapes are those of a small GPT (12 x 64 tokens, width 128, 84 characters), in all three layouts, and 512^3. The
table is in GFLOP/s. Set the threads as above for figures of one core.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from numstack import memory
from numstack.kernels.gemm import VARIANTS, gemm

TOKENS, WIDTH, VOCABULARY = 12 * 64, 128, 84
SHAPES = {
    "square": (512, 512, 512),
    "qkv": (TOKENS, 3 * WIDTH, WIDTH),
    "projection": (TOKENS, WIDTH, WIDTH),
    "mlp up": (TOKENS, 4 * WIDTH, WIDTH),
    "mlp down": (TOKENS, WIDTH, 4 * WIDTH),
    "mlp up, weight gradient": (WIDTH, 4 * WIDTH, TOKENS),
    "head": (TOKENS, VOCABULARY, WIDTH),
}


def main() -> None:
    options = harness.parse_options(__doc__)
    torch = harness.one_threaded_torch()
    columns = ["shape", "m", "n", "k", "layout", *VARIANTS.runnable(), "numpy", *(["torch"] if torch else [])]
    rows: list[list[Any]] = []
    for what, (m, n, k) in SHAPES.items():
        for layout in ("TN",) if what.endswith("weight gradient") else ("NN", "NT"):
            rng = np.random.default_rng(0)
            a = rng.standard_normal((k, m) if layout[0] == "T" else (m, k), dtype=np.float32)
            b = rng.standard_normal((n, k) if layout[1] == "T" else (k, n), dtype=np.float32)
            rows.append([what, m, n, k, layout, *gflops(a, b, layout, 2e-9 * m * n * k, torch)])
    harness.report("gemm", columns, rows, options)


def gflops(a: np.ndarray, b: np.ndarray, layout: str, gflop: float, torch: Any) -> list[float]:
    """GFLOP/s of every variant, of NumPy, and of PyTorch if given."""
    left, right = (a.T if layout[0] == "T" else a), (b.T if layout[1] == "T" else b)
    out = np.empty((left.shape[0], right.shape[1]), np.float32)
    device_a, device_b, device_c = memory.from_host(a), memory.from_host(b), memory.empty(out.shape, np.float32)
    results = []
    for variant in VARIANTS.runnable():
        run = partial(gemm, device_a, device_b, device_c, layout=layout, variant=variant)
        results.append(gflop / harness.median_s(run))
    results.append(gflop / harness.median_s(lambda: np.matmul(left, right, out=out)))
    if torch is not None:
        tensors = [torch.from_numpy(x) for x in (left, right, out)]
        results.append(gflop / harness.median_s(lambda: torch.matmul(tensors[0], tensors[1], out=tensors[2])))
    return results


if __name__ == "__main__":
    main()
