"""Reductions among the 32 threads of a warp, and among all threads of a one-dimensional block.

A warp reduces by butterfly: in step k, lane i adds the value of lane i xor 2^k. After five steps each lane has summed
all 32 values in the same order of pairs, so that every lane holds the same bits and no memory was used::

    lane        0    1    2    3   ...
    xor 1      01   01   23   23
    xor 2    0123 0123 0123 0123

A block reduces in two steps: each warp by butterfly, then the warps' results, which pass through shared memory. All
threads of the block must call these functions, threads without data with the neutral element.
"""

import math

from numba import cuda, float32, uint32

WARP = 32
"""Threads of a warp."""

LOWEST = float32(-3.4028235e38)
"""The least finite float32: where a running maximum starts. Unlike -inf it gives no NaN in LOWEST - LOWEST."""


@cuda.jit(device=True)
def warp_sum(x):
    """The sum of x over the warp, in every lane."""
    x += cuda.shfl_xor_sync(0xFFFFFFFF, x, 16)
    x += cuda.shfl_xor_sync(0xFFFFFFFF, x, 8)
    x += cuda.shfl_xor_sync(0xFFFFFFFF, x, 4)
    x += cuda.shfl_xor_sync(0xFFFFFFFF, x, 2)
    x += cuda.shfl_xor_sync(0xFFFFFFFF, x, 1)
    return x


@cuda.jit(device=True)
def warp_sum_of_two(a, b):
    """The sum of a over the warp in its lower 16 lanes, that of b in the upper: six shuffles instead of ten."""
    is_low = uint32(cuda.threadIdx.x) % uint32(WARP) < uint32(16)
    mine = a if is_low else b
    mine += cuda.shfl_xor_sync(0xFFFFFFFF, b if is_low else a, 16)
    mine += cuda.shfl_xor_sync(0xFFFFFFFF, mine, 8)
    mine += cuda.shfl_xor_sync(0xFFFFFFFF, mine, 4)
    mine += cuda.shfl_xor_sync(0xFFFFFFFF, mine, 2)
    mine += cuda.shfl_xor_sync(0xFFFFFFFF, mine, 1)
    return mine


@cuda.jit(device=True)
def warp_max(x):
    """The largest x of the warp, in every lane."""
    x = max(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, 16))
    x = max(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, 8))
    x = max(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, 4))
    x = max(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, 2))
    x = max(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, 1))
    return x


@cuda.jit(device=True)
def block_sum(x, warps):
    """The sum of x over the block, in every thread. ``warps``: 32 float32 of shared memory, free again on return."""
    x = warp_sum(x)
    if cuda.blockDim.x > 32:
        lane = cuda.threadIdx.x % 32
        if lane == 0:
            warps[cuda.threadIdx.x // 32] = x
        cuda.syncthreads()
        x = float32(0)
        if lane < cuda.blockDim.x // 32:
            x = warps[lane]
        x = warp_sum(x)
        cuda.syncthreads()
    return x


@cuda.jit(device=True)
def block_max(x, warps):
    """The largest x of the block, in every thread. ``warps``: 32 float32 of shared memory, free again on return."""
    x = warp_max(x)
    if cuda.blockDim.x > 32:
        lane = cuda.threadIdx.x % 32
        if lane == 0:
            warps[cuda.threadIdx.x // 32] = x
        cuda.syncthreads()
        x = LOWEST
        if lane < cuda.blockDim.x // 32:
            x = warps[lane]
        x = warp_max(x)
        cuda.syncthreads()
    return x


@cuda.jit(device=True)
def online_sum(total, largest, x):
    """``sum exp(x_i - max x)`` after one more x, from the sum and the maximum before it.

    One of the two exponentials that the update needs is always exp(0): only the other is computed. The caller then sets
    ``largest = max(largest, x)``.
    """
    step = math.exp(-abs(x - largest))
    if x > largest:
        return total * step + float32(1)
    return total + step
