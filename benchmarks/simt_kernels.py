"""Kernels of benchmarks.simt, which import numba.cuda and nothing else: its simulator runs one of them."""

from __future__ import annotations

from numba import cuda, float32

TILE = 16
TM, TN, BK = 8, 2, 32
FULL = 0xFFFFFFFF


def shared_tile(a, b, c):  # type: ignore[no-untyped-def]
    """16 x 16 threads, one element of c each; whole tiles only."""
    a_tile = cuda.shared.array((TILE, TILE), float32)
    b_tile = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    i, j = cuda.blockIdx.y * TILE + y, cuda.blockIdx.x * TILE + x
    total = float32(0)
    for k0 in range(0, a.shape[1], TILE):
        a_tile[y, x] = a[i, k0 + x]
        b_tile[y, x] = b[k0 + y, j]
        cuda.syncthreads()
        for k in range(TILE):
            total += a_tile[y, k] * b_tile[k, x]
        cuda.syncthreads()
    c[i, j] = total


def register_tile(a, b, c):  # type: ignore[no-untyped-def]
    """16 x 8 threads, 8 x 2 elements of c each."""
    a_tile = cuda.shared.array((BK, 8 * TM), float32)
    b_tile = cuda.shared.array((BK, 16 * TN), float32)
    total = cuda.local.array((TM, TN), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    i0, j0 = cuda.blockIdx.y * 8 * TM, cuda.blockIdx.x * 16 * TN
    for m in range(TM):
        for n in range(TN):
            total[m, n] = float32(0)
    for k0 in range(0, a.shape[1], BK):
        for row in range(y, 8 * TM, 8):
            for k in range(x, BK, 16):
                a_tile[k, row] = a[i0 + row, k0 + k]
        for k in range(y, BK, 8):
            for n in range(TN):
                b_tile[k, n * 16 + x] = b[k0 + k, j0 + n * 16 + x]
        cuda.syncthreads()
        for k in range(BK):
            for m in range(TM):
                value = a_tile[k, y * TM + m]
                for n in range(TN):
                    total[m, n] += value * b_tile[k, n * 16 + x]
        cuda.syncthreads()
    for m in range(TM):
        for n in range(TN):
            c[i0 + y * TM + m, j0 + n * 16 + x] = total[m, n]


@cuda.jit(device=True)
def warp_sum(value):  # type: ignore[no-untyped-def]
    """The sum over the lanes of a warp, in every lane."""
    for offset in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(FULL, value, offset)
    return value


@cuda.jit(device=True)
def block_sum(value, sums):  # type: ignore[no-untyped-def]
    """The sum over the threads of a block, in every thread."""
    value = warp_sum(value)
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    if lane == 0:
        sums[warp] = value
    cuda.syncthreads()
    value = warp_sum(sums[lane] if lane < cuda.blockDim.x // 32 else float32(0))
    cuda.syncthreads()
    return value


def layernorm(x, weight, bias, out, eps):  # type: ignore[no-untyped-def]
    """A block of 128 threads for each row, reduced by shuffles."""
    sums = cuda.shared.array(32, float32)
    row, columns = cuda.blockIdx.x, x.shape[1]
    total = float32(0)
    for c in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        total += x[row, c]
    mean = block_sum(total, sums) / float32(columns)
    total = float32(0)
    for c in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        total += (x[row, c] - mean) ** 2
    rstd = float32(1) / (block_sum(total, sums) / float32(columns) + eps) ** float32(0.5)
    for c in range(cuda.threadIdx.x, columns, cuda.blockDim.x):
        out[row, c] = (x[row, c] - mean) * rstd * weight[c] + bias[c]
