"""numba's steps from Python to types, without what generated code never needs: half of the time they took.

Generated code has no references to count, so nobody asks where a variable is last used; numba's steps find that out
anew each time. It has no closures, ``with``, raised messages, literal_unroll or whole-array expressions either.
"""

from __future__ import annotations

import functools
import operator
from typing import Any

from numba.core import types
from numba.core.compiler_machinery import register_pass
from numba.core.ir_utils import build_definitions
from numba.core.registry import cpu_target
from numba.core.ssa import reconstruct_ssa
from numba.core.transforms import canonicalize_cfg
from numba.core.typed_passes import PreLowerStripPhis
from numba.core.typing.context import Context
from numba.core.untyped_passes import IRProcessing, ReconstructSSA

OPERATORS = frozenset(function for function in vars(operator).values() if callable(function))

UNNEEDED = {
    *("WithLifting", "InlineClosureLikes", "RewriteDynamicRaises", "MakeFunctionToJitFunction", "InlineInlinables"),
    *("FindLiterallyCalls", "LiteralUnroll", "LiteralPropagationSubPipelinePass", "InlineOverloads"),
    *("NopythonRewrites", "IRLegalization"),
}


@register_pass(mutates_CFG=True, analysis_only=False)
class Blocks(IRProcessing):
    """Basic blocks, in numba's form."""

    _name = "numstack_blocks"

    def run_pass(self, state: Any) -> bool:
        state.func_ir.blocks = canonicalize_cfg(state.func_ir.blocks)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class SingleAssignments(ReconstructSSA):
    """A variable of its own for each assignment, so that each has its own type."""

    _name = "numstack_single_assignments"

    def run_pass(self, state: Any) -> bool:
        state.func_ir = reconstruct_ssa(state.func_ir)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class MergedAssignments(PreLowerStripPhis):
    """Assignments in place of phi nodes."""

    _name = "numstack_merged_assignments"

    def run_pass(self, state: Any) -> bool:
        state.func_ir = self._strip_phi_nodes(state.func_ir)
        state.func_ir._definitions = build_definitions(state.func_ir.blocks)
        return True


INSTEAD: dict[type, type] = {
    IRProcessing: Blocks,
    ReconstructSSA: SingleAssignments,
    PreLowerStripPhis: MergedAssignments,
}


class _Remembering(Context):
    """Finds the type of an operator on numbers of given types once: most calls in a kernel are such."""

    _known: dict[tuple[Any, ...], Any]

    def _resolve_user_function_type(self, func: Any, args: Any, kws: Any, literals: Any = None) -> Any:
        def resolve() -> Any:
            return super(_Remembering, self)._resolve_user_function_type(func, args, kws, literals)

        of_numbers = all(isinstance(kind, (types.Number, types.Boolean)) for kind in args)
        if not isinstance(func, types.Function) or func.typing_key not in OPERATORS or kws or not of_numbers:
            return resolve()
        key = (func, args)
        if key not in self._known:
            self._known[key] = resolve()
        return self._known[key]


@functools.cache
def typing_context() -> Context:
    """numba's typing context of the CPU, all that is registered there included, which remembers operators."""
    context = object.__new__(_Remembering)
    context.__dict__.update(vars(cpu_target.typing_context), _known={})
    return context
