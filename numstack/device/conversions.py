"""Device functions between float32 and what a floating array stores: float32, float16, or bfloat16's bits in uint16.

``widen(x_N[i])`` is float32 whatever the array holds, and ``y_N[i] = narrow(value, y_N.dtype)`` rounds to nearest even,
so one kernel serves all three formats. Both are ordinary functions on the host, and known to numba's CPU and CUDA
targets.
"""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.extending import intrinsic as cpu_intrinsic
from numba.core.extending import overload as cpu_overload
from numba.cuda.extending import intrinsic as cuda_intrinsic
from numba.cuda.extending import overload as cuda_overload


def widen(x: Any) -> Any:
    """float32 of an element of a floating array; uint16 holds the bits of a bfloat16."""
    x = np.asarray(x)[()]
    if x.dtype == np.uint16:
        return np.uint32(np.uint32(x) << np.uint32(16)).view(np.float32)
    return np.float32(x)


def narrow(value: Any, dtype: Any) -> Any:
    """float32 ``value`` as an element of an array of ``dtype``, rounded to nearest even; uint16 gets bfloat16 bits."""
    value = np.float32(value)
    dtype = np.dtype(dtype)
    if dtype == np.uint16:
        bits = value.view(np.uint32)
        if np.isnan(value):
            return np.uint16((int(bits) >> 16) | 0x40)
        return np.uint16((int(bits) + 0x7FFF + ((int(bits) >> 16) & 1)) >> 16)
    with np.errstate(over="ignore"):
        return dtype.type(value)


def lower_bits_as_float(builder: Any, bits: Any) -> Any:
    """LLVM's instructions for float32 of the bits of a bfloat16."""
    wide = builder.shl(builder.zext(bits, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
    return builder.bitcast(wide, ir.FloatType())


def lower_float_as_bits(builder: Any, value: Any) -> Any:
    """LLVM's instructions for the bits of the bfloat16 nearest to a float32, on any target."""
    i32 = ir.IntType(32)
    bits = builder.bitcast(value, i32)
    high = builder.lshr(bits, ir.Constant(i32, 16))
    # Ties go to the even neighbour; a NaN must not round to infinity.
    half = builder.add(ir.Constant(i32, 0x7FFF), builder.and_(high, ir.Constant(i32, 1)))
    rounded = builder.lshr(builder.add(bits, half), ir.Constant(i32, 16))
    quiet = builder.or_(high, ir.Constant(i32, 0x40))
    is_nan = builder.fcmp_unordered("uno", value, value)
    return builder.trunc(builder.select(is_nan, quiet, rounded), ir.IntType(16))


def _bits_as_float(typingctx: Any, bits: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return lower_bits_as_float(builder, args[0])

    return types.float32(types.uint16), codegen


def _float_as_bits(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return lower_float_as_bits(builder, args[0])

    return types.uint16(types.float32), codegen


def _float_as_bits_ptx(typingctx: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        convert = ir.InlineAsm(ir.FunctionType(ir.IntType(16), [ir.FloatType()]), "cvt.rn.bf16.f32 $0, $1;", "=h,f")
        return builder.call(convert, [args[0]])

    return types.uint16(types.float32), codegen


def _make_overloads(overload: Any, bits_as_float: Any, float_as_bits: Any) -> None:
    @overload(widen)
    def widen_overload(x):  # type: ignore[no-untyped-def]  # numba compares the bare signatures
        if x == types.uint16:
            return lambda x: bits_as_float(x)
        if isinstance(x, types.Float):
            return lambda x: np.float32(x)
        return None

    @overload(narrow)
    def narrow_overload(value, dtype):  # type: ignore[no-untyped-def]
        if not isinstance(dtype, types.DType):
            return None
        if dtype.dtype == types.uint16:
            return lambda value, dtype: float_as_bits(np.float32(value))
        if dtype.dtype == types.float32:
            return lambda value, dtype: np.float32(value)
        if dtype.dtype == types.float16:
            return lambda value, dtype: np.float16(value)
        return None


_make_overloads(cpu_overload, cpu_intrinsic(_bits_as_float), cpu_intrinsic(_float_as_bits))
_make_overloads(cuda_overload, cuda_intrinsic(_bits_as_float), cuda_intrinsic(_float_as_bits_ptx))
