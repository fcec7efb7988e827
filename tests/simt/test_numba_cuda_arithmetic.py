"""numba-cuda's own tests of math functions, operators, casts and bit operations, as launches of simt.

Each case names the test that it was made from, in ``numba/cuda/tests/cudapy`` of the numba-cuda 0.30.4 wheel. Those of
test_math.py compile one kernel a function and type; here one kernel holds them all, and each is compared alone.
"""

import functools
import math
import operator

import numpy as np
import pytest
from numba import cuda, float64, int32, types

from tests.simt.support import WAYS, Cases
from tests.support import poisoned

case = Cases()
N = 31

# ---- test_math.py


def unary(out, x):
    i = cuda.grid(1)
    if i < x.size:
        v = x[i]
        out[0, i] = math.acos(v)
        out[1, i] = math.asin(v)
        out[2, i] = math.atan(v)
        out[3, i] = math.acosh(v + 1)
        out[4, i] = math.asinh(v)
        out[5, i] = math.atanh(v * v / 2)
        out[6, i] = math.cos(v)
        out[7, i] = math.sin(v)
        out[8, i] = math.tan(v)
        out[9, i] = math.cosh(v)
        out[10, i] = math.sinh(v)
        out[11, i] = math.tanh(v)
        out[12, i] = math.erf(v)
        out[13, i] = math.erfc(v)
        out[14, i] = math.exp(v)
        out[15, i] = math.exp2(v)
        out[16, i] = math.expm1(v)
        out[17, i] = math.fabs(-v)
        out[18, i] = math.gamma(v + 1)
        out[19, i] = math.lgamma(v + 1)
        out[20, i] = math.log(v + 1)
        out[21, i] = math.log2(v + 1)
        out[22, i] = math.log10(v + 1)
        out[23, i] = math.log1p(v)
        out[24, i] = math.sqrt(v)
        out[25, i] = math.ceil(v)
        out[26, i] = math.floor(v)
        out[27, i] = math.trunc(v)
        out[28, i] = math.degrees(v)
        out[29, i] = math.radians(v)


UNARY = {
    "acos": np.arccos,
    "asin": np.arcsin,
    "atan": np.arctan,
    "acosh": lambda v: np.arccosh(v + 1),
    "asinh": np.arcsinh,
    "atanh": lambda v: np.arctanh(v * v / 2),
    "cos": np.cos,
    "sin": np.sin,
    "tan": np.tan,
    "cosh": np.cosh,
    "sinh": np.sinh,
    "tanh": np.tanh,
    "erf": np.vectorize(math.erf),
    "erfc": np.vectorize(math.erfc),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "fabs": np.fabs,
    "gamma": np.vectorize(lambda v: math.gamma(v + 1)),
    "lgamma": np.vectorize(lambda v: math.lgamma(v + 1)),
    "log": lambda v: np.log(v + 1),
    "log2": lambda v: np.log2(v + 1),
    "log10": lambda v: np.log10(v + 1),
    "log1p": np.log1p,
    "sqrt": np.sqrt,
    "ceil": np.ceil,
    "floor": np.floor,
    "trunc": np.trunc,
    "degrees": np.degrees,
    "radians": np.radians,
}
INPUTS = {
    "float32": np.linspace(0, 1, N, dtype=np.float32),
    "float64": np.linspace(0, 1, N),
    "int64": np.arange(N, dtype=np.int64) % 2,
}


@functools.cache
def unary_results(dtype: str, way: str) -> np.ndarray:
    x = INPUTS[dtype]
    out = poisoned((len(UNARY), N), np.float32 if dtype == "float32" else np.float64)
    WAYS[way](unary, 1, 32, out, x)
    return out


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize("name", UNARY)
def test_math(name, dtype, way):
    got = unary_results(dtype, way)[list(UNARY).index(name)]
    expected = UNARY[name](INPUTS[dtype].astype(np.float64))
    np.testing.assert_allclose(got, expected, rtol=3e-6 if dtype == "float32" else 1e-13, atol=1e-7)


def binary(out, x, y):
    i = cuda.grid(1)
    if i < x.size:
        out[0, i] = math.atan2(x[i], y[i])
        out[1, i] = math.hypot(x[i], y[i])
        out[2, i] = math.pow(x[i], y[i])
        out[3, i] = x[i] ** y[i]
        out[4, i] = math.fmod(x[i], y[i])
        out[5, i] = x[i] % y[i]
        out[6, i] = math.copysign(x[i], -y[i])
        out[7, i] = x[i] // y[i]


BINARY = {
    "atan2": np.arctan2,
    "hypot": np.hypot,
    "pow": np.power,
    "pow_binop": np.power,
    "fmod": np.fmod,
    "mod_binop": np.mod,
    "copysign": lambda x, y: np.copysign(x, -y),
    "floordiv": np.floor_divide,
}


@functools.cache
def binary_results(dtype: str, way: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    x, y = np.linspace(0.1, 5, N).astype(dtype), np.linspace(-3, 2.5, N).astype(dtype)
    out = poisoned((len(BINARY), N), dtype)
    WAYS[way](binary, 1, 32, out, x, y)
    return out, x, y


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", BINARY)
def test_math_of_two(name, dtype, way):
    out, x, y = binary_results(dtype, way)
    expected = BINARY[name](x, y).astype(np.float64)
    got = out[list(BINARY).index(name)]
    np.testing.assert_allclose(got, expected, rtol=3e-6 if dtype == "float32" else 1e-13, atol=1e-6)


SPECIAL = np.array([1, 0, np.nan, np.inf, -np.inf])


@case(
    "test_math.math_is{nan,inf,finite}",
    np.zeros((3, 5), np.bool_),
    SPECIAL,
    expected=np.array([np.isnan(SPECIAL), np.isinf(SPECIAL), np.isfinite(SPECIAL)]),
    block=5,
)
def classify(out, x):
    i = cuda.grid(1)
    out[0, i] = math.isnan(x[i])
    out[1, i] = math.isinf(x[i])
    out[2, i] = math.isfinite(x[i])


# A modulus of zero is NaN, not an exception (input: NaN, so that it is the caller's).
@case("test_math.math_mod_binop[0]", np.full(1, np.nan), np.zeros(1), expected=np.nan)
def modulo_zero(x, y):
    x[0] = (x[0] * 0 + 1) % y[0]


# ---- test_frexp_ldexp.py


def frexp(mantissa, exponent, x):
    mantissa[0], exponent[0] = math.frexp(x)


def ldexp(out, x, exponent):
    out[0] = math.ldexp(x, exponent)


for name, dtype in (("f4", np.float32), ("f8", np.float64)):
    case(
        f"test_frexp_ldexp.frexp_{name}",
        poisoned(1, dtype),
        poisoned(1, np.int32),
        dtype(3.1415),
        expected=(dtype(0.785375), 2),
    )(frexp)
    case(f"test_frexp_ldexp.ldexp_{name}", poisoned(1, dtype), dtype(0.785375), np.int32(2), expected=dtype(3.1415))(
        ldexp
    )

# ---- test_minmax.py


def extremes(larger, smaller, a, b):
    i = cuda.grid(1)
    if i >= len(larger):
        return
    larger[i] = float64(max(a[i], b[i]))
    smaller[i] = float64(min(a[i], b[i]))


for left, right in (
    (np.float64, np.float64),
    (np.float32, np.float64),
    (np.float64, np.float32),
    (np.float32, np.float32),
):
    a, b = np.arange(5, dtype=left) + left(0.5), np.full(5, 2, right)
    case(
        f"test_minmax.{{max,min}}_f{np.dtype(left).itemsize}f{np.dtype(right).itemsize}",
        poisoned(5, np.float64),
        poisoned(5, np.float64),
        a,
        b,
        expected=(np.maximum(a, b), np.minimum(a, b)),
        block=8,
    )(extremes)

# ---- test_powi.py, test_idiv.py, test_py2_div_issue.py, test_boolean.py

MATRIX = np.arange(10, dtype=np.float64).reshape(2, 5)


@case("test_powi.powi", poisoned((2, 5), np.float64), MATRIX, np.int8(2), expected=MATRIX**2, block=(2, 5))
def matrix_power(out, a, power):
    y, x = cuda.grid(2)
    m, n = out.shape
    if x >= n or y >= m:
        return
    out[y, x] = math.pow(a[y, x], int32(power))


@case("test_powi.powi_binop", poisoned((2, 5), np.float64), MATRIX, np.int8(2), expected=MATRIX**2, block=(2, 5))
def matrix_power_operator(out, a, power):
    y, x = cuda.grid(2)
    m, n = out.shape
    if x >= n or y >= m:
        return
    out[y, x] = a[y, x] ** power


@case("test_idiv.inplace_div", np.ones((2, 2), np.float32), np.int32(2), np.int32(2), expected=0.5)
@case("test_idiv.inplace_div_double", np.ones((2, 2)), np.int32(2), np.int32(2), expected=0.5)
def divide_in_place(x, n, m):
    for i in range(n):
        for j in range(m):
            x[i, j] /= 2.0


SCALED = (1.001 * np.arange(15)).astype(np.float32)


@case("test_py2_div_issue.py2_div_issue", *[poisoned(15)] * 3, np.int32(15), expected=(SCALED,) * 3, block=15)
def scale_and_divide(y, ya, yb, n):
    i = cuda.grid(1)
    k = i % n  # noqa: F841
    answer = np.float32(1.001 * np.float32(i))
    y[i] = answer
    ya[i] = answer * 1.0
    yb[i] = answer / 1.0


@case("test_boolean.boolean[True]", poisoned(1, np.float64), True, expected=123)
@case("test_boolean.boolean[False]", poisoned(1, np.float64), False, expected=321)
def boolean_argument(out, flag):
    if flag:
        out[0] = 123
    else:
        out[0] = 321


# ---- test_operator.py


def operators(out, a, b):
    i = 0
    out[0] = operator.add(a[i], b[i])
    out[1] = operator.sub(a[i], b[i])
    out[2] = operator.mul(a[i], b[i])
    out[3] = operator.truediv(a[i], b[i])
    out[4] = operator.floordiv(a[i], b[i])


case(
    "test_operator.{add,sub,mul,truediv,floordiv}",
    poisoned(5, np.float64),
    np.array([7.5]),
    np.array([2.0]),
    expected=np.array([9.5, 5.5, 15, 3.75, 3]),
)(operators)


def half_arithmetic(out, predicates, a, b):
    out[0] = a[0] + b[0]
    out[1] = a[0] - b[0]
    out[2] = a[0] * b[0]
    out[3] = a[0] / b[0]
    out[4] = -a[0]
    out[5] = abs(-a[0])
    out[6] = a[0]
    out[6] += b[0]
    predicates[0] = a[0] > b[0]
    predicates[1] = a[0] >= b[0]
    predicates[2] = a[0] < b[0]
    predicates[3] = a[0] <= b[0]
    predicates[4] = a[0] == b[0]
    predicates[5] = a[0] != b[0]


A, B = np.float16(0.7), np.float16(0.3)
PREDICATES = np.array([True, True, False, False, False, True])
case(
    "test_operator.fp16_{binary,unary,inplace_binary,comparison}",
    poisoned(7, np.float16),
    ~PREDICATES,
    np.array([A]),
    np.array([B]),
    expected=(np.array([A + B, A - B, A * B, A / B, -A, A, A + B]), PREDICATES),
)(half_arithmetic)


def half_with_others(out, a, b):
    out[0] = a[0] + b[0]
    out[1] = a[0] - b[0]
    out[2] = a[0] * b[0]
    out[3] = a[0] / b[0]


for dtype in (np.int8, np.int16, np.int64, np.float32, np.float64):
    a, b = np.array([A]), np.array([57]).astype(dtype)
    result = np.result_type(np.float16, dtype)
    case(
        f"test_operator.mixed_fp16_binary_arithmetic[{np.dtype(dtype)}]",
        poisoned(4, result),
        a,
        b,
        expected=np.concatenate([a + b, a - b, a * b, a / b]),
        rtol=1e-3 if result == np.float16 else 1e-6,
    )(half_with_others)

# ---- test_casting.py


def casts(signed, unsigned, floats, x):
    signed[0] = np.int8(x[0])
    signed[1] = np.int16(x[0])
    signed[2] = np.int32(x[0])
    signed[3] = np.int64(x[0])
    if x[0] > 0:
        unsigned[0] = np.uint8(x[0])
        unsigned[1] = np.uint16(x[0])
        unsigned[2] = types.uint32(x[0])
        unsigned[3] = types.uint64(x[0])
    floats[0] = np.float32(x[0]) / np.float32(2)
    floats[1] = np.float64(x[0]) / np.float64(2)


for dtype in (np.float32, np.float64, np.int64):
    for value in (12.3, -12.3):
        x = np.array([value]).astype(dtype)
        case(
            f"test_casting.{'int_to_float' if dtype is np.int64 else 'float_to_{int,uint,float}'}"
            f"[{np.dtype(dtype)} {value}]",
            poisoned(4, np.int64),
            np.zeros(4, np.uint64),
            poisoned(2, np.float64),
            x,
            expected=(int(value), max(int(value), 0), x.astype(np.float64) / 2),
            rtol=1e-7,
        )(casts)


def half_casts(integers, halves, floats, x):
    integers[0] = int(x[0])
    halves[0] = x[0]
    halves[1] = np.float16(floats[0])
    floats[1] = np.float32(x[0]) / np.float32(2)


case(
    "test_casting.{float_to_int,float_to_float}[float16]",
    poisoned(1, np.int64),
    poisoned(2, np.float16),
    np.array([3.3, 0], np.float32),
    np.array([-12.3], np.float16),
    expected=(-12, np.array([-12.3, 3.3], np.float16), np.array([3.3, np.float16(-12.3) / 2], np.float32)),
)(half_casts)

# ---- test_intrinsics.py: bits, rounding, fused multiply-add


def count_bits(out, x):
    out[0] = cuda.popc(x)


def count_bits_by_method(out, x):
    out[0] = x.bit_count()


for dtype in (np.uint8, np.uint16, np.uint32, np.uint64):
    n_bits = 8 * np.dtype(dtype).itemsize
    all_set = dtype(2**n_bits - 1)
    case(f"test_intrinsics.popc_u{n_bits // 8}", poisoned(1, np.int32), all_set, expected=n_bits)(count_bits)
    # numba's CPU target has no bit_count; the compiler says so.
    case(
        f"test_intrinsics.bit_count_u{n_bits // 8}", poisoned(1, np.int32), all_set, expected=n_bits, ways=("checked",)
    )(count_bits_by_method)


def leading_and_first(out, x):
    out[0] = cuda.clz(x)
    out[1] = cuda.ffs(x)


for source, value, outcome in (
    ("i4", np.int32(0x00100000), (11, 21)),
    ("u4", np.uint32(0x80000000), (0, 32)),
    ("i4_1s", np.int32(-1), (0, 1)),
    ("i4_0s", np.int32(0), (32, 0)),
    ("i8", np.int64(0x10000), (47, 17)),
    ("i8[high]", np.int64(0x100000000), (31, 33)),
):
    case(
        f"test_intrinsics.{{clz,ffs}}_{source}",
        poisoned(2, np.int32),
        value,
        expected=np.array(outcome),
    )(leading_and_first)


def reverse_bits(out, x):
    out[0] = cuda.brev(x)


for value, outcome in ((np.uint32(0x30F0), 0x0F0C0000), (np.uint64(0x000030F0000030F0), 0x0F0C00000F0C0000)):
    case(
        f"test_intrinsics.brev_u{value.itemsize}",
        poisoned(1, value.dtype),
        value,
        expected=value.dtype.type(outcome),
    )(reverse_bits)


def fused_and_cube_root(out, a, b, c):
    out[0] = cuda.fma(a, b, c)
    out[1] = cuda.cbrt(a)


for size, dtype in ((4, np.float32), (8, np.float64)):
    case(
        f"test_intrinsics.{{fma_f{size},cbrt_f{8 * size}}}",
        poisoned(2, dtype),
        dtype(2),
        dtype(3),
        dtype(4),
        expected=np.array([10, 2 ** (1 / 3)]),
        rtol=1e-6,
    )(fused_and_cube_root)

HALVES = np.array([-3.0, -2.5, -2.25, -1.5, 1.5, 2.25, 2.5, 2.75])


def round_all(out, x):
    i = cuda.grid(1)
    out[i] = round(x[i])


for name, dtype in (("f4", np.float32), ("f8", np.float64)):
    case(
        f"test_intrinsics.round_{name}",
        poisoned(8, np.int64),
        HALVES.astype(dtype),
        expected=np.array([round(v) for v in HALVES]),
        block=8,
    )(round_all)


@pytest.mark.parametrize("case, way", case.parameters())
def test_case(case, way):
    case.run(way)
