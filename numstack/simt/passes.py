"""numba's steps from Python to types, without what kernels never need: half of the time they took.

Kernels have no references to count, so nobody asks where a variable is last used; numba's steps find that out anew each
time. They have no closures, ``with``, raised messages, literal_unroll or whole-array expressions either. numba-cuda has
a copy of numba's steps of its own, under the same names: both are served here.
"""

from __future__ import annotations

import functools
import importlib
import operator
from collections.abc import Callable
from typing import Any

from numba.core import types
from numba.core.registry import cpu_target

OPERATORS = frozenset(function for function in vars(operator).values() if callable(function))

UNNEEDED = {
    *("WithLifting", "InlineClosureLikes", "RewriteDynamicRaises", "MakeFunctionToJitFunction", "InlineInlinables"),
    *("FindLiterallyCalls", "LiteralUnroll", "LiteralPropagationSubPipelinePass", "InlineOverloads"),
    *("NopythonRewrites", "IRLegalization"),
}


@functools.cache
def steps_instead(core: str) -> dict[type, type]:
    """What takes the place of which step of ``core``, the package "numba.core" or "numba.cuda.core"."""
    modules = ("compiler_machinery", "ir_utils", "ssa", "transforms", "typed_passes", "untyped_passes")
    machinery, utils, ssa, transforms, typed, untyped = (importlib.import_module(f"{core}.{name}") for name in modules)
    register = machinery.register_pass(mutates_CFG=True, analysis_only=False)

    def blocks(step: Any, state: Any) -> bool:
        state.func_ir.blocks = transforms.canonicalize_cfg(state.func_ir.blocks)
        return True

    def single_assignments(step: Any, state: Any) -> bool:
        """A variable of its own for each assignment, so that each has its own type."""
        state.func_ir = ssa.reconstruct_ssa(state.func_ir)
        state.func_ir._definitions = utils.build_definitions(state.func_ir.blocks)
        return True

    def merged_assignments(step: Any, state: Any) -> bool:
        """Assignments in place of phi nodes."""
        state.func_ir = step._strip_phi_nodes(state.func_ir)
        state.func_ir._definitions = utils.build_definitions(state.func_ir.blocks)
        return True

    runs = {
        untyped.IRProcessing: blocks,
        untyped.ReconstructSSA: single_assignments,
        typed.PreLowerStripPhis: merged_assignments,
    }
    return {
        step: register(type(run.__name__, (step,), {"_name": f"numstack_{run.__name__}", "run_pass": run}))
        for step, run in runs.items()
    }


def remembering(resolve: Callable[..., Any]) -> Callable[..., Any]:
    """A typing context's ``_resolve_user_function_type`` that finds the type of an operator on numbers once.

    Most calls in a kernel are such.
    """
    known: dict[tuple[Any, ...], Any] = {}

    def type_of_call(func: Any, args: Any, kws: Any, literals: Any = None) -> Any:
        of_numbers = all(isinstance(kind, (types.Number, types.Boolean)) for kind in args)
        if not isinstance(func, types.Function) or func.typing_key not in OPERATORS or kws or not of_numbers:
            return resolve(func, args, kws, literals)
        if (func, args) not in known:
            known[func, args] = resolve(func, args, kws, literals)
        return known[func, args]

    return type_of_call


@functools.cache
def typing_context() -> Any:
    """numba's typing context of the CPU, all that is registered there included, which remembers operators."""
    numbas: Any = cpu_target.typing_context
    context = object.__new__(type(numbas))
    context.__dict__.update(vars(numbas))
    context._resolve_user_function_type = remembering(context._resolve_user_function_type)
    return context
