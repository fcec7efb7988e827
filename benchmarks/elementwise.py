"""Element-wise operations, copies and transposes, beside NumPy.

usage: NUMSTACK_THREADS=1 python -m benchmarks.elementwise [--json PATH]

The table is in GB/s read and written, 2048 x 2048 elements; the strided copy takes the queries' heads out of packed
queries, keys and values.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks import harness
from numstack import memory
from numstack.kernels import elementwise

SHAPE = (2048, 2048)
BATCH, TIME, HEADS, HEAD_WIDTH = 8, 256, 8, 64


def main() -> None:
    options = harness.parse_options(__doc__)
    a = np.random.default_rng(0).standard_normal(SHAPE, dtype=np.float32)
    out, half = np.empty_like(a), np.empty(SHAPE, ml_dtypes.bfloat16)
    x, y, bits = memory.from_host(a), memory.from_host(a), memory.empty(SHAPE, np.uint16)
    qkv = a.reshape(-1)[: 3 * BATCH * TIME * HEADS * HEAD_WIDTH].reshape(BATCH, TIME, 3, HEADS, HEAD_WIDTH)
    queries = qkv[:, :, 0].transpose(0, 2, 1, 3)
    device_queries = memory.from_host(qkv)[:, :, 0].transpose(0, 2, 1, 3)
    packed, device_packed = np.empty(queries.shape, np.float32), memory.empty(queries.shape, np.float32)
    n = a.nbytes
    rows: list[list[Any]] = []
    for name, nbytes, run, peer in (
        ("add", 3 * n, partial(elementwise.add, x, x, y), partial(np.add, a, a, out=out)),
        ("scale", 2 * n, partial(elementwise.scale, x, y, 0.5), partial(np.multiply, a, np.float32(0.5), out=out)),
        ("cast to bfloat16", 1.5 * n, partial(elementwise.cast, x, bits), partial(np.copyto, half, a, "unsafe")),
        ("cast from bfloat16", 1.5 * n, partial(elementwise.cast, bits, x), partial(np.copyto, out, half)),
        ("fill", n, partial(elementwise.fill, y, 1.0), partial(out.fill, 1.0)),
        ("copy", 2 * n, partial(elementwise.copy, x, y), partial(np.copyto, out, a)),
        (
            "copy, strided",
            2 * queries.nbytes,
            partial(elementwise.copy, device_queries, device_packed),
            partial(np.copyto, packed, queries),
        ),
        *(
            (
                f"transpose, {variant}",
                2 * n,
                partial(elementwise.transpose, x, y, variant=variant),
                partial(np.copyto, out, a.T),
            )
            for variant in elementwise.TRANSPOSE_VARIANTS.defaults(x, y)
        ),
    ):
        rows.append([name, 1e-9 * nbytes / harness.median_s(run), 1e-9 * nbytes / harness.median_s(peer)])
    harness.report("elementwise", ("operation", "numstack", "numpy"), rows, options)


if __name__ == "__main__":
    main()
