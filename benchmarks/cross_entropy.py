"""Cross-entropy: loss and gradient, every variant, beside PyTorch where it is installed.

usage: NUMSTACK_THREADS=1 python -m benchmarks.cross_entropy [--json PATH]

The table is in GB/s, float32, of the least bytes the operation can move: the loss reads the logits once; loss and
gradient read and write them once. PyTorch (log_softmax, nll_loss and their backward) runs on one CPU thread.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from numstack import memory
from numstack.kernels import cross_entropy
from numstack.kernels.rows import row_of

SHAPES = [(768, 84), (256, 50304)]  # characters; GPT-2's vocabulary, padded


def main() -> None:
    options = harness.parse_options(__doc__)
    torch = harness.one_threaded_torch()
    rows: list[list[Any]] = []
    for R, V in SHAPES:
        rng = np.random.default_rng(0)
        host_logits = rng.standard_normal((R, V), dtype=np.float32)
        host_targets = rng.integers(0, V, R).astype(np.int32)
        logits, targets = memory.from_host(host_logits), memory.from_host(host_targets)
        loss, lse = (memory.empty(R, np.float32) for _ in range(2))
        dlogits, scale = memory.empty((R, V), np.float32), memory.from_host(np.array([1 / R], np.float32))
        for variant in cross_entropy.FORWARD.defaults(row_of(V, logits), 4):
            run = partial(cross_entropy.forward, logits, targets, loss, lse, variant=variant)
            rows.append([f"loss {variant}", f"{R} x {V}", gb_per_s(run, logits.nbytes)])
        for where, out in (("", dlogits), (" in place", memory.from_host(host_logits))):
            source = logits if out is dlogits else out
            for variant in cross_entropy.FORWARD_BACKWARD.defaults(row_of(V, logits), 4, False):
                run = partial(cross_entropy.forward_backward, source, targets, loss, out, scale, variant=variant)
                rows.append([f"loss and gradient{where} {variant}", f"{R} x {V}", gb_per_s(run, 2 * logits.nbytes)])
        if torch is not None:
            rows.append(["loss and gradient torch", f"{R} x {V}", torch_rate(torch, host_logits, host_targets)])
    harness.report("cross_entropy", ("what and variant", "shape", "GB/s"), rows, options)


def gb_per_s(run: Any, nbytes: int) -> float:
    return 1e-9 * nbytes / harness.median_s(run)


def torch_rate(torch: Any, logits: np.ndarray, targets: np.ndarray) -> float:
    leaf = torch.from_numpy(logits).requires_grad_()
    indices = torch.from_numpy(targets.astype(np.int64))

    def run() -> None:
        leaf.grad = None
        torch.nn.functional.cross_entropy(leaf, indices).backward()

    return gb_per_s(run, 2 * logits.nbytes)


if __name__ == "__main__":
    main()
