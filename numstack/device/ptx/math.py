"""Approximations that a GPU has an instruction for: one issue slot of its special function unit.

==========  ===================  =====================================================
function    PTX                  largest relative error (PTX ISA)
==========  ===================  =====================================================
exp2        ex2.approx.ftz.f32   2^-22.5
log2        lg2.approx.ftz.f32   2^-22 absolute for x in [0.5, 2]
reciprocal  rcp.approx.ftz.f32   2^-23
rsqrt       rsqrt.approx.ftz.f32  2^-22.9
tanh        tanh.approx.f32      2^-11: less than half a bfloat16's last place, 2^-9
==========  ===================  =====================================================

``ftz``: subnormal numbers count as 0. On a CPU they are computed to float32's precision.
"""

from __future__ import annotations

import math

import numpy as np
from numba import float32

from numstack.device.ptx.assembly import ptx

LOG2_E = float32(1.4426950408889634)
"""exp(x) is exp2(LOG2_E x)."""


@ptx("ex2.approx.ftz.f32 $result, $x;")
def exp2(x: float32) -> float32:
    """2^x."""
    return float32(np.exp2(x))


@ptx("lg2.approx.ftz.f32 $result, $x;")
def log2(x: float32) -> float32:
    """The logarithm of x to base 2."""
    return float32(math.log2(x))


@ptx("max.f32 $result, $x, $y;")
def maximum(x: float32, y: float32) -> float32:
    """The larger of x and y; if one is NaN, the other: one instruction, where Python's max() is a comparison more."""
    return max(x, y)


@ptx("rcp.approx.ftz.f32 $result, $x;")
def reciprocal(x: float32) -> float32:
    """1 / x; of 0 infinity."""
    return float32(1) / x


@ptx("rsqrt.approx.ftz.f32 $result, $x;")
def rsqrt(x: float32) -> float32:
    """1 / sqrt(x); of 0 infinity."""
    return float32(1) / float32(math.sqrt(x))


@ptx("tanh.approx.f32 $result, $x;")
def tanh(x: float32) -> float32:
    """The hyperbolic tangent."""
    return float32(math.tanh(x))
