"""The rungs of the ladder that run everywhere, on a CPU and on any GPU."""

from collections.abc import Callable
from functools import cache
from typing import Any

from numba import cuda, float32

from numstack.device import Kernel, Stream, kernel, narrow, widen
from numstack.kernels import gelu
from numstack.kernels.gemm.problem import Problem, Spec
from numstack.kernels.launch import ceil_div
from numstack.kernels.variants import Variant

SHARED_TILE = 16  # threads along each side of a block, elements along each side of a tile
# Shared arrays with one more column than needed: threads that go down a column then hit different memory banks.
SHARED_TILE_PADDED = SHARED_TILE + 1

# register_tile: a block of 16 x 8 threads computes 64 x 32 elements of c, a thread 8 rows of 2 columns 16 apart.
# Sixteen neighbours in x, one vector on a CPU, read one element of a and sixteen neighbouring ones of b.
BLOCK_X = 16
BLOCK_Y = 8
THREAD_ROWS = 8
THREAD_COLUMNS = 2
TILE_M = BLOCK_Y * THREAD_ROWS
TILE_N = BLOCK_X * THREAD_COLUMNS
TILE_K = 32
UNROLL_K = 8  # compilers for GPUs unroll this much; all of TILE_K at once costs them registers, and spills


@cuda.jit(device=True)
def load_or_zero(x, i, j):
    """x[i, j], or 0 outside of x: a tile may hang over the edge."""
    if i < x.shape[0] and j < x.shape[1]:
        return widen(x[i, j])
    return float32(0)


def _make_store(spec: Spec) -> Any:
    """A device function that stores alpha op(a) op(b) at one place, after the epilogue."""
    has_bias, has_gelu, has_residual = spec.has_bias, spec.has_gelu, spec.has_residual
    keeps_preactivation = spec.keeps_preactivation
    has_gelu_backward = spec.has_gelu_backward
    gelu_tanh, gelu_tanh_slope = gelu.gelu_tanh, gelu.gelu_tanh_slope

    @cuda.jit(device=True)
    def store(value, i, j, c, bias, residual, preactivation):
        if has_bias:
            value += widen(bias[0, j])
        if keeps_preactivation:
            preactivation[i, j] = narrow(value, preactivation.dtype)
        if has_gelu:
            value = gelu_tanh(value)
        if has_gelu_backward:
            value *= gelu_tanh_slope(widen(preactivation[i, j]))
        if has_residual:
            value += widen(residual[i, j])
        c[i, j] = narrow(value, c.dtype)

    return store


# Every kernel takes a, b, c, bias as a row, residual, preactivation and alpha; what its Spec does not use, it does not
# touch. Blocks: x along the rows of c, which may be millions of tokens; y along its columns.


@cache
def _thread_per_element_kernel(spec: Spec) -> Kernel:
    a_is_KM, b_is_NK = spec.a_is_KM, spec.b_is_NK
    store = _make_store(spec)

    @kernel(name=spec.name("thread_per_element"))
    def thread_per_element(a, b, c, bias, residual, preactivation, alpha):
        i = cuda.blockIdx.x * SHARED_TILE + cuda.threadIdx.y
        j = cuda.blockIdx.y * SHARED_TILE + cuda.threadIdx.x
        depth = a.shape[0] if a_is_KM else a.shape[1]
        if i < c.shape[0] and j < c.shape[1]:
            total = float32(0)
            for k in range(depth):
                left = a[k, i] if a_is_KM else a[i, k]
                right = b[j, k] if b_is_NK else b[k, j]
                total += widen(left) * widen(right)
            store(alpha * total, i, j, c, bias, residual, preactivation)

    return thread_per_element


@cache
def _shared_tile_kernel(spec: Spec) -> Kernel:
    a_is_KM, b_is_NK = spec.a_is_KM, spec.b_is_NK
    store = _make_store(spec)

    @kernel(name=spec.name("shared_tile"))
    def shared_tile(a, b, c, bias, residual, preactivation, alpha):
        a_tile = cuda.shared.array((SHARED_TILE, SHARED_TILE_PADDED), float32)  # [m, k]
        b_tile = cuda.shared.array((SHARED_TILE, SHARED_TILE_PADDED), float32)  # [k, n]
        tx = cuda.threadIdx.x
        ty = cuda.threadIdx.y
        i0 = cuda.blockIdx.x * SHARED_TILE
        j0 = cuda.blockIdx.y * SHARED_TILE
        depth = a.shape[0] if a_is_KM else a.shape[1]
        total = float32(0)
        for k0 in range(0, depth, SHARED_TILE):
            # Neighbours in x read neighbours in memory, whichever way the operand lies.
            if a_is_KM:
                a_tile[tx, ty] = load_or_zero(a, k0 + ty, i0 + tx)
            else:
                a_tile[ty, tx] = load_or_zero(a, i0 + ty, k0 + tx)
            if b_is_NK:
                b_tile[tx, ty] = load_or_zero(b, j0 + ty, k0 + tx)
            else:
                b_tile[ty, tx] = load_or_zero(b, k0 + ty, j0 + tx)
            cuda.syncthreads()
            for k in range(SHARED_TILE):
                total += a_tile[ty, k] * b_tile[k, tx]
            cuda.syncthreads()
        i = i0 + ty
        j = j0 + tx
        if i < c.shape[0] and j < c.shape[1]:
            store(alpha * total, i, j, c, bias, residual, preactivation)

    return shared_tile


def _make_load_tile(n_rows: int, n_columns: int, transposed: bool) -> Any:
    """A device function by which the block loads a tile, neighbours in x along its rows in global memory."""
    y_steps, x_steps = n_rows // BLOCK_Y, n_columns // BLOCK_X

    @cuda.jit(device=True)
    def load_tile(tile, source, i0, j0):
        for y in range(y_steps):
            for x in range(x_steps):
                i = y * BLOCK_Y + cuda.threadIdx.y
                j = x * BLOCK_X + cuda.threadIdx.x
                if transposed:
                    tile[j, i] = load_or_zero(source, i0 + i, j0 + j)
                else:
                    tile[i, j] = load_or_zero(source, i0 + i, j0 + j)

    return load_tile


@cache
def _register_tile_kernel(spec: Spec) -> Kernel:
    a_is_KM, b_is_NK = spec.a_is_KM, spec.b_is_NK
    store = _make_store(spec)
    # a's tile lies as a does in memory: a warp reads only one or two of its elements at a time, in either order. b's is
    # always [k, n], so that neighbours in x read neighbours; padded where it is written down its columns.
    a_shape = (TILE_K, TILE_M) if a_is_KM else (TILE_M, TILE_K)
    b_shape = (TILE_N, TILE_K) if b_is_NK else (TILE_K, TILE_N)
    load_a = _make_load_tile(*a_shape, transposed=False)
    load_b = _make_load_tile(*b_shape, transposed=b_is_NK)
    a_tile_rows, a_tile_columns = (TILE_K, TILE_M) if a_is_KM else (TILE_M, TILE_K + 1)
    b_tile_columns = TILE_N + 1 if b_is_NK else TILE_N

    @kernel(name=spec.name("register_tile"))
    def register_tile(a, b, c, bias, residual, preactivation, alpha):
        a_tile = cuda.shared.array((a_tile_rows, a_tile_columns), float32)
        b_tile = cuda.shared.array((TILE_K, b_tile_columns), float32)
        total = cuda.local.array((THREAD_ROWS, THREAD_COLUMNS), float32)
        tx = cuda.threadIdx.x
        ty = cuda.threadIdx.y
        i0 = cuda.blockIdx.x * TILE_M
        j0 = cuda.blockIdx.y * TILE_N
        depth = a.shape[0] if a_is_KM else a.shape[1]
        for m in range(THREAD_ROWS):
            for n in range(THREAD_COLUMNS):
                total[m, n] = float32(0)
        for k0 in range(0, depth, TILE_K):
            if a_is_KM:
                load_a(a_tile, a, k0, i0)
            else:
                load_a(a_tile, a, i0, k0)
            if b_is_NK:
                load_b(b_tile, b, j0, k0)
            else:
                load_b(b_tile, b, k0, j0)
            cuda.syncthreads()
            for k1 in range(0, TILE_K, UNROLL_K):
                for k in range(UNROLL_K):
                    for m in range(THREAD_ROWS):
                        row = ty * THREAD_ROWS + m
                        left = a_tile[k1 + k, row] if a_is_KM else a_tile[row, k1 + k]
                        for n in range(THREAD_COLUMNS):
                            total[m, n] += left * b_tile[k1 + k, n * BLOCK_X + tx]
            cuda.syncthreads()
        for m in range(THREAD_ROWS):
            for n in range(THREAD_COLUMNS):
                i = i0 + ty * THREAD_ROWS + m
                j = j0 + n * BLOCK_X + tx
                if i < c.shape[0] and j < c.shape[1]:
                    store(alpha * total[m, n], i, j, c, bias, residual, preactivation)

    return register_tile


def _launch_with(
    kernel_of: Callable[[Spec], Kernel], tile_m: int, tile_n: int, block: tuple[int, int]
) -> Callable[..., None]:
    def launch(problem: Problem, stream: Stream | None) -> None:
        n_rows, n_columns, c = problem.m, problem.n, problem.c
        # c stands in for what is not given; the kernel does not touch it.
        bias = c if problem.bias is None else problem.bias.reshape(1, n_columns)
        residual = c if problem.residual is None else problem.residual
        preactivation = c if problem.preactivation is None else problem.preactivation
        operands = (problem.a, problem.b, c, bias, residual, preactivation, problem.alpha)
        grid = (ceil_div(n_rows, tile_m), ceil_div(n_columns, tile_n))
        kernel_of(problem.spec)[grid, block, stream](*operands, flops=problem.flops)

    return launch


LADDER = [
    Variant(
        "thread_per_element",
        _launch_with(_thread_per_element_kernel, SHARED_TILE, SHARED_TILE, (SHARED_TILE, SHARED_TILE)),
        "The definition: a thread an element of c, operands straight from global memory.",
    ),
    Variant(
        "shared_tile",
        _launch_with(_shared_tile_kernel, SHARED_TILE, SHARED_TILE, (SHARED_TILE, SHARED_TILE)),
        "Loads each operand once a block instead of once a thread: 16 times less global traffic.",
    ),
    Variant(
        "register_tile",
        _launch_with(_register_tile_kernel, TILE_M, TILE_N, (BLOCK_X, BLOCK_Y)),
        "Reads 10 shared values for 16 multiply-adds instead of 32.",
    ),
]
