"""Two 16-bit floats in one 32-bit register, as mma, wgmma, stmatrix and wide loads and stores take them.

The low half lies first in memory.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, types, uint16, uint32
from numba.core.extending import intrinsic as cpu_intrinsic
from numba.core.extending import overload as cpu_overload

from numstack.device.conversions import narrow, widen
from numstack.device.ptx.assembly import ptx

_BFLOAT16 = np.dtype(np.uint16)  # as conversions.py stores it


@ptx("cvt.rn.bf16x2.f32 $result, $high, $low;")
def pack_bf16(low: float32, high: float32) -> uint32:
    """Both as bfloat16, to nearest even."""
    return uint32(narrow(low, _BFLOAT16)) | (uint32(narrow(high, _BFLOAT16)) << uint32(16))


@ptx("cvt.rn.f16x2.f32 $result, $high, $low;")
def pack_f16(low: float32, high: float32) -> uint32:
    """Both as float16, to nearest even."""
    return uint32(_half_bits(low)) | (uint32(_half_bits(high)) << uint32(16))


@ptx("{ .reg .b32 bits; shl.b32 bits, $pair, 16; mov.b32 $result, bits; }")
def low_bf16(pair: uint32) -> float32:
    """The low bfloat16."""
    return widen(uint16(pair & uint32(0xFFFF)))


@ptx("{ .reg .b32 bits; and.b32 bits, $pair, 0xffff0000; mov.b32 $result, bits; }")
def high_bf16(pair: uint32) -> float32:
    """The high bfloat16."""
    return widen(uint16(pair >> uint32(16)))


@ptx("{ .reg .b16 low, high; mov.b32 {low, high}, $pair; cvt.f32.f16 $result, low; }")
def low_f16(pair: uint32) -> float32:
    """The low float16."""
    return _half_value(uint16(pair & uint32(0xFFFF)))


@ptx("{ .reg .b16 low, high; mov.b32 {low, high}, $pair; cvt.f32.f16 $result, high; }")
def high_f16(pair: uint32) -> float32:
    """The high float16."""
    return _half_value(uint16(pair >> uint32(16)))


@ptx("mov.b32 $result, $x;")
def bits_of(x: float32) -> uint32:
    """The bits of a float32."""
    return np.float32(x).view(np.uint32)


@ptx("mov.b32 $result, $bits;")
def value_of(bits: uint32) -> float32:
    """The float32 that has these bits."""
    return np.uint32(bits).view(np.float32)


# float16 to and from its bits on a CPU, where numba has no such conversion.


def _half_bits(value: Any) -> Any:
    with np.errstate(over="ignore"):
        return np.float32(value).astype(np.float16).view(np.uint16)


def _half_value(bits: Any) -> Any:
    return np.float32(np.uint16(bits).view(np.float16))


@cpu_intrinsic
def _bits_of(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.fptrunc(args[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


@cpu_intrinsic
def _value_of(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fpext(builder.bitcast(args[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


cpu_overload(_half_bits)(lambda value: lambda value: _bits_of(np.float32(value)))
cpu_overload(_half_value)(lambda bits: lambda bits: _value_of(bits))
