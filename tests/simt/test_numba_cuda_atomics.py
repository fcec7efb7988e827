"""numba-cuda's own tests of atomics (test_atomics.py), as launches of simt.

Each case names the test that it was made from, in ``numba/cuda/tests/cudapy`` of the numba-cuda 0.30.4 wheel. There
one device function takes ``cuda.atomic.add`` and its like as an argument; here a factory makes a kernel for each.
"""

from typing import Any

import numpy as np
import pytest
from numba import cuda, float32, float64, int32, uint32, uint64

from tests.simt.support import Cases

case = Cases()
RANDOM = np.random.default_rng(0)
IDENTITY = {np.uint32: uint32, np.int32: int32, np.float32: float32, np.float64: float64, np.uint64: uint64}
BINS = RANDOM.integers(0, 32, 32)
SQUARE = RANDOM.integers(0, 32, (4, 8))


@cuda.jit(device=True)
def as_uint64(value):
    return uint64(value)


# Made by hand for each operation, since an atomic is not a value that a kernel could be given.


def add_shared(dtype, start):
    def kernel(x, op2):
        i = cuda.threadIdx.x
        bins = cuda.shared.array(32, dtype)
        bins[i] = start
        cuda.syncthreads()
        cuda.atomic.add(bins, int(x[i] % 32), op2)
        cuda.syncthreads()
        x[i] = bins[i]

    return kernel


def sub_shared(dtype, start):
    def kernel(x, op2):
        i = cuda.threadIdx.x
        bins = cuda.shared.array(32, dtype)
        bins[i] = start
        cuda.syncthreads()
        cuda.atomic.sub(bins, int(x[i] % 32), op2)
        cuda.syncthreads()
        x[i] = bins[i]

    return kernel


def and_shared(dtype, start):
    def kernel(x, op2):
        i = cuda.threadIdx.x
        bins = cuda.shared.array(32, dtype)
        bins[i] = start
        cuda.syncthreads()
        cuda.atomic.and_(bins, x[i] % 32, op2)
        cuda.syncthreads()
        x[i] = bins[i]

    return kernel


def or_shared(dtype, start):
    def kernel(x, op2):
        i = cuda.threadIdx.x
        bins = cuda.shared.array(32, dtype)
        bins[i] = start
        cuda.syncthreads()
        cuda.atomic.or_(bins, x[i] % 32, op2)
        cuda.syncthreads()
        x[i] = bins[i]

    return kernel


def xor_shared(dtype, start):
    def kernel(x, op2):
        i = cuda.threadIdx.x
        bins = cuda.shared.array(32, dtype)
        bins[i] = start
        cuda.syncthreads()
        cuda.atomic.xor(bins, x[i] % 32, op2)
        cuda.syncthreads()
        x[i] = bins[i]

    return kernel


def folded(ufunc: np.ufunc, start: float, op2: float, dtype: Any) -> np.ndarray:
    """What 32 threads leave when each applies ``op2`` to the bin that BINS names for it."""
    bins = np.full(32, start, dtype)
    ufunc.at(bins, BINS, dtype(op2))
    return bins


for source, make, ufunc, start, op2, dtype in (
    ("atomic_add", add_shared, np.add, 0, 1, np.uint32),
    ("atomic_add_float", add_shared, np.add, 0, 1, np.float32),
    ("atomic_add_double", add_shared, np.add, 0, 1, np.float64),
    ("atomic_sub", sub_shared, np.subtract, 0, 1, np.int32),
    ("atomic_sub_float", sub_shared, np.subtract, 0, 1, np.float32),
    ("atomic_sub_double", sub_shared, np.subtract, 0, 1, np.float64),
    ("atomic_and", and_shared, np.bitwise_and, 1, 213, np.uint32),
    ("atomic_or", or_shared, np.bitwise_or, 0, 213, np.uint32),
    ("atomic_xor", xor_shared, np.bitwise_xor, 0, 213, np.uint32),
):
    case(f"test_atomics.{source}", BINS.astype(dtype), dtype(op2), expected=folded(ufunc, start, op2, dtype), block=32)(
        make(IDENTITY[dtype], start)
    )


# ---- every operation on a two-dimensional shared array, with a tuple of signed and unsigned indices


def two_dimensions_shared(dtype):
    def kernel(add, sub, and_, or_, xor, op2):
        tx = cuda.threadIdx.x
        ty = cuda.threadIdx.y
        tile = cuda.shared.array((4, 8), dtype)
        tile[tx, ty] = add[tx, ty]
        cuda.syncthreads()
        cuda.atomic.add(tile, (tx, ty), op2)
        cuda.syncthreads()
        add[tx, ty] = tile[tx, ty]
        tile[tx, ty] = sub[tx, ty]
        cuda.syncthreads()
        cuda.atomic.sub(tile, (tx, as_uint64(ty)), op2)
        cuda.syncthreads()
        sub[tx, ty] = tile[tx, ty]
        tile[tx, ty] = and_[tx, ty]
        cuda.syncthreads()
        cuda.atomic.and_(tile, (tx, ty), op2)
        cuda.syncthreads()
        and_[tx, ty] = tile[tx, ty]
        tile[tx, ty] = or_[tx, ty]
        cuda.syncthreads()
        cuda.atomic.or_(tile, (tx, as_uint64(ty)), op2)
        cuda.syncthreads()
        or_[tx, ty] = tile[tx, ty]
        tile[tx, ty] = xor[tx, ty]
        cuda.syncthreads()
        cuda.atomic.xor(tile, (as_uint64(tx), ty), op2)
        cuda.syncthreads()
        xor[tx, ty] = tile[tx, ty]

    return kernel


OP2 = 213
ALL_FIVE = tuple(f(SQUARE, OP2) for f in (np.add, np.subtract, np.bitwise_and, np.bitwise_or, np.bitwise_xor))
case(
    "test_atomics.atomic_{add,sub,and,or,xor}{2,3}",
    *[SQUARE.astype(np.uint32)] * 5,
    np.uint32(OP2),
    expected=tuple(x.astype(np.uint32) for x in ALL_FIVE),
    block=(4, 8),
)(two_dimensions_shared(uint32))


def two_dimensions_shared_floats(dtype):
    def kernel(add, sub, op2):
        tx = cuda.threadIdx.x
        ty = cuda.threadIdx.y
        tile = cuda.shared.array((4, 8), dtype)
        tile[tx, ty] = add[tx, ty]
        cuda.syncthreads()
        cuda.atomic.add(tile, (tx, ty), op2)
        cuda.syncthreads()
        add[tx, ty] = tile[tx, ty]
        tile[tx, ty] = sub[tx, ty]
        cuda.syncthreads()
        cuda.atomic.sub(tile, (tx, as_uint64(ty)), op2)
        cuda.syncthreads()
        sub[tx, ty] = tile[tx, ty]

    return kernel


for name, dtype in (("float", np.float32), ("double", np.float64)):
    case(
        f"test_atomics.atomic_{{add,sub}}_{name}_{{2,3}}",
        SQUARE.astype(dtype),
        SQUARE.astype(dtype),
        dtype(1),
        expected=(SQUARE + 1, SQUARE - 1),
        block=(4, 8),
    )(two_dimensions_shared_floats(IDENTITY[dtype]))


# ---- global memory


def in_global_memory(add, sub, and_, or_, xor, index, op2):
    i = cuda.threadIdx.x
    bin = int(index[i] % 32)
    cuda.atomic.add(add, bin, op2)
    cuda.atomic.sub(sub, bin, op2)
    cuda.atomic.and_(and_, bin, op2)
    cuda.atomic.or_(or_, bin, op2)
    cuda.atomic.xor(xor, bin, op2)


def folded_from(ufunc: np.ufunc, start: np.ndarray) -> np.ndarray:
    bins = start.copy()
    ufunc.at(bins, BINS, bins.dtype.type(OP2))
    return bins


UFUNCS = (np.add, np.subtract, np.bitwise_and, np.bitwise_or, np.bitwise_xor)
START = RANDOM.integers(0, 32, 32).astype(np.int32)
for dtype in (np.int32, np.uint64):
    case(
        f"test_atomics.atomic_{{and,or,xor}}_global[{np.dtype(dtype)}]",
        *[START.astype(dtype)] * 5,
        BINS.astype(np.int32),
        dtype(OP2),
        expected=tuple(folded_from(ufunc, START.astype(dtype)) for ufunc in UFUNCS),
        block=32,
    )(in_global_memory)


def doubles_in_global_memory(add, sub, square, index):
    i = cuda.threadIdx.x
    cuda.atomic.add(add, index[i] % 32, 1.0)
    cuda.atomic.sub(sub, index[i] % 32, 1.0)
    cuda.atomic.add(square, (i // 8, as_uint64(i % 8)), 1)


case(
    "test_atomics.atomic_{add,sub}_double_global{,_2,_3}",
    np.zeros(32),
    np.zeros(32),
    SQUARE.astype(np.float64),
    BINS,
    expected=(np.bincount(BINS, minlength=32), -np.bincount(BINS, minlength=32), SQUARE + 1),
    block=32,
)(doubles_in_global_memory)


def two_dimensions_in_global_memory(and_, or_, xor, op2):
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    index = (tx, ty)
    cuda.atomic.and_(and_, index, op2)
    cuda.atomic.or_(or_, (tx, as_uint64(ty)), op2)
    cuda.atomic.xor(xor, (as_uint64(tx), ty), op2)


case(
    "test_atomics.atomic_{and,or,xor}_global_2",
    *[SQUARE.astype(np.uint32)] * 3,
    np.uint32(OP2),
    expected=ALL_FIVE[2:],
    block=(4, 8),
)(two_dimensions_in_global_memory)


# ---- exchange


def exchange(shared_out, global_out, square, dtype_of_value):
    i = cuda.threadIdx.x
    tile = cuda.shared.array(32, uint32)
    tile[i] = shared_out[i]
    cuda.syncthreads()
    cuda.atomic.exch(tile, (i + 1) % 32, dtype_of_value)
    cuda.syncthreads()
    shared_out[i] = tile[i]
    cuda.atomic.exch(global_out, i, dtype_of_value)
    cuda.atomic.exch(square, (i // 8, i % 8), dtype_of_value)


case(
    "test_atomics.atomic_exch{,2,3,_global}",
    BINS.astype(np.uint32),
    BINS.astype(np.uint32),
    SQUARE.astype(np.uint32),
    np.uint32(77),
    expected=(77, 77, 77),
    block=32,
)(exchange)

# ---- increment and decrement with wrap-around


def increments_of(dtype):
    def kernel(increased, decreased, shared_increased, shared_decreased, limit):
        tx = cuda.threadIdx.x
        ty = cuda.threadIdx.y
        cuda.atomic.inc(increased, (tx, ty), limit)
        cuda.atomic.dec(decreased, (tx, ty), limit)
        tile = cuda.shared.array((4, 8), dtype)
        tile[tx, ty] = shared_increased[tx, ty]
        cuda.syncthreads()
        cuda.atomic.inc(tile, (tx, ty), limit)
        cuda.syncthreads()
        shared_increased[tx, ty] = tile[tx, ty]
        tile[tx, ty] = shared_decreased[tx, ty]
        cuda.syncthreads()
        cuda.atomic.dec(tile, (tx, ty), limit)
        cuda.syncthreads()
        shared_decreased[tx, ty] = tile[tx, ty]

    return kernel


for dtype in (np.uint32, np.uint64):
    x = SQUARE.astype(dtype)
    increased, decreased = np.where(x >= 20, 0, x + 1), np.where((x == 0) | (x > 20), 20, x - dtype(1))
    bits = 8 * np.dtype(dtype).itemsize
    case(
        f"test_atomics.atomic_{{inc2,inc_global_2,dec2,dec_global2}}_{bits}",
        *[x] * 4,
        dtype(20),
        expected=(increased, decreased) * 2,
        block=(4, 8),
    )(increments_of(IDENTITY[dtype]))

# ---- extremes


def largest(out, x):
    tx = cuda.threadIdx.x
    bx = cuda.blockIdx.x
    cuda.atomic.max(out, 0, x[tx, bx])


def smallest(out, x):
    tx = cuda.threadIdx.x
    bx = cuda.blockIdx.x
    cuda.atomic.min(out, 0, x[tx, uint64(bx)])


for dtype in (np.int32, np.uint32, np.int64, np.uint64, np.float32, np.float64):
    low = 0 if np.dtype(dtype).kind == "u" else -65535
    x = RANDOM.integers(low, 65535, (32, 8)).astype(dtype)
    name = np.dtype(dtype).name.replace("float64", "double")
    case(f"test_atomics.atomic_max_{name}", np.zeros(1, dtype), x, expected=x.max(), grid=8, block=32)(largest)
    name = name.replace("float32", "float")  # numba-cuda's own spelling
    case(f"test_atomics.atomic_min_{name}", np.full(1, 65535, dtype), x, expected=x.min(), grid=8, block=32)(smallest)

NAN = np.array([np.nan])
for kernel, name in ((largest, "max"), (smallest, "min")):
    # A NaN on either side leaves the element as it is.
    case(f"test_atomics.atomic_{name}_nan_location", NAN, np.full((1, 1), 5.0), expected=np.nan)(kernel)
    case(f"test_atomics.atomic_{name}_nan_val", np.array([5.0]), NAN[None], expected=5)(kernel)


@case("test_atomics.atomic_max_double_shared", np.zeros(1), BINS.astype(np.float64), expected=BINS.max(), block=32)
def largest_by_shared(out, x):
    i = cuda.threadIdx.x
    values = cuda.shared.array(32, float64)
    values[i] = x[i]
    result = cuda.shared.array(1, float64)
    if i == 0:
        result[0] = out[0]
    cuda.syncthreads()
    cuda.atomic.max(result, 0, values[i])
    cuda.syncthreads()
    if i == 0:
        out[0] = result[0]


@case("test_atomics.atomic_min_double_shared", np.full(1, 32.0), BINS.astype(np.float64), expected=BINS.min(), block=32)
def smallest_by_shared(out, x):
    i = cuda.threadIdx.x
    values = cuda.shared.array(32, float64)
    values[i] = x[i]
    result = cuda.shared.array(1, float64)
    if i == 0:
        result[0] = out[0]
    cuda.syncthreads()
    cuda.atomic.min(result, 0, values[i])
    cuda.syncthreads()
    if i == 0:
        out[0] = result[0]


def extremes_without_nan(largest, smallest, x):
    i = cuda.threadIdx.x
    cuda.atomic.nanmax(largest, 0, x[i])
    cuda.atomic.nanmin(smallest, 0, x[i])


for dtype, name in ((np.int32, "int32"), (np.uint64, "uint64"), (np.float64, "double")):
    x = RANDOM.integers(1, 65535, 32).astype(dtype)
    if np.dtype(dtype).kind == "f":
        x[1::2] = np.nan
    case(
        f"test_atomics.atomic_nan{{max,min}}_{name}",
        np.zeros(1, dtype),
        np.full(1, 65535, dtype),
        x,
        expected=(np.nanmax(x), np.nanmin(x)),
        block=32,
    )(extremes_without_nan)

# ---- compare and swap


def swap_1d(x, old, fill, y):
    i = cuda.grid(1)
    if i < x.size:
        old[i] = cuda.atomic.cas(x, i, fill, y[i])


def swap_2d(x, old, fill, y):
    index = cuda.grid(2)
    if index[0] < x.shape[0] and index[1] < x.shape[1]:
        old[index] = cuda.atomic.cas(x, index, fill, y[index])


def swap_first(x, old, fill, y):
    i = cuda.grid(1)
    if i < x.size:
        old[i] = cuda.atomic.compare_and_swap(x[i:], fill, y[i])


for number, dtype, fill, other in (
    ("", np.int32, -99, -1),
    ("2", np.int64, -45, -1),
    ("3", np.uint32, 99, 7),
    ("4", np.uint64, 45, 7),
):
    x = RANDOM.permutation(np.repeat([fill, other], 50)).astype(dtype)
    y = RANDOM.integers(1, 10, 100).astype(dtype)
    swapped = np.where(x == dtype(fill), y, x)
    outcome = {"grid": 10, "block": 10}
    case(f"test_atomics.atomic_cas{number}_1dim", x, 0 * x, dtype(fill), y, expected=(swapped, x), **outcome)(swap_1d)
    square = [v.reshape(10, 10) for v in (x, 0 * x, y, swapped)]
    case(
        f"test_atomics.atomic_cas{number}_2dim",
        square[0],
        square[1],
        dtype(fill),
        square[2],
        expected=(square[3], square[0]),
        grid=(3, 3),
        block=(4, 4),
    )(swap_2d)
    case(
        f"test_atomics.atomic_compare_and_swap{number}",
        x,
        0 * x,
        dtype(fill),
        y,
        expected=(swapped, x),
        **outcome,
    )(swap_first)


# ---- the old value is returned


def returns_old(x, value):
    x[1] = cuda.atomic.add(x, 0, value)
    x[3] = cuda.atomic.max(x, 2, value)
    x[5] = cuda.atomic.min(x, 4, value)


for source, start, value in (
    ("add_returns_old", 10, 1),
    ("{max_returns_old_replace,min_returns_old_no_replace}", 1, 10),
    ("{max_returns_no_replace,min_returns_old_replace}", 10, 1),
    ("{max,min}_returns_old_nan_in_array", np.nan, 11),
    ("{max,min}_returns_old_nan_val", 10, np.nan),
):
    largest_value, smallest_value = max(start, value), min(start, value)  # Python's keep the first beside a NaN
    total = np.float32(start) + np.float32(value)
    case(
        f"test_atomics.atomic_{source}",
        np.array([start, 0, start, 0, start, 0], np.float32),
        np.float32(value),
        expected=np.array([total, start, largest_value, start, smallest_value, start]),
    )(returns_old)


@pytest.mark.parametrize("case, way", case.parameters())
def test_case(case, way):
    case.run(way)
