"""Embedding: forward, and every backward variant.

usage: NUMSTACK_THREADS=1 python -m benchmarks.embedding [--json PATH]

The table is in microseconds a call and in GB/s, float32, of the least bytes the operation can move: each position's row
read and written forward; read, and its row of the table read and written, backward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from numstack import memory
from numstack.kernels import embedding
from numstack.kernels.rows import row_of

SHAPES = [(12, 64, 84, 128), (4, 1024, 50304, 128)]  # B, T, V, C: characters; GPT-2's vocabulary
LARGEST_SCAN = 10**9  # comparisons, V B T C, above which the scan is left out: it would take minutes


def main() -> None:
    options = harness.parse_options(__doc__)
    rows: list[list[Any]] = []
    for B, T, V, C in SHAPES:
        rng = np.random.default_rng(0)
        # Frequencies fall as 1 / rank, as those of words do.
        frequencies = 1 / np.arange(1, V + 1)
        host_tokens = rng.choice(V, (B, T), p=frequencies / frequencies.sum()).astype(np.int32)
        tokens = memory.from_host(host_tokens)
        table, positions, dout = (
            memory.from_host(rng.standard_normal(shape, dtype=np.float32)) for shape in ((V, C), (T, C), (B, T, C))
        )
        out, groups = memory.empty((B, T, C), np.float32), memory.empty(embedding.groups_size(B, T, V), np.int32)
        what = f"B{B} T{T} V{V} C{C}"
        for name, of_groups in (("forward", None), ("forward, tokens grouped", groups)):
            forward = harness.median_s(partial(embedding.forward, tokens, table, positions, out, of_groups))
            rows.append([what, name, 1e6 * forward, 2e-9 * out.nbytes / forward])
        for variant in embedding.BACKWARD.defaults(row_of(C, dout), True):
            if variant == "scan" and V * B * T * C > LARGEST_SCAN:
                continue
            run = partial(embedding.backward, tokens, dout, table, positions, groups, variant=variant)
            seconds = harness.median_s(run)
            rows.append([what, f"backward {variant}", 1e6 * seconds, 3e-9 * out.nbytes / seconds])
    harness.report("embedding", ("shape", "pass and variant", "us", "GB/s"), rows, options)


if __name__ == "__main__":
    main()
