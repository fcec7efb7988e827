"""Loops in which neighbouring threads take neighbouring elements, rewritten so that lanes can be innermost.

for c in range(threadIdx.x, C, blockDim.x):      for c0 in range(at_first_lane(threadIdx.x), C, blockDim.x):
    s += x[row, c]                         ->        c = c0 + lane
                                                     if c < C:
                                                         s += x[row, c]
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable

from numstack.simt.flow import Statements, blocks, placed
from numstack.simt.inline import Program
from numstack.simt.nodes import PREFIX, Barrier, contains, count_stores, walk
from numstack.simt.uniform import AT_FIRST_LANE, CHUNK, THREAD, Uniformity

#: Names of counts that are positive in every launch.
_POSITIVE = ("blockDim", "gridDim", "gridsize", "warpsize")


def interchange_strided_loops(
    program: Program,
    uniformity: Uniformity,
    first_lane_works: Callable[[ast.expr], bool],
    new_name: Callable[[str], str],
) -> bool:
    """Rewrite the loops of a program where that is possible; whether there was one."""
    return _Interchange(program, uniformity, first_lane_works, new_name).sequence(program.body)


class _Interchange:
    def __init__(
        self,
        program: Program,
        uniformity: Uniformity,
        first_lane_works: Callable[[ast.expr], bool],
        new_name: Callable[[str], str],
    ) -> None:
        self.program = program
        self.uniformity = uniformity
        self.first_lane_works = first_lane_works
        self.new_name = new_name
        self.stores = count_stores(program.body)
        self.loads: dict[str, int] = {}
        for node in walk(program.body):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self.loads[node.id] = self.loads.get(node.id, 0) + 1

    def sequence(self, statements: Statements) -> bool:
        changed = False
        for statement in statements:
            if isinstance(statement, ast.For) and self.is_strided(statement):
                self.rewrite(statement)
                changed = True
            for block in blocks(statement):
                changed |= self.sequence(block)
        return changed

    def is_strided(self, loop: ast.For) -> bool:
        call, target = loop.iter, loop.target
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range"):
            return False
        if not isinstance(target, ast.Name) or len(call.args) < 2 or contains(loop, Barrier):
            return False
        start, stop = call.args[:2]
        step = call.args[2] if len(call.args) == 3 else ast.Constant(1)
        level = self.uniformity.level
        if level(start) != THREAD or level(stop) > CHUNK or level(step) > CHUNK or not self.is_positive(step):
            return False
        if self.uniformity.loop_levels.get(id(loop), 0) > CHUNK or self.stores[target.id] != 1:
            return False
        inside = sum(1 for node in walk(loop.body) if isinstance(node, ast.Name) and node.id == target.id)
        if inside != self.loads.get(target.id, 0):
            return False  # its last value is used after the loop
        known = self.uniformity.known(start)
        if known is None or not self.first_lane_works(start):
            return False
        return bool((known.values >= known.values[self.uniformity.geometry.first]).all())

    def is_positive(self, node: ast.expr) -> bool:
        value = self.uniformity.constant(node)
        if isinstance(value, int):
            return value > 0
        if isinstance(node, ast.Name):
            if node.id.startswith(PREFIX):
                return node.id.removeprefix(PREFIX).partition(".")[0] in _POSITIVE
            return node.id in self.uniformity.definitions and self.is_positive(self.uniformity.definitions[node.id])
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Add)):
            return self.is_positive(node.left) and self.is_positive(node.right)
        return False

    def rewrite(self, loop: ast.For) -> None:
        assert isinstance(loop.iter, ast.Call) and isinstance(loop.target, ast.Name)
        start, stop, *step = loop.iter.args
        first = self.new_name(f"{loop.target.id}_first")
        at_first = ast.Call(ast.Name(AT_FIRST_LANE, ast.Load()), [start], [])
        known = self.uniformity.known(start)
        assert known is not None
        geometry = self.uniformity.geometry
        if (known.values - known.values[geometry.first] == geometry.lane).all():
            offset: ast.expr = ast.Name(f"{PREFIX}lane", ast.Load())
        else:
            offset = ast.BinOp(copy.deepcopy(start), ast.Sub(), copy.deepcopy(at_first))
        value = ast.BinOp(ast.Name(first, ast.Load()), ast.Add(), offset)
        index = ast.Assign([ast.Name(loop.target.id, ast.Store())], value)
        test = ast.Compare(ast.Name(loop.target.id, ast.Load()), [ast.Lt()], [copy.deepcopy(stop)])
        body = [placed(index, loop), placed(ast.If(test, loop.body, []), loop)]
        loop.iter.args = [placed(at_first, loop), stop, *step]  # type: ignore[list-item]
        loop.target = placed(ast.Name(first, ast.Store()), loop)  # type: ignore[assignment]
        loop.body = body  # type: ignore[assignment]
