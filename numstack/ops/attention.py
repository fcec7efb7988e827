"""Attention over packed queries, keys and values."""

from __future__ import annotations

from typing import Any

import numpy as np

from numstack import memory
from numstack.autograd import Node, record
from numstack.errors import ShapeError
from numstack.kernels import attention as kernels
from numstack.tensor import Tensor


def attention(qkv: Tensor, *, n_heads: int, causal: bool = True, scale: float | None = None) -> Tensor:
    """Scaled dot-product attention of each head, with queries, keys and values side by side in one tensor.

    Parameters
    ----------
    qkv : Tensor, shape (B, T, 3 * C)
        C channels of queries, then of keys, then of values; each C is ``n_heads`` heads one after the other.
    n_heads : int
        C must be a multiple.
    causal : bool
        Position t sees positions up to t only.
    scale : float, optional
        Factor on the products of queries and keys; ``1 / sqrt(C / n_heads)`` by default.

    Returns
    -------
    Tensor, shape (B, T, C)

    Raises
    ------
    ShapeError
        If the last axis is not three times a multiple of ``n_heads``.

    Notes
    -----
    Kernels read the heads as strided views and write the result and the gradient the same way: nothing is copied.
    There is no dropout of attention probabilities.
    """
    if qkv.ndim != 3 or n_heads < 1 or qkv.shape[2] % (3 * n_heads):
        raise ShapeError(
            f"attention: qkv has shape {qkv.shape} with n_heads={n_heads}; "
            "expected (B, T, 3 * C) with C a multiple of n_heads"
        )
    n_batch, n_time, n_channels = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    head_width = n_channels // n_heads
    out = memory.empty((n_batch, n_time, n_channels), qkv.array.dtype, scope="forward")
    lse_BHT = memory.empty((n_batch, n_heads, n_time), np.float32, scope="forward")
    q, k, v = _heads(qkv.array, 3, n_heads, head_width)
    (out_BHTD,) = _heads(out, 1, n_heads, head_width)
    kernels.forward(q, k, v, out_BHTD, lse_BHT, causal=causal, scale=scale)

    def backward(node: Node) -> None:
        dqkv = memory.empty((n_batch, n_time, 3 * n_channels), out.dtype, scope="backward")
        workspace = memory.empty((kernels.workspace_size(q),), np.float32, scope="workspace")
        dq, dk, dv = _heads(dqkv, 3, n_heads, head_width)
        (dout_BHTD,) = _heads(node.gradient, 1, n_heads, head_width)
        kernels.backward(q, k, v, out_BHTD, dout_BHTD, lse_BHT, dq, dk, dv, workspace, causal=causal, scale=scale)
        node.give(0, dqkv)

    return record("attention", out, (qkv,), backward)


def _heads(packed_BTE: Any, n_parts: int, n_heads: int, head_width: int) -> list[Any]:
    """Views (B, H, T, D) of the parts that lie side by side in the last axis."""
    n_batch, n_time = packed_BTE.shape[:2]
    parts_PBHTD = packed_BTE.reshape(n_batch, n_time, n_parts, n_heads, head_width).transpose(2, 0, 3, 1, 4)
    return [parts_PBHTD[part] for part in range(n_parts)]
