"""A kernel and the device functions that it calls, as one list of statements.

    @cuda.jit(device=True)                  x_2 = s
    def warp_sum(x):                        for o in (16, 8, 4, 2, 1):
        for o in (16, 8, 4, 2, 1):     ->       shuffled = WarpOp(shfl_xor_sync, x_2, o)
            x += cuda.shfl_xor_sync(            x_2 += shuffled
                FULL, x, o)                 mean = x_2 / n
        return x
    ...
    mean = warp_sum(s) / n

Names become unique, ``cuda.threadIdx.x`` becomes a name with dots, and whatever involves several threads (barriers,
shuffles, votes) becomes a statement of its own, in Python's order of evaluation.
"""

from __future__ import annotations

import ast
import builtins
import copy
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

from numba import types

from numstack.simt import atomics, dialect, intrinsics
from numstack.simt.flow import Statements, assign, lower_continues, lower_returns, placed
from numstack.simt.geometry import Geometry
from numstack.simt.nodes import (
    PREFIX,
    SHUFFLES,
    VOTES,
    Alloc,
    Barrier,
    Collective,
    WarpOp,
    constant,
    count_stores,
    is_stable,
    operands,
    truth,
)
from numstack.simt.source import (
    Source,
    constant_object,
    cuda_name,
    device_function,
    error_at,
    is_collective,
    refuse_gpu_only,
    source_of,
)

AXES = "xyz"
FENCES = {"threadfence", "threadfence_block", "threadfence_system", "nanosleep"}
BARRIERS = {"syncthreads", "syncthreads_or", "syncthreads_and", "syncthreads_count"}
#: Functions of numba.cuda that are plain arithmetic, by the name of their twin in numstack.simt.intrinsics.
PURE = {"popc", "brev", "clz", "ffs", "fma", "cbrt", "selp"}


@dataclass
class Program:
    """A kernel without calls of device functions.

    Attributes
    ----------
    parameters : list of str
    body : list of statements
        No ``return`` or ``continue``; `Barrier`, `WarpOp` and `Alloc` are statements.
    namespace : dict
        What names that are not variables stand for.
    taken : set of str
        Names that variables have, or must not have.
    """

    source: Source
    parameters: list[str]
    body: Statements
    namespace: dict[str, Any] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)


def flatten(source: Source) -> Program:
    """Inline every device function.

    Raises
    ------
    KernelError
        At recursion, or at a construct that is not supported.
    """
    return _Flattener(source).program()


class _Flattener:
    def __init__(self, source: Source) -> None:
        self.source = source
        self.namespace: dict[str, Any] = {}
        self.taken: set[str] = set(source.parameters) | Geometry.NAMES
        self.single: set[str] = set()
        self.callers: list[FunctionType] = []
        self.local_constants: dict[str, Any] = {}

    def program(self) -> Program:
        parameters: dict[str, ast.expr] = {n: ast.Name(n, ast.Load()) for n in self.source.parameters}
        body = self.function(self.source, parameters, None)
        return Program(self.source, self.source.parameters, body, self.namespace, self.taken)

    def new_name(self, wish: str) -> str:
        name, number = wish, 1
        while name in self.taken or name in self.namespace:
            number += 1
            name = f"{wish}_{number}"
        self.taken.add(name)
        return name

    # functions

    def function(self, source: Source, parameters: dict[str, ast.expr], result: str | None) -> Statements:
        """The statements of a function whose parameters are replaced; ``result`` receives what it returns."""
        if source.function in self.callers:
            raise error_at(source.tree, f"{source.name} calls itself", "write the recursion as a loop")
        self.callers.append(source.function)
        tree = copy.deepcopy(source.tree)
        replace: dict[str, ast.expr] = dict(parameters)
        for name in count_stores(tree.body):
            if name not in replace:
                replace[name] = ast.Name(self.new_name(name), ast.Load())
        _Names(self, source, replace).rename(tree)
        counts = count_stores(tree.body)
        is_kernel = len(self.callers) == 1

        def keep(statement: ast.Return) -> Statements:
            if result is not None:
                return [assign(result, statement.value or ast.Constant(None), statement)]
            value = statement.value
            if value is None or (isinstance(value, ast.Constant) and value.value is None):
                return []
            if is_kernel:
                raise error_at(statement, "a kernel returns a value", "store it in an array argument")
            return [placed(ast.Expr(value), statement)]  # type: ignore[list-item]

        lowered = lower_continues(tree.body, self.new_name)
        lowered = lower_returns(lowered, self.new_name("returned"), keep, leaves_kernel=is_kernel)
        for name in counts:
            self.local_constants[name] = None
        self.single |= {name for name, count in counts.items() if count == 1}
        body = self.statements(lowered)
        self.callers.pop()
        return body

    def statements(self, statements: Statements) -> Statements:
        out: Statements = []
        for statement in statements:
            self.statement(statement, out)
        return out

    def statement(self, statement: ast.stmt, out: Statements) -> None:
        if isinstance(statement, ast.If):
            taken = truth(statement.test, self.namespace, self.local_constants)
            if taken is not None:
                out += self.statements(statement.body if taken else statement.orelse)
                return
            statement.test = self.expression(statement.test, out)
            statement.body = self.statements(statement.body) or [placed(ast.Pass(), statement)]  # type: ignore[list-item]
            statement.orelse = self.statements(statement.orelse)
            out.append(statement)
        elif isinstance(statement, ast.For):
            if statement.orelse:
                raise error_at(statement, "for ... else", "set a flag before break instead")
            statement.iter = self.expression(statement.iter, out)
            statement.body = self.statements(statement.body)
            out.append(statement)
        elif isinstance(statement, ast.While):
            self.while_loop(statement, out)
        elif isinstance(statement, ast.Assign):
            self.assignment(statement, out)
        elif isinstance(statement, ast.AnnAssign):
            if statement.value is not None:
                self.assignment(placed(ast.Assign([statement.target], statement.value), statement), out)  # type: ignore[arg-type]
        elif isinstance(statement, ast.AugAssign):
            statement.target = self.expression(statement.target, out)  # type: ignore[assignment]
            if self.is_special(statement.value):
                self.hoist_target(statement.target, out)
            statement.value = self.expression(statement.value, out)
            out.append(statement)
        elif isinstance(statement, ast.Expr):
            self.expression_statement(statement, out)
        elif isinstance(statement, (ast.Break, ast.Pass)):
            out.append(statement)
        else:
            name = type(statement).__name__.lower()
            raise error_at(
                statement, f"{name!r} is not supported in a kernel", "write it with if, for, while and assignments"
            )

    def hoist_target(self, target: ast.expr, out: Statements) -> None:
        """Evaluate the index of ``x[index] += value`` before ``value`` does something."""
        if isinstance(target, ast.Subscript) and not is_stable(target.slice):
            elements = target.slice.elts if isinstance(target.slice, ast.Tuple) else [target.slice]
            kept = [element if is_stable(element) else self.keep(element, "index", out) for element in elements]
            target.slice = placed(ast.Tuple(kept, ast.Load()), target) if len(kept) > 1 else kept[0]  # type: ignore[assignment]

    def while_loop(self, statement: ast.While, out: Statements) -> None:
        if statement.orelse:
            raise error_at(statement, "while ... else", "set a flag before break instead")
        if not self.is_special(statement.test):
            statement.body = self.statements(statement.body)
            out.append(statement)
            return
        # while f(x): body  ->  go = f(x);  while go: body; go = f(x)
        name = self.new_name("go")
        again = copy.deepcopy(statement.test)
        self.assignment(assign(name, statement.test, statement), out)
        statement.test = placed(ast.Name(name, ast.Load()), statement)  # type: ignore[assignment]
        statement.body = self.statements(statement.body)
        self.assignment(assign(name, again, statement), statement.body)
        out.append(statement)

    def assignment(self, statement: ast.Assign, out: Statements) -> None:
        value = statement.value
        if (
            isinstance(value, ast.Call)
            and (alloc := self.allocation(value)) is not None
            and len(statement.targets) == 1
        ):
            target = statement.targets[0]
            if isinstance(target, ast.Name) and target.id in self.single:
                alloc.target = target.id
                out.append(alloc)
                return
        value = self.expression(value, out)
        for target in statement.targets:
            self.assign_to(target, value, statement, out)
            if len(statement.targets) > 1 and isinstance(target, ast.Name):
                value = placed(ast.Name(target.id, ast.Load()), statement)  # type: ignore[assignment]

    def assign_to(self, target: ast.expr, value: ast.expr, place: ast.stmt, out: Statements) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            if isinstance(value, ast.Tuple) and len(value.elts) == len(target.elts):
                values = value.elts
                if not all(is_stable(element) and not isinstance(element, ast.Name) for element in values):
                    values = [e if isinstance(e, ast.Constant) else self.keep(e, "item", out) for e in values]
                for element, item in zip(target.elts, values, strict=True):
                    self.assign_to(element, item, place, out)
            elif isinstance(value, ast.Attribute) and value.attr == "shape":
                for index, element in enumerate(target.elts):
                    item = ast.Subscript(copy.deepcopy(value), ast.Constant(index), ast.Load())
                    self.assign_to(element, placed(item, place), place, out)  # type: ignore[arg-type]
            else:
                kept = placed(ast.Assign([target], value), place)
                out.append(kept)  # type: ignore[arg-type]
            return
        if isinstance(target, ast.Subscript):
            target = self.expression(target, out)
        if isinstance(target, ast.Name) and target.id in self.single:
            self.local_constants[target.id] = constant(value, self.namespace, self.local_constants)
        out.append(placed(ast.Assign([target], value), place))  # type: ignore[arg-type]

    def expression_statement(self, statement: ast.Expr, out: Statements) -> None:
        call = statement.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
            name = call.func.id.removeprefix(PREFIX)
            if call.func.id.startswith(PREFIX):
                if name == "syncthreads":
                    out.append(_placed_barrier(statement, None, name, None))
                    return
                if name == "syncwarp":
                    out.append(_placed_warp_op(statement, None, name, None, None))
                    return
                if name in FENCES:
                    return
        value = self.expression(call, out)
        if not isinstance(value, (ast.Name, ast.Constant)):
            out.append(placed(ast.Expr(value), statement))  # type: ignore[arg-type]

    # expressions

    def is_special(self, node: ast.AST) -> bool:
        """Whether evaluating this takes statements of its own."""
        return any(isinstance(child, ast.Call) and self.kind(child) is not None for child in ast.walk(node))

    def kind(self, call: ast.Call) -> str | None:
        if isinstance(call.func, ast.Name) and call.func.id.startswith(PREFIX):
            name = call.func.id.removeprefix(PREFIX)
            if name in SHUFFLES or name in VOTES:
                return "warp"
            if name in BARRIERS:
                return "barrier"
            if name in ("shared.array", "local.array", "shared.array_like", "local.array_like"):
                return "alloc"
            raise error_at(call, f"cuda.{name} is not supported on the CPU", "see numstack.simt for what is")
        function = constant_object(call.func, self.namespace)
        if is_collective(function):
            return "collective"
        refuse_gpu_only(call, function)
        return "device" if device_function(function) is not None else None

    def keep(self, value: ast.expr, wish: str, out: Statements) -> ast.expr:
        name = self.new_name(wish)
        out.append(assign(name, value, value))
        return placed(ast.Name(name, ast.Load()), value)  # type: ignore[return-value]

    def expression(self, node: ast.expr, out: Statements) -> ast.expr:
        """The expression with calls that take statements replaced by names; those statements go to ``out``."""
        if not self.is_special(node):
            return node
        if isinstance(node, ast.BoolOp) and any(self.is_special(value) for value in node.values[1:]):
            return self.short_circuit(node, out)
        if isinstance(node, ast.IfExp) and (self.is_special(node.body) or self.is_special(node.orelse)):
            return self.conditional(node, out)
        if isinstance(node, (ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)):
            raise error_at(node, "a device function inside a comprehension or lambda", "write a loop")
        parts = operands(node)
        last = max((i for i, (_, _, child) in enumerate(parts) if self.is_special(child)), default=-1)
        for index, (name, position, child) in enumerate(parts):
            if self.is_special(child):
                child = self.expression(child, out)
            if index < last and not is_stable(child):
                child = self.keep(child, "operand", out)
            if position is None:
                setattr(node, name, child)
            else:
                getattr(node, name)[position] = child
        if isinstance(node, ast.Call):
            return self.call(node, out)
        return node

    def short_circuit(self, node: ast.BoolOp, out: Statements) -> ast.expr:
        """``a and f(b)``  ->  ``both = a;  if both: both = f(b)``"""
        name = self.new_name("both" if isinstance(node.op, ast.And) else "either")
        self.assignment(assign(name, node.values[0], node), out)
        rest = node.values[1] if len(node.values) == 2 else placed(ast.BoolOp(node.op, node.values[1:]), node)
        test: ast.expr = ast.Name(name, ast.Load())
        if isinstance(node.op, ast.Or):
            test = ast.UnaryOp(ast.Not(), test)
        branch: Statements = []
        self.assignment(assign(name, rest, node), branch)  # type: ignore[arg-type]
        out.append(placed(ast.If(test, branch, []), node))  # type: ignore[arg-type]
        return placed(ast.Name(name, ast.Load()), node)  # type: ignore[return-value]

    def conditional(self, node: ast.IfExp, out: Statements) -> ast.expr:
        """``f(a) if c else b``  ->  ``if c: chosen = f(a)`` ``else: chosen = b``"""
        name = self.new_name("chosen")
        test = self.expression(node.test, out)
        body: Statements = []
        orelse: Statements = []
        self.assignment(assign(name, node.body, node), body)
        self.assignment(assign(name, node.orelse, node), orelse)
        out.append(placed(ast.If(test, body, orelse), node))  # type: ignore[arg-type]
        return placed(ast.Name(name, ast.Load()), node)  # type: ignore[return-value]

    def call(self, call: ast.Call, out: Statements) -> ast.expr:
        kind = self.kind(call)
        if kind == "device":
            return self.inline(call, out)
        if kind == "alloc":
            alloc = self.allocation(call)
            assert alloc is not None
            alloc.target = self.new_name("array")
            out.append(alloc)
            return placed(ast.Name(alloc.target, ast.Load()), call)  # type: ignore[return-value]
        if kind == "barrier":
            name = call.func.id.removeprefix(PREFIX)  # type: ignore[attr-defined]
            target = self.new_name(name.removeprefix("sync"))
            out.append(_placed_barrier(call, target, name, self.keep(call.args[0], "predicate", out)))
            return placed(ast.Name(target, ast.Load()), call)  # type: ignore[return-value]
        if kind == "warp":
            return self.warp_op(call, out)
        if kind == "collective":
            out.append(self.collective(call))
            return placed(ast.Constant(None), call)  # type: ignore[return-value]
        return call

    def warp_op(self, call: ast.Call, out: Statements) -> ast.expr:
        name = call.func.id.removeprefix(PREFIX)  # type: ignore[attr-defined]
        arguments = list(call.args) + [keyword.value for keyword in call.keywords]
        if name == "activemask":
            name, arguments = "ballot_sync", [ast.Constant(0), ast.Constant(True)]
        if len(arguments) < 2:
            raise error_at(call, f"cuda.{name} needs a mask and a value", "see numba.cuda's documentation")
        value = arguments[1]
        if not isinstance(value, ast.Name) or value.id.startswith(PREFIX) or name in VOTES:
            value = self.keep(value, "predicate" if name in VOTES else "value", out)
        extra = arguments[2] if len(arguments) > 2 else None
        target = self.new_name("vote" if name in VOTES else "shuffled")
        out.append(_placed_warp_op(call, target, name, value, extra))
        return placed(ast.Name(target, ast.Load()), call)  # type: ignore[return-value]

    def collective(self, call: ast.Call) -> Collective:
        function = constant_object(call.func, self.namespace)
        if call.keywords or len(call.args) % 3 or not all(isinstance(array, ast.Name) for array in call.args[::3]):
            raise error_at(
                call,
                f"{function.__name__} takes (local array, first register, how many) for each of its parameters",
                "give exactly these, by position",
            )
        operation: Collective = placed(Collective(None, ast.Tuple(call.args, ast.Load())), call)  # type: ignore[assignment]
        operation.target, operation.kind, operation.function = None, function.__name__, function
        return operation

    def inline(self, call: ast.Call, out: Statements) -> ast.expr:
        function = device_function(constant_object(call.func, self.namespace))
        assert function is not None
        callee = source_of(function)
        arguments = self.arguments(call, callee)
        changed = count_stores(callee.tree.body)
        parameters: dict[str, ast.expr] = {}
        for name, value in arguments.items():
            if name not in changed and is_stable(value):
                parameters[name] = value
            else:
                kept = self.new_name(name)
                self.assignment(assign(kept, value, call), out)
                parameters[name] = ast.Name(kept, ast.Load())
                if name not in changed:
                    self.local_constants[kept] = constant(value, self.namespace, self.local_constants)
        result = self.new_name(f"{callee.name.lstrip('_')}_result") if _returns_value(callee.tree) else None
        out += self.function(callee, parameters, result)
        if result is None:
            return placed(ast.Constant(None), call)  # type: ignore[return-value]
        return placed(ast.Name(result, ast.Load()), call)  # type: ignore[return-value]

    def arguments(self, call: ast.Call, callee: Source) -> dict[str, ast.expr]:
        if any(isinstance(argument, ast.Starred) for argument in call.args):
            raise error_at(call, "a call with *arguments", "write the arguments one by one")
        names = callee.parameters
        given: dict[str, ast.expr] = dict(zip(names, call.args, strict=False))
        for keyword in call.keywords:
            given[keyword.arg or "**"] = keyword.value
        defaults = callee.function.__defaults__ or ()
        for name, value in zip(names[len(names) - len(defaults) :], defaults, strict=True):
            if name not in given:
                given[name] = placed(ast.Name(self.bind(name, value), ast.Load()), call)  # type: ignore[assignment]
        if len(call.args) > len(names) or set(given) != set(names):
            raise error_at(call, f"{callee.name} takes ({', '.join(names)})", "give exactly these arguments")
        return {name: given[name] for name in names}

    def bind(self, wish: str, value: Any) -> str:
        """A name in the program for a global object."""
        if getattr(builtins, wish, None) is value:
            self.namespace[wish] = value
            return wish
        for name in (wish, f"{wish}_global"):
            if name in self.namespace and self.namespace[name] is value:
                return name
        name = wish if wish not in self.taken and wish not in self.namespace else self.new_name(f"{wish}_global")
        self.namespace[name] = value
        return name

    def allocation(self, call: ast.Call) -> Alloc | None:
        """``shared.array`` or ``local.array`` as a statement, without its target."""
        if not (isinstance(call.func, ast.Name) and call.func.id.startswith(PREFIX)):
            return None
        space, _, kind = call.func.id.removeprefix(PREFIX).partition(".")
        if space not in ("shared", "local") or kind != "array":
            if kind == "array_like":
                raise error_at(call, f"cuda.{space}.array_like", f"use cuda.{space}.array with a constant shape")
            return None
        given: dict[str, ast.expr] = dict(zip(("shape", "dtype"), call.args, strict=False))
        given.update({keyword.arg or "": keyword.value for keyword in call.keywords})
        if not {"shape", "dtype"} <= set(given):
            raise error_at(call, f"cuda.{space}.array without shape and dtype", "give both")
        value = constant(given["shape"], self.namespace, self.local_constants)
        shape = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(size, int) or hasattr(size, "__index__") for size in shape):
            raise error_at(
                call, f"the shape of this cuda.{space}.array is not constant", "use literals or global constants"
            )
        alloc: Alloc = placed(Alloc(given["dtype"]), call)  # type: ignore[assignment]
        alloc.space = space
        alloc.shape = tuple(int(size) for size in shape)
        if space == "local" and 0 in alloc.shape:
            raise error_at(call, "a local array of size 0", "give it a size")
        return alloc


class _Names(ast.NodeTransformer):
    """Replace parameters, rename variables, and give cuda's objects and globals their names in the program."""

    def __init__(self, flattener: _Flattener, source: Source, replace: dict[str, ast.expr]) -> None:
        self.flattener = flattener
        self.globals = source.namespace
        self.replace = replace

    def rename(self, tree: ast.FunctionDef) -> None:
        tree.body = [self.visit(statement) for statement in tree.body]

    def visit_Name(self, node: ast.Name) -> ast.AST:
        if node.id in self.replace:
            new = copy.deepcopy(self.replace[node.id])
            if isinstance(node.ctx, ast.Store):
                new.ctx = ast.Store()  # type: ignore[attr-defined]
            return _moved(new, node)
        name = cuda_name(node, self.globals)
        if name is not None:
            return self.cuda_object(node, name)
        if node.id not in self.globals:
            raise error_at(node, f"{node.id} is not defined", "assign it first, or import it")
        value = self.globals[node.id]
        replacement = dialect.replacement(value)
        if replacement is not None:
            node.id = self.flattener.bind(replacement.__name__, replacement)
        else:
            node.id = self.flattener.bind(node.id, value)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        root: ast.AST = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if isinstance(root, ast.Name) and root.id not in self.replace:
            name = cuda_name(node, self.globals)
            if name is not None:
                return self.cuda_object(node, name)
            value = constant_object(node, self.globals)
            if isinstance(value, types.Type):  # cuda.float32
                return _moved(ast.Name(self.flattener.bind(node.attr, value), ast.Load()), node)
            replacement = dialect.replacement(value)
            if replacement is not None:
                return _moved(ast.Name(self.flattener.bind(replacement.__name__, replacement), ast.Load()), node)
        return self.generic_visit(node)

    def cuda_object(self, node: ast.AST, name: str) -> ast.AST:
        if name in PURE:
            return _moved(ast.Name(self.flattener.bind(name, getattr(intrinsics, name)), ast.Load()), node)
        if name.startswith("atomic."):
            function = atomics.FUNCTIONS.get(name.removeprefix("atomic."))
            if function is None:
                raise error_at(
                    node, f"cuda.{name} is not supported on the CPU", "use one of cuda.atomic's other functions"
                )
            return _moved(ast.Name(self.flattener.bind(function.__name__, function), ast.Load()), node)
        return _moved(ast.Name(PREFIX + name, ast.Load()), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        name = cuda_name(node.func, self.globals)
        if name in ("grid", "gridsize"):
            count = constant(node.args[0], self.globals, dict.fromkeys(self.replace)) if len(node.args) == 1 else None
            if count not in (1, 2, 3):
                raise error_at(node, f"cuda.{name} takes 1, 2 or 3", "write the number of dimensions")
            axes: list[ast.expr] = [ast.Name(f"{PREFIX}{name}.{axis}", ast.Load()) for axis in AXES[:count]]
            return _moved(axes[0] if count == 1 else ast.Tuple(axes, ast.Load()), node)
        if name == "const.array_like":
            return self.visit(node.args[0])  # type: ignore[no-any-return]
        pairwise = dialect.PAIRWISE.get(self.builtin(node.func))
        if pairwise is not None and len(node.args) > 1:  # max(a, b, c)  ->  max(max(a, b), c)
            function = ast.Name(self.flattener.bind(pairwise.__name__, pairwise), ast.Load())
            result, *others = [self.visit(argument) for argument in node.args]
            for other in others:
                result = ast.Call(copy.deepcopy(function), [result, other], [])
            return placed(result, node)
        return self.generic_visit(node)

    def builtin(self, node: ast.AST) -> str:
        """The name of the builtin function that a node stands for, or an empty string."""
        if isinstance(node, ast.Name) and node.id not in self.replace and self.globals.get(node.id) in (max, min):
            return str(self.globals[node.id].__name__)
        return ""

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        node.value = self.visit(node.value)
        return node


def _moved(node: ast.AST, place: ast.AST) -> ast.AST:
    """``node`` at the place of another, whatever place it had."""
    for child in ast.walk(node):
        ast.copy_location(child, place)
        child.file = getattr(place, "file", "<unknown>")  # type: ignore[attr-defined]
    return node


def _returns_value(tree: ast.FunctionDef) -> bool:
    returns = [node for node in ast.walk(tree) if isinstance(node, ast.Return)]
    return any(node.value is not None for node in returns)


def _placed_barrier(place: ast.AST, target: str | None, kind: str, value: ast.expr | None) -> Barrier:
    barrier: Barrier = placed(Barrier(value), place)  # type: ignore[assignment]
    barrier.target, barrier.kind = target, kind
    return barrier


def _placed_warp_op(
    place: ast.AST, target: str | None, kind: str, value: ast.expr | None, extra: ast.expr | None
) -> WarpOp:
    operation: WarpOp = placed(WarpOp(value, extra), place)  # type: ignore[assignment]
    operation.target, operation.kind = target, kind
    return operation
