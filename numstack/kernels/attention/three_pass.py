"""Attention by the formula: a block for each query, or for dk and dv each key, walks over the other side's rows.

Threads take a row of the other side each for the scores, and an element of their own row for the result. The scores are
computed anew in each pass.
"""

import math

from numba import cuda, float32

from numstack.device import Array, Stream, kernel, narrow, widen
from numstack.kernels.warp import LOWEST, WARP, block_max, block_sum

BLOCK = 128  # threads: at least the largest width


@cuda.jit(device=True)
def _dot(a_BHTD, b_BHTD, batch, head, i, j):
    """a_i . b_j."""
    total = float32(0)
    for d in range(a_BHTD.shape[3]):
        total += widen(a_BHTD[batch, head, i, d]) * widen(b_BHTD[batch, head, j, d])
    return total


@kernel(name="attention.forward three_pass")
def _forward(q_BHTD, k_BHTD, v_BHTD, out_BHTD, lse_BHT, scale, causal):
    """Grid (queries, heads, batch)."""
    warps = cuda.shared.array(WARP, float32)
    p_J = cuda.shared.array(BLOCK, float32)
    query = cuda.blockIdx.x
    head = cuda.blockIdx.y
    batch = cuda.blockIdx.z
    thread = cuda.threadIdx.x
    D = q_BHTD.shape[3]
    keys = min(query + 1, k_BHTD.shape[2]) if causal else k_BHTD.shape[2]

    largest = LOWEST
    for key0 in range(0, keys, BLOCK):
        if key0 + thread < keys:
            largest = max(largest, scale * _dot(q_BHTD, k_BHTD, batch, head, query, key0 + thread))
    largest = block_max(largest, warps)

    total = float32(0)
    for key0 in range(0, keys, BLOCK):
        if key0 + thread < keys:
            total += math.exp(scale * _dot(q_BHTD, k_BHTD, batch, head, query, key0 + thread) - largest)
    total = block_sum(total, warps)

    result = float32(0)
    for key0 in range(0, keys, BLOCK):
        if key0 + thread < keys:
            p_J[thread] = math.exp(scale * _dot(q_BHTD, k_BHTD, batch, head, query, key0 + thread) - largest)
        cuda.syncthreads()
        if thread < D:
            for j in range(min(BLOCK, keys - key0)):
                result += p_J[j] * widen(v_BHTD[batch, head, key0 + j, thread])
        cuda.syncthreads()
    if thread < D:
        out_BHTD[batch, head, query, thread] = narrow(result / total, out_BHTD.dtype)
    if thread == 0:
        lse_BHT[batch, head, query] = largest + math.log(total)


@kernel(name="attention.dq three_pass")
def _dq(q_BHTD, k_BHTD, v_BHTD, out_BHTD, dout_BHTD, lse_BHT, dq_BHTD, delta_BHT, scale, causal):
    """Grid (queries, heads, batch); makes delta as well."""
    warps = cuda.shared.array(WARP, float32)
    ds_J = cuda.shared.array(BLOCK, float32)
    query = cuda.blockIdx.x
    head = cuda.blockIdx.y
    batch = cuda.blockIdx.z
    thread = cuda.threadIdx.x
    D = q_BHTD.shape[3]
    keys = min(query + 1, k_BHTD.shape[2]) if causal else k_BHTD.shape[2]
    lse = lse_BHT[batch, head, query]

    product = float32(0)
    if thread < D:
        product = widen(out_BHTD[batch, head, query, thread]) * widen(dout_BHTD[batch, head, query, thread])
    delta = block_sum(product, warps)

    result = float32(0)
    for key0 in range(0, keys, BLOCK):
        key = key0 + thread
        if key < keys:
            p = math.exp(scale * _dot(q_BHTD, k_BHTD, batch, head, query, key) - lse)
            ds_J[thread] = p * (_dot(dout_BHTD, v_BHTD, batch, head, query, key) - delta)
        cuda.syncthreads()
        if thread < D:
            for j in range(min(BLOCK, keys - key0)):
                result += ds_J[j] * widen(k_BHTD[batch, head, key0 + j, thread])
        cuda.syncthreads()
    if thread < D:
        dq_BHTD[batch, head, query, thread] = narrow(scale * result, dq_BHTD.dtype)
    if thread == 0:
        delta_BHT[batch, head, query] = delta


@kernel(name="attention.dkv three_pass")
def _dkv(q_BHTD, k_BHTD, v_BHTD, dout_BHTD, lse_BHT, dk_BHTD, dv_BHTD, delta_BHT, scale, causal):
    """Grid (keys, heads, batch)."""
    p_I = cuda.shared.array(BLOCK, float32)
    ds_I = cuda.shared.array(BLOCK, float32)
    key = cuda.blockIdx.x
    head = cuda.blockIdx.y
    batch = cuda.blockIdx.z
    thread = cuda.threadIdx.x
    D = q_BHTD.shape[3]
    queries = q_BHTD.shape[2]

    dk = float32(0)
    dv = float32(0)
    for query0 in range(key if causal else 0, queries, BLOCK):
        query = query0 + thread
        if query < queries:
            p = math.exp(scale * _dot(q_BHTD, k_BHTD, batch, head, query, key) - lse_BHT[batch, head, query])
            dp = _dot(dout_BHTD, v_BHTD, batch, head, query, key)
            p_I[thread] = p
            ds_I[thread] = p * (dp - delta_BHT[batch, head, query])
        cuda.syncthreads()
        if thread < D:
            for i in range(min(BLOCK, queries - query0)):
                dk += ds_I[i] * widen(q_BHTD[batch, head, query0 + i, thread])
                dv += p_I[i] * widen(dout_BHTD[batch, head, query0 + i, thread])
        cuda.syncthreads()
    if thread < D:
        dk_BHTD[batch, head, key, thread] = narrow(scale * dk, dk_BHTD.dtype)
        dv_BHTD[batch, head, key, thread] = narrow(dv, dv_BHTD.dtype)


def forward(arrays: tuple[Array, ...], scale: float, causal: bool, product_flops: int, stream: Stream | None) -> None:
    """Launch the forward pass over (q, k, v, out, lse)."""
    B, H, T, _ = arrays[0].shape
    _forward[(T, H, B), BLOCK, stream](*arrays, scale, causal, flops=2 * product_flops)


def backward(arrays: tuple[Array, ...], scale: float, causal: bool, product_flops: int, stream: Stream | None) -> None:
    """Launch the backward pass over (q, k, v, out, dout, lse, dq, dk, dv, delta)."""
    q, k, v, out, dout, lse, dq, dk, dv, delta = arrays
    B, H, T, _ = q.shape
    _dq[(T, H, B), BLOCK, stream](q, k, v, out, dout, lse, dq, delta, scale, causal, flops=3 * product_flops)
    _dkv[(k.shape[2], H, B), BLOCK, stream](q, k, v, dout, lse, dk, dv, delta, scale, causal, flops=4 * product_flops)
