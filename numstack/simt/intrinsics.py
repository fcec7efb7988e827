"""Functions of numba.cuda that are plain arithmetic, for numba's CPU target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic, overload


def _bit_count(name: str, *, counts_zeros: bool = False, one_based: bool = False) -> Callable[..., Any]:
    """An integer function of LLVM that gives an int32 (as numba.cuda does)."""

    def typed(typingctx: Any, value: Any) -> Any:
        if not isinstance(value, types.Integer):
            return None
        kind = types.unliteral(value)

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            width = args[0].type
            arguments = [args[0], ir.Constant(ir.IntType(1), 0)] if counts_zeros else [args[0]]
            function = builder.module.declare_intrinsic(
                name, [width], ir.FunctionType(width, [argument.type for argument in arguments])
            )
            result = builder.call(function, arguments)
            if one_based:  # the position of the lowest bit, 0 if there is none
                none = builder.icmp_unsigned("==", args[0], ir.Constant(width, 0))
                result = builder.select(none, ir.Constant(width, 0), builder.add(result, ir.Constant(width, 1)))
            i32 = ir.IntType(32)
            return (
                builder.trunc(result, i32)
                if width.width > 32
                else builder.zext(result, i32)
                if width.width < 32
                else result
            )

        return types.int32(kind), codegen

    typed.__name__ = name
    return intrinsic(typed)  # type: ignore[no-any-return]


popc = _bit_count("llvm.ctpop")
clz = _bit_count("llvm.ctlz", counts_zeros=True)
ffs = _bit_count("llvm.cttz", counts_zeros=True, one_based=True)


@intrinsic
def brev(typingctx: Any, value: Any) -> Any:
    """The bits of an integer in reverse order."""
    if not isinstance(value, types.Integer):
        return None
    kind = types.unliteral(value)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        width = args[0].type
        function = builder.module.declare_intrinsic("llvm.bitreverse", [width], ir.FunctionType(width, [width]))
        return builder.call(function, args)

    return kind(kind), codegen


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` with one rounding."""
    kind = types.float32 if a == b == c == types.float32 else types.float64

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return kind(kind, kind, kind), codegen


@intrinsic
def selp(typingctx: Any, condition: Any, a: Any, b: Any) -> Any:
    """``a if condition else b``, both evaluated."""
    kind = typingctx.unify_types(types.unliteral(a), types.unliteral(b))
    if kind is None:
        return None

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(args[0], args[1], args[2])

    return kind(types.boolean, kind, kind), codegen


def cbrt(x: Any) -> Any:
    """Cube root."""
    return np.cbrt(x)


@overload(cbrt)
def _cbrt(x):  # type: ignore[no-untyped-def]
    return lambda x: np.cbrt(x)
