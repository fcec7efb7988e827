"""Attention, causal, forward and backward: both variants, beside PyTorch where it is installed.

usage: NUMSTACK_THREADS=1 python -m benchmarks.attention [--json PATH]

The table is in GFLOP/s, float32, of the least arithmetic: two products of T x T x D forward and five backward, half of
each for causal. q, k and v are views of one packed array, as in training. PyTorch runs on one CPU thread.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from numstack import memory
from numstack.kernels import attention

SHAPES = [(12, 4, 64, 32), (12, 4, 128, 32), (2, 12, 256, 64)]  # B, H, T, D


def main() -> None:
    options = harness.parse_options(__doc__)
    torch = harness.one_threaded_torch()
    rows: list[list[Any]] = []
    for B, H, T, D in SHAPES:
        rng = np.random.default_rng(0)
        host_qkv = rng.standard_normal((B, T, 3, H, D), dtype=np.float32)
        host_dout = rng.standard_normal((B, T, H, D), dtype=np.float32)
        q, k, v = heads(memory.from_host(host_qkv))
        dq, dk, dv = heads(memory.empty((B, T, 3, H, D), np.float32))
        out, dout = (
            a.transpose(0, 2, 1, 3) for a in (memory.empty((B, T, H, D), np.float32), memory.from_host(host_dout))
        )
        lse = memory.empty((B, H, T), np.float32)
        workspace = memory.empty((attention.workspace_size(q),), np.float32)
        product = B * H * T * T * D
        what = f"B{B} H{H} T{T} D{D}"
        for variant in attention.FORWARD.runnable():
            forward = partial(attention.forward, q, k, v, out, lse, variant=variant)
            backward = partial(attention.backward, q, k, v, out, dout, lse, dq, dk, dv, workspace, variant=variant)
            rows.append([what, variant, gflop_per_s(forward, 2 * product), gflop_per_s(backward, 5 * product)])
        if torch is not None:
            rows.append([what, "torch", *torch_rates(torch, host_qkv, host_dout, product)])
    harness.report("attention", ("shape", "variant", "forward", "backward"), rows, options)


def heads(packed: Any) -> list[Any]:
    """q, k and v as [batch, head, time, width]."""
    return [packed[:, :, i].transpose(0, 2, 1, 3) for i in range(3)]


def gflop_per_s(run: Any, flops: int) -> float:
    return 1e-9 * flops / harness.median_s(run)


def torch_rates(torch: Any, qkv: np.ndarray, dout: np.ndarray, product: int) -> tuple[float, float]:
    q, k, v = (torch.from_numpy(np.ascontiguousarray(a)).requires_grad_() for a in heads(qkv))
    gradient = torch.from_numpy(dout.transpose(0, 2, 1, 3))
    run = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, is_causal=True)
    out = run()
    backward = partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True)
    return gflop_per_s(run, 2 * product), gflop_per_s(backward, 5 * product)


if __name__ == "__main__":
    main()
