"""Variables that are cheaper to compute again than to keep for every thread.

    i = cuda.grid(1)          is computed in each loop over lanes that uses i: no array of one i per thread, and LLVM
    row = i // C              sees that neighbouring lanes have neighbouring indices

A variable qualifies if it is assigned once, from indices, parameters and other such variables by plain arithmetic, and
if all its uses come after that in the same pass through the code.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numba.core import types

from numstack.simt import dialect
from numstack.simt.flow import Statements, blocks
from numstack.simt.inline import Program
from numstack.simt.nodes import count_stores, loaded, stored
from numstack.simt.source import constant_object
from numstack.simt.uniform import AT_FIRST_LANE, BLOCK, CHUNK, THREAD, Uniformity

_PURE_NODES = (
    ast.Name,
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.Compare,
    ast.BoolOp,
    ast.IfExp,
    ast.operator,
    ast.unaryop,
    ast.cmpop,
    ast.boolop,
    ast.Load,
    ast.Tuple,
    ast.Slice,
)
_CHEAP_CALLS = {
    int,
    bool,
    float,
    dialect.max_of_two,
    dialect.min_of_two,
    np.int32,
    np.int64,
    np.uint32,
    np.intp,
    np.float32,
}
_MAX_NODES = 40


class Recomputed:
    """The variables of a program that are computed again where they are used.

    Attributes
    ----------
    definitions : dict of str to ast.expr
        In order of assignment.
    at_chunk_start : set of str
        Those among them that are the same for all lanes of a chunk, and are computed once for each chunk.
    """

    def __init__(
        self,
        program: Program,
        uniformity: Uniformity,
        chunk_variables: set[str],
        arg_types: Mapping[str, types.Type],
    ) -> None:
        self.arg_types = arg_types
        self.uniformity = uniformity
        self.namespace = program.namespace
        self.stores = count_stores(program.body)
        self.parameters = set(program.parameters)
        self.definitions: dict[str, ast.expr] = {}
        #: Positions, in order of the text, of the statements that load and store each variable.
        self._loads: dict[str, list[int]] = defaultdict(list)
        self._store: dict[str, int] = {}
        self._candidates: list[tuple[str, ast.expr, int, int]] = []
        self._position = 0
        self._number(program.body)
        for name, value, start, end in self._candidates:
            if all(start < use < end for use in self._loads[name]) and self.can_repeat(value, start, end):
                self.definitions[name] = value
        self.at_chunk_start: set[str] = set()
        for name, value in list(self.definitions.items()):
            if uniformity.levels[name] < THREAD:
                if self._starts_chunk(value, chunk_variables):
                    self.at_chunk_start.add(name)
                else:
                    del self.definitions[name]

    def _starts_chunk(self, value: ast.expr, chunk_variables: set[str]) -> bool:
        """Whether an expression needs nothing that a chunk computes on its way."""
        for name in loaded(value):
            if name in self.definitions:
                if name not in self.at_chunk_start and not self._starts_chunk(self.definitions[name], chunk_variables):
                    return False
            elif name in self.uniformity.variables and (
                name in chunk_variables or self.uniformity.levels[name] > BLOCK
            ):
                return False
        return True

    def _number(self, statements: Statements) -> None:
        first = len(self._candidates)
        for statement in statements:
            self._position += 1
            here = self._position
            inner = blocks(statement)
            if inner:
                header = [
                    child
                    for child in ast.iter_child_nodes(statement)
                    if not isinstance(child, (ast.stmt, ast.excepthandler))
                ]
                reads, writes = loaded(header), stored(header)
            else:
                reads, writes = loaded(statement), stored(statement)
            if isinstance(statement, ast.While):  # its condition is read again after the body
                self._number(statement.body)
                inner = []
                self._position += 1
                for name in reads:
                    self._loads[name].append(self._position)
            for name in reads:
                self._loads[name].append(here)
            for name in writes:
                self._store[name] = here
            for block in inner:
                self._number(block)
            if (
                isinstance(statement, ast.Assign)
                and len(statement.targets) == 1
                and isinstance(statement.targets[0], ast.Name)
                and self.stores[statement.targets[0].id] == 1
                and statement.targets[0].id not in self.parameters
                and self.uniformity.levels[statement.targets[0].id] > BLOCK
            ):
                self._candidates.append((statement.targets[0].id, statement.value, here, -1))
        self._position += 1
        end = self._position
        for index in range(first, len(self._candidates)):
            name, value, start, known_end = self._candidates[index]
            if known_end < 0:
                self._candidates[index] = (name, value, start, end)

    def can_repeat(self, value: ast.expr, start: int, end: int) -> bool:
        """Whether an expression gives the same at any time between two positions in the text."""
        if not self.is_cheap(value):
            return False
        for name in loaded(value):
            if name in self.definitions or (name in self.parameters and name not in self.stores):
                continue
            if name not in self.uniformity.variables:
                continue  # a global
            if self.uniformity.levels[name] == THREAD or self.stores[name] != 1:
                return False
            if start < self._store[name] < end:
                return False
        return True

    def repeats_in(self, value: ast.expr, body: Statements, level: int) -> bool:
        """Whether an expression gives the same all through ``body``, from variables of at most this level."""
        changed = stored(body)
        return self.is_cheap(value) and all(
            name in self.definitions
            or name not in self.uniformity.variables
            or (name not in changed and self.uniformity.levels[name] <= min(level, CHUNK))
            for name in loaded(value)
        )

    def is_cheap(self, node: ast.expr) -> bool:
        """Whether an expression is a little arithmetic on indices, variables and sizes, or a view of an argument."""
        count = 0
        pending: list[ast.AST] = [node]
        while pending:
            part = pending.pop()
            count += 1
            if count > _MAX_NODES:
                return False
            if isinstance(part, ast.Subscript):
                if isinstance(part.value, ast.Attribute) and part.value.attr == "shape":
                    continue
                if not self.is_view(part):
                    return False
                pending.append(part.slice)
            elif isinstance(part, ast.Attribute):
                if part.attr not in ("size", "ndim", "shape"):
                    return False
            elif isinstance(part, ast.Call):
                if isinstance(part.func, ast.Name) and part.func.id == AT_FIRST_LANE:
                    continue
                function = constant_object(part.func, self.namespace)
                if part.keywords or not (isinstance(function, types.Type) or _is_cheap_call(function)):
                    return False
                pending += part.args
            elif isinstance(part, _PURE_NODES):
                pending += ast.iter_child_nodes(part)
            else:
                return False
        return True

    def is_view(self, node: ast.Subscript) -> bool:
        """Whether indexing gives an array (of an argument), not an element."""
        array = self.arg_types.get(node.value.id) if isinstance(node.value, ast.Name) else None
        indices = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        return isinstance(array, types.Array) and (
            len(indices) < array.ndim or any(isinstance(index, ast.Slice) for index in indices)
        )

    def has_first_lane(self, value: ast.expr) -> bool:
        """Whether an expression can be computed for the first lane of a chunk alone."""
        for name in loaded(value):
            if name in self.definitions:
                if not self.has_first_lane(self.definitions[name]):
                    return False
            elif name in self.uniformity.variables and self.uniformity.levels[name] == THREAD:
                return False
        return True


def _is_cheap_call(function: Any) -> bool:
    try:
        return function in _CHEAP_CALLS
    except TypeError:
        return False
