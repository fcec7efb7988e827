"""float16 for numba's CPU target, which knows the type but has neither a representation nor arithmetic for it.

Importing this gives it one: LLVM's ``half``, which the CPU's conversion instructions load and store, rounding to
nearest even. Arithmetic promotes to float32, as numba's typing rules say; what is stored to a float16 array is rounded
once.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.datamodel import models, register_default
from numba.core.extending import lower_builtin
from numba.core.imputils import lower_cast

HALF, SINGLE, DOUBLE = ir.HalfType(), ir.FloatType(), ir.DoubleType()


@register_default(types.Float)
class FloatModel(models.PrimitiveModel):
    """numba's model of floats, and float16."""

    def __init__(self, manager: Any, kind: types.Float) -> None:
        super().__init__(manager, kind, {16: HALF, 32: SINGLE, 64: DOUBLE}[kind.bitwidth])


@lower_cast(types.float64, types.float16)
def _double_to_half(context: Any, builder: Any, source: Any, target: Any, value: Any) -> Any:
    """Round once: to float32 with the lost bits kept in the lowest one (to odd), then to float16.

    There is no instruction for it, and LLVM would call a function of a library that is not loaded.
    """
    i32 = ir.IntType(32)
    near = builder.fptrunc(value, SINGLE)
    back = builder.fpext(near, DOUBLE)
    magnitude = builder.module.declare_intrinsic("llvm.fabs", [DOUBLE])
    bits = builder.bitcast(near, i32)
    too_far = builder.fcmp_ordered(">", builder.call(magnitude, [back]), builder.call(magnitude, [value]))
    toward_zero = builder.sub(bits, builder.zext(too_far, i32))
    odd = builder.bitcast(builder.or_(toward_zero, i32(1)), SINGLE)
    is_inexact = builder.fcmp_ordered("!=", back, value)
    return builder.fptrunc(builder.select(is_inexact, odd, near), HALF)


@lower_builtin(bool, types.float16)
def _is_true(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    return builder.fcmp_unordered("!=", args[0], HALF(0.0))
