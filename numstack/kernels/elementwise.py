"""What moves or combines arrays element by element.

=========  ====================================================================================
add        out = a + b
scale      out = factor x
cast       out = x, in another floating format, rounded to nearest even
fill       x = value
copy       out = x, either of them strided: a transposed, sliced or packed view
transpose  out_CR = x_RC^T
=========  ====================================================================================

They wait for memory, whatever they compute. ``thread_per_element`` has neighbouring threads on neighbouring elements;
on a GPU ``vectors`` keeps more bytes under way by 16 bytes a thread, eight elements of bfloat16. What lies side by side
on both ends is copied so, too: as fast as by the driver, but such a copy may start early.

``transpose`` has a ladder of its own: ``thread_per_element`` reads along rows, so it writes down columns, each element
to a cache line of its own; ``shared_tile`` turns a 32 x 32 tile in shared memory, and both reads and writes along rows.
Its tile is one column wider than it need be, or the 32 threads that read down a column would all meet in one memory
bank; ``vector_tile`` moves 16 bytes a thread both ways (65536 x 3072 bfloat16 on an H200: 3.81 to 3.97 TB/s).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import cuda, float32, uint16, uint32

from numstack.device import Array, Kernel, Stream, current_device, kernel, narrow, widen
from numstack.device.ptx import load4, load4_once, load8, store4, store4_once, store8
from numstack.device.ptx.halves import high_halves, low_halves
from numstack.errors import DTypeError, ShapeError
from numstack.kernels.launch import (
    FLOATS,
    are_aligned,
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
VECTOR_BLOCK = 128  # of kernels of vectors, one of which a thread reads; if none, blocks would not start fast enough
NARROW_BLOCK = 192  # where a thread reads half a vector, so that as many blocks would have to start twice as fast
WIDE_BLOCK = 768  # where a thread reads two: 1,536 threads of a processor have enough under way
BLOCK_X, BLOCK_Y = 32, 8  # strided copies: x along the last axis, y over all others
TILE = 32  # transpose: a block of 32 x 8 threads turns 32 x 32 elements
TILE_PADDED = TILE + 1
TILE_STEPS = TILE // BLOCK_Y
TILE_ROWS, TILE_WORDS = 64, 64  # of a tile that is moved by vectors


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


@cuda.jit(device=True)
def _times(x, factor):
    return factor * x


@cuda.jit(device=True)
def _unchanged(x, factor):
    return x


# A thread takes one vector, and neighbouring threads neighbouring vectors; the last may be cut short, and is done
# element by element. More than one vector a thread, all asked for before the first is waited for, is no faster: full
# processors have enough under way (scale, 65536 x 3072 bfloat16 on an H200: 4.21 TB/s with one, 4.02 with four). Blocks
# that stay (add: 4.13 for 4.35), the copy engine through shared memory (4.12) and loads that pass by the first cache
# (4.10) are slower; stores that tell the second one to forget are as fast. Loads that tell it to give their lines up
# last gain 0.6% to 1.5% in copies, 1.3% to 1.7% in casts to float32, 0.3% to 0.6% in additions, 0.2% to 0.4% in casts
# to bfloat16, by as many bytes from and to memory, but their lines stay in the way of what comes next (see adamw), and
# to release each of them (applypriority) costs a copy 1% and an addition 4%; a cast to float32 would keep 0.6%. An
# addition in place, whose stores release what was kept, would gain 0.9%. So they are not used. Without them a kernel of
# ours copies as fast as the driver does (0.997 to 1.002 of its rate), and of ten in a row 0.7% faster, as each starts
# before the one ahead is over.
#
# What else counts is how many bytes a multiprocessor has under way: 48 KiB are best. A thread of add, or of a cast from
# float32 to bfloat16, reads 32 bytes, so a full processor of 2,048 threads has 64 KiB. PyTorch's addition has 48 by
# chance, as its registers leave room for three quarters of the threads; two blocks of 768 are as many, and no more fit:
# add 4.375 TB/s (4.345 in blocks of 128, 4.36 of 1024, 4.32 of 512 and 4.35 of 640, which fill processors; PyTorch
# 4.365), the cast 4.364 (4.347; PyTorch 4.351). A thread that reads 16 bytes needs all 2,048: scale loses 10% in blocks
# of 768, and casts to float32 9%. Blocks of 128 threads are up to 0.5% faster than of 256 there, but fill has 3.29 TB/s
# with them for 4.50, since no more blocks can be started. Casts to float32, of which a thread reads 8 bytes, have 4.14
# with 128, 4.17 with 192, 4.16 with 256; PyTorch's compiled one 4.15, ten of each in a row. There eight elements a
# thread whose halves neighbours exchange, so that all accesses are of 16 bytes side by side, have 4.17 as well.
_VECTOR_ACCESSES = {4: (load4, store4), 8: (load8, store8)}


def _make_add_vectors(width: int) -> Kernel:
    load, store = _VECTOR_ACCESSES[width]

    @kernel(name=f"elementwise.add vectors of {width}", starts_early=True)
    def add_vectors(a_N, b_N, out_N):
        a = cuda.local.array(width, float32)
        b = cuda.local.array(width, float32)
        n = out_N.size
        start = cuda.grid(1) * width
        if start + width <= n:
            load(a_N, start, a, 0)
            load(b_N, start, b, 0)
            for e in range(width):
                a[e] += b[e]
            store(out_N, start, a, 0)
        else:
            for i in range(start, n):
                out_N[i] = narrow(widen(a_N[i]) + widen(b_N[i]), out_N.dtype)

    return add_vectors


def _make_map_vectors(name: str, function: Callable[..., Any], width: int) -> Kernel:
    """out = function(x, factor)."""
    load, store = _VECTOR_ACCESSES[width]

    @kernel(name=f"elementwise.{name} vectors of {width}", starts_early=True)
    def map_vectors(x_N, out_N, factor):
        x = cuda.local.array(width, float32)
        n = out_N.size
        start = cuda.grid(1) * width
        if start + width <= n:
            load(x_N, start, x, 0)
            for e in range(width):
                x[e] = function(x[e], factor)
            store(out_N, start, x, 0)
        else:
            for i in range(start, n):
                out_N[i] = narrow(function(widen(x_N[i]), factor), out_N.dtype)

    return map_vectors


def _make_fill_vectors(width: int) -> Kernel:
    _, store = _VECTOR_ACCESSES[width]

    @kernel(name=f"elementwise.fill vectors of {width}", starts_early=True)
    def fill_vectors(x_N, value):
        values = cuda.local.array(width, float32)
        for e in range(width):
            values[e] = value
        n = x_N.size
        start = cuda.grid(1) * width
        if start + width <= n:
            store(x_N, start, values, 0)
        else:
            for i in range(start, n):
                x_N[i] = narrow(value, x_N.dtype)

    return fill_vectors


_BY_VECTORS = {
    width: {
        "add": _make_add_vectors(width),
        "scale": _make_map_vectors("scale", _times, width),
        "cast": _make_map_vectors("cast", _unchanged, width),
        "fill": _make_fill_vectors(width),
    }
    for width in _VECTOR_ACCESSES
}


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


@functools.cache
def transpose_vector_tile(pack: int, rows: int = TILE_ROWS, words: int = TILE_WORDS) -> Kernel:
    """Turns tiles of ``rows`` by ``words`` 32-bit words, each of ``pack`` elements of 16 bits, or of one of 32.

    In shared memory, word w of row r is at ``r words + 4 (r // group) + w`` where a group is as many rows as make up a
    vector of the output. Both ways through are free of conflicts: in, 8 lanes write 128 contiguous bytes of a row; out,
    lane l reads at group l % 8 and word l // 8, and the 4 words between groups send all 32 to banks of their own::

        lane    0  1  2     7   8  9        31
        bank    0  4  8 .. 28   1  5   ..   31

    Elements of 16 bits leave in pairs of columns: the low halves of a group's words are one, the high halves the other.
    """
    group = 4 * pack
    n_in, n_out = rows * words // (4 * BLOCK), rows * words // (group * BLOCK)
    n_in_words = 4 * n_in
    row_vectors, far_groups = words // 4, rows // group // 8
    tile_words = rows * words + rows // group * 4

    @kernel(name=f"elementwise.transpose vector_tile of {'two' if pack == 2 else 'one'}", starts_early=True)
    def transpose(x_RW, out_CQ, n_rows, n_columns):
        tile = cuda.shared.array(tile_words, float32)
        vectors = cuda.local.array(n_in_words, float32)
        column = cuda.local.array(group, float32)
        low = cuda.local.array(4, float32)
        high = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        r0 = cuda.blockIdx.x * rows
        w0 = cuda.blockIdx.y * words
        W = x_RW.shape[1]
        Q = out_CQ.shape[1]
        for k in range(n_in):
            r = r0 + (k * BLOCK + t) // row_vectors
            w = w0 + (k * BLOCK + t) % row_vectors * 4
            if r < n_rows and w < W:
                load4_once(x_RW, r * W + w, vectors, 4 * k)
        for k in range(n_in):
            r = (k * BLOCK + t) // row_vectors
            w = (k * BLOCK + t) % row_vectors * 4
            if r0 + r < n_rows and w0 + w < W:
                store4(tile, r * words + r // group * 4 + w, vectors, 4 * k)
        cuda.syncthreads()
        for k in range(n_out):
            warp = (k * BLOCK + t) // 32
            j = t % 8 + warp % far_groups * 8
            w = t % 32 // 8 + warp // far_groups * 4
            c = (w0 + w) * pack
            start = c * Q + r0 // pack + 4 * j
            if c < n_columns and r0 + j * group < n_rows:
                for i in range(group):
                    column[i] = tile[(j * group + i) * words + 4 * j + w]
                if pack == 2:
                    for i in range(4):
                        low[i] = low_halves(column[i * pack], column[i * pack + pack - 1])
                        high[i] = high_halves(column[i * pack], column[i * pack + pack - 1])
                    store4_once(out_CQ, start, low, 0)
                    store4_once(out_CQ, start + Q, high, 0)
                else:
                    store4_once(out_CQ, start, column, 0)

    return transpose


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


_BY_ELEMENTS = {"add": _add, "scale": _scale, "cast": _cast, "fill": _fill_float}


def _launch_elements(operation: str, arrays: list[Array], scalars: tuple[float, ...], stream: Stream | None) -> None:
    grid = ceil_div(arrays[0].size, BLOCK)
    _BY_ELEMENTS[operation][grid, BLOCK, stream](*arrays, *scalars, flops=arrays[0].size)


def _launch_vectors(operation: str, arrays: list[Array], scalars: tuple[float, ...], stream: Stream | None) -> None:
    width = _vector_width(arrays[-1])
    block = _vector_block(width * sum(array.itemsize for array in arrays[:-1]))
    grid = ceil_div(arrays[0].size, block * width)
    if operation == "cast":
        scalars = (1.0,)  # what is not multiplied by
    _BY_VECTORS[width][operation][grid, block, stream](*arrays, *scalars, flops=arrays[0].size)


def _vector_block(bytes_read: int) -> int:
    """Threads of a block, each of which reads so many bytes."""
    if bytes_read == 0:
        return BLOCK
    if bytes_read < 16:
        return NARROW_BLOCK
    return WIDE_BLOCK if bytes_read >= 32 else VECTOR_BLOCK


def _vector_width(out: Array) -> int:
    """Elements of a thread: 16 bytes of the output, so that a warp writes 512 bytes side by side."""
    return 16 // out.itemsize


VARIANTS = Variants(
    "elementwise",
    [
        Variant("thread_per_element", _launch_elements, "The definition."),
        Variant("vectors", _launch_vectors, "16 bytes a thread.", are_aligned, made_for="gpu"),
    ],
)


def _launch_flat(
    operation: str, variant: str | None, stream: Stream | None, scalars: tuple[float, ...] = (), **arrays: Array
) -> None:
    """Check arrays of one shape, and launch."""
    check_floats(f"elementwise.{operation}", **arrays)
    check_contiguous(f"elementwise.{operation}", **arrays)
    first = next(iter(arrays.values()))
    check_shape(f"elementwise.{operation}", first.shape, **arrays)
    flat_arrays = [flat(array) for array in arrays.values()]
    VARIANTS.pick(variant, *flat_arrays).launch(operation, flat_arrays, scalars, stream)


def add(a: Array, b: Array, out: Array, *, variant: str | None = None, stream: Stream | None = None) -> None:
    """out = a + b.

    Parameters
    ----------
    a, b, out : array of any one shape, float32, float16 or bfloat16 as uint16 bits, C-contiguous
        The dtypes may differ; out may be a or b.
    variant : str, optional
        A name in ``VARIANTS``.

    Raises
    ------
    ShapeError, DTypeError, ConfigError
        If the arrays differ in shape, or an argument is not as said.
    """
    _launch_flat("add", variant, stream, a=a, b=b, out=out)


def scale(x: Array, out: Array, factor: float, *, variant: str | None = None, stream: Stream | None = None) -> None:
    """out = factor x.

    Parameters
    ----------
    x, out : array of any one shape, float32, float16 or bfloat16 as uint16 bits, C-contiguous
        The dtypes may differ; out may be x.
    factor : float
    variant : str, optional
        A name in ``VARIANTS``.

    Raises
    ------
    ShapeError, DTypeError, ConfigError
        If the arrays differ in shape, or an argument is not as said.
    """
    _launch_flat("scale", variant, stream, (float(factor),), x=x, out=out)


def cast(x: Array, out: Array, *, variant: str | None = None, stream: Stream | None = None) -> None:
    """out = x in out's format, rounded to nearest even; what is too large for float16 becomes infinite.

    Parameters
    ----------
    x, out : array of any one shape, float32, float16 or bfloat16 as uint16 bits, C-contiguous
    variant : str, optional
        A name in ``VARIANTS``.

    Raises
    ------
    ShapeError, DTypeError, ConfigError
        If the arrays differ in shape, or an argument is not as said.
    """
    _launch_flat("cast", variant, stream, x=x, out=out)


def keep(x: Array, kept: Array | None, stream: Stream | None) -> None:
    """kept = x in kept's format, if there is one: for kernels that do not write it themselves, before they change x."""
    if kept is not None:
        cast(x, kept, stream=stream)


def fill(x: Array, value: float, *, variant: str | None = None, stream: Stream | None = None) -> None:
    """x = value, everywhere.

    Parameters
    ----------
    x : array of any shape, float32, float16, bfloat16 as uint16 bits, or int32, C-contiguous
    value : float, or int where x is int32
    variant : str, optional
        A name in ``VARIANTS``; int32 has one variant.

    Raises
    ------
    DTypeError, ConfigError
        If x is not as said, or is int32 and value is not an int.
    """
    if x.dtype in FLOATS:
        _launch_flat("fill", variant, stream, (float(value),), x=x)
        return
    check_contiguous("elementwise.fill", x=x)
    check_dtype("elementwise.fill", np.int32, x=x)
    if value != int(value):
        raise DTypeError(f"elementwise.fill: x has dtype int32 but value={value!r}; pass an int")
    _fill_integer[ceil_div(x.size, BLOCK), BLOCK, stream](flat(x), int(value))


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
        device = current_device()
        if device.kind != "cpu" and x.nbytes % 4 == 0 and are_aligned(x, out):  # words move as they are
            shape = (x.nbytes // 4,)
            words = [device.view(device.address(array), shape, np.float32, owner=array) for array in (x, out)]
            VARIANTS.pick(None, *words).launch("cast", words, (), stream)
            return
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


def _launch_vector_tile(x_RC: Array, out_CR: Array, stream: Stream | None) -> None:
    R, C = x_RC.shape
    pack = 4 // x_RC.itemsize
    device = current_device()
    x_RW = device.view(device.address(x_RC), (R, C // pack), np.float32, owner=x_RC)
    out_CQ = device.view(device.address(out_CR), (C, R // pack), np.float32, owner=out_CR)
    grid = (ceil_div(R, TILE_ROWS), ceil_div(C, TILE_WORDS * pack))
    transpose_vector_tile(pack)[grid, BLOCK, stream](x_RW, out_CQ, R, C)


def _turns_vectors(x_RC: Array, out_CR: Array) -> bool:
    """Whether rows of both are whole vectors of 16 bytes."""
    vector = 16 // x_RC.itemsize
    return x_RC.shape[0] % vector == 0 == x_RC.shape[1] % vector and are_aligned(x_RC, out_CR)


TRANSPOSE_VARIANTS = Variants(
    "elementwise.transpose",
    [
        Variant("thread_per_element", _launch_thread_per_element, "The definition; writes are scattered."),
        Variant("shared_tile", _launch_shared_tile, "Turns tiles in shared memory: reads and writes along rows."),
        Variant("vector_tile", _launch_vector_tile, "16 bytes a thread, both ways.", _turns_vectors, made_for="gpu"),
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
    TRANSPOSE_VARIANTS.pick(variant, x_RC, out_CR).launch(x_RC, out_CR, stream)
