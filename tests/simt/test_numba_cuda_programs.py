"""numba-cuda's own tests of whole programs and of Python's control flow, as launches of simt.

Each case names the test that it was made from, in ``numba/cuda/tests/cudapy`` of the numba-cuda 0.30.4 wheel.
"""

import math

import numpy as np
import pytest
from numba import cuda, float32, float64

from tests.simt.support import Cases
from tests.support import poisoned

case = Cases()
RANDOM = np.random.default_rng(42)

# ---- test_matmul.py

TILE, N_TILES = 8, 3
N = TILE * N_TILES
LEFT, RIGHT = RANDOM.random((2, N, N)).astype(np.float32)


@case(
    "test_matmul.cuda_matmul",
    poisoned((N, N)),
    LEFT,
    RIGHT,
    expected=LEFT @ RIGHT,
    grid=(N_TILES, N_TILES),
    block=(TILE, TILE),
    rtol=1e-5,
)
def matmul(c, a, b):
    a_tile = cuda.shared.array(shape=(TILE, TILE), dtype=float32)
    b_tile = cuda.shared.array(shape=(TILE, TILE), dtype=float32)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    x = tx + cuda.blockIdx.x * cuda.blockDim.x
    y = ty + cuda.blockIdx.y * cuda.blockDim.y
    total = float32(0)
    for i in range(N_TILES):
        if x < N and y < N:
            a_tile[ty, tx] = a[y, tx + i * TILE]
            b_tile[ty, tx] = b[ty + i * TILE, x]
        cuda.syncthreads()
        if x < N and y < N:
            for j in range(TILE):
                total += a_tile[ty, j] * b_tile[j, tx]
        cuda.syncthreads()
    if x < N and y < N:
        c[y, x] = total


# ---- test_laplace.py: one relaxation, and its largest change by a tree in shared memory

WIDTH = 16


@cuda.jit(device=True)
def larger(a, b):
    if a > b:
        return a
    else:
        return b


PLATE = RANDOM.random((WIDTH, WIDTH))
RELAXED = PLATE.copy()
RELAXED[1:-1, 1:-1] = 0.25 * (PLATE[1:-1, 2:] + PLATE[1:-1, :-2] + PLATE[:-2, 1:-1] + PLATE[2:, 1:-1])
CHANGE = RELAXED - PLATE


@case(
    "test_laplace.laplace_small",
    PLATE,
    poisoned((2, 2), np.float64),
    PLATE,
    expected=(RELAXED, CHANGE.reshape(2, 8, 2, 8).max((1, 3))),
    grid=(2, 2),
    block=(8, 8),
    rtol=1e-12,
)
def relax(new, error, old):
    changes = cuda.shared.array((8, 8), dtype=float64)
    ty = cuda.threadIdx.x
    tx = cuda.threadIdx.y
    n = old.shape[0]
    m = old.shape[1]
    i, j = cuda.grid(2)
    changes[ty, tx] = 0
    if j >= 1 and j < n - 1 and i >= 1 and i < m - 1:
        new[j, i] = 0.25 * (old[j, i + 1] + old[j, i - 1] + old[j - 1, i] + old[j + 1, i])
        changes[ty, tx] = new[j, i] - old[j, i]
    cuda.syncthreads()
    t = 8 // 2
    while t > 0:
        if ty < t:
            changes[ty, tx] = larger(changes[ty, tx], changes[ty + t, tx])
        t //= 2
        cuda.syncthreads()
    t = 8 // 2
    while t > 0:
        if tx < t and ty == 0:
            changes[ty, tx] = larger(changes[ty, tx], changes[ty, tx + t])
        t //= 2
        cuda.syncthreads()
    if tx == 0 and ty == 0:
        error[cuda.blockIdx.y, cuda.blockIdx.x] = changes[0, 0]


# ---- test_blackscholes.py, test_montecarlo.py, test_nondet.py

COEFFICIENTS = (0.31938153, -0.356563782, 1.781477937, -1.821255978, 1.330274429)
A1, A2, A3, A4, A5 = COEFFICIENTS
RSQRT2PI = 0.39894228040143267793994605993438


@cuda.jit(device=True)
def normal_cdf(d):
    k = 1.0 / (1.0 + 0.2316419 * math.fabs(d))
    value = RSQRT2PI * math.exp(-0.5 * d * d) * (k * (A1 + k * (A2 + k * (A3 + k * (A4 + k * A5)))))
    if d > 0:
        value = 1.0 - value
    return value


def normal_cdf_numpy(d):
    k = 1 / (1 + 0.2316419 * np.abs(d))
    value = RSQRT2PI * np.exp(-0.5 * d * d) * k * np.polyval(COEFFICIENTS[::-1], k)
    return np.where(d > 0, 1 - value, value)


STOCK, STRIKE, YEARS = RANDOM.uniform(5, 30, 40), RANDOM.uniform(1, 100, 40), RANDOM.uniform(0.25, 10, 40)
RATE, VOLATILITY = 0.02, 0.3
D1 = (np.log(STOCK / STRIKE) + (RATE + 0.5 * VOLATILITY**2) * YEARS) / (VOLATILITY * np.sqrt(YEARS))
D2 = D1 - VOLATILITY * np.sqrt(YEARS)
DISCOUNTED = STRIKE * np.exp(-RATE * YEARS)
CALL = STOCK * normal_cdf_numpy(D1) - DISCOUNTED * normal_cdf_numpy(D2)
PUT = DISCOUNTED * (1 - normal_cdf_numpy(D2)) - STOCK * (1 - normal_cdf_numpy(D1))


@case(
    "test_blackscholes.blackscholes",
    *[poisoned(40, np.float64)] * 2,
    STOCK,
    STRIKE,
    YEARS,
    RATE,
    VOLATILITY,
    expected=(CALL, PUT),
    grid=2,
    block=32,
    rtol=1e-8,
)
def black_scholes(call, put, stock, strike, years, rate, volatility):
    i = cuda.threadIdx.x + cuda.blockIdx.x * cuda.blockDim.x
    if i >= stock.shape[0]:
        return
    root = math.sqrt(years[i])
    d1 = (math.log(stock[i] / strike[i]) + (rate + 0.5 * volatility * volatility) * years[i]) / (volatility * root)
    d2 = d1 - volatility * root
    cdf1 = normal_cdf(d1)
    cdf2 = normal_cdf(d2)
    discount = math.exp((-1.0 * rate) * years[i])
    call[i] = stock[i] * cdf1 - strike[i] * discount * cdf2
    put[i] = strike[i] * discount * (1.0 - cdf2) - stock[i] * (1.0 - cdf1)


NOISE = RANDOM.standard_normal(20)


@case(
    "test_montecarlo.montecarlo",
    poisoned(20, np.float64),
    STOCK,
    0.5,
    0.1,
    0.2,
    NOISE,
    expected=STOCK[:20] * np.exp(0.1 * 0.5 + 0.2 * NOISE),
    block=32,
    rtol=1e-12,
)
def step_paths(paths, last, dt, c0, c1, noise):
    i = cuda.grid(1)
    if i >= paths.shape[0]:
        return
    paths[i] = last[i] * math.exp(c0 * dt + c1 * noise[i])


DIAGONAL = np.arange(8, dtype=np.float32)
GRID = np.arange(64, dtype=np.float32).reshape(8, 8)


@case("test_nondet.for_pre", poisoned((8, 8)), GRID, DIAGONAL, expected=GRID @ np.diag(DIAGONAL), block=(32, 8))
def diagonal_product(c, a, b):
    start_x, start_y = cuda.grid(2)
    grid_x = cuda.gridDim.x * cuda.blockDim.x
    grid_y = cuda.gridDim.y * cuda.blockDim.y
    height = c.shape[0]
    width = c.shape[1]
    for x in range(start_x, width, (grid_x)):
        for y in range(start_y, height, (grid_y)):
            c[y, x] = a[y, x] * b[x]


# ---- test_reduction.py: sums by a tree, by warps, and of sizes around a block's


def sum_by_tree(out, x):
    partial = cuda.shared.array(128, float64)
    i = cuda.threadIdx.x
    total = 0.0
    for j in range(i, x.size, 128):
        total += x[j]
    partial[i] = total
    cuda.syncthreads()
    half = 64
    while half > 0:
        if i < half:
            partial[i] += partial[i + half]
        cuda.syncthreads()
        half //= 2
    if i == 0:
        out[0] = partial[0]


for n in (0, 1, 15, 16, 17, 127, 128, 129, 1025):
    x = np.arange(n, dtype=np.float64) + 1
    case(f"test_reduction.sum_reduce[{n}]", poisoned(1, np.float64), x, expected=x.sum(), block=128)(sum_by_tree)


@case(
    "test_reduction.max_reduce",
    poisoned(1, np.float64),
    np.arange(371, dtype=np.float64) + 1,
    expected=371,
    block=64,
)
def largest_by_shuffles(out, x):
    partial = cuda.shared.array(2, float64)
    i = cuda.threadIdx.x
    largest = 0.0
    for j in range(i, x.size, 64):
        largest = max(largest, x[j])
    for shift in (16, 8, 4, 2, 1):
        largest = max(largest, cuda.shfl_down_sync(0xFFFFFFFF, largest, shift))
    if i % 32 == 0:
        partial[i // 32] = largest
    cuda.syncthreads()
    if i == 0:
        out[0] = max(partial[0], partial[1])


# ---- test_device_func.py


@cuda.jit(device=True)
def add2f(a, b):
    return a + b


@cuda.jit(device=True)
def indirect(a, b):
    return add2f(a, b)


TEN = np.arange(10, dtype=np.float32)


@case("test_device_func.use_add2f", TEN, expected=2 * TEN, block=10)
def use_add2f(x):
    i = cuda.grid(1)
    x[i] = add2f(x[i], x[i])


@case("test_device_func.indirect_add2f", TEN, expected=2 * TEN, block=10)
def use_indirect(x):
    i = cuda.grid(1)
    x[i] = indirect(x[i], x[i])


@cuda.jit(device=True)
def rgba(r, g, b, a):
    return ((r & 0xFF) << 16) | ((g & 0xFF) << 8) | ((b & 0xFF) << 0) | ((a & 0xFF) << 24)


@case("test_device_func.device_casting", poisoned(1, np.int32), np.arange(1, 5, dtype=np.float32), expected=0x04010203)
def pack_colour(out, channels):
    out[0] = rgba(int(channels[0]), int(channels[1]), int(channels[2]), int(channels[3]))


# ---- test_recursion.py (Python under checks only)


@cuda.jit(device=True)
def fibonacci(n):
    if n < 2:
        return n
    return fibonacci(n - 1) + fibonacci(n - 2)


@case("test_recursion.global_implicit_sig", poisoned(1, np.int64), np.array([10]), expected=55, ways=("checked",))
def call_fibonacci(out, x):
    out[0] = fibonacci(x[0])


# ---- test_lang.py, test_iterators.py

TUPLE = (1.0, 2.5, 3.0)
INTEGERS, FLOATS = (1, 2, 3), (4.5, 5.6, 6.7)


@case("test_lang.enumerate", np.zeros(3), expected=np.array(TUPLE))
def enumerate_tuple(out):
    for i, v in enumerate(TUPLE):
        out[i] = v


@case("test_lang.zip", np.zeros(1), expected=sum(INTEGERS) + sum(FLOATS), rtol=1e-15)
def zip_tuples(out):
    c = 0
    for i, j in zip(INTEGERS, FLOATS):  # noqa: B905  # numba takes no strict=
        c += i + j
    out[0] = c


X, Y = np.array([10, 9, 8, 7, 6]), np.array([1, 2, 3, 4, 5])


@case("test_iterators.enumerate", np.zeros(1, np.int32), X, expected=0)
def enumerate_array(error, x):
    count = 0
    for i, v in enumerate(x):
        if count != i:
            error[0] = 1
        if v != x[i]:
            error[0] = 2
        count += 1
    if count != len(x):
        error[0] = 3


@case("test_iterators.zip", np.zeros(1, np.int32), X, Y, expected=0)
def zip_arrays(error, x, y):
    i = 0
    for xv, yv in zip(x, y):  # noqa: B905
        if xv != x[i]:
            error[0] = 1
        if yv != y[i]:
            error[0] = 2
        i += 1
    if i != len(x):
        error[0] = 3


@case("test_iterators.enumerate_zip", np.zeros(1, np.int32), X, Y, expected=0)
def enumerate_zip(error, x, y):
    count = 0
    for i, (xv, yv) in enumerate(zip(x, y)):  # noqa: B905
        if i != count:
            error[0] = 1
        if xv != x[i] or yv != y[i]:
            error[0] = 2
        count += 1
    if count != len(x):
        error[0] = 4


# ---- test_ssa.py: variables that change type, are redefined, or are defined in branches


@case("test_ssa.argument_name_reused", poisoned(1, np.float64), np.int64(123), expected=124)
def reuse_argument(out, x):
    x += 1
    out[0] = x


@case("test_ssa.if_else_redefine[less]", poisoned(1, np.float64), np.int64(2), np.int64(3), expected=2)
@case("test_ssa.if_else_redefine[greater]", poisoned(1, np.float64), np.int64(3), np.int64(2), expected=2)
def redefine_in_branches(out, x, y):
    z = x * y
    if x < y:
        z = x
    else:
        z = y
    out[0] = z


@case("test_ssa.sum_loop_2vars[0]", np.zeros(2), np.int64(0), expected=0)
@case("test_ssa.sum_loop_2vars[10]", np.zeros(2), np.int64(10), expected=np.array([45, 110]))
def sum_of_two(out, n):
    c = 0
    d = n
    for i in range(n):
        c += i
        d += n
    out[0] = c
    out[1] = d


@case("test_ssa.sum_2d_loop", np.zeros(1), np.int64(10), expected=495)
def sum_of_nested_loops(out, n):
    c = 0
    for i in range(n):
        for j in range(n):
            c += j
        c += i
    out[0] = c


def phi_propagation(out, actions):
    n = 1
    i = 0
    ct = 0
    while n > 0 and i < len(actions):
        n -= 1
        while actions[i]:
            if actions[i]:
                if actions[i]:
                    n += 10
                actions[i] -= 1
            else:
                if actions[i]:
                    n += 20
                actions[i] += 1
            ct += n
        ct += n
    out[0] = ct
    out[1] = n


PHI = (np.array([1, 2]), np.array([1, 2]))
phi_propagation(*PHI)  # it is plain Python as well
case("test_ssa.phi_propagation", np.array([1, 2]), np.array([1, 2]), expected=PHI)(phi_propagation)


@case("test_ssa.issue2194", poisoned(1, np.float64), np.zeros(1), expected=(1, 1))
def range_of_unsigned(out, v):
    s = np.uint32(1)
    for i in range(s):
        v[i] = 1
    for _ in range(s, 1):
        pass
    out[0] = v[0]


@case("test_ssa.issue3094[True]", poisoned(1, np.int64), True, expected=1)
@case("test_ssa.issue3094[False]", poisoned(1, np.int64), False, expected=0)
def define_in_branches(out, flag):
    if flag:
        x = 1
    else:
        x = 0
    out[0] = x


@case("test_ssa.issue3931", poisoned((3, 2), np.float64), np.ones((3, 2)), expected=1)
def reshape_in_a_loop(out, x):
    for _ in range(1):
        x = x.reshape(3 * 2)
        x = x.reshape(3, 2)
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            out[i, j] = x[i, j]


@case("test_ssa.issue3979", poisoned(2, np.int64), np.array([1, 2]), np.array([3, 4]), expected=np.array([2, 4]))
def loop_over_arrays(out, a, b):
    x = a[0]
    y = b[0]
    for i in a:
        x = i
    for i in b:
        y = i
    out[0] = x
    out[1] = y


@case("test_ssa.issue5223", poisoned(5, np.float64), np.ones(5), expected=1)
def branch_on_length(out, x):
    if len(x) == 5:
        for i in range(len(x)):
            out[i] = x[i]
    else:
        for i in range(len(x)):
            out[i] = x[i] + 1


@case(
    "test_ssa.issue5482_missing_variable_init",
    poisoned(1, np.int64),
    np.int64(1),
    np.int64(5),
    np.int64(3),
    expected=10,
)
def defined_in_the_first_iteration(out, x, v, n):
    for i in range(n):
        if i == 0:
            if i == x:
                pass
            else:
                problematic = v
        else:
            if i == x:
                pass
            else:
                problematic = problematic + v
    out[0] = problematic


@case("test_ssa.issue5623_equal_statements_in_same_bb", np.array([0, 666]), True, expected=1)
def equal_statements(stack, flag):
    i = 0
    c = 1
    if flag is True:
        stack[i] = c
        i += 1
        stack[i] = c
        i += 1


@pytest.mark.parametrize("case, way", case.parameters())
def test_case(case, way):
    case.run(way)
