"""Types of variables, from numba's own inference over a twin of the kernel in which one thread runs alone.

    s = float32(0)                              s = float32(0)
    s += x[cuda.grid(1)]                   ->   s += x[a_index]
    cuda.syncthreads()                          shuffled = s
    shuffled = WarpOp(shfl_xor_sync, s, 1)

Only types are inferred; the twin is never lowered or run.
"""

from __future__ import annotations

import ast
import copy
from typing import Any

from numba.core import compiler, types
from numba.core.bytecode import FunctionIdentity
from numba.core.compiler import CompilerBase
from numba.core.compiler_lock import global_compiler_lock
from numba.core.compiler_machinery import PassManager
from numba.core.registry import cpu_target
from numba.core.typed_passes import NopythonTypeInference
from numba.core.untyped_passes import (
    ExtractByteCode,
    FixupArgs,
    IRProcessing,
    ReconstructSSA,
    RewriteSemanticConstants,
    TranslateByteCode,
)

from numstack.simt.flow import Statements, assign, blocks
from numstack.simt.inline import Program
from numstack.simt.nodes import PREFIX, SHUFFLES, Alloc, Barrier, WarpOp
from numstack.simt.passes import steps_instead, typing_context
from numstack.simt.tile import stack_tile
from numstack.simt.uniform import AT_FIRST_LANE


class _Typing(CompilerBase):
    def define_pipelines(self) -> list[PassManager]:
        manager, instead = PassManager("types"), steps_instead("numba.core")
        manager.add_pass(TranslateByteCode, "bytecode")
        manager.add_pass(FixupArgs, "arguments")
        manager.add_pass(instead[IRProcessing], "ir")
        manager.add_pass(RewriteSemanticConstants, "constants")
        manager.add_pass(instead[ReconstructSSA], "ssa")
        manager.add_pass(NopythonTypeInference, "types")
        manager.finalize()
        return [manager]

    def typemap(self, function: Any) -> dict[str, types.Type]:
        self.state.func_id = FunctionIdentity.from_function(function)
        ExtractByteCode().run_pass(self.state)
        self.state.lifted = ()
        self.state.lifted_from = None
        with global_compiler_lock:
            [manager] = self.define_pipelines()
            manager.run(self.state)
        return dict(self.state.typemap)


def variable_types(program: Program, arg_types: tuple[types.Type, ...]) -> dict[str, types.Type]:
    """The type of each variable of a program; variables that hold values of several types get the common one."""
    body = _Alone(program).sequence(copy.deepcopy(program.body))
    arguments = ast.arguments([], [ast.arg(name) for name in program.parameters], None, [], [], None, [])
    function = ast.FunctionDef("twin", arguments, body or [ast.Pass()], [])
    for node in ast.walk(function):
        if not hasattr(node, "lineno"):
            node.lineno = node.end_lineno = 1  # type: ignore[attr-defined]
            node.col_offset = node.end_col_offset = 0  # type: ignore[attr-defined]
    module = ast.fix_missing_locations(ast.Module([function], []))
    environment: dict[str, Any] = {**program.namespace, "stack_tile": stack_tile, "a_int32": types.int32}
    exec(compile(module, "<twin>", "exec"), environment)
    flags = compiler.Flags()
    flags.nrt = True
    flags.error_model = "numpy"
    typing = _Typing(typing_context(), cpu_target.target_context, None, arg_types, types.none, flags, {})
    found: dict[str, set[types.Type]] = {}
    for name, kind in typing.typemap(environment["twin"]).items():
        found.setdefault(name.partition(".")[0], set()).add(types.unliteral(kind))
    return {name: _common(kinds) for name, kinds in found.items()}


def _common(kinds: set[types.Type]) -> types.Type:
    unified = None
    ordered = sorted(kinds, key=str)
    if len(ordered) == 1:
        return ordered[0]
    unified = cpu_target.typing_context.unify_types(*ordered)
    return unified if unified is not None else types.undefined


class _Alone(ast.NodeTransformer):
    def __init__(self, program: Program) -> None:
        self.program = program

    def sequence(self, statements: Statements) -> Statements:
        out: Statements = []
        for statement in statements:
            for block in blocks(statement):
                block[:] = self.sequence(block) or [ast.Pass()]
            if isinstance(statement, Barrier):
                if statement.target is not None:
                    out.append(assign(statement.target, _int32(), statement))
            elif isinstance(statement, WarpOp):
                if statement.target is not None and statement.kind not in SHUFFLES:
                    is_bool = statement.kind in ("any_sync", "all_sync", "eq_sync")
                    value: ast.expr = ast.Constant(True) if is_bool else _int32()
                    out.append(assign(statement.target, value, statement))
                elif statement.target is not None:
                    assert statement.value is not None
                    out.append(assign(statement.target, self.visit(statement.value), statement))
            elif isinstance(statement, Alloc):
                shape = ast.Tuple([ast.Constant(size) for size in statement.shape], ast.Load())
                call = ast.Call(ast.Name("stack_tile", ast.Load()), [shape, self.visit(statement.dtype)], [])
                out.append(assign(statement.target, call, statement))
            else:
                if isinstance(statement, (ast.If, ast.While)):
                    statement.test = self.visit(statement.test)
                elif isinstance(statement, ast.For):
                    statement.iter = self.visit(statement.iter)
                else:
                    statement = self.visit(statement)
                out.append(statement)
        return out

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if not node.id.startswith(PREFIX):
            return node
        what = node.id.removeprefix(PREFIX).partition(".")[0]
        if what in ("grid", "gridsize"):
            return ast.copy_location(ast.Constant(1 << 40), node)  # as wide as numba.cuda's, int64
        return ast.copy_location(_int32(), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == AT_FIRST_LANE:
            return self.visit(node.args[0])  # type: ignore[no-any-return]
        if isinstance(node.func, ast.Name) and node.func.id.startswith(PREFIX):
            return ast.copy_location(_int32(), node)
        return self.generic_visit(node)


def _int32() -> ast.expr:
    return ast.Call(ast.Name("a_int32", ast.Load()), [ast.Constant(1)], [])
