"""What moves or combines arrays element by element.

=========  ====================================================================================
add        out = a + b
scale      out = factor x
cast       out = x, in another floating format, rounded to nearest even
fill       x = value
copy       out = x, either of them strided: a transposed, sliced or packed view
transpose  out_CR = x_RC^T
=========  ====================================================================================

All but ``transpose`` have one variant, a thread an element, neighbouring threads on neighbouring elements: they wait
for memory whatever they compute. ``transpose`` has a ladder: ``thread_per_element`` reads along rows, so it writes down
columns, each element to a cache line of its own; ``shared_tile`` turns a 32 x 32 tile in shared memory, and both reads
and writes along rows. Its tile is one column wider than it need be, or the 32 threads that read down a column would all
meet in one memory bank.
"""

import math
from typing import Any

import numpy as np
from numba import cuda, uint16, uint32

from numstack.device import Array, Kernel, Stream, kernel, narrow, widen
from numstack.errors import DTypeError, ShapeError
from numstack.kernels.launch import (
    FLOATS,
    ceil_div,
    check_contiguous,
    check_dtype,
    check_floats,
    check_ndim,
    check_shape,
    dtype_name,
    flat,
)
from numstack.kernels.variants import Variant, Variants

BLOCK = 256
BLOCK_X, BLOCK_Y = 32, 8  # strided copies: x along the last axis, y over all others
TILE = 32  # transpose: a block of 32 x 8 threads turns 32 x 32 elements
TILE_PADDED = TILE + 1
TILE_STEPS = TILE // BLOCK_Y


@kernel
def _add(a_N, b_N, out_N):
    i = cuda.grid(1)
    if i < out_N.size:
        out_N[i] = narrow(widen(a_N[i]) + widen(b_N[i]), out_N.dtype)


@kernel
def _scale(x_N, out_N, factor):
    i = cuda.grid(1)
    if i < out_N.size:
        out_N[i] = narrow(factor * widen(x_N[i]), out_N.dtype)


@kernel
def _cast(x_N, out_N):
    i = cuda.grid(1)
    if i < out_N.size:
        out_N[i] = narrow(widen(x_N[i]), out_N.dtype)


@kernel
def _fill_float(x_N, value):
    i = cuda.grid(1)
    if i < x_N.size:
        x_N[i] = narrow(value, x_N.dtype)


@kernel
def _fill_integer(x_N, value):
    i = cuda.grid(1)
    if i < x_N.size:
        x_N[i] = value


@kernel
def _copy_1d(x_A, out_A):
    i = cuda.grid(1)
    if i < out_A.size:
        out_A[i] = x_A[i]


@kernel
def _copy_2d(x_AB, out_AB):
    a = cuda.blockIdx.x * BLOCK_Y + cuda.threadIdx.y
    b = cuda.blockIdx.y * BLOCK_X + cuda.threadIdx.x
    if a < out_AB.shape[0] and b < out_AB.shape[1]:
        out_AB[a, b] = x_AB[a, b]


# The divisions stand before the condition: a CPU then does them once for all threads of a row.


@kernel
def _copy_3d(x_ABC, out_ABC):
    ab = cuda.blockIdx.x * BLOCK_Y + cuda.threadIdx.y
    c = cuda.blockIdx.y * BLOCK_X + cuda.threadIdx.x
    A, B, C = out_ABC.shape
    a = ab // B
    b = ab % B
    if a < A and c < C:
        out_ABC[a, b, c] = x_ABC[a, b, c]


@kernel
def _copy_4d(x_ABCD, out_ABCD):
    abc = cuda.blockIdx.x * BLOCK_Y + cuda.threadIdx.y
    d = cuda.blockIdx.y * BLOCK_X + cuda.threadIdx.x
    A, B, C, D = out_ABCD.shape
    ab = abc // C
    c = abc % C
    a = ab // B
    b = ab % B
    if a < A and d < D:
        out_ABCD[a, b, c, d] = x_ABCD[a, b, c, d]


_COPY_STRIDED = {2: _copy_2d, 3: _copy_3d, 4: _copy_4d}


@kernel
def _transpose_thread_per_element(x_RC, out_CR):
    r = cuda.blockIdx.x * BLOCK_Y + cuda.threadIdx.y
    c = cuda.blockIdx.y * BLOCK_X + cuda.threadIdx.x
    if r < x_RC.shape[0] and c < x_RC.shape[1]:
        out_CR[c, r] = x_RC[r, c]


def _make_transpose_shared_tile(bits: Any) -> Kernel:
    @kernel
    def transpose_shared_tile(x_RC, out_CR):
        tile = cuda.shared.array((TILE, TILE_PADDED), bits)
        tx = cuda.threadIdx.x
        ty = cuda.threadIdx.y
        r0 = cuda.blockIdx.x * TILE
        c0 = cuda.blockIdx.y * TILE
        for step in range(TILE_STEPS):
            r = step * BLOCK_Y + ty
            if r0 + r < x_RC.shape[0] and c0 + tx < x_RC.shape[1]:
                tile[r, tx] = x_RC[r0 + r, c0 + tx]
        cuda.syncthreads()
        for step in range(TILE_STEPS):
            c = step * BLOCK_Y + ty
            if c0 + c < x_RC.shape[1] and r0 + tx < x_RC.shape[0]:
                out_CR[c0 + c, r0 + tx] = tile[tx, c]

    return transpose_shared_tile


# A shared array has its type in the source.
_TRANSPOSE_SHARED_TILE = {2: _make_transpose_shared_tile(uint16), 4: _make_transpose_shared_tile(uint32)}
_BITS = {2: np.uint16, 4: np.uint32}


def _bits(operation: str, x: Array, out: Array) -> tuple[Array, Array]:
    """Both arrays as unsigned integers: what is only moved needs one kernel a size, not one a dtype."""
    check_dtype(operation, x.dtype, out=out)
    if x.itemsize not in _BITS:
        raise DTypeError(f"{operation}: x has dtype {dtype_name(x.dtype)}; expected elements of 2 or 4 bytes")
    bits = _BITS[x.itemsize]
    return x.view(bits), out.view(bits)


def _launch_flat(
    operation: str, kernel_: Kernel, arrays: dict[str, Array], scalars: tuple[Any, ...], stream: Stream | None
) -> None:
    """Check arrays of one shape, and launch a thread an element."""
    check_floats(operation, **arrays)
    check_contiguous(operation, **arrays)
    first = next(iter(arrays.values()))
    check_shape(operation, first.shape, **arrays)
    kernel_[ceil_div(first.size, BLOCK), BLOCK, stream](
        *[flat(array) for array in arrays.values()], *scalars, flops=first.size
    )


def add(a: Array, b: Array, out: Array, *, stream: Stream | None = None) -> None:
    """out = a + b.

    Parameters
    ----------
    a, b, out : array of any one shape, float32, float16 or bfloat16 as uint16 bits, C-contiguous
        The dtypes may differ; out may be a or b.

    Raises
    ------
    ShapeError, DTypeError
        If the arrays differ in shape, or are not as said.
    """
    _launch_flat("elementwise.add", _add, {"a": a, "b": b, "out": out}, (), stream)


def scale(x: Array, out: Array, factor: float, *, stream: Stream | None = None) -> None:
    """out = factor x.

    Parameters
    ----------
    x, out : array of any one shape, float32, float16 or bfloat16 as uint16 bits, C-contiguous
        The dtypes may differ; out may be x.
    factor : float

    Raises
    ------
    ShapeError, DTypeError
        If the arrays differ in shape, or are not as said.
    """
    _launch_flat("elementwise.scale", _scale, {"x": x, "out": out}, (float(factor),), stream)


def cast(x: Array, out: Array, *, stream: Stream | None = None) -> None:
    """out = x in out's format, rounded to nearest even; what is too large for float16 becomes infinite.

    Parameters
    ----------
    x, out : array of any one shape, float32, float16 or bfloat16 as uint16 bits, C-contiguous

    Raises
    ------
    ShapeError, DTypeError
        If the arrays differ in shape, or are not as said.
    """
    _launch_flat("elementwise.cast", _cast, {"x": x, "out": out}, (), stream)


def fill(x: Array, value: float, *, stream: Stream | None = None) -> None:
    """x = value, everywhere.

    Parameters
    ----------
    x : array of any shape, float32, float16, bfloat16 as uint16 bits, or int32, C-contiguous
    value : float, or int where x is int32

    Raises
    ------
    DTypeError
        If x is not as said, or is int32 and value is not an int.
    """
    check_contiguous("elementwise.fill", x=x)
    grid = ceil_div(x.size, BLOCK)
    if x.dtype in FLOATS:
        _fill_float[grid, BLOCK, stream](flat(x), float(value))
        return
    check_dtype("elementwise.fill", np.int32, x=x)
    if value != int(value):
        raise DTypeError(f"elementwise.fill: x has dtype int32 but value={value!r}; pass an int")
    _fill_integer[grid, BLOCK, stream](flat(x), int(value))


def copy(x: Array, out: Array, *, stream: Stream | None = None) -> None:
    """out = x, where either may be a strided view.

    Parameters
    ----------
    x, out : array of one shape with 1 to 4 axes, of one dtype with elements of 2 or 4 bytes
        They must not overlap. Contiguous arrays may have any number of axes.

    Raises
    ------
    ShapeError, DTypeError
        If the arrays differ in shape or dtype, or have too many axes.
    """
    check_shape("elementwise.copy", x.shape, out=out)
    x, out = _bits("elementwise.copy", x, out)
    if x.flags.c_contiguous and out.flags.c_contiguous:
        x, out = flat(x), flat(out)
    if x.ndim == 1:
        _copy_1d[ceil_div(x.size, BLOCK), BLOCK, stream](x, out)
        return
    if x.ndim not in _COPY_STRIDED:
        raise ShapeError(
            f"elementwise.copy: x has {x.ndim} axes (shape {x.shape}); a strided copy takes at most 4: merge some"
        )
    n_rows = math.prod(x.shape[:-1])
    grid = (ceil_div(n_rows, BLOCK_Y), ceil_div(x.shape[-1], BLOCK_X))
    _COPY_STRIDED[x.ndim][grid, (BLOCK_X, BLOCK_Y), stream](x, out)


def _launch_thread_per_element(x_RC: Array, out_CR: Array, stream: Stream | None) -> None:
    grid = (ceil_div(x_RC.shape[0], BLOCK_Y), ceil_div(x_RC.shape[1], BLOCK_X))
    _transpose_thread_per_element[grid, (BLOCK_X, BLOCK_Y), stream](x_RC, out_CR)


def _launch_shared_tile(x_RC: Array, out_CR: Array, stream: Stream | None) -> None:
    grid = (ceil_div(x_RC.shape[0], TILE), ceil_div(x_RC.shape[1], TILE))
    _TRANSPOSE_SHARED_TILE[x_RC.itemsize][grid, (BLOCK_X, BLOCK_Y), stream](x_RC, out_CR)


TRANSPOSE_VARIANTS = Variants(
    "elementwise.transpose",
    [
        Variant("thread_per_element", _launch_thread_per_element, "The definition; writes are scattered."),
        Variant("shared_tile", _launch_shared_tile, "Turns tiles in shared memory: reads and writes along rows."),
    ],
)


def transpose(x_RC: Array, out_CR: Array, *, variant: str | None = None, stream: Stream | None = None) -> None:
    """out_CR = x_RC^T.

    Parameters
    ----------
    x_RC : array, shape (R, C), elements of 2 or 4 bytes, C-contiguous
    out_CR : array, shape (C, R), of the same dtype, C-contiguous
        Must not overlap x.
    variant : str, optional
        A name in ``TRANSPOSE_VARIANTS``.

    Raises
    ------
    ShapeError, DTypeError, ConfigError
        If an argument is not as said.
    """
    check_ndim("elementwise.transpose", 2, x_RC=x_RC)
    check_shape("elementwise.transpose", x_RC.shape[::-1], out_CR=out_CR)
    check_contiguous("elementwise.transpose", x_RC=x_RC, out_CR=out_CR)
    x_RC, out_CR = _bits("elementwise.transpose", x_RC, out_CR)
    TRANSPOSE_VARIANTS.pick(variant).launch(x_RC, out_CR, stream)
