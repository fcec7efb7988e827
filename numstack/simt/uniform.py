"""Which values are the same for all threads of a block, or of a chunk.

Two analyses that help one another:

- *known values*: an expression of thread indices and constants is evaluated for every thread of the block, up to a
  multiple of something that is the same for all: ``cuda.grid(1) // 32`` with 128 threads a block is
  ``[0 ... 0, 1 ... 1, 2 ... 2, 3 ... 3] + 4 n``, hence the same for all threads of a warp;
- *levels*: a variable is as uniform as what is assigned to it and as the conditions under which that happens.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba.core import types

from numstack.simt import atomics
from numstack.simt.flow import Statements
from numstack.simt.geometry import Geometry
from numstack.simt.inline import Program
from numstack.simt.nodes import COMPARE, PREFIX, SHUFFLES, Alloc, WarpOp, constant, count_stores, walk

BLOCK, CHUNK, THREAD = 0, 1, 2
AT_FIRST_LANE = PREFIX + "at_first_lane"


@dataclass(frozen=True)
class Known:
    """An integer for each thread, plus an unknown multiple of ``step`` that is the same for all (0: exactly these)."""

    values: np.ndarray
    step: int

    @property
    def constant(self) -> int | None:
        first = self.values[0]
        return int(first) if self.step == 0 and (self.values == first).all() else None


_BINARY = {ast.Add: operator.add, ast.Sub: operator.sub}
_EXACT = {
    ast.Mult: operator.mul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.LShift: operator.lshift,
}


class Uniformity:
    """Levels of the variables of a program.

    Parameters
    ----------
    program : Program
    arg_types : dict of str to numba type
    geometry : Geometry
    per_thread : set of str
        Variables to be taken as different in each thread, whatever is assigned to them.
    """

    def __init__(
        self, program: Program, arg_types: Mapping[str, types.Type], geometry: Geometry, per_thread: set[str]
    ) -> None:
        self.namespace = program.namespace
        self.geometry = geometry
        self.per_thread = per_thread
        self.arg_types = arg_types
        counts = count_stores(program.body)
        self.variables = set(counts) | set(program.parameters)
        self.levels = dict.fromkeys(self.variables, BLOCK)
        self.definitions: dict[str, ast.expr] = {}
        self.range_variables: set[str] = set()
        self.local_arrays: set[str] = set()
        for node in walk(program.body):
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                if counts[name] == 1 and name not in program.parameters:
                    self.definitions[name] = node.value
            elif isinstance(node, ast.For) and isinstance(node.target, ast.Name) and _is_range(node.iter):
                if counts[node.target.id] == 1:
                    self.range_variables.add(node.target.id)
            elif isinstance(node, Alloc) and node.space == "local":
                self.local_arrays.add(node.target)
        self.loop_levels: dict[int, int] = {}
        self.raise_levels(per_thread | self.local_arrays, THREAD)
        self.changed = True
        while self.changed:
            self.changed = False
            self._known: dict[int, tuple[ast.AST, Known | None]] = {}
            self.sequence(program.body, BLOCK, [])

    def raise_levels(self, names: set[str], level: int) -> None:
        for name in names:
            if level > self.levels.get(name, BLOCK):
                self.levels[name] = level
                self.changed = True

    def constant(self, node: ast.AST) -> Any:
        """The number that an expression is in every launch and every thread, else None."""
        value = constant(node, self.namespace, dict.fromkeys(self.variables))
        if value is None and (known := self.known(node)) is not None:
            return known.constant
        return value

    # Levels.

    def sequence(self, statements: Statements, control: int, exits: list[int]) -> None:
        """Raise levels by what statements assign, where they run only if something of level ``control`` is so.

        ``exits[-1]`` becomes the level at which the enclosing loop is left.
        """
        for statement in statements:
            if isinstance(statement, ast.If):
                self.branch(statement, control, exits)
            elif isinstance(statement, (ast.For, ast.While)):
                header = statement.iter if isinstance(statement, ast.For) else statement.test
                level = max(control, self.level(header), self.loop_levels.get(id(statement), BLOCK))
                if isinstance(statement, ast.For):
                    self.raise_levels(_targets(statement.target), level)
                inner = [*exits, BLOCK]
                self.sequence(statement.body, level, inner)
                if inner[-1] > self.loop_levels.get(id(statement), BLOCK):
                    self.loop_levels[id(statement)] = inner[-1]
                    self.changed = True
            elif isinstance(statement, ast.Break):
                exits[-1] = max(exits[-1], control)
            elif isinstance(statement, ast.Assign):
                level = max(control, self.level(statement.value))
                for target in statement.targets:
                    self.raise_levels(_targets(target), level)
            elif isinstance(statement, ast.AugAssign):
                if isinstance(statement.target, ast.Name):
                    self.raise_levels({statement.target.id}, max(control, self.level(statement.value)))
            elif isinstance(statement, WarpOp) and statement.target is not None:
                is_one_value = statement.kind not in SHUFFLES
                self.raise_levels({statement.target}, max(control, CHUNK if is_one_value else THREAD))

    def branch(self, statement: ast.If, control: int, exits: list[int]) -> None:
        inner = max(control, self.level(statement.test))
        leaving = getattr(statement, "exits", None)
        self.sequence(statement.body, control if leaving == "orelse" else inner, exits)
        self.sequence(statement.orelse, control if leaving == "body" else inner, exits)

    def loop_level(self, loop: ast.For | ast.While) -> int:
        """How uniform the number of iterations is, whatever the conditions around the loop."""
        header = loop.iter if isinstance(loop, ast.For) else loop.test
        return max(self.level(header), self.loop_levels.get(id(loop), BLOCK))

    def level(self, node: ast.AST) -> int:
        """How uniform an expression is."""
        structural = self._structural(node)
        if structural == BLOCK:
            return BLOCK
        known = self.known(node)
        if known is None:
            return structural
        values = known.values
        if (values == values[0]).all():
            return BLOCK
        return min(structural, CHUNK if (values == values[self.geometry.first]).all() else THREAD)

    def _structural(self, node: ast.AST) -> int:
        if isinstance(node, ast.Name):
            if node.id.startswith(PREFIX):
                is_index = node.id.startswith((f"{PREFIX}threadIdx", f"{PREFIX}grid.")) or node.id in _LANES
                return THREAD if is_index else BLOCK
            return self.levels.get(node.id, BLOCK)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            if node.func.id == AT_FIRST_LANE:
                return min(CHUNK, self.level(node.args[0]))
            if node.func.id in atomics.NAMES:
                return THREAD
        return max(
            (self.level(child) for child in ast.iter_child_nodes(node) if isinstance(child, _PARTS)), default=BLOCK
        )

    # Known values.

    def known(self, node: ast.AST) -> Known | None:
        """The value of an integer (or bool) expression for every thread, if that follows from thread indices."""
        key = id(node)
        if key not in self._known:
            self._known[key] = (node, None)  # what refers to itself is not known
            self._known[key] = (node, self._evaluate(node))  # the node is kept: its id must not be used again
        return self._known[key][1]

    def _exactly(self, value: Any, step: int = 0) -> Known:
        return Known(np.broadcast_to(np.asarray(value, dtype=np.int64), (self.geometry.n_threads,)), step)

    def _evaluate(self, node: ast.AST) -> Known | None:
        if isinstance(node, ast.Constant):
            return self._exactly(node.value) if isinstance(node.value, int) else None
        if isinstance(node, ast.Name):
            return self._name(node)
        if isinstance(node, ast.BinOp):
            return self._binary(node)
        if isinstance(node, ast.UnaryOp):
            operand = self.known(node.operand)
            if operand is None or isinstance(node.op, ast.Invert):
                return None
            if isinstance(node.op, ast.Not):
                return self._exactly(operand.values == 0) if operand.step == 0 else None
            return operand if isinstance(node.op, ast.UAdd) else Known(-operand.values, operand.step)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARE:
            left, right = self.known(node.left), self.known(node.comparators[0])
            if left is None or right is None or left.step or right.step:
                return None
            return self._exactly(COMPARE[type(node.ops[0])](left.values, right.values))
        if isinstance(node, ast.BoolOp):
            operands = [self.known(value) for value in node.values]
            if any(operand is None or operand.step for operand in operands):
                return None
            combine = np.logical_and if isinstance(node.op, ast.And) else np.logical_or
            return self._exactly(combine.reduce([operand.values != 0 for operand in operands if operand is not None]))
        if (
            isinstance(node, ast.Call)
            and len(node.args) == 1
            and not node.keywords
            and _is_int_cast(node.func, self.namespace)
        ):
            return self.known(node.args[0])
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            value = constant(node, self.namespace, dict.fromkeys(self.variables))
            if isinstance(value, int):
                return self._exactly(value)
            if _is_size(node) and self._structural(node) == BLOCK:
                return self._exactly(0, 1)
        return None

    def _name(self, node: ast.Name) -> Known | None:
        name = node.id
        if name.startswith(PREFIX):
            what, _, axis = name.removeprefix(PREFIX).partition(".")
            size = self.geometry.block["xyz".index(axis)] if axis in ("x", "y", "z") else 0
            if what == "threadIdx":
                return self._exactly(self.geometry.axes[axis])
            if what == "grid":
                return self._exactly(self.geometry.axes[axis], size)
            if what == "laneid":
                return self._exactly(self.geometry.thread % self.geometry.warp_size)
            if what == "lane":
                return self._exactly(self.geometry.lane)
            if what == "blockDim":
                return self._exactly(size)
            if what == "warpsize":
                return self._exactly(self.geometry.warp_size)
            return (
                self._exactly(0, size if what == "gridsize" else 1)
                if what in ("blockIdx", "gridDim", "gridsize")
                else None
            )
        if name in self.variables:
            if (
                name in self.definitions
                and name not in self.per_thread
                and (known := self.known(self.definitions[name]))
            ):
                return known
            if self.levels[name] != BLOCK:
                return None
            kind = self.arg_types.get(name)
            return self._exactly(0, 1) if isinstance(kind, types.Integer) or name in self.range_variables else None
        value = constant(node, self.namespace, {})
        return self._exactly(value) if isinstance(value, (int, np.integer)) else None

    def _binary(self, node: ast.BinOp) -> Known | None:
        left, right = self.known(node.left), self.known(node.right)
        if left is None or right is None:
            return None
        kind = type(node.op)
        if kind in _BINARY:
            return Known(_BINARY[kind](left.values, right.values), math.gcd(left.step, right.step))
        if left.step == right.step == 0 and kind in _EXACT:
            if kind is ast.LShift and not ((right.values >= 0) & (right.values < 31)).all():
                return None
            return Known(_EXACT[kind](left.values, right.values), 0)
        if kind is ast.Mult:
            factor, other = (left.constant, right) if left.constant is not None else (right.constant, left)
            if factor is not None:
                return Known(other.values * factor, abs(other.step * factor))
            same = (left.values == left.values[0]).all() and (right.values == right.values[0]).all()
            return self._exactly(0, 1) if same else None
        divisor = right.constant
        if divisor is None or divisor < 0:
            return None
        if kind is ast.RShift and divisor < 62:
            kind, divisor = ast.FloorDiv, 1 << divisor
        if kind is ast.BitAnd and (divisor + 1) & divisor == 0:
            kind, divisor = ast.Mod, divisor + 1
        if divisor == 0 or left.step % divisor:
            same = (left.values == left.values[0]).all()
            return self._exactly(0, 1) if same and kind in (ast.FloorDiv, ast.Mod) else None
        if kind is ast.FloorDiv:
            return Known(left.values // divisor, left.step // divisor)
        if kind is ast.Mod:
            return self._exactly(left.values % divisor)
        return None


_LANES = (f"{PREFIX}laneid", f"{PREFIX}lane")
_PARTS = (ast.expr, ast.keyword)
_INTEGERS = {
    int,
    np.int32,
    np.int64,
    np.uint32,
    np.uint64,
    np.intp,
    types.int32,
    types.int64,
    types.uint32,
    types.uint64,
}


def _targets(target: ast.AST) -> set[str]:
    if isinstance(target, ast.Name):
        return {target.id}
    if isinstance(target, (ast.Tuple, ast.List)):
        return set().union(*(_targets(element) for element in target.elts))
    return set()


def _is_range(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "range"


def _is_int_cast(function: ast.AST, namespace: Mapping[str, Any]) -> bool:
    from numstack.simt.source import constant_object

    value = constant_object(function, namespace)
    try:
        return value in _INTEGERS
    except TypeError:
        return False


def _is_size(node: ast.AST) -> bool:
    """``x.size``, ``x.shape[0]``: an integer that is the same for all threads."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.value, ast.Attribute) and node.value.attr == "shape"
    return isinstance(node, ast.Attribute) and node.attr in ("size", "ndim")
