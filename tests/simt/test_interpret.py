"""Kernels run in Python give what NumPy gives, construct by construct; and the arithmetic is numba's."""

import math
import operator

import numpy as np
import pytest
from numba import cuda, float32, int32, int64, types, uint32
from numba.core.registry import cpu_target
from numba.np.numpy_support import from_dtype

from numstack.errors import KernelError
from numstack.simt.interpret import interpret
from numstack.simt.scalars import OPERATORS, Int32, dtype_of, hold
from numstack.simt.step import step
from tests.simt.support import dim
from tests.support import poisoned

RANDOM = np.random.default_rng(5)
FULL = 0xFFFFFFFF
WIDTH = 32
TABLE = np.arange(10, dtype=np.int32) * 3


def uniform(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


# ---- kernels


def add(x, y, out):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i] + y[i]


def reverse_in_shared(x, out):
    tile = cuda.shared.array(WIDTH, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    cuda.syncthreads()
    out[i] = tile[WIDTH - 1 - i]


def reverse_in_dynamic_shared(x, out):
    values = cuda.shared.array(0, float32)
    order = cuda.shared.array(0, int32)[WIDTH:]
    i = cuda.threadIdx.x
    values[i] = x[i]
    order[i] = WIDTH - 1 - i
    cuda.syncthreads()
    out[i] = values[order[i]]


def matmul(a, b, c):
    a_tile = cuda.shared.array((4, 4), float32)
    b_tile = cuda.shared.array(shape=(4, 4), dtype=float32)
    column, row = cuda.grid(2)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    total = float32(0)
    for start in range(0, a.shape[1], 4):
        inside = row < a.shape[0] and start + tx < a.shape[1]
        a_tile[ty, tx] = a[row, start + tx] if inside else float32(0)
        inside = column < b.shape[1] and start + ty < b.shape[0]
        b_tile[ty, tx] = b[start + ty, column] if inside else float32(0)
        cuda.syncthreads()
        for k in range(4):
            total += a_tile[ty, k] * b_tile[k, tx]
        cuda.syncthreads()
    if row >= c.shape[0] or column >= c.shape[1]:
        return
    c[row, column] = total


def collatz(n, steps):
    i = cuda.grid(1)
    if i >= n.size:
        return
    value = n[i]
    count = 0
    while True:
        if value == 1:
            break
        count += 1
        if value % 2:
            value = 3 * value + 1
            continue
        value //= 2
    steps[i] = count


@cuda.jit(device=True)
def warp_sum(value):
    for shift in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(FULL, value, shift)
    return value


@cuda.jit(device=True)
def block_sum(value, partial):
    total = warp_sum(value)
    if cuda.laneid == 0:
        partial[cuda.threadIdx.x // 32] = total
    cuda.syncthreads()
    result = float32(0)
    for warp in range(cuda.blockDim.x // 32):
        result += partial[warp]
    return result


def sum_rows(x, out):
    partial = cuda.shared.array(4, float32)
    row = cuda.blockIdx.x
    value = float32(0)
    for column in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
        value += x[row, column]
    total = block_sum(value, partial)
    if cuda.threadIdx.x == 0:
        out[row] = total


def shuffles(out):
    lane = cuda.laneid
    out[0, lane] = cuda.shfl_sync(FULL, lane * 10, 5)
    out[1, lane] = cuda.shfl_up_sync(FULL, lane, 1)
    out[2, lane] = cuda.shfl_down_sync(FULL, lane, 2)
    out[3, lane] = cuda.shfl_xor_sync(FULL, lane, 3)


def votes(x, out):
    lane = cuda.laneid
    positive = x[lane] > 0
    out[0, lane] = cuda.all_sync(FULL, positive)
    out[1, lane] = cuda.any_sync(FULL, positive)
    out[2, lane] = cuda.ballot_sync(FULL, positive)
    out[3, lane] = cuda.popc(cuda.ballot_sync(FULL, positive))
    if lane < 8:
        out[4, lane] = cuda.ballot_sync(0xFF, positive)


def counts(x, out):
    i = cuda.threadIdx.x
    out[0, i] = cuda.syncthreads_count(x[i] > 0)
    out[1, i] = cuda.syncthreads_and(x[i] > 0)
    out[2, i] = cuda.syncthreads_or(x[i] > 0)


def histogram(x, bins, largest):
    local = cuda.shared.array(8, int32)
    i = cuda.threadIdx.x
    if i < 8:
        local[i] = 0
    cuda.syncthreads()
    cuda.atomic.add(local, x[i], 1)
    cuda.atomic.max(largest, 0, x[i])
    cuda.syncthreads()
    if i < 8:
        cuda.atomic.add(bins, i, local[i])


def local_polynomial(x, out):
    coefficients = cuda.local.array(3, float32)
    for k in range(3):
        coefficients[k] = float32(k + 1)
    i = cuda.grid(1)
    total = float32(0)
    for k in range(2, -1, -1):
        total = total * x[i] + coefficients[k]
    out[i] = total


def row_views(x, out):
    row = x[cuda.threadIdx.x]
    target = out[cuda.threadIdx.x, 1:]
    for k in range(target.shape[0]):
        target[k] = row[k] + row[k + 1]
    out[cuda.threadIdx.x, :1] = 7


def three_dimensions(out):
    x, y, z = cuda.grid(3)
    nx, ny, nz = cuda.gridsize(3)
    out[z, y, x] = x + nx * (y + ny * (z + nz * 0))


def constants(out):
    table = cuda.const.array_like(TABLE)
    i = cuda.threadIdx.x
    out[i] = table[i] + TABLE[9 - i] + WIDTH


def swaps(x):
    i = 2 * cuda.threadIdx.x
    x[i], x[i + 1] = x[i + 1], x[i]
    x[i] += 1
    a = b = x[i]
    x[i] = a if 0 < i < 4 <= 4 else -b


# ---- results


def run(kernel, grid, block, *args, **options):
    interpret(kernel, dim(grid), dim(block), args, **options)


@pytest.mark.parametrize("n", [1, 31, 32, 33, 100])
def test_elementwise(n):
    x, y, out = uniform(n), uniform(n), poisoned(n)
    run(add, -(-n // 32), 32, x, y, out)
    np.testing.assert_array_equal(out, x + y)


def test_strided_arrays_and_a_dispatcher():
    x, out = uniform(10, 6), poisoned((10, 6))
    run(cuda.jit(add), 1, 32, x[:, 1], x[::-1, 2], out[:, 3])
    np.testing.assert_array_equal(out[:, 3], x[:, 1] + x[::-1, 2])
    assert np.isnan(np.delete(out, 3, axis=1)).all()


@pytest.mark.parametrize("kernel", [reverse_in_shared, reverse_in_dynamic_shared])
def test_shared_memory(kernel):
    x, out = uniform(WIDTH), poisoned(WIDTH)
    run(kernel, 1, WIDTH, x, out, shared_bytes=8 * WIDTH)
    np.testing.assert_array_equal(out, x[::-1])


@pytest.mark.parametrize("checks", [True, False])
@pytest.mark.parametrize("m, n, k", [(4, 4, 4), (5, 9, 7), (1, 1, 13)])
def test_matmul(m, n, k, checks):
    a, b, c = uniform(m, k), uniform(k, n), poisoned((m, n))
    run(matmul, (-(-n // 4), -(-m // 4)), (4, 4), a, b, c, checks=checks)
    np.testing.assert_allclose(c, a.astype(float) @ b, rtol=1e-5, atol=1e-5)


def test_while_break_continue_and_early_return():
    n, out = np.array([1, 2, 3, 7, 27], np.int64), poisoned(5, np.int32)
    run(collatz, 1, 8, n, out)
    assert out.tolist() == [0, 1, 7, 16, 111]


def test_barriers_and_shuffles_inside_device_functions():
    x, out = uniform(3, 130), poisoned(3)
    run(sum_rows, 3, 128, x, out)
    np.testing.assert_allclose(out, x.sum(1, dtype=float), rtol=1e-5)


def test_shuffles():
    out, lanes = poisoned((4, 32), np.int32), np.arange(32)
    run(shuffles, 1, 32, out)
    np.testing.assert_array_equal(out[0], 50)
    np.testing.assert_array_equal(out[1], np.maximum(lanes - 1, 0))
    np.testing.assert_array_equal(out[2], np.where(lanes < 30, lanes + 2, lanes))
    np.testing.assert_array_equal(out[3], lanes ^ 3)


def test_votes():
    x, out = uniform(32), np.zeros((5, 32), np.int32)
    run(votes, 1, 32, x, out)
    ballot = sum(1 << lane for lane in range(32) if x[lane] > 0)
    assert out[:4, 0].tolist() == [0, 1, np.uint32(ballot).astype(np.int32), (x > 0).sum()]
    np.testing.assert_array_equal(out[:4], np.repeat(out[:4, :1], 32, 1))
    assert out[4].tolist() == [ballot & 0xFF] * 8 + [0] * 24


@pytest.mark.parametrize("x", [np.arange(40) - 20, np.arange(40) + 1, -np.arange(40)])
def test_barriers_that_count(x):
    out = poisoned((3, 40), np.int32)
    run(counts, 1, 40, x, out)
    np.testing.assert_array_equal(out, np.repeat([[(x > 0).sum()], [(x > 0).all()], [(x > 0).any()]], 40, 1))


def test_atomics_on_shared_and_global_memory():
    x, bins, largest = RANDOM.integers(0, 7, 64).astype(np.int32), np.zeros(8, np.int32), np.zeros(1, np.int32)
    run(histogram, 3, 64, x, bins, largest)
    np.testing.assert_array_equal(bins, 3 * np.bincount(x, minlength=8))
    assert largest[0] == x.max()


def test_local_arrays():
    x, out = uniform(16), poisoned(16)
    run(local_polynomial, 2, 8, x, out)
    np.testing.assert_allclose(out, 1 + 2 * x + 3 * x**2, rtol=1e-5)


def test_slices_are_views():
    x, out = uniform(3, 5), poisoned((3, 5))
    run(row_views, 1, 3, x, out)
    np.testing.assert_array_equal(out[:, 1:], x[:, :-1] + x[:, 1:])
    np.testing.assert_array_equal(out[:, 0], 7)


def test_three_dimensions():
    out = poisoned((6, 4, 4), np.int32)
    run(three_dimensions, (2, 1, 3), (2, 4, 2), out)
    np.testing.assert_array_equal(out.ravel(), np.arange(96))


def test_constants():
    out = poisoned(10, np.int32)
    run(constants, 1, 10, out)
    np.testing.assert_array_equal(out, 27 + WIDTH)


def test_assignments_of_several_targets():
    x = np.arange(8, dtype=np.float32)
    run(swaps, 1, 4, x)
    assert x.tolist() == [-2, 0, 4, 2, -6, 4, -8, 6]


def test_closures_are_constants():
    def make(n, function):
        def kernel(out):
            out[cuda.grid(1)] = function(n)

        return kernel

    @cuda.jit(device=True)
    def square(x):
        return x * x

    out = poisoned(1)
    run(make(3, square), 1, 1, out)
    assert out[0] == 9


def test_no_threads_and_empty_arrays():
    run(add, 0, 32, *(np.empty(0, np.float32),) * 3)
    run(add, 1, 32, *(np.empty(0, np.float32),) * 3)


def test_what_kernels_cannot_have_is_an_error_with_its_line():
    def kernel(x):
        values = [x[i] for i in range(3)]
        x[0] = values[0]

    with pytest.raises(KernelError, match=r"test_interpret.py:\d+: .*cannot be used in a kernel.*\n.*values = \["):
        run(kernel, 1, 1, uniform(3))


# ---- arithmetic

DTYPES = [np.dtype(t) for t in "?bBhHiIqQfd"]
_PYTHON = {
    "Add": operator.add,
    "Mult": operator.mul,
    "Div": operator.truediv,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "Pow": operator.pow,
    "LShift": operator.lshift,
    "BitAnd": operator.and_,
    "Lt": operator.lt,
}


def numba_result(function, *dtypes: np.dtype) -> np.dtype | None:
    context = cpu_target.typing_context
    context.refresh()
    try:
        signature = context.resolve_function_type(function, tuple(from_dtype(d) for d in dtypes), {})
    except Exception:  # numba has many errors for "no such operation"
        return None
    result = getattr(signature, "return_type", None)
    return np.dtype(str(result)) if isinstance(result, (types.Number, types.Boolean)) else None


@pytest.mark.parametrize("name", _PYTHON)
def test_results_have_the_types_that_numba_infers(name):
    wrong = []
    with np.errstate(all="ignore"):
        for a in DTYPES:
            for b in DTYPES:
                expected = numba_result(_PYTHON[name], a, b)
                # numba calls bool ** int32 a float32, a slip of its overload table that nobody can want.
                if expected is None or (name == "Pow" and a == np.bool_):
                    continue
                got = dtype_of(OPERATORS[name](hold(a.type(3)), hold(b.type(2))))
                if got != expected:
                    wrong.append(f"{a} {name} {b}: {got}, numba {expected}")
    assert not wrong


@pytest.mark.parametrize(
    "name, function", [("USub", operator.neg), ("Invert", operator.invert), ("UAdd", operator.pos)]
)
def test_unary_results_have_the_types_that_numba_infers(name, function):
    for a in DTYPES:
        expected = numba_result(function, a)
        if expected is not None:
            assert dtype_of(OPERATORS[name](hold(a.type(1)))) == expected, a


def arithmetic(out, unsigned, signed, halves):
    out[0] = int32(0x7FFFFFFF) + int32(1)  # widened
    out[1] = int64(int32(0x80000000))  # wrapped by the cast
    out[2] = (uint32(0xFFFFFFFF) * uint32(0xFFFFFFFF)) >> 32  # 64 bits
    out[3] = 0x7FFFFFFFFFFFFFFF + unsigned.size  # wrapped at 64 bits, without a warning
    unsigned[0] = uint32(3) - uint32(5)
    signed[0] = 200 + 100  # int8
    out[4] = -7 // 2
    out[5] = -7 % 3
    out[6] = int(-2.7)
    out[7] = 1 if float32(0.1) == 0.1 else 0  # compared in float64
    halves[0] = float32(1) / 3
    halves[1] = math.sqrt(float32(2)) * 2  # an int64 makes it float64
    halves[2] = 1.0 / (halves.size - 6)
    halves[3] = math.exp(float32(100))
    halves[4] = max(float32(1), math.sqrt(-1.0))
    halves[5] = math.floor(2.5) + round(2.5) + abs(-3) + min(4, 5, 6)


def test_arithmetic_is_numbas():
    out, unsigned, signed = poisoned(8, np.int64), poisoned(1, np.uint32), poisoned(1, np.int8)
    halves = poisoned(6, np.float64)
    run(arithmetic, 1, 1, out, unsigned, signed, halves, checks=False)
    assert out.tolist() == [2**31, -(2**31), 0xFFFFFFFE, -(2**63), -4, 2, -2, 0]
    assert (unsigned[0], signed[0]) == (0xFFFFFFFE, 44)
    # float32 / int64 is float64; exp of a float32 is one.
    expected = [1 / 3, np.float64(np.sqrt(np.float32(2))) * 2, np.inf, np.inf, 1, 11]
    np.testing.assert_array_equal(halves, expected)


def test_int32_widens_to_int64():
    assert type(Int32(3) * 4) is int


# ---- stepping


def diverging(x, out):
    tile = cuda.shared.array(4, float32)
    i = cuda.threadIdx.x
    if i < 2:
        tile[i] = x[i]
    else:
        tile[i] = -x[i]
    cuda.syncthreads()
    out[i] = tile[3 - i]


def test_step_shows_lines_threads_variables_and_shared_memory():
    x, out = np.arange(4, dtype=np.float32), poisoned(4)
    first = diverging.__code__.co_firstlineno
    stops = list(step(diverging, (1, 1, 1), (4, 1, 1), (x, out)))
    assert [(stop.line - first, len(stop.threads)) for stop in stops] == [
        (1, 4),
        (2, 4),
        (3, 4),
        (4, 2),
        (6, 2),
        (7, 4),
        (8, 4),
    ]
    assert stops[4].threads == [(2, 0, 0), (3, 0, 0)]
    assert stops[4].variables["i"] == [2, 3]
    assert stops[4].source == "tile[i] = -x[i]"
    np.testing.assert_array_equal(stops[4].shared["tile"], [0, 1, np.nan, np.nan])
    np.testing.assert_array_equal(out, [-3, -2, 1, 0])


def test_step_enters_device_functions():
    x, out = uniform(1, 64), poisoned(1)
    stops = list(step(sum_rows, (1, 1, 1), (64, 1, 1), (x, out)))
    assert any(stop.source.startswith("value += cuda.shfl_xor_sync") and len(stop.threads) == 64 for stop in stops)
    np.testing.assert_allclose(out, x.sum(1, dtype=float), rtol=1e-5)
