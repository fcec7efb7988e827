"""Statements that the compiler adds to Python's: what involves several threads at once, and memory they share."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from numstack.simt.source import constant_object, dotted

#: ``cuda.threadIdx.x`` and the like become names with dots, which no variable can have.
PREFIX = "cuda."


class _Statement(ast.stmt):
    if TYPE_CHECKING:  # typeshed gives statements line numbers as positional parameters

        def __init__(self, *fields: ast.expr | None) -> None: ...


class Barrier(_Statement):
    """``target = syncthreads_or(value)``; plain ``syncthreads()`` has neither."""

    _fields = ("value",)
    target: str | None
    kind: str
    value: ast.expr | None


class WarpOp(_Statement):
    """``target = shfl_xor_sync(mask, value, extra)``: a shuffle, a vote, or ``syncwarp``.

    ``value`` is the name of a variable of its own, for other lanes read it.
    """

    _fields = ("value", "extra")
    target: str | None
    kind: str
    value: ast.expr | None
    extra: ast.expr | None


class Collective(WarpOp):
    """A call of a `collective` function; ``extra`` is the tuple of its arguments."""

    function: Callable[..., None]


class Alloc(_Statement):
    """``target = shared.array(shape, dtype)`` or ``local.array``; a shape of (0,) is sized at launch."""

    _fields = ("dtype",)
    target: str
    space: str
    shape: tuple[int, ...]
    dtype: ast.expr


SHUFFLES = {"shfl_sync", "shfl_up_sync", "shfl_down_sync", "shfl_xor_sync"}
VOTES = {"any_sync", "all_sync", "ballot_sync", "eq_sync", "activemask"}


def walk(nodes: ast.AST | Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Every node of a statement or of several."""
    for node in [nodes] if isinstance(nodes, ast.AST) else nodes:
        yield from ast.walk(node)


def contains(nodes: ast.AST | Iterable[ast.AST], *kinds: type[ast.AST]) -> bool:
    """Whether a node of one of these kinds is among them."""
    return any(isinstance(node, kinds) for node in walk(nodes))


def loaded(nodes: ast.AST | Iterable[ast.AST]) -> set[str]:
    """Variables that are read (an augmented assignment reads too)."""
    names = set()
    for node in walk(nodes):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and not node.id.startswith(PREFIX):
            names.add(node.id)
        elif isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def stored(nodes: ast.AST | Iterable[ast.AST]) -> set[str]:
    """Variables that are assigned."""
    names = set()
    for node in walk(nodes):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (Barrier, WarpOp, Alloc)) and node.target is not None:
            names.add(node.target)
    return names


def count_stores(nodes: Iterable[ast.AST]) -> dict[str, int]:
    """How many statements assign each variable."""
    counts: dict[str, int] = {}
    for node in walk(nodes):
        names = []
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names = [node.id]
        elif isinstance(node, (Barrier, WarpOp, Alloc)) and node.target is not None:
            names = [node.target]
        for name in names:
            counts[name] = counts.get(name, 0) + 1
    return counts


_BINARY: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
COMPARE: dict[type[ast.cmpop], Any] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_UNARY: dict[type[ast.unaryop], Any] = {ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert}


def constant(node: ast.AST, namespace: Mapping[str, Any], local: Mapping[str, Any]) -> Any:
    """The number (or tuple of numbers) that an expression is in every launch, else None.

    ``namespace`` holds the globals, ``local`` the kernel's variables: their value, or None if it is not constant.
    """

    def of(node: ast.AST) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, (ast.Name, ast.Attribute)):
            parts = dotted(node)
            if parts is not None and parts[0] in local:
                return local[parts[0]] if len(parts) == 1 else None
            return constant_object(node, namespace)
        if isinstance(node, ast.Tuple):
            return tuple(of(element) for element in node.elts)
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            return _BINARY[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
            return _UNARY[type(node.op)](of(node.operand))
        if isinstance(node, ast.Subscript):
            return of(node.value)[of(node.slice)]
        return None

    try:
        value = of(node)
    except (ArithmeticError, TypeError, IndexError, ValueError):
        return None
    items = value if isinstance(value, tuple) else (value,)
    return value if all(isinstance(item, (int, float, np.integer, np.floating)) for item in items) else None


def truth(test: ast.expr, namespace: Mapping[str, Any], local: Mapping[str, Any]) -> bool | None:
    """Whether a condition holds in every launch, or fails in every one (that of a specialised kernel does), else None.

    ``namespace`` and ``local`` are those of :func:`constant`.
    """
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = truth(test.operand, namespace, local)
        return None if inner is None else not inner
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and type(test.ops[0]) in COMPARE:
        sides = [constant(side, namespace, local) for side in (test.left, *test.comparators)]
        return None if None in sides else bool(COMPARE[type(test.ops[0])](*sides))
    value = constant(test, namespace, local)
    return None if value is None else bool(value)


def is_stable(node: ast.AST) -> bool:
    """Whether evaluating this later, or twice, gives the same: names, constants, and shapes and dtypes of arrays."""
    if isinstance(node, (ast.Name, ast.Constant)):
        return True
    if isinstance(node, ast.Attribute):
        return is_stable(node.value)
    if isinstance(node, ast.Subscript):
        return (
            isinstance(node.value, ast.Attribute)
            and node.value.attr == "shape"
            and isinstance(node.slice, ast.Constant)
        )
    return isinstance(node, (ast.Tuple, ast.UnaryOp)) and all(
        is_stable(child) for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)
    )


def operands(node: ast.expr) -> list[tuple[str, int | None, ast.expr]]:
    """Sub-expressions in order of evaluation: field, position in the field's list, expression."""
    found: list[tuple[str, int | None, ast.expr]] = []
    for name, value in ast.iter_fields(node):
        if isinstance(node, ast.Call) and name == "func":
            continue
        if isinstance(value, ast.expr):
            found.append((name, None, value))
        elif isinstance(value, list):
            for position, item in enumerate(value):
                if isinstance(item, ast.expr):
                    found.append((name, position, item))
                elif isinstance(item, ast.keyword):
                    found.append(("keywords", position, item))  # type: ignore[arg-type]
    return found
