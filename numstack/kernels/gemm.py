"""Matrix product: c = alpha op(a) op(b), with what usually follows it done before c is stored.

=======  ===========================  ===============================================================
layout   c_MN =                       in a linear layer y = x w (x: tokens by inputs, w: inputs by outputs)
=======  ===========================  ===============================================================
NN       alpha a_MK b_KN              forward, y = x w
NT       alpha a_MK b_NK^T            gradient of the input, dx = dy w^T
TN       alpha a_KM^T b_KN            gradient of the weight, dw = x^T dy
=======  ===========================  ===============================================================

No operand is ever transposed in memory. Epilogues, on ab = alpha op(a) op(b):

- ``bias``: c = ab + bias_N;
- ``bias_gelu``: p = ab + bias_N, c = gelu(p), tanh form; p is stored too where the backward pass will need it;
- ``residual``: c = ab + residual_MN, plus bias_N if given.

``accumulate`` adds into c (c = ab + c), for gradients that have several contributions.

The ladder, each block computing one tile of c:

- ``thread_per_element``: every thread walks along a row of op(a) and a column of op(b), all of it from global memory.
- ``shared_tile``: a block of 16 x 16 threads loads 16 x 16 elements of each operand into shared memory, and reads
  each of them 16 times there: 16 times less traffic from global memory.
- ``register_tile``: a thread computes 8 x 2 elements of c in registers, so that a value read from shared memory is
  used 2 or 8 times; shared memory, not arithmetic, was what ``shared_tile`` waited for.

Sources: the ladder follows Simon Boehm, "How to optimize a CUDA matmul kernel" (2022).
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32

from numstack.device import Array, Kernel, Stream, kernel, narrow, widen
from numstack.errors import ConfigError, ShapeError
from numstack.kernels import gelu
from numstack.kernels.launch import (
    ceil_div,
    check_contiguous,
    check_floats,
    check_ndim,
    check_option,
    check_shape,
)
from numstack.kernels.variants import Variant, Variants

LAYOUTS = ("NN", "NT", "TN")
EPILOGUES = (None, "bias", "bias_gelu", "residual")

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


def reference(
    a: np.ndarray,
    b: np.ndarray,
    *,
    layout: str = "NN",
    alpha: float = 1.0,
    epilogue: str | None = None,
    bias: np.ndarray | None = None,
    residual: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """c and, for ``bias_gelu``, the value before the GELU (else c again), in float64.

    ``accumulate`` is ``residual=c``.
    """
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    c = alpha * ((a.T if layout[0] == "T" else a) @ (b.T if layout[1] == "T" else b))
    if bias is not None:
        c = c + np.asarray(bias, np.float64)
    if epilogue == "bias_gelu":
        return gelu.reference(c, "tanh")[0], c
    if residual is not None:
        c = c + np.asarray(residual, np.float64)
    return c, c


class Spec(NamedTuple):
    """What a kernel is specialised for; constants in its source."""

    a_is_KM: bool
    b_is_NK: bool
    has_bias: bool
    has_gelu: bool
    has_residual: bool
    keeps_preactivation: bool

    def name(self, variant: str) -> str:
        """What traces call the kernel: ``gemm.register_tile NT bias_gelu``."""
        layout = "TN" if self.a_is_KM else "NT" if self.b_is_NK else "NN"
        epilogue = [("bias", self.has_bias), ("gelu", self.has_gelu), ("residual", self.has_residual)]
        return " ".join(["gemm." + variant, layout, "_".join(part for part, is_there in epilogue if is_there)]).rstrip()


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
    gelu_tanh = gelu.gelu_tanh

    @cuda.jit(device=True)
    def store(value, i, j, c, bias, residual, preactivation):
        if has_bias:
            value += widen(bias[0, j])
        if keeps_preactivation:
            preactivation[i, j] = narrow(value, preactivation.dtype)
        if has_gelu:
            value = gelu_tanh(value)
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
    def launch(spec: Spec, operands: tuple[Any, ...], flops: int, stream: Stream | None) -> None:
        n_rows, n_columns = operands[2].shape
        grid = (ceil_div(n_rows, tile_m), ceil_div(n_columns, tile_n))
        kernel_of(spec)[grid, block, stream](*operands, flops=flops)

    return launch


VARIANTS = Variants(
    "gemm",
    [
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
    ],
)


def gemm(
    a: Array,
    b: Array,
    c: Array,
    *,
    layout: str = "NN",
    alpha: float = 1.0,
    accumulate: bool = False,
    epilogue: str | None = None,
    bias: Array | None = None,
    residual: Array | None = None,
    preactivation: Array | None = None,
    variant: str | None = None,
    stream: Stream | None = None,
) -> None:
    """c = alpha op(a) op(b), then the epilogue.

    Parameters
    ----------
    a : array, shape (M, K), or (K, M) in layout TN
    b : array, shape (K, N), or (N, K) in layout NT
    c : array, shape (M, N)
        Written; must not overlap a or b. Any size may be 0; with K = 0 the product is 0.
    layout : {"NN", "NT", "TN"}
    alpha : float
    accumulate : bool
        Add into c. Without an epilogue only.
    epilogue : {None, "bias", "bias_gelu", "residual"}
    bias : array, shape (N,)
        For bias and bias_gelu; optional for residual.
    residual : array, shape (M, N)
        For residual; may be c.
    preactivation : array, shape (M, N), optional
        For bias_gelu: gets what went into the GELU.
    variant : str, optional
        A name in ``VARIANTS``.

    All arrays are float32, float16 or bfloat16 as uint16 bits, in any mixture, and C-contiguous; sums are float32.

    Raises
    ------
    ShapeError, DTypeError, ConfigError
        If the shapes, dtypes or options do not fit one another.

    Notes
    -----
    Workspace: none. Deterministic: yes.
    """
    check_option("gemm", "layout", layout, LAYOUTS)
    check_option("gemm", "epilogue", epilogue, EPILOGUES)
    given = {"bias": bias, "residual": residual, "preactivation": preactivation}
    extras = {name: array for name, array in given.items() if array is not None}
    _check_extras(epilogue, accumulate, extras)
    arrays = {
        "a_KM" if layout[0] == "T" else "a_MK": a,
        "b_NK" if layout[1] == "T" else "b_KN": b,
        "c_MN": c,
    }
    check_ndim("gemm", 2, **arrays)
    m, k = a.shape if layout[0] == "N" else a.shape[::-1]
    n = _check_sizes(layout, arrays, m, k)
    for name, array in extras.items():
        check_shape("gemm", (n,) if name == "bias" else (m, n), **{name: array})
    arrays |= extras
    check_floats("gemm", **arrays)
    check_contiguous("gemm", **arrays)

    if accumulate:
        residual = c
    spec = Spec(
        a_is_KM=layout[0] == "T",
        b_is_NK=layout[1] == "T",
        has_bias=bias is not None,
        has_gelu=epilogue == "bias_gelu",
        has_residual=residual is not None,
        keeps_preactivation=preactivation is not None,
    )
    # c stands in for what is not given; the kernel does not touch it.
    bias_1N = c if bias is None else bias.reshape(1, n)
    residual = c if residual is None else residual
    preactivation = c if preactivation is None else preactivation
    operands = (a, b, c, bias_1N, residual, preactivation, float(alpha))
    VARIANTS.pick(variant).launch(spec, operands, 2 * m * n * k, stream)


def _check_extras(epilogue: str | None, accumulate: bool, extras: dict[str, Array]) -> None:
    """Raise ConfigError unless the epilogue has the arrays it needs and no others."""
    if accumulate and epilogue is not None:
        raise ConfigError(
            f"gemm: accumulate=True with epilogue={epilogue!r}; accumulate takes no epilogue: add into c with "
            'epilogue="residual", residual=c, or leave one out'
        )
    needed, allowed = {
        None: ((), ()),
        "bias": (("bias",), ("bias",)),
        "bias_gelu": (("bias",), ("bias", "preactivation")),
        "residual": (("residual",), ("bias", "residual")),
    }[epilogue]
    for name in needed:
        if name not in extras:
            raise ConfigError(f"gemm: epilogue={epilogue!r} needs {name}, which is missing; pass {name}=")
    for name in extras:
        if name not in allowed:
            raise ConfigError(f"gemm: {name} is given but epilogue={epilogue!r} does not use it; leave it out")


def _check_sizes(layout: str, arrays: dict[str, Array], m: int, k: int) -> int:
    """N, or ShapeError if the sizes of a, b and c do not fit one another."""
    (a_name, _), (b_name, b), (_, c) = arrays.items()
    b_k, n = b.shape if layout[1] == "N" else b.shape[::-1]
    if b_k != k:
        other = {"NN": "NT", "NT": "NN"}.get(layout)
        advice = f'pass b transposed (layout="{other}") or fix the shape' if other and n == k else "fix the shape"
        raise ShapeError(f"gemm: {a_name} has K={k} but {b_name} has K={b_k}; {advice}")
    if c.shape != (m, n):
        raise ShapeError(
            f"gemm: c_MN has shape {c.shape} but layout {layout} of {a_name} and {b_name} gives ({m}, {n})"
        )
    return n
