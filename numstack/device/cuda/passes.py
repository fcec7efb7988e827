"""numba-cuda's steps from Python to LLVM: without what kernels never need, and with what they do first.

What is left out changes no machine code. What is put in, for Hopper and later, is a wait for the kernel ahead on the
stream, and leave for the one behind to start.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

from numba.cuda.compiler import CUDACompiler
from numba.cuda.core import compiler_machinery, ir, untyped_passes
from numba.cuda.descriptor import cuda_target

from numstack.device.ptx import sync
from numstack.simt.passes import UNNEEDED, remembering, steps_instead

_patching = threading.Lock()


@contextlib.contextmanager
def quick(kernel: Callable[..., None], first_acts: tuple[str, ...]) -> Iterator[None]:
    """Inside the ``with`` block numba compiles kernels, and what they call, by fewer steps: a quarter less time.

    ``kernel`` calls ``first_acts``, functions of ``numstack.device.ptx.sync``, before all else.
    """
    context: Any = cuda_target.typing_context
    with _patching:
        define = CUDACompiler.define_pipelines

        def our_steps(compiler: Any) -> list[Any]:
            [manager] = define(compiler)
            instead = steps_instead("numba.cuda.core")
            steps = [(step, name) for step, name in manager.passes if step.__name__ not in UNNEEDED]
            manager.passes = [(instead.get(step, step), name) for step, name in steps]
            if first_acts and compiler.state.func_id.func is kernel:
                manager.add_pass_after(_calling_first(first_acts), instead[untyped_passes.IRProcessing])
            manager._finalized = False
            manager.finalize()
            return [manager]

        CUDACompiler.define_pipelines = our_steps
        context._resolve_user_function_type = _type_of_call()
        try:
            yield
        finally:
            CUDACompiler.define_pipelines = define
            del context._resolve_user_function_type


@functools.cache
def _calling_first(acts: tuple[str, ...]) -> type:
    """The step that puts calls of functions without arguments at a kernel's start, in order."""

    def run(step: Any, state: Any) -> bool:
        blocks = state.func_ir.blocks
        first = blocks[min(blocks)]
        calls = []
        for act in acts:
            called, result = (first.scope.redefine(f"${act}", first.loc) for _ in range(2))
            calls.append(ir.Assign(ir.Global(act, getattr(sync, act), first.loc), called, first.loc))
            calls.append(ir.Assign(ir.Expr.call(called, (), (), first.loc), result, first.loc))
        first.body[:0] = calls
        return True

    names = {"_name": "numstack_calling_first", "run_pass": run, "__init__": lambda step: None}
    step = type("CallingFirst", (compiler_machinery.FunctionPass,), names)
    compiler_machinery.register_pass(mutates_CFG=False, analysis_only=False)(step)
    return step


@functools.cache
def _type_of_call() -> Callable[..., Any]:
    return remembering(cuda_target.typing_context._resolve_user_function_type)
