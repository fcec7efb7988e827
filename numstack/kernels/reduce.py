"""Sums and maxima: of a whole array, and of its columns.

=================  =============================================================================================
sum, max           of all elements
norm               sqrt(sum x^2), the global L2 norm that gradient clipping needs
count_nonfinite    how many elements are infinite or NaN
sum_rows           out_C = sum over r of x_RC, the gradient of a bias
clip_scale         min(1, max_norm / norm), computed on the device so that the host never waits for a norm
=================  =============================================================================================

Reductions of a whole array take two kernels. In the first, every block reduces its own stretch of x: each thread takes
every 256th element, then the block's 256 values are combined by halves in shared memory. It leaves one number a block
in the workspace; the second kernel, one block, reduces those. Which elements are combined in which order depends on the
size of x alone: the same bits on every run and every device, which atomic additions would not give::

    x          |  stretch of block 0  |  stretch of block 1  |  ...      each >= 4096 elements, <= 1024 blocks
    workspace  [ p0, p1, ... ]
    out        [ p0 + p1 + ... ]

That is the ladder's ``thread_per_element``; on a GPU ``vectors`` reads 16 bytes a lane, several of them at once, by
blocks that stay (``reduce_vectors.py``).

``sum_rows`` has a ladder too: ``thread_per_column`` walks down whole columns, too few threads where columns are few;
``two_phase`` also cuts the rows into stretches, and adds the stretches' sums in a second kernel; ``vectors`` as above.
"""

import builtins
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, from_dtype, int32

from numstack.device import Array, Kernel, Stream, kernel, narrow, widen
from numstack.errors import ShapeError
from numstack.kernels import elementwise
from numstack.kernels.launch import (
    are_aligned,
    ceil_div,
    check_contiguous,
    check_dtype,
    check_floats,
    check_ndim,
    check_shape,
    check_workspace,
    flat,
)
from numstack.kernels.reduce_vectors import (
    BLOCKS,
    TILE,
    VECTOR,
    WARPS,
    make_first_phase,
    n_tiles_and_stretches,
    shared_bytes,
    sum_rows_phases,
)
from numstack.kernels.variants import Variant, Variants
from numstack.kernels.warp import WARP

BLOCK = 256
MAX_BLOCKS = 1024  # a few for each multiprocessor of the largest GPU; one block then reduces their results
MIN_STRETCH = 16 * BLOCK

COLUMNS = 32  # sum_rows: threads in x, one column each
ROWS = 8  # sum_rows: threads in y, every eighth row each
MIN_ROWS = 64
MAX_STRETCHES = 64


def reference_norm(x: np.ndarray) -> float:
    """The L2 norm of all elements, in float64."""
    return float(np.sqrt(np.sum(np.square(np.asarray(x, np.float64)))))


@cuda.jit(device=True)
def _value(x):
    return widen(x)


@cuda.jit(device=True)
def _square(x):
    return widen(x) * widen(x)


@cuda.jit(device=True)
def _is_nonfinite(x):
    return int32(0) if math.isfinite(widen(x)) else int32(1)


@cuda.jit(device=True)
def _same(x):
    return x


@cuda.jit(device=True)
def _root(x):
    return math.sqrt(x)


@cuda.jit(device=True)
def _add(a, b):
    return a + b


@cuda.jit(device=True)
def _larger(a, b):
    # Unlike max(), a NaN on either side wins, in whatever order the elements meet.
    return a if a > b or a != a else b


@cuda.jit(device=True)
def _zero(x_N):
    return float32(0)


@cuda.jit(device=True)
def _zero_count(x_N):
    return int32(0)


@cuda.jit(device=True)
def _first(x_N):
    return widen(x_N[0])


class Phases(NamedTuple):
    """The kernels of a reduction: two first phases, of which one runs, and the second."""

    elements: Kernel
    vectors: Kernel
    second: Kernel


def _make_phases(
    name: str,
    element: Callable[..., Any],
    combine: Callable[..., Any],
    neutral: Callable[..., Any],
    finish: Callable[..., Any],
    dtype: Any,
) -> Phases:
    """The kernels of a reduction: contributions of x, then of the workspace, which ``finish`` ends.

    ``neutral(x_N)`` is what combining starts from: 0 for a sum, any element of x for a maximum.
    """

    @cuda.jit(device=True)
    def over_block(value, shared):
        # Reads two halves, leaves their combination in the first: 256 values, 128, 64, ... 1.
        t = cuda.threadIdx.x
        shared[t] = value
        cuda.syncthreads()
        half = BLOCK // 2
        while half > 0:
            if t < half:
                shared[t] = combine(shared[t], shared[t + half])
            cuda.syncthreads()
            half //= 2
        return shared[0]

    @kernel(name=f"reduce.{name} first phase")
    def first_phase(x_N, partial_P, stretch):
        shared = cuda.shared.array(BLOCK, dtype)
        start = cuda.blockIdx.x * stretch
        stop = min(start + stretch, x_N.size)
        value = neutral(x_N)
        for i0 in range(start, stop, BLOCK):
            i = i0 + cuda.threadIdx.x
            if i < stop:
                value = combine(value, element(x_N[i]))
        value = over_block(value, shared)
        if cuda.threadIdx.x == 0:
            partial_P[cuda.blockIdx.x] = value

    @kernel(name=f"reduce.{name} second phase", starts_early=True)
    def second_phase(partial_P, out_1, n_partials):
        shared = cuda.shared.array(BLOCK, dtype)
        value = neutral(partial_P)
        for i0 in range(0, n_partials, BLOCK):
            i = i0 + cuda.threadIdx.x
            if i < n_partials:
                value = combine(value, partial_P[i])
        value = over_block(value, shared)
        if cuda.threadIdx.x == 0:
            out_1[0] = finish(value)

    vectors = make_first_phase(name, element, combine, neutral, over_block, dtype)
    return Phases(first_phase, vectors, second_phase)


_SUM = _make_phases("sum", _value, _add, _zero, _same, float32)
_MAX = _make_phases("max", _value, _larger, _first, _same, float32)
_NORM = _make_phases("norm", _square, _add, _zero, _root, float32)
_COUNT = _make_phases("count_nonfinite", _is_nonfinite, _add, _zero_count, _same, int32)


@kernel
def _clip_scale(norm_1, scale_1, max_norm):
    norm = norm_1[0]
    if not math.isfinite(norm):
        scale_1[0] = float32(math.nan)
    elif norm > max_norm:
        scale_1[0] = max_norm / norm
    else:
        scale_1[0] = float32(1)


@kernel
def _sum_rows_thread_per_column(x_RC, out_C, accumulate):
    c = cuda.grid(1)
    if c < x_RC.shape[1]:
        total = float32(0)
        for r in range(x_RC.shape[0]):
            total += widen(x_RC[r, c])
        if accumulate:
            total += widen(out_C[c])
        out_C[c] = narrow(total, out_C.dtype)


@kernel
def _sum_rows_first_phase(x_RC, partial_SC, stretch):
    shared = cuda.shared.array((ROWS, COLUMNS), float32)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    c = cuda.blockIdx.x * COLUMNS + tx
    start = cuda.blockIdx.y * stretch
    stop = min(start + stretch, x_RC.shape[0])
    total = float32(0)
    for r0 in range(start, stop, ROWS):
        r = r0 + ty
        if r < stop and c < x_RC.shape[1]:
            total += widen(x_RC[r, c])
    shared[ty, tx] = total
    cuda.syncthreads()
    if ty == 0 and c < x_RC.shape[1]:
        for row in range(1, ROWS):
            total += shared[row, tx]
        partial_SC[cuda.blockIdx.y * x_RC.shape[1] + c] = total


@kernel
def _sum_rows_second_phase(partial_SC, out_C, n_stretches, accumulate):
    c = cuda.grid(1)
    if c < out_C.size:
        total = float32(0)
        for s in range(n_stretches):
            total += partial_SC[s * out_C.size + c]
        if accumulate:
            total += widen(out_C[c])
        out_C[c] = narrow(total, out_C.dtype)


def workspace_size(n: int) -> int:
    """Elements (float32) of workspace that a reduction of n elements needs; at least 1."""
    return _blocks_and_stretch(n)[0] or 1


def sum_rows_workspace_size(n_rows: int, n_columns: int) -> int:
    """Elements (float32) of workspace that :func:`sum_rows` needs; at least 1."""
    n_stretches = _stretches(n_rows)[0]
    if n_columns % VECTOR == 0:
        n_stretches = builtins.max(n_stretches, n_tiles_and_stretches(n_rows, n_columns, copies=False)[1])
    return n_stretches * n_columns or 1


def _blocks_and_stretch(n: int) -> tuple[int, int]:
    """How many blocks reduce n elements, and how many elements, a multiple of BLOCK, each takes."""
    stretch = BLOCK * ceil_div(n, BLOCK * MAX_BLOCKS)
    if stretch < MIN_STRETCH:
        stretch = MIN_STRETCH
    return ceil_div(n, stretch), stretch


def _stretches(n_rows: int) -> tuple[int, int]:
    """How many stretches the rows are cut into, and how many rows each has."""
    stretch = ceil_div(n_rows, MAX_STRETCHES)
    if stretch < MIN_ROWS:
        stretch = MIN_ROWS
    return ceil_div(n_rows, stretch), stretch


def _by_elements(phases: Phases, x_N: Array, partial_P: Array, out_1: Array, stream: Stream | None) -> None:
    n_blocks, stretch = _blocks_and_stretch(x_N.size)
    phases.elements[n_blocks, BLOCK, stream](x_N, partial_P, stretch, flops=x_N.size)
    phases.second[1, BLOCK, stream](partial_P, out_1, n_blocks)


def _by_vectors(phases: Phases, x_N: Array, partial_P: Array, out_1: Array, stream: Stream | None) -> None:
    n_blocks = min(BLOCKS, ceil_div(x_N.size, TILE))
    phases.vectors[n_blocks, BLOCK, stream](x_N, partial_P, flops=x_N.size)
    phases.second[1, BLOCK, stream](partial_P, out_1, n_blocks)


VARIANTS = Variants(
    "reduce",
    [
        Variant("thread_per_element", _by_elements, "Each block reduces a stretch, neighbouring threads side by side."),
        Variant(
            "vectors",
            _by_vectors,
            note="16 bytes a lane, several of them at once, by blocks that stay.",
            supports=lambda aligned: aligned,
            made_for="gpu",
        ),
    ],
)


def _reduce(
    operation: str,
    phases: Phases,
    x: Array,
    out_1: Array,
    workspace: Array,
    out_dtype: Any,
    variant: str | None,
    stream: Stream | None,
) -> None:
    check_floats(operation, x=x)
    check_contiguous(operation, x=x)
    check_dtype(operation, out_dtype, out_1=out_1)
    check_shape(operation, (1,), out_1=out_1)
    check_workspace(operation, workspace, workspace_size(x.size))
    VARIANTS.pick(variant, are_aligned(x)).launch(phases, flat(x), workspace.view(out_dtype), out_1, stream)


def sum(x: Array, out_1: Array, workspace: Array, *, variant: str | None = None, stream: Stream | None = None) -> None:
    """out = the sum of x; 0 if x is empty.

    Parameters
    ----------
    x : array of any shape, float32, float16 or bfloat16 as uint16 bits, C-contiguous
    out_1 : array, shape (1,), float32
    workspace : array of at least ``workspace_size(x.size)`` float32
    variant : str, optional
        A name in ``VARIANTS``.

    Raises
    ------
    ShapeError, DTypeError
        If an argument is not as said.

    Notes
    -----
    Deterministic: yes. Sums are float32, of at most n / 131072 + 50 terms in a row.
    """
    _reduce("reduce.sum", _SUM, x, out_1, workspace, np.float32, variant, stream)


def max(x: Array, out_1: Array, workspace: Array, *, variant: str | None = None, stream: Stream | None = None) -> None:
    """out = the largest element of x; NaN if there is one.

    Parameters
    ----------
    x : array of any shape, float32, float16 or bfloat16 as uint16 bits, C-contiguous
        At least one element.
    out_1 : array, shape (1,), float32
    workspace : array of at least ``workspace_size(x.size)`` float32
    variant : str, optional
        A name in ``VARIANTS``.

    Raises
    ------
    ShapeError, DTypeError
        If an argument is not as said, or x is empty.
    """
    if x.size == 0:
        raise ShapeError(f"reduce.max: x has shape {x.shape}, no elements; a maximum needs one at least")
    _reduce("reduce.max", _MAX, x, out_1, workspace, np.float32, variant, stream)


def norm(x: Array, out_1: Array, workspace: Array, *, variant: str | None = None, stream: Stream | None = None) -> None:
    """out = sqrt(sum x^2); 0 if x is empty, infinite if a square is (elements beyond 1.8e19).

    Parameters
    ----------
    x : array of any shape, float32, float16 or bfloat16 as uint16 bits, C-contiguous
    out_1 : array, shape (1,), float32
    workspace : array of at least ``workspace_size(x.size)`` float32
    variant : str, optional
        A name in ``VARIANTS``.

    Raises
    ------
    ShapeError, DTypeError
        If an argument is not as said.
    """
    _reduce("reduce.norm", _NORM, x, out_1, workspace, np.float32, variant, stream)


def count_nonfinite(
    x: Array, out_1: Array, workspace: Array, *, variant: str | None = None, stream: Stream | None = None
) -> None:
    """out = how many elements of x are infinite or NaN.

    Parameters
    ----------
    x : array of any shape, float32, float16 or bfloat16 as uint16 bits, C-contiguous
    out_1 : array, shape (1,), int32
    workspace : array of at least ``workspace_size(x.size)`` float32
    variant : str, optional
        A name in ``VARIANTS``.

    Raises
    ------
    ShapeError, DTypeError
        If an argument is not as said.
    """
    _reduce("reduce.count_nonfinite", _COUNT, x, out_1, workspace, np.int32, variant, stream)


def clip_scale(norm_1: Array, scale_1: Array, *, max_norm: float, stream: Stream | None = None) -> None:
    """scale = min(1, max_norm / norm), what gradients of this norm are to be multiplied by.

    A norm that is infinite or NaN gives NaN, at which AdamW skips the step.

    Parameters
    ----------
    norm_1, scale_1 : array, shape (1,), float32
        scale_1 may be norm_1.
    max_norm : float
    """
    check_dtype("reduce.clip_scale", np.float32, norm_1=norm_1, scale_1=scale_1)
    check_shape("reduce.clip_scale", (1,), norm_1=norm_1, scale_1=scale_1)
    _clip_scale[1, 1, stream](norm_1, scale_1, float(max_norm))


def _sum_rows_by_column(
    x_RC: Array, out_C: Array, copy_RC: Array | None, workspace: Array, accumulate: bool, stream: Stream | None
) -> None:
    elementwise.keep(x_RC, copy_RC, stream)
    _sum_rows_thread_per_column[ceil_div(out_C.size, BLOCK), BLOCK, stream](x_RC, out_C, accumulate, flops=x_RC.size)


def _sum_rows_two_phase(
    x_RC: Array, out_C: Array, copy_RC: Array | None, workspace: Array, accumulate: bool, stream: Stream | None
) -> None:
    n_rows, n_columns = x_RC.shape
    elementwise.keep(x_RC, copy_RC, stream)
    n_stretches, stretch = _stretches(n_rows)
    grid = (ceil_div(n_columns, COLUMNS), n_stretches)
    _sum_rows_first_phase[grid, (COLUMNS, ROWS), stream](x_RC, workspace, stretch, flops=x_RC.size)
    _sum_rows_second_phase[ceil_div(n_columns, BLOCK), BLOCK, stream](workspace, out_C, n_stretches, accumulate)


def _sum_rows_by_vectors(
    x_RC: Array, out_C: Array, copy_RC: Array | None, workspace: Array, accumulate: bool, stream: Stream | None
) -> None:
    n_rows, n_columns = x_RC.shape
    n_tiles, n_stretches, stretch = n_tiles_and_stretches(n_rows, n_columns, copy_RC is not None)
    first_phase, second_phase = sum_rows_phases(from_dtype(x_RC.dtype), copy_RC is not None)
    copy_N = workspace if copy_RC is None else flat(copy_RC)  # without a copy an array that is written anyway
    first_phase[(n_tiles, n_stretches), (WARP, WARPS), stream, shared_bytes(copy_RC is not None)](
        flat(x_RC), copy_N, workspace, n_rows, n_columns, stretch, flops=x_RC.size
    )
    second_phase[ceil_div(n_columns, WARP), (WARP, WARP), stream](workspace, out_C, n_stretches, accumulate)


SUM_ROWS_VARIANTS = Variants(
    "reduce.sum_rows",
    [
        Variant("thread_per_column", _sum_rows_by_column, "The definition: a thread walks down each column."),
        Variant("two_phase", _sum_rows_two_phase, "Cuts columns into stretches of rows, so that all processors work."),
        Variant(
            "vectors",
            _sum_rows_by_vectors,
            note="16 bytes a lane, several rows at once.",
            supports=lambda columns, aligned: columns % VECTOR == 0 and aligned,
            made_for="gpu",
        ),
    ],
)


def sum_rows(
    x_RC: Array,
    out_C: Array,
    workspace: Array,
    *,
    accumulate: bool = False,
    copy_RC: Array | None = None,
    variant: str | None = None,
    stream: Stream | None = None,
) -> None:
    """out_C = the sum of the rows of x_RC.

    Parameters
    ----------
    x_RC : array, shape (R, C), float32, float16 or bfloat16 as uint16 bits, C-contiguous
    out_C : array, shape (C,), float32, float16 or bfloat16 as uint16 bits
    workspace : array of at least ``sum_rows_workspace_size(R, C)`` float32
    accumulate : bool
        Add into out_C.
    copy_RC : array, shape (R, C), float32, float16 or bfloat16 as uint16 bits, C-contiguous, optional
        Gets x, in another format: what matrix products take of a gradient in float32.
    variant : str, optional
        A name in ``SUM_ROWS_VARIANTS``.

    Raises
    ------
    ShapeError, DTypeError, ConfigError
        If an argument is not as said.

    Notes
    -----
    Deterministic: yes.
    """
    check_ndim("reduce.sum_rows", 2, x_RC=x_RC)
    copies = {} if copy_RC is None else {"copy_RC": copy_RC}
    check_floats("reduce.sum_rows", x_RC=x_RC, out_C=out_C, **copies)
    check_contiguous("reduce.sum_rows", x_RC=x_RC, out_C=out_C, **copies)
    check_shape("reduce.sum_rows", x_RC.shape, **copies)
    check_shape("reduce.sum_rows", x_RC.shape[1:], out_C=out_C)
    check_workspace("reduce.sum_rows", workspace, sum_rows_workspace_size(*x_RC.shape))
    chosen = SUM_ROWS_VARIANTS.pick(variant, x_RC.shape[1], are_aligned(x_RC, *copies.values()))
    chosen.launch(x_RC, out_C, copy_RC, workspace, bool(accumulate), stream)
