"""A kernel's source rewritten so that one call of it is one thread.

    def _sum(x_N, out):                          def _sum(_t, x_N, out):
        i = cuda.threadIdx.x                         i = _t.threadIdx.x
        if i < x_N.size:                   ->        if _Lt(i, x_N.size):
            s[i] = 2 * x_N[i]                            _store(s, i, _Mult(2, _load(x_N, i, (file, 12))), (file, 12))
        cuda.syncthreads()                           yield ("syncthreads",)

A thread is a generator that stops wherever threads meet; a device function in which they meet is one too, entered by
``yield from``. Line numbers stay those of the source, so that tracebacks and debuggers show the kernel as written.
"""

import ast
import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar

import numpy as np
from numba import types

from numstack.simt.arrays import ATOMIC_NAMES, Array, atomic, load, store
from numstack.simt.scalars import INTRINSICS, OPERATORS, STAND_INS, Cast, Undefined, as_numpy_dtype, hold
from numstack.simt.source import (
    Source,
    constant_object,
    cuda_name,
    device_calls,
    device_function,
    error_at,
    is_collective,
    refuse_gpu_only,
    source_of,
)

BARRIERS = ("syncthreads", "syncthreads_and", "syncthreads_or", "syncthreads_count")
VOTES = ("all_sync", "any_sync", "eq_sync", "ballot_sync", "match_any_sync", "match_all_sync")
WARP_OPERATIONS = ("syncwarp", "shfl_sync", "shfl_up_sync", "shfl_down_sync", "shfl_xor_sync", *VOTES)
_PER_THREAD = ("threadIdx", "blockIdx", "blockDim", "gridDim", "laneid", "warpsize")
_FULL_MASK = 0xFFFFFFFF

_STATEMENTS = (
    ast.Assign,
    ast.AugAssign,
    ast.AnnAssign,
    ast.For,
    ast.While,
    ast.If,
    ast.Expr,
    ast.Return,
    ast.Pass,
    ast.Break,
    ast.Continue,
    ast.Assert,
    ast.Raise,
)
_Node = TypeVar("_Node", bound=ast.AST)
_NOT_IN_KERNELS = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Yield, ast.YieldFrom)


@dataclass(frozen=True)
class ThreadFunction:
    """A rewritten function: called with the thread in front of its own arguments."""

    call: Callable[..., Any]
    is_generator: bool


class Program:
    """A kernel and the device functions that it reaches, rewritten.

    Parameters
    ----------
    kernel : function
    stop_at_lines : bool
        Whether threads also stop in front of each statement, with ``yield ("line",)``.

    Attributes
    ----------
    kernel : ThreadFunction
    uses_threadfence : bool
        Whether blocks may communicate through global memory.

    Raises
    ------
    KernelError
        At something that kernels cannot have, with its line.
    """

    def __init__(self, kernel: FunctionType, *, stop_at_lines: bool = False) -> None:
        self.stop_at_lines = stop_at_lines
        self.uses_threadfence = False
        self._functions: dict[FunctionType, ThreadFunction] = {}
        self.kernel = self.function(source_of(kernel), is_kernel=True)

    def owns(self, frame: Any) -> bool:
        """Whether a Python frame runs code of this program."""
        return frame.f_globals.get("_program") is self

    def function(self, source: Source, *, is_kernel: bool = False) -> ThreadFunction:
        """The rewritten form of a function."""
        function = source.function
        if function not in self._functions:
            # What a call of itself, met while it is being rewritten, will find.
            later = ThreadFunction(lambda *args: self._functions[function].call(*args), self._stops(source))
            self._functions[function] = later
            self._functions[function] = ThreadFunction(self._rewrite(source, is_kernel), later.is_generator)
        return self._functions[function]

    def _stops(self, source: Source) -> bool:
        return self.stop_at_lines or _meets_others(source, ())

    def _rewrite(self, source: Source, is_kernel: bool) -> Callable[..., Any]:
        names: dict[str, Any] = dict(_HELPERS) | {"_program": self}
        tree = copy.deepcopy(source.tree)
        _Rewriter(self, source, names, is_kernel=is_kernel).rewrite(tree)
        tree.args.args.insert(0, ast.arg("_t"))
        tree.args.defaults = []
        module = ast.fix_missing_locations(ast.Module([tree], []))
        exec(compile(module, source.file, "exec"), names)
        function: Any = names[source.name]
        function.__defaults__ = source.function.__defaults__
        return function  # type: ignore[no-any-return]


def _meets_others(source: Source, callers: tuple[FunctionType, ...]) -> bool:
    namespace = source.namespace
    calls = [node for node in ast.walk(source.tree) if isinstance(node, ast.Call)]
    if any(cuda_name(call.func, namespace) in (*BARRIERS, *WARP_OPERATIONS) for call in calls):
        return True
    if any(is_collective(constant_object(call.func, namespace)) for call in calls):
        return True
    callers = (*callers, source.function)
    return any(callee.function not in callers and _meets_others(callee, callers) for _, callee in device_calls(source))


def _stand_in(value: Any) -> Any:
    """What a name from outside the kernel stands for inside it."""
    if isinstance(value, np.ndarray):
        return Array(value, "a constant array", None, constant=True)
    if isinstance(value, tuple):
        return tuple(_stand_in(part) for part in value)
    if isinstance(value, (types.Number, types.Boolean)):
        return Cast(as_numpy_dtype(value))
    if isinstance(value, type) and issubclass(value, (np.number, np.bool_)):
        return Cast(np.dtype(value))
    if callable(value):
        return STAND_INS.get(value) or (value if isinstance(value, type) else _on_host(value))
    return hold(value)


def _on_host(function: Any) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        undefined = next((value for value in args if value.__class__ is Undefined), None)
        return hold(function(*args, **named)) if undefined is None else undefined

    return call


class _Rewriter(ast.NodeTransformer):
    def __init__(self, program: Program, source: Source, names: dict[str, Any], *, is_kernel: bool) -> None:
        self.program = program
        self.source = source
        self.namespace = source.namespace
        self.names = names
        self.is_kernel = is_kernel
        self.local = set(source.parameters)
        self.local |= {n.id for n in ast.walk(source.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self.n_temporaries = 0

    def rewrite(self, tree: ast.FunctionDef) -> None:
        tree.body = self.block(tree.body)

    # ---- building blocks

    def site(self, node: Any) -> ast.expr:
        return _literal((self.source.file, node.lineno))

    def temporary(self) -> str:
        self.n_temporaries += 1
        return f"_{self.n_temporaries}"

    def helper(self, node: Any, name: str, *args: ast.expr) -> ast.Call:
        return _at(node, ast.Call(ast.Name(name, ast.Load()), list(args), []))

    def constant(self, node: ast.expr, value: Any) -> ast.expr:
        if isinstance(value, (bool, int, float)) and type(value) in (bool, int, float):
            return _at(node, ast.Constant(value))
        name = f"_constant_{len(self.names)}"
        self.names[name] = value
        return _at(node, ast.Name(name, ast.Load()))

    def cuda_name(self, node: ast.expr) -> str | None:
        root: ast.AST = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id in self.local:
            return None
        return cuda_name(node, self.namespace)

    def unsupported(self, node: ast.AST, what: str) -> Exception:
        return error_at(node, f"{what} cannot be used in a kernel", "rewrite this line without it")

    # ---- statements

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        for statement in statements:
            if not isinstance(statement, _STATEMENTS):
                raise self.unsupported(statement, f"`{type(statement).__name__.lower()}`")
            if self.program.stop_at_lines:
                done.append(_at(statement, ast.Expr(ast.Yield(_literal(("line",))))))
            result = self.visit(statement)
            done += result if isinstance(result, list) else [result]
        return done

    def visit_If(self, node: ast.If | ast.While) -> ast.stmt:
        node.test = self.visit(node.test)
        node.body, node.orelse = self.block(node.body), self.block(node.orelse)
        return node

    def visit_While(self, node: ast.While) -> ast.stmt:
        return self.visit_If(node)

    def visit_For(self, node: ast.For) -> ast.stmt:
        node.iter = self.visit(node.iter)
        node.body, node.orelse = self.block(node.body), self.block(node.orelse)
        return node

    def visit_Return(self, node: ast.Return) -> ast.stmt | list[ast.stmt]:
        if node.value is not None:
            node.value = self.visit(node.value)
        if not self.is_kernel:
            return node
        ended = ast.Attribute(ast.Name("_t", ast.Load()), "ended", ast.Store())
        return [_at(node, ast.Assign([ended], self.site(node))), node]

    def visit_Assign(self, node: ast.Assign) -> ast.stmt | list[ast.stmt]:
        name = node.targets[0].id if isinstance(node.targets[0], ast.Name) else "array"
        if isinstance(node.value, ast.Call) and self.cuda_name(node.value.func) in ("shared.array", "local.array"):
            value: ast.expr = self.array_declaration(node.value, name)
        else:
            value = self.visit(node.value)
        if len(node.targets) == 1:
            return self.assign(node, node.targets[0], value)
        temporary = self.temporary()
        done: list[ast.stmt] = [_at(node, ast.Assign([ast.Name(temporary, ast.Store())], value))]
        for target in node.targets:
            done += self.assign(node, target, ast.Name(temporary, ast.Load()))
        return done

    def assign(self, node: ast.stmt, target: ast.expr, value: ast.expr) -> list[ast.stmt]:
        if isinstance(target, ast.Name):
            return [_at(node, ast.Assign([target], value))]
        if isinstance(target, ast.Subscript):
            container, index = self.visit(target.value), self.index(target.slice)
            return [_at(node, ast.Expr(self.helper(target, "_store", container, index, value, self.site(target))))]
        if isinstance(target, (ast.Tuple, ast.List)):
            parts = [self.temporary() for _ in target.elts]
            unpacked = ast.Tuple([ast.Name(part, ast.Store()) for part in parts], ast.Store())
            done: list[ast.stmt] = [_at(node, ast.Assign([unpacked], value))]
            for part, element in zip(parts, target.elts, strict=True):
                done += self.assign(node, element, ast.Name(part, ast.Load()))
            return done
        raise self.unsupported(target, f"an assignment to `{ast.unparse(target)}`")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> list[ast.stmt] | ast.stmt:
        if node.value is None:
            return _at(node, ast.Pass())
        return self.assign(node, node.target, self.visit(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> list[ast.stmt]:
        operation = f"_{type(node.op).__name__}"
        target = node.target
        if isinstance(target, ast.Name):
            old = _at(target, ast.Name(target.id, ast.Load()))
            return [_at(node, ast.Assign([target], self.helper(node, operation, old, self.visit(node.value))))]
        if not isinstance(target, ast.Subscript):
            raise self.unsupported(target, f"an assignment to `{ast.unparse(target)}`")
        array, index = self.temporary(), self.temporary()
        both = ast.Tuple([ast.Name(array, ast.Store()), ast.Name(index, ast.Store())], ast.Store())
        keep = ast.Assign([both], ast.Tuple([self.visit(target.value), self.index(target.slice)], ast.Load()))
        place = [ast.Name(array, ast.Load()), ast.Name(index, ast.Load())]
        site = self.site(target)
        new = self.helper(node, operation, self.helper(target, "_load", *place, site), self.visit(node.value))
        return [_at(node, keep), _at(node, ast.Expr(self.helper(target, "_store", *place, new, site)))]

    # ---- expressions

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, _NOT_IN_KERNELS):
            raise self.unsupported(node, f"`{ast.unparse(node)}`")
        return super().generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.expr:
        if node.id in self.local or not isinstance(node.ctx, ast.Load):
            return node
        return self.outside(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        root: ast.expr = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id not in self.local:
            return self.outside(node)
        node.value = self.visit(node.value)
        return node

    def outside(self, node: ast.Name | ast.Attribute) -> ast.expr:
        """A name that is not the function's own: something of numba.cuda, a constant, a function."""
        name = self.cuda_name(node)
        if name is not None:
            first, *rest = name.split(".")
            if first not in _PER_THREAD:
                raise error_at(node, f"cuda.{name} is not supported", "numstack.simt runs what its documentation lists")
            value: ast.expr = ast.Name("_t", ast.Load())
            for part in (first, *rest):
                value = ast.Attribute(value, part, ast.Load())
            return _at(node, value)
        value = constant_object(node, self.namespace)
        if value is None and isinstance(node, ast.Attribute):
            node.value = self.visit(node.value)
            return node
        if value is None:
            if isinstance(node, ast.Name) and node.id not in self.namespace:
                raise error_at(node, f"the name {node.id} is not defined", "define it before the kernel runs")
            return node
        function = device_function(value)
        if function is not None:
            return self.constant(node, self.program.function(source_of(function)).call)
        return self.constant(node, _stand_in(value))

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        return self.helper(node, "_load", self.visit(node.value), self.index(node.slice), self.site(node))

    def index(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Tuple):
            return _at(node, ast.Tuple([self.index(part) for part in node.elts], ast.Load()))
        if isinstance(node, ast.Slice):
            parts = [
                self.visit(p) if p is not None else ast.Constant(None) for p in (node.lower, node.upper, node.step)
            ]
            return self.helper(node, "_slice", *parts)
        plain: ast.expr = self.visit(node)
        return plain

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        return self.helper(node, f"_{type(node.op).__name__}", self.visit(node.left), self.visit(node.right))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        operand = self.visit(node.operand)
        if isinstance(node.op, ast.Not) or isinstance(operand, ast.Constant):
            node.operand = operand
            return node
        return self.helper(node, f"_{type(node.op).__name__}", operand)

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        if any(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops):
            return self.generic_visit(node)  # type: ignore[return-value]
        left = self.visit(node.left)
        parts: list[ast.expr] = []
        for position, (op, comparator) in enumerate(zip(node.ops, node.comparators, strict=True), start=1):
            right = self.visit(comparator)
            following = right
            if position < len(node.ops):  # a < b < c evaluates b once
                temporary = self.temporary()
                right = ast.NamedExpr(ast.Name(temporary, ast.Store()), right)
                following = ast.Name(temporary, ast.Load())
            parts.append(self.helper(node, f"_{type(op).__name__}", left, right))
            left = following
        return parts[0] if len(parts) == 1 else _at(node, ast.BoolOp(ast.And(), parts))

    def visit_Call(self, node: ast.Call) -> ast.expr:
        name = self.cuda_name(node.func)
        if name is not None:
            return self.cuda_call(node, name)
        function = None
        root = node.func
        while isinstance(root, ast.Attribute):
            root = root.value
        if not (isinstance(root, ast.Name) and root.id in self.local):
            called = constant_object(node.func, self.namespace)
            if is_collective(called):
                return self.collective_call(node, called)
            refuse_gpu_only(node, called)
            function = device_function(called)
        node.func = self.visit(node.func)
        node.args = [self.visit(argument) for argument in node.args]
        for keyword in node.keywords:
            keyword.value = self.visit(keyword.value)
        if function is None:
            return node
        node.args.insert(0, ast.Name("_t", ast.Load()))
        if self.program.function(source_of(function)).is_generator:
            return _at(node, ast.YieldFrom(node))
        return node

    def collective_call(self, node: ast.Call, function: Callable[..., None]) -> ast.expr:
        parts: list[ast.expr] = [ast.Constant(function.__name__), ast.Constant(_FULL_MASK)]
        parts += [self.constant(node, function), *(self.visit(argument) for argument in node.args)]
        return _at(node, ast.Yield(ast.Tuple(parts, ast.Load())))

    def cuda_call(self, node: ast.Call, name: str) -> ast.expr:
        if name in ("shared.array", "local.array"):
            return self.array_declaration(node, "array")
        args: list[ast.expr] = [self.visit(argument) for argument in node.args]
        if name == "const.array_like":
            return args[0]
        if name.startswith("atomic.") and name[7:] in ATOMIC_NAMES:
            return self.helper(node, "_atomic", ast.Constant(name[7:]), self.site(node), *args)
        if name in (*BARRIERS, *WARP_OPERATIONS):
            if node.keywords:
                raise error_at(node, f"cuda.{name} with named arguments", "give them by position")
            if name == "syncwarp" and not args:
                args = [ast.Constant(_FULL_MASK)]
            return _at(node, ast.Yield(ast.Tuple([ast.Constant(name), *args], ast.Load())))
        if name in ("grid", "gridsize", "lanemask_lt"):
            return _at(node, ast.Call(ast.Attribute(ast.Name("_t", ast.Load()), name, ast.Load()), args, []))
        if name in INTRINSICS:
            self.program.uses_threadfence |= name in ("threadfence", "threadfence_system")
            return _at(node, ast.Call(self.constant(node, INTRINSICS[name]), args, []))
        raise error_at(node, f"cuda.{name} is not supported", "numstack.simt runs what its documentation lists")

    def array_declaration(self, node: ast.Call, name: str) -> ast.expr:
        """``tile = cuda.shared.array(shape, dtype)``: every thread that comes here gets the same array."""
        kind = self.cuda_name(node.func)
        keywords = [ast.keyword(k.arg, self.visit(k.value)) for k in node.keywords if k.arg != "alignment"]
        args = [ast.Constant(name), *(self.visit(argument) for argument in node.args[:2])]
        if kind == "shared.array":
            args.insert(1, _literal((self.source.file, node.lineno, node.col_offset)))
        method = ast.Attribute(
            ast.Name("_t", ast.Load()), "shared_array" if kind == "shared.array" else "local_array", ast.Load()
        )
        return _at(node, ast.Call(method, args, keywords))


def _literal(value: tuple[Any, ...]) -> ast.Constant:
    """A tuple that is built when the code is compiled, not each time it runs."""
    return ast.Constant(value)  # type: ignore[arg-type]  # compile() takes it, typeshed doesn't know


def _at(node: ast.AST, new: _Node) -> _Node:
    return ast.copy_location(new, node)


_HELPERS: dict[str, Any] = {f"_{name}": function for name, function in OPERATORS.items()}
_HELPERS |= {"_load": load, "_store": store, "_atomic": atomic, "_slice": slice}
