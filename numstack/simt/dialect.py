"""Where numba's CPU target differs from its CUDA target: functions that do on the CPU what a kernel does on a GPU.

math.floor(x)       a float of x's type, not an int64
max(x, y)           a NaN loses against a number
math.fmod(x, y)     is there
math.exp(x)         of a float32: arithmetic that LLVM puts into vectors, not a call of the C library for each lane
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic, overload

from numstack.simt import vector_math


def _rounding(name: str) -> Callable[..., Any]:
    """``math.floor`` and the like as in C: float to float; an integer becomes float64."""

    def typed(typingctx: Any, x: Any) -> Any:
        if not isinstance(x, (types.Float, types.Integer)):
            return None
        kind = x if x == types.float32 else types.float64

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            width = args[0].type
            function = builder.module.declare_intrinsic(f"llvm.{name}", [width], ir.FunctionType(width, [width]))
            return builder.call(function, args)

        return kind(kind), codegen

    typed.__name__ = name
    return intrinsic(typed)  # type: ignore[no-any-return]


def _extreme(name: str, predicate: str) -> Callable[..., Any]:
    """``max`` or ``min`` of two numbers: of floats, the number if the other is a NaN."""

    def typed(typingctx: Any, a: Any, b: Any) -> Any:
        if not (isinstance(a, types.Number | types.Boolean) and isinstance(b, types.Number | types.Boolean)):
            return None
        kind = typingctx.unify_types(types.unliteral(a), types.unliteral(b))

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            width = args[0].type
            if isinstance(kind, types.Float):
                function = builder.module.declare_intrinsic(
                    f"llvm.{name}num", [width], ir.FunctionType(width, [width] * 2)
                )
                return builder.call(function, args)
            compare = builder.icmp_signed if getattr(kind, "signed", False) else builder.icmp_unsigned
            return builder.select(compare(predicate, args[0], args[1]), args[0], args[1])

        return kind(kind, kind), codegen

    typed.__name__ = f"{name}_of_two"
    typed.__doc__ = f"``{name}`` of two numbers; of floats, the number if the other is a NaN."
    return intrinsic(typed)  # type: ignore[no-any-return]


max_of_two = _extreme("max", ">")
min_of_two = _extreme("min", "<")


def fmod(x: Any, y: Any) -> Any:
    """``math.fmod``."""
    return np.fmod(x, y)


@overload(fmod)
def _fmod(x, y):  # type: ignore[no-untyped-def]
    return lambda x, y: np.fmod(x, y)


#: Functions that kernels name, and those that are called instead.
_REPLACED: dict[Any, Callable[..., Any]] = {
    math.floor: _rounding("floor"),
    math.ceil: _rounding("ceil"),
    math.trunc: _rounding("trunc"),
    math.fmod: fmod,
    math.exp: vector_math.exp,
}
#: The builtins ``max`` and ``min``, for two numbers.
PAIRWISE: dict[str, Callable[..., Any]] = {"max": max_of_two, "min": min_of_two}


def replacement(value: Any) -> Callable[..., Any] | None:
    """What is called instead of a function, if anything."""
    try:
        return _REPLACED.get(value)
    except TypeError:
        return None
