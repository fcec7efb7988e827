"""Integer ``//`` and ``%`` by a variable, as calls that LLVM may make where nobody needs the result.

    if mask:                               quotient = floor_divide(row, heads)     # moved out of the loop
        y[i] = x[row // heads]      ->     ...
                                           if mask: y[i] = x[quotient]

A division by zero traps, so LLVM divides only in lanes whose condition holds. Where the operands are the same in all
lanes its vectoriser (seen in LLVM 22) then takes the first lane's result for all, also if that lane did not divide: the
others load from a wrong address. These functions are defined for every divisor (numba's result by zero is 0), say so,
and are not inlined, for inside them the division would be seen again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic


def _make(name: str, operation: Callable[[Any, Any], Any]) -> Any:
    def typed(typingctx: Any, a: Any, b: Any) -> Any:
        function = typingctx.resolve_value_type(operation)
        signature = function.get_call_type(typingctx, (types.unliteral(a), types.unliteral(b)), {})

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            divide = context.get_function(operation, signature)
            if not isinstance(signature.return_type, types.Integer):
                return divide(builder, args)
            kinds = [arg.type for arg in args]
            symbol = f"numstack.{name}.{'.'.join(map(str, signature.args))}"
            known = builder.module.globals.get(symbol)
            if known is None:
                result = context.get_value_type(signature.return_type)
                known = ir.Function(builder.module, ir.FunctionType(result, kinds), symbol)
                known.linkage = "internal"
                for attribute in ("noinline", "nounwind", "readnone", "speculatable", "willreturn"):
                    set.add(known.attributes, attribute)  # llvmlite does not know all of them
                inner = ir.IRBuilder(known.append_basic_block("entry"))
                inner.ret(divide(inner, known.args))
            return builder.call(known, args)

        return signature, codegen

    typed.__name__ = name
    typed.__doc__ = f"``{operation.__name__}`` of two numbers."
    return intrinsic(typed)


#: What divides, by the class of the operator in ``ast``.
FUNCTIONS: dict[str, Any] = {
    "FloorDiv": _make("floor_divide", operator.floordiv),
    "Mod": _make("remainder", operator.mod),
}
