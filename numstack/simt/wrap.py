"""Negative indices: counted from the end, as numba does, where an index may be negative at all.

    x[i - 1]            ->   x[wrap_index(i - 1, x.shape[0])]
    x[-1]               ->   x[x.shape[0] - 1]
    if i > 0: x[i - 1]  ->   if i > 0: x[i - 1]

Generated code does not wrap by itself, for LLVM rarely proves that an index is not negative, and then gathers elements
one by one that lie side by side. What is proven here: thread indices, sizes, what is added and multiplied from such,
loops that count up from such, and what a condition around the access says.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numba.core import cgutils, types
from numba.core.extending import intrinsic

from numstack.simt import atomics, dialect
from numstack.simt.flow import Statements, placed
from numstack.simt.inline import Program
from numstack.simt.nodes import PREFIX, Alloc, Barrier, WarpOp, constant, count_stores, loaded, walk
from numstack.simt.source import constant_object
from numstack.simt.uniform import AT_FIRST_LANE, Uniformity


@intrinsic
def wrap_index(typingctx: Any, index: Any, sizes: Any) -> Any:
    """``index``, or ``index + size`` if it is negative; of a tuple, each of its integers.

    ``sizes`` is a shape, for an index of the whole array, or the size of one axis.
    """
    kinds = list(index) if isinstance(index, types.BaseTuple) else [index]
    wrapped = [types.intp if isinstance(kind, types.Integer) else kind for kind in kinds]
    result = types.Tuple(wrapped) if isinstance(index, types.BaseTuple) else wrapped[0]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        values = cgutils.unpack_tuple(builder, args[0]) if isinstance(index, types.BaseTuple) else [args[0]]
        lengths = cgutils.unpack_tuple(builder, args[1]) if isinstance(sizes, types.BaseTuple) else [args[1]]
        for axis, kind in enumerate(kinds):
            if isinstance(kind, types.Integer):
                value = context.cast(builder, values[axis], kind, types.intp)
                is_negative = builder.icmp_signed("<", value, value.type(0))
                values[axis] = builder.select(is_negative, builder.add(value, lengths[axis]), value)
        if isinstance(index, types.BaseTuple):
            return context.make_tuple(builder, result, values)
        return values[0]

    return result(index, sizes), codegen


def wrap_negative_indices(
    program: Program, uniformity: Uniformity, arg_types: Mapping[str, types.Type], *, assume: bool
) -> set[str]:
    """Rewrite the indices of a program that may be negative.

    Returns
    -------
    set of str
        Integer parameters that were assumed not to be negative (none unless ``assume``): whoever calls must check.
    """
    wrapper = _Wrapper(program, uniformity, arg_types, assume)
    wrapper.sequence(program.body)
    return wrapper.assumed


_SAME_SIGN = (ast.Add, ast.Mult, ast.FloorDiv, ast.LShift, ast.RShift, ast.BitOr, ast.BitXor, ast.Pow)
_NOT_NEGATIVE_CALLS = {len, abs}


class _Wrapper:
    def __init__(
        self, program: Program, uniformity: Uniformity, arg_types: Mapping[str, types.Type], assume: bool
    ) -> None:
        self.namespace = program.namespace
        self.uniformity = uniformity
        self.arg_types = arg_types
        self.assume = assume
        self.assumed: set[str] = set()
        self.stores = count_stores(program.body)
        self.allocations = {node.target: node for node in walk(program.body) if isinstance(node, Alloc)}
        #: Lower bounds of expressions, by their dump, and pairs (a, b) with a >= b, from the conditions around.
        self.bounds: dict[str, int] = {}
        self.ordered: set[tuple[str, str]] = set()
        self.not_negative = set(self.stores)
        self._find_variables(program.body)

    # Variables: not negative until something else is assigned.

    def _find_variables(self, body: Statements) -> None:
        assignments: list[tuple[str, ast.expr | None]] = []
        for node in walk(body):
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, ast.Name):
                        assignments.append((target.id, node.value))
                    else:
                        assignments += [
                            (n.id, None)
                            for n in walk(target)
                            if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
                        ]
            elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
                assignments.append((node.target.id, value))
            elif isinstance(node, ast.For) and isinstance(node.target, ast.Name):
                assignments.append((node.target.id, self._smallest(node.iter)))
            elif isinstance(node, (WarpOp, Barrier)) and node.target is not None:
                is_shuffle = isinstance(node, WarpOp) and node.kind.startswith("shfl")
                assignments.append(
                    (node.target, node.value if is_shuffle else None if node.kind == "ballot_sync" else ast.Constant(0))
                )
        while True:
            negative = {
                n
                for n, value in assignments
                if n in self.not_negative and (value is None or not self.is_not_negative(value))
            }
            if not negative:
                return
            self.not_negative -= negative

    def _smallest(self, items: ast.expr) -> ast.expr | None:
        """The smallest value that a loop takes, if there is an expression for it."""
        values = constant(items, self.namespace, dict.fromkeys(self.uniformity.variables))
        if isinstance(values, tuple):
            return ast.Constant(min(values, default=0))
        if not (isinstance(items, ast.Call) and isinstance(items.func, ast.Name) and items.func.id == "range"):
            return None
        if len(items.args) == 1:
            return ast.Constant(0)
        if len(items.args) == 2:
            return items.args[0]
        step = self.uniformity.constant(items.args[2])
        if isinstance(step, int) and step < 0:
            stop = self.uniformity.constant(items.args[1])
            return ast.Constant(stop + 1) if isinstance(stop, int) else None
        return items.args[0] if self.is_not_negative(items.args[2]) else None

    # Expressions.

    def is_not_negative(self, node: ast.expr) -> bool:
        if self.bounds and self.bounds.get(ast.dump(node), -1) >= 0:
            return True
        known = self.uniformity.known(node)
        if known is not None and known.step == 0:
            return bool((known.values >= 0).all())
        if isinstance(node, ast.Constant):
            return isinstance(node.value, (int, bool)) and node.value >= 0
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.BinOp):
            return self._binary(node)
        if isinstance(node, ast.IfExp):
            return self.is_not_negative(node.body) and self.is_not_negative(node.orelse)
        if isinstance(node, (ast.Compare, ast.BoolOp)):
            return True
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.op, ast.Not) or (
                isinstance(node.op, ast.UAdd) and self.is_not_negative(node.operand)
            )
        if isinstance(node, ast.Attribute):
            if node.attr in ("size", "ndim"):
                return True
            value = constant_object(node, self.namespace)
            return isinstance(value, (int, np.integer)) and bool(value >= 0)
        if isinstance(node, ast.Subscript):
            return self._element(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        return False

    def _name(self, node: ast.Name) -> bool:
        if node.id.startswith(PREFIX):
            return True
        if node.id in self.stores:
            return node.id in self.not_negative
        if node.id in self.arg_types:
            kind = self.arg_types[node.id]
            if not isinstance(kind, types.Integer) or not kind.signed:
                return isinstance(kind, (types.Integer, types.Boolean))
            if self.assume:
                self.assumed.add(node.id)
            return self.assume
        value = self.namespace.get(node.id)
        return isinstance(value, (int, np.integer)) and bool(value >= 0)

    def _binary(self, node: ast.BinOp) -> bool:
        if isinstance(node.op, ast.Sub):
            limit = self.uniformity.constant(node.right)
            if isinstance(limit, int) and self.bounds.get(ast.dump(node.left), limit - 1) >= limit:
                return True
            return (ast.dump(node.left), ast.dump(node.right)) in self.ordered
        if isinstance(node.op, ast.Mod):
            return self.is_not_negative(node.right)
        if isinstance(node.op, ast.BitAnd):
            return self.is_not_negative(node.left) or self.is_not_negative(node.right)
        if isinstance(node.op, _SAME_SIGN):
            return self.is_not_negative(node.left) and self.is_not_negative(node.right)
        return False

    def _element(self, node: ast.Subscript) -> bool:
        if isinstance(node.value, ast.Attribute) and node.value.attr == "shape":
            return True
        if not isinstance(node.value, ast.Name):
            return False
        array = self.arg_types.get(node.value.id)
        if isinstance(array, types.Array):
            kind = array.dtype
        elif node.value.id in self.allocations:
            kind = constant_object(self.allocations[node.value.id].dtype, self.namespace)
        else:
            return False
        if isinstance(kind, types.Type):
            return isinstance(kind, types.Boolean) or (isinstance(kind, types.Integer) and not kind.signed)
        return isinstance(kind, type) and issubclass(kind, (np.unsignedinteger, np.bool_))

    def _call(self, node: ast.Call) -> bool:
        if isinstance(node.func, ast.Name) and node.func.id == AT_FIRST_LANE:
            return self.is_not_negative(node.args[0])
        function = constant_object(node.func, self.namespace)
        arguments = [self.is_not_negative(argument) for argument in node.args]
        if function is dialect.max_of_two:
            return any(arguments)
        if function is dialect.min_of_two:
            return all(arguments)
        if function is wrap_index or _is_in(function, _NOT_NEGATIVE_CALLS):
            return True
        is_cast = isinstance(function, types.Integer) or function is int
        is_cast = is_cast or (isinstance(function, type) and issubclass(function, np.integer))
        return is_cast and all(arguments)

    # Conditions.

    @contextmanager
    def given(self, test: ast.expr, is_true: bool) -> Iterator[None]:
        """Use what a condition says about what runs under it."""
        before = dict(self.bounds), set(self.ordered)
        self._learn(test, is_true)
        yield
        self.bounds, self.ordered = before

    def _learn(self, test: ast.expr, is_true: bool) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._learn(test.operand, not is_true)
        elif isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == is_true:
            for part in test.values:
                self._learn(part, is_true)
        elif isinstance(test, ast.Compare):
            operands = [test.left, *test.comparators]
            if len(operands) > 2 and not is_true:
                return
            for left, operator, right in zip(operands, test.ops, operands[1:], strict=False):
                self._learn_order(left, operator, right, is_true)

    def _learn_order(self, left: ast.expr, operator: ast.cmpop, right: ast.expr, is_true: bool) -> None:
        """Note ``larger >= smaller`` or ``larger > smaller``."""
        if isinstance(operator, ast.Eq) and is_true:
            self._note(left, right, 0)
            self._note(right, left, 0)
        elif isinstance(operator, (ast.Lt, ast.LtE)):
            strict = isinstance(operator, ast.Lt)
            self._note(right, left, strict) if is_true else self._note(left, right, not strict)
        elif isinstance(operator, (ast.Gt, ast.GtE)):
            strict = isinstance(operator, ast.Gt)
            self._note(left, right, strict) if is_true else self._note(right, left, not strict)

    def _note(self, larger: ast.expr, smaller: ast.expr, by: int) -> None:
        if any(self.stores.get(name, 0) > 1 for name in loaded(larger) | loaded(smaller)):
            return  # it may change under the condition
        if any(isinstance(node, (ast.Subscript, ast.Call)) for node in [*walk(larger), *walk(smaller)]):
            return
        key = ast.dump(larger)
        self.ordered.add((key, ast.dump(smaller)))
        value = self.uniformity.constant(smaller)
        bound = value + by if isinstance(value, int) else (by if self.is_not_negative(smaller) else None)
        if bound is not None:
            self.bounds[key] = max(bound, self.bounds.get(key, bound))

    # Rewriting.

    def sequence(self, statements: Statements) -> None:
        for statement in statements:
            if isinstance(statement, ast.If):
                statement.test = self.expression(statement.test)
                with self.given(statement.test, True):
                    self.sequence(statement.body)
                with self.given(statement.test, False):
                    self.sequence(statement.orelse)
            elif isinstance(statement, ast.While):
                statement.test = self.expression(statement.test)
                with self.given(statement.test, True):
                    self.sequence(statement.body)
            elif isinstance(statement, ast.For):
                statement.iter = self.expression(statement.iter)
                self.sequence(statement.body)
            elif not isinstance(statement, (Alloc, Barrier)):
                for field, value in ast.iter_fields(statement):
                    if isinstance(value, ast.expr):
                        setattr(statement, field, self.expression(value))
                    elif isinstance(value, list):
                        value[:] = [self.expression(v) if isinstance(v, ast.expr) else v for v in value]

    def expression(self, node: ast.expr) -> ast.expr:
        return _Indices(self).visit(node)  # type: ignore[no-any-return]

    def indices(self, array: ast.expr, index: ast.expr) -> ast.expr:
        """The index of an access, which may be a tuple."""
        if isinstance(index, ast.Tuple):
            index.elts[:] = [self.index(array, element, axis) for axis, element in enumerate(index.elts)]
            return index
        return self.index(array, index, None)

    def index(self, array: ast.expr, index: ast.expr, axis: int | None) -> ast.expr:
        """The index along one axis; without ``axis``, of the whole array: a number, or a variable with a tuple."""
        if isinstance(index, ast.Slice) or self.is_not_negative(index):
            return index
        sizes: ast.expr = ast.Attribute(copy.deepcopy(array), "shape", ast.Load())
        value = self.uniformity.constant(index)
        is_constant = isinstance(value, int) and value < 0
        if axis is not None or is_constant:
            sizes = ast.Subscript(sizes, ast.Constant(axis or 0), ast.Load())
        if is_constant:
            return placed(ast.BinOp(sizes, ast.Sub(), ast.Constant(-value)), index)  # type: ignore[return-value]
        self.namespace["wrap_index"] = wrap_index
        return placed(ast.Call(ast.Name("wrap_index", ast.Load()), [index, sizes], []), index)  # type: ignore[return-value]


class _Indices(ast.NodeTransformer):
    def __init__(self, wrapper: _Wrapper) -> None:
        self.wrapper = wrapper

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        node.test = self.visit(node.test)
        with self.wrapper.given(node.test, True):
            node.body = self.visit(node.body)
        with self.wrapper.given(node.test, False):
            node.orelse = self.visit(node.orelse)
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.AST:
        before = dict(self.wrapper.bounds), set(self.wrapper.ordered)
        for position, value in enumerate(node.values):
            node.values[position] = self.visit(value)
            self.wrapper._learn(node.values[position], isinstance(node.op, ast.And))
        self.wrapper.bounds, self.wrapper.ordered = before
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if isinstance(node.value, ast.Attribute) and node.value.attr in ("shape", "strides"):
            return node
        if isinstance(node.value, ast.Subscript) and _root(node) in self.wrapper.allocations:  # t[i][j] is t[i, j]
            inner, outer = (s.elts if isinstance(s, ast.Tuple) else [s] for s in (node.value.slice, node.slice))
            both = placed(ast.Tuple([*inner, *outer], ast.Load()), node)
            return self.visit(placed(ast.Subscript(node.value.value, both, node.ctx), node))  # type: ignore[no-any-return, arg-type]
        node.value = self.visit(node.value)
        node.slice = self.visit(node.slice)
        node.slice = self.wrapper.indices(node.value, node.slice)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name in atomics.NAMES and name != atomics.atomic_compare_and_swap.__name__:
            node.args[1] = self.wrapper.indices(node.args[0], node.args[1])
        return node


def _root(node: ast.expr) -> str | None:
    """The variable that is indexed, once or repeatedly."""
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def _is_in(value: Any, known: set[Any]) -> bool:
    try:
        return value in known
    except TypeError:
        return False
