"""numba-cuda's own tests of shared, local and constant memory, views and arguments, as launches of simt.

Each case names the test that it was made from, in ``numba/cuda/tests/cudapy`` of the numba-cuda 0.30.4 wheel.
"""

from collections import namedtuple

import numpy as np
import pytest
from numba import cuda, float32, float64, int32, int64, types

from tests.simt.support import Cases
from tests.support import poisoned

case = Cases()
RANDOM = np.random.default_rng(8)

# ---- test_sm.py: shared memory


@cuda.jit(device=True)
def inner_shared():
    inner = cuda.shared.array(1, dtype=int32)
    inner[0] = 7


@case("test_sm.issue_953_sm_linkage_conflict", poisoned(1, np.int32), expected=3)
def outer_shared(out):
    outer = cuda.shared.array(1, dtype=int32)
    outer[0] = 3
    inner_shared()
    out[0] = outer[0]


def shared_size(shape, dtype):
    def kernel(out):
        array = cuda.shared.array(shape, dtype=dtype)
        out[0] = array.size

    return kernel


for name, shape in (("1d", 2), ("2d", (2, 3)), ("3d", (2, 3, 4))):
    case(f"test_sm.issue_1051_shared_size_broken_{name}", poisoned(1, np.int32), expected=np.prod(shape))(
        shared_size(shape, int32)
    )
for dtype in (types.float16, np.float16):
    case("test_sm.issue_fp16_support", poisoned(1, np.int32), expected=2)(shared_size(2, dtype))


def copy_by_first_thread(dtype):
    def kernel(x, y):
        tile = cuda.shared.array(16, dtype=dtype)
        tx = cuda.threadIdx.x
        bx = cuda.blockIdx.x
        bd = cuda.blockDim.x
        i = bx * bd + tx
        if i < len(x):
            tile[tx] = x[i]
        cuda.syncthreads()
        if tx == 0:
            for j in range(16):
                y[bd * bx + j] = tile[j]

    return kernel


BOOLS = RANDOM.integers(0, 2, 128).astype(np.bool_)
case("test_sm.shared_bool", BOOLS, np.zeros(128, np.bool_), expected=(BOOLS, BOOLS), grid=8, block=16)(
    copy_by_first_thread(types.boolean)
)


def sliced(source, n, expected):
    return case(f"test_sm.{source}", poisoned(n, np.int32), expected=np.array(expected), shared_bytes=4 * n)


@sliced("dynshared_slice_write", 2, [1, 2])
def slice_write(x):
    memory = cuda.shared.array(0, dtype=int32)
    first = memory[0:1]
    second = memory[1:2]
    first[0] = 1
    second[0] = 2
    x[0] = memory[0]
    x[1] = memory[1]


@sliced("dynshared_slice_read", 2, [1, 2])
def slice_read(x):
    memory = cuda.shared.array(0, dtype=int32)
    first = memory[0:1]
    second = memory[1:2]
    memory[0] = 1
    memory[1] = 2
    x[0] = first[0]
    x[1] = second[0]


@sliced("dynshared_slice_diff_sizes", 3, [1, 2, 3])
def slice_different_sizes(x):
    memory = cuda.shared.array(0, dtype=int32)
    first = memory[0:1]
    second = memory[1:3]
    memory[0] = 1
    memory[1] = 2
    memory[2] = 3
    x[0] = first[0]
    x[1] = second[0]
    x[2] = second[1]


@sliced("dynshared_slice_overlap", 5, [1, 2, 2, 3, 4])
def slice_overlap(x):
    memory = cuda.shared.array(0, dtype=int32)
    first = memory[0:2]
    second = memory[1:4]
    for i in range(4):
        memory[i] = i + 1
    x[0] = first[0]
    x[1] = first[1]
    x[2] = second[0]
    x[3] = second[1]
    x[4] = second[2]


@sliced("dynshared_slice_gaps", 7, [99, 1, 2, 99, 3, 4, 99])
def slice_gaps(x):
    memory = cuda.shared.array(0, dtype=int32)
    first = memory[1:3]
    second = memory[4:6]
    for i in range(7):
        memory[i] = 99
    first[0] = 1
    first[1] = 2
    second[0] = 3
    second[1] = 4
    for i in range(7):
        x[i] = memory[i]


@sliced("dynshared_slice_write_backwards", 4, [2, 1, 4, 3])
def slice_write_backwards(x):
    memory = cuda.shared.array(0, dtype=int32)
    first = memory[1::-1]
    second = memory[3:1:-1]
    first[0] = 1
    first[1] = 2
    second[0] = 3
    second[1] = 4
    for i in range(4):
        x[i] = memory[i]


@sliced("dynshared_slice_nonunit_stride", 6, [1, 99, 2, 99, 3, 99])
def slice_nonunit_stride(x):
    memory = cuda.shared.array(0, dtype=int32)
    even = memory[::2]
    for i in range(6):
        memory[i] = 99
    for i in range(3):
        even[i] = i + 1
    for i in range(6):
        x[i] = memory[i]


@sliced("dynshared_slice_nonunit_reverse_stride", 6, [99, 3, 99, 2, 99, 1])
def slice_nonunit_reverse_stride(x):
    memory = cuda.shared.array(0, dtype=int32)
    odd = memory[-1::-2]
    for i in range(6):
        memory[i] = 99
    for i in range(3):
        odd[i] = i + 1
    for i in range(6):
        x[i] = memory[i]


NUMBERS = np.arange(128, dtype=np.int64)


@case(
    "test_sm.issue_5073",
    poisoned(128, np.int64),
    NUMBERS,
    np.int64(8),
    expected=NUMBERS,
    grid=8,
    block=16,
    shared_bytes=128,
)
def copy_by_slices(y, x, chunk):
    memory = cuda.shared.array(0, dtype=int64)
    first = memory[0:chunk]
    second = memory[chunk : chunk * 2]
    tx = cuda.threadIdx.x
    i = cuda.blockIdx.x * cuda.blockDim.x + tx
    if i < len(x):
        if tx < chunk:
            first[tx] = x[i]
        else:
            second[tx - chunk] = x[i]
    cuda.syncthreads()
    if tx == 0:
        for j in range(chunk):
            y[cuda.blockDim.x * cuda.blockIdx.x + j] = first[j]
            y[cuda.blockDim.x * cuda.blockIdx.x + j + chunk] = second[j]


# ---- test_sync.py, test_globals.py, test_freevar.py: sizes that are literals, globals, closure variables

SIZE = 100


@case("test_globals.global_int_const", poisoned(SIZE, np.int32), expected=np.arange(SIZE), block=SIZE)
def shared_of_global_size(out):
    tile = cuda.shared.array(SIZE, int32)
    i = cuda.grid(1)
    if i == 0:
        for j in range(SIZE):
            tile[j] = j
    cuda.syncthreads()
    out[i] = tile[i]


@case("test_sync.simple_smem", poisoned(100, np.int32), expected=np.arange(100), block=100)
def shared_of_local_size(out):
    N = 100
    tile = cuda.shared.array(N, int32)
    i = cuda.grid(1)
    if i == 0:
        for j in range(N):
            tile[j] = j
    cuda.syncthreads()
    out[i] = tile[i]


S0, S1 = 10, 20
RATIOS = (np.arange(10)[:, None] + 1) / (np.arange(20) + 1)


@case("test_sync.coop_smem2d", poisoned((10, 20)), expected=RATIOS, block=(10, 20), rtol=1e-6)
@case("test_globals.global_tuple_const", poisoned((10, 20)), expected=RATIOS, block=(10, 20), rtol=1e-6)
def shared_2d(out):
    i, j = cuda.grid(2)
    tile = cuda.shared.array((S0, S1), float32)
    tile[i, j] = (i + 1) / (j + 1)
    cuda.syncthreads()
    out[i, j] = tile[i, j]


@case("test_sync.dyn_shared_memory", poisoned(50), expected=2 * np.arange(50), block=50, shared_bytes=200)
def dynamic_shared(out):
    i = cuda.grid(1)
    tile = cuda.shared.array(0, float32)
    tile[i] = i * 2
    cuda.syncthreads()
    out[i] = tile[i]


def shared_of_free_variables(size, dtype):
    @case("test_freevar.freevar", np.arange(2, dtype=np.float32), np.int64(1), expected=np.array([0, 5]))
    def kernel(a, i):
        tile = cuda.shared.array(size, dtype=dtype)
        tile[i] = 5
        a[i] = tile[i]


shared_of_free_variables(1024, float32)


# ---- test_localmem.py


@case("test_localmem.local_array", poisoned(1000, np.int32), np.arange(1000, dtype=np.int32), expected=np.arange(1000))
def local_array(out, x):
    local = cuda.local.array(1000, dtype=int32)
    for i in range(local.shape[0]):
        local[i] = x[i]
    for i in range(local.shape[0]):
        out[i] = local[i]


@case("test_localmem.local_array_1_tuple", poisoned(5, np.int32), np.arange(5, dtype=np.int32), expected=np.arange(5))
def local_array_of_a_tuple(out, x):
    local = cuda.local.array((5,), dtype=int32)
    for i in range(local.shape[0]):
        local[i] = x[i]
    for i in range(local.shape[0]):
        out[i] = local[i]


def local_of(dtype):
    def kernel(x):
        local = cuda.local.array(10, dtype=dtype)
        local[0] = x[0] + 1
        x[0] = local[0]

    return kernel


for source, dtype in (("numba_dtype", int32), ("numpy_dtype", np.int32), ("string_dtype", "int32")):
    case(f"test_localmem.{source}", np.array([6], np.int32), expected=7)(local_of(dtype))


def local_size(dtype):
    def kernel(out):
        array = cuda.local.array(2, dtype=dtype)
        out[0] = array.size

    return kernel


for dtype in (types.float16, np.float16):
    case("test_localmem.issue_fp16_support", poisoned(1, np.int32), expected=2)(local_size(dtype))


# ---- test_constmem.py

CONST_EMPTY = np.array([])
CONST_1D = np.arange(10, dtype=np.float64) / 2
CONST_2D = np.asfortranarray(np.arange(100, dtype=np.int32).reshape(10, 10))
CONST_3D = np.arange(125, dtype=np.float32).reshape(5, 5, 5)
CONST_3_BYTES = np.arange(3, dtype=np.uint8)


@case("test_constmem.const_array", poisoned(10, np.float64), expected=CONST_1D + 1, grid=2, block=5)
def constant_1d(out):
    table = cuda.const.array_like(CONST_1D)
    i = cuda.grid(1)
    out[i] = table[i] + 1.0


@case("test_constmem.const_empty", poisoned(1, np.int64), expected=0)
def constant_empty(out):
    table = cuda.const.array_like(CONST_EMPTY)
    i = cuda.grid(1)
    out[i] = len(table)


@case("test_constmem.const_align", poisoned(3, np.float64), expected=CONST_3_BYTES + CONST_1D[:3], block=3)
def constants_of_two_sizes(out):
    a = cuda.const.array_like(CONST_3_BYTES)
    b = cuda.const.array_like(CONST_1D)
    i = cuda.grid(1)
    out[i] = a[i] + b[i]


@case("test_constmem.const_array_2d", poisoned((10, 10), np.int32), expected=CONST_2D, grid=(2, 2), block=(5, 5))
def constant_2d(out):
    table = cuda.const.array_like(CONST_2D)
    i, j = cuda.grid(2)
    out[i, j] = table[i, j]


@case(
    "test_constmem.const_array_3d",
    np.asfortranarray(poisoned((5, 5, 5))),
    expected=CONST_3D,
    block=(5, 5, 5),
)
def constant_3d(out):
    table = cuda.const.array_like(CONST_3D)
    i = cuda.threadIdx.x
    j = cuda.threadIdx.y
    k = cuda.threadIdx.z
    out[i, j, k] = table[i, j, k]


# ---- test_slicing.py, test_array.py, test_transpose.py, test_array_methods.py: views and strides

SQUARE = np.arange(100, dtype=np.int32).reshape(10, 10)


@cuda.jit(device=True)
def copy_row(out, row):
    for i in range(out.shape[0]):
        out[i] = row[i]


@case("test_slicing.slice_as_arg", poisoned((10, 10), np.int32), SQUARE, expected=SQUARE, block=10)
def rows_as_arguments(out, x):
    i = cuda.grid(1)
    copy_row(out[i, :], x[i, :])


def index_of_self(x):
    i = cuda.grid(1)
    if i < x.shape[0]:
        x[i] = i


def misaligned():
    return np.ndarray(9, np.double, np.zeros(80, np.byte).data, 4)


def every_second():
    return np.zeros(10)[:-1:2]


case("test_array.gpu_array_strided", misaligned, expected=np.arange(9), grid=10, block=10)(index_of_self)
case("test_array.gpu_array_interleaved", every_second, expected=np.arange(5), block=8)(index_of_self)


def transpose(dtype):
    def kernel(out, x):
        tile = cuda.shared.array((16, 17), dtype)
        tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
        row, column = cuda.blockIdx.y * 16 + ty, cuda.blockIdx.x * 16 + tx
        if row < x.shape[0] and column < x.shape[1]:
            tile[ty, tx] = x[row, column]
        cuda.syncthreads()
        row, column = cuda.blockIdx.x * 16 + ty, cuda.blockIdx.y * 16 + tx
        if row < out.shape[0] and column < out.shape[1]:
            out[row, column] = tile[tx, ty]

    return kernel


transpose_float, transpose_bool = transpose(float64), transpose(types.boolean)
for rows, columns in ((5, 6), (33, 16)):
    x = np.arange(rows * columns, dtype=np.float64).reshape(rows, columns)
    case(
        f"test_transpose.transpose[{rows}x{columns}]",
        poisoned((columns, rows), np.float64),
        x,
        expected=x.T,
        grid=(-(-columns // 16), -(-rows // 16)),
        block=(16, 16),
    )(transpose_float)
for rows, columns in ((2, 3), (16, 17), (17, 16), (14, 14)):
    flags = RANDOM.integers(0, 2, (rows, columns)).astype(np.bool_)
    case(
        f"test_transpose.transpose_bool[{rows}x{columns}]",
        ~flags.T.copy(),
        flags,
        expected=flags.T,
        grid=(-(-columns // 16), -(-rows // 16)),
        block=(16, 16),
    )(transpose_bool)


def transposed_view():
    return np.arange(120, dtype=np.int64).reshape(10, 12)[::2, ::2].T


@case(
    "test_transpose.transpose_view",
    poisoned((6, 5), np.int64),
    transposed_view,
    expected=transposed_view(),
    block=(6, 5),
)
def copy_2d(out, x):
    i, j = cuda.grid(2)
    out[i, j] = x[i, j]


# ---- test_array_args.py: arrays and tuples as arguments


@cuda.jit(device=True)
def element(a, i):
    return a[i]


@case("test_array_args.array_ary", poisoned(10, np.float64), np.arange(10.0), expected=np.arange(10), grid=10)
def element_by_function(out, x):
    i = cuda.grid(1)
    out[i] = element(x, i)


@case("test_array_args.unituple", poisoned(3, np.int64), (1, 2, 3), expected=np.array([1, 2, 3]))
def tuple_argument(out, x):
    out[0] = x[0]
    out[1] = x[1]
    out[2] = x[2]


@case(
    "test_array_args.tuple",
    poisoned(2, np.int64),
    poisoned(2, np.float64),
    (1, 2, 4.5, 5.5),
    expected=(np.array([1, 2]), np.array([4.5, 5.5])),
)
def mixed_tuple_argument(integers, floats, x):
    integers[0] = x[0]
    integers[1] = x[1]
    floats[0] = x[2]
    floats[1] = x[3]


Point = namedtuple("Point", ("x", "y", "r"))


@case(
    "test_array_args.namedtuple",
    poisoned(2, np.int64),
    poisoned(1, np.float64),
    Point(1, 2, 2.236),
    expected=(np.array([1, 2]), 2.236),
)
def named_tuple_argument(integers, floats, point):
    integers[0] = point.x
    integers[1] = point.y
    floats[0] = point.r


@case("test_array_args.tuple_of_tuples", poisoned(4, np.int64), ((5, 6), (8, 9, 10)), expected=np.array([2, 3, 6, 10]))
def nested_tuple_argument(out, x):
    out[0] = len(x[0])
    out[1] = len(x[1])
    out[2] = x[0][1]
    out[3] = x[1][2]


@case("test_array_args.tuple_of_tuples_and_scalars", poisoned(3, np.int64), ((6, 5), 7), expected=np.array([2, 5, 7]))
def tuple_of_tuple_and_scalar(out, x):
    out[0] = len(x[0])
    out[1] = x[0][1]
    out[2] = x[1]


ONES = np.ones(10)


@case(
    "test_array_args.tuple_of_arrays", (np.zeros(10), ONES, 3 * ONES), expected=((4 * ONES, ONES, 3 * ONES),), block=10
)
def tuple_of_arrays(x):
    i = cuda.grid(1)
    if i < len(x[0]):
        x[0][i] = x[1][i] + x[2][i]


@case(
    "test_array_args.tuple_of_array_scalar_tuple",
    poisoned(5, np.int64),
    (2 * np.arange(2), 10, (4, 3)),
    expected=np.array([0, 2, 10, 4, 3]),
)
def tuple_of_everything(out, x):
    out[0] = x[0][0]
    out[1] = x[0][1]
    out[2] = x[1]
    out[3] = x[2][0]
    out[4] = x[2][1]


@pytest.mark.parametrize("case, way", case.parameters())
def test_case(case, way):
    case.run(way)
