"""A plan as Python source that numba compiles: ordinary loops over chunks and lanes, commented with the kernel's lines.

    for first_x in range(0, 128, 32):
        for this_lane in range(32):
            # layernorm.py:31  d = x[row, c] - mean
            mean = mean_threads[first_x + this_lane]
            ...

Each loop over lanes reads what it needs of a thread's variables into scalars and writes back what is needed later. A
variable that lives across barriers is an array with one element for each thread (``mean_threads``), one that lives
within a region an array with one for each lane (``mean_lanes``), any other a scalar.
"""

from __future__ import annotations

import ast
import copy
import linecache
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from numstack.simt import division, warp
from numstack.simt.codegen import Hints
from numstack.simt.collective import WARP, registers_of_warp
from numstack.simt.flow import Statements
from numstack.simt.geometry import Geometry
from numstack.simt.nodes import PREFIX, SHUFFLES, Alloc, Collective, loaded, stored
from numstack.simt.plan import BlockVote, Branch, Guard, Lanes, Leave, Loop, Node, Region, Scalar, Together, Warp
from numstack.simt.source import error_at
from numstack.simt.uniform import AT_FIRST_LANE, CHUNK, Uniformity

if TYPE_CHECKING:
    from numstack.simt.storage import Storage


class NotTheSame(Exception):
    """A variable of single threads is needed where one value must do for all: ``name`` must be kept per thread."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Emitter:
    """Writes a kernel.

    Attributes
    ----------
    hints : Hints
        What the compiler must know about the lines.
    places : dict of int to ast node
        The statement of the kernel behind a line.
    """

    def __init__(self, storage: Storage, geometry: Geometry, uniformity: Uniformity) -> None:
        self.storage = storage
        self.geometry = geometry
        self.uniformity = uniformity
        self.lines: list[str] = []
        self.hints = Hints()
        self.places: dict[int, ast.AST] = {}
        self.depth = 0
        self.uses: set[str] = set()
        self._last_place: tuple[str, int] | None = None
        self._in_place: set[str] = set()  # recomputed variables of the current statements that change inside them

    # Lines.

    def line(self, text: str, place: ast.AST | None = None) -> int:
        self.lines.append("    " * self.depth + text)
        if place is not None:
            self.places[len(self.lines)] = place
        return len(self.lines)

    def comment(self, place: ast.AST) -> None:
        file, number = getattr(place, "file", ""), getattr(place, "lineno", 0)
        if (file, number) != self._last_place:
            self._last_place = (file, number)
            text = linecache.getline(file, number).strip()
            self.line(f"# {Path(file).name}:{number}  {text}")

    def indented(self, header: str, place: ast.AST | None = None) -> int:
        number = self.line(header, place)
        self.depth += 1
        return number

    # Nodes.

    def nodes(self, nodes: list[Node], level: Callable[[ast.AST], str]) -> None:
        """Emit nodes; ``level`` writes expressions that are the same for the whole block, or chunk."""
        start = len(self.lines)
        for node in nodes:
            self.node(node, level)
        if len(self.lines) == start:
            self.line("pass")

    def node(self, node: Node, level: Callable[[ast.AST], str]) -> None:
        if isinstance(node, Region):
            self.region(node)
        elif isinstance(node, Lanes):
            self.lanes(node)
        elif isinstance(node, Warp):
            self.warp(node)
        elif isinstance(node, Together):
            self.together(node.operation)
        elif isinstance(node, BlockVote):
            self.block_vote(node)
        elif isinstance(node, Scalar):
            self.scalar(node.statement, level)
        elif isinstance(node, Leave):
            self.line("break", node.statement)
        elif isinstance(node, Branch):
            self.comment(node.place)
            self.indented(f"if {level(node.test)}:", node.place)
            self.nodes(node.body, level)
            self.depth -= 1
            if node.orelse:
                self.indented("else:")
                self.nodes(node.orelse, level)
                self.depth -= 1
        elif isinstance(node, Loop):
            self.loop(node, level)
        else:
            self.guard(node, level)

    def loop(self, node: Loop, level: Callable[[ast.AST], str]) -> None:
        header = node.header
        self.comment(header)
        if isinstance(header, ast.For):
            number = self.indented(f"for {ast.unparse(header.target)} in {level(header.iter)}:", header)
            if self.storage.is_short_warp_loop(node):
                self.hints.unrolled.add(number)
        else:
            self.indented(f"while {level(header.test)}:", header)
        self.nodes(node.body, level)
        self.depth -= 1

    def scalar(self, statement: ast.stmt, level: Callable[[ast.AST], str]) -> None:
        self.comment(statement)
        for text in level(statement).split("\n"):
            self.line(text, statement)

    def region(self, region: Region) -> None:
        carried = self.storage.carried(region)
        for name in carried:
            self.line(f"{name}_before = {name}")
        loops = self.geometry.chunk_loops()
        for header in loops:
            self.indented(header)
        for name in carried:
            self.line(f"{name} = {name}_before")
        for name, value in self.storage.chunk_start(region):
            self.line(f"{name} = {self.in_chunk(value)}")
        self.nodes(region.body, self.in_chunk)
        self.depth -= len(loops)
        self._last_place = None

    def guard(self, node: Guard, level: Callable[[ast.AST], str]) -> None:
        if not node.check:
            self.nodes(node.body, level)
            return
        flag = self.storage.new_name("any_lane")
        self.line(f"{flag} = False")
        self.begin_lanes()
        self.recomputed({node.mask})
        self.fetch({node.mask})
        self.line(f"{flag} = {flag} or {node.mask}")
        self.end_lanes()
        self.indented(f"if {flag}:")
        self.nodes(node.body, level)
        self.depth -= 1

    # Loops over lanes.

    def begin_lanes(self) -> None:
        headers = self.geometry.lane_loops()
        for header in headers[:-1]:
            self.hints.unrolled.add(self.indented(header))
        self.hints.lanes.add(self.indented(headers[-1]))
        self._last_place = None

    def end_lanes(self) -> None:
        self.depth -= len(self.geometry.lane_loops())

    def recomputed(self, names: set[str]) -> None:
        """Compute the recomputed variables among ``names``, and those that they need, in order."""
        for name, value in self.storage.recomputed(names):
            self.line(f"{name} = {self.in_thread(value)}")

    def fetch(self, names: set[str]) -> None:
        for name in sorted((names & self.storage.tiles.keys()) - self.storage.local_arrays.keys()):
            self.line(f"{name} = {self.tile(name)}")

    def tile(self, name: str, *, first_lane: bool = False) -> str:
        space = self.storage.tiles[name]
        index = self.geometry.name("thread" if space == "threads" else "lane", first_lane=first_lane)
        return f"{name}_{space}[{ast.unparse(ast.parse(index))}]"

    def lanes(self, node: Lanes) -> None:
        storage = self.storage
        flow = storage.liveness.flows[node]
        statements = [s for s in node.statements if not isinstance(s, Alloc)]
        if not statements and not node.masks:
            return
        after = storage.liveness.after[node]
        written = {name for name in flow.assigned & after if name in storage.tiles and name not in storage.local_arrays}
        kept = {name for name in written if storage.is_kept(node, name)}
        masks = node.masks
        reads = loaded([*statements, *masks]) | ({node.mask} if node.mask else set())
        # What depends on a loop among these statements is computed where it stands, not before all of them.
        changed = stored(statements) - storage.recomputed_variables.keys()
        self._in_place = {
            name for name in reads & storage.recomputed_variables.keys() if storage.with_operands({name}) & changed
        }
        self.begin_lanes()
        self.recomputed(reads - self._in_place)
        self.fetch((flow.exposed | ({node.mask} if node.mask else set())) | kept)
        if node.mask and statements:
            self.indented(f"if {node.mask}:")
        self.statements(statements)
        for name in sorted(written - kept) if node.mask else []:
            self.line(f"{self.tile(name)} = {name}")
        if node.mask and statements:
            self.depth -= 1
        for name in sorted(kept if node.mask else written):
            if name not in {m.targets[0].id for m in masks}:  # type: ignore[attr-defined]
                self.line(f"{self.tile(name)} = {name}")
        for mask in masks:
            name = mask.targets[0].id  # type: ignore[attr-defined]
            self.comment(mask)
            if name in storage.tiles:
                self.line(f"{self.tile(name)} = bool({self.in_thread(mask.value)})", mask)
        self.end_lanes()

    def statements(self, statements: Statements) -> None:
        """Statements of one thread."""
        start = len(self.lines)
        for statement in statements:
            if isinstance(statement, ast.Pass) or self._is_computed_before(statement):
                continue
            self.comment(statement)
            if isinstance(statement, ast.If):
                self.indented(f"if {self.in_thread(statement.test)}:", statement)
                self.statements(statement.body)
                self.depth -= 1
                if any(not isinstance(s, ast.Pass) for s in statement.orelse):
                    self.indented("else:")
                    self.statements(statement.orelse)
                    self.depth -= 1
            elif isinstance(statement, ast.For):
                header = f"for {ast.unparse(statement.target)} in {self.in_thread(statement.iter)}:"
                number = self.indented(header, statement)
                if self.storage.planner.is_unrolled(statement):
                    self.hints.unrolled.add(number)
                self.statements(statement.body)
                self.depth -= 1
            elif isinstance(statement, ast.While):
                self.indented(f"while {self.in_thread(statement.test)}:", statement)
                self.statements(statement.body)
                self.depth -= 1
            else:
                self.line(self.in_thread(statement), statement)
        if len(self.lines) == start:
            self.line("pass")

    def _is_computed_before(self, statement: ast.stmt) -> bool:
        return self.storage.planner.is_recomputed(statement) and not stored(statement) <= self._in_place

    # Operations of several threads.

    def warp(self, node: Warp) -> None:
        operation = node.operation
        assert operation.target is not None
        self.comment(operation)
        if operation.kind not in SHUFFLES:
            self.vote(operation.target, operation.kind, node.value, node.mask, operation)
            return
        if operation.target not in self.storage.tiles:
            return  # its result is not used
        if operation.extra is None:
            raise error_at(operation, f"cuda.{operation.kind} without a lane", "give mask, value and lane")
        function = warp.FUNCTIONS.get(operation.kind)
        value = node.value
        if function is not None and self.uniformity.level(operation.extra) <= CHUNK:
            start = self.geometry.name("thread" if self.storage.tiles[value] == "threads" else "lane", first_lane=True)
            to = self.geometry.name(
                "thread" if self.storage.tiles[operation.target] == "threads" else "lane", first_lane=True
            )
            arguments = [
                f"{operation.target}_{self.storage.tiles[operation.target]}",
                to,
                f"{value}_{self.storage.tiles[value]}",
                start,
                self.in_chunk(operation.extra),
            ]
            name = self.storage.bind(function.__name__, function)
            self.line(f"{name}({', '.join(arguments)})", operation)
            return
        self.begin_lanes()
        reads = loaded(operation.extra)
        self.recomputed(reads)
        self.fetch(reads)
        lane = self.geometry.name("laneid")
        extra = f"({self.in_thread(operation.extra)})"
        source = {
            "shfl_sync": f"{extra} % 32",
            "shfl_xor_sync": f"({lane} ^ {extra}) % 32",
            "shfl_up_sync": f"{lane} - {extra} if {lane} >= {extra} else {lane}",
            "shfl_down_sync": f"{lane} + {extra} if {lane} + {extra} < 32 else {lane}",
        }[operation.kind]
        offset = self.geometry.name("thread", first_lane=True) if self.storage.tiles[value] == "threads" else "0"
        element = f"{value}_{self.storage.tiles[value]}[{offset} + ({source})]"
        self.line(f"{self.tile(operation.target)} = {ast.unparse(ast.parse(element))}", operation)
        self.end_lanes()

    def together(self, operation: Collective) -> None:
        if self.geometry.n_threads % WARP:
            raise error_at(
                operation,
                f"{operation.kind} takes whole warps, but a block has {self.geometry.n_threads} threads",
                "launch blocks of a multiple of 32 threads",
            )
        assert isinstance(operation.extra, ast.Tuple)
        view = self.storage.bind("registers_of_warp", registers_of_warp)
        arguments = []
        for array, first, count in zip(*(operation.extra.elts[i::3] for i in range(3)), strict=True):
            assert isinstance(array, ast.Name)
            if array.id not in self.storage.local_arrays:
                raise error_at(
                    operation, f"{operation.kind} takes local arrays; {array.id} is none", "copy it into one"
                )
            is_by_thread = self.storage.tiles.get(array.id) == "threads"
            thread = self.geometry.name("thread" if is_by_thread else "lane", first_lane=True)
            arguments.append(f"{view}({array.id}, {thread}, {self.in_chunk(first)}, {self.in_chunk(count)})")
        self.comment(operation)
        function = self.storage.bind(operation.kind, operation.function)
        self.line(f"{function}({', '.join(arguments)})", operation)

    def vote(self, target: str, kind: str, value: str, mask: str | None, place: ast.AST) -> None:
        """Count, or collect, what the lanes of a chunk say."""
        if kind == "eq_sync":
            self.equality(target, value, mask, place)
            return
        votes = self.storage.new_name("votes")
        taking_part = self.storage.new_name("taking_part")
        self.line(f"{votes} = 0")
        needs_all = kind in ("all_sync", "syncthreads_and")
        if needs_all:
            self.line(f"{taking_part} = 0")
        self.cast_votes(kind, votes, taking_part if needs_all else None, value, mask)
        self.line(f"{target} = {self.result_of(kind, votes, taking_part)}", place)

    def equality(self, target: str, value: str, mask: str | None, place: ast.AST) -> None:
        """``target`` is whether all lanes have the same value: that of the last one."""
        last = self.storage.new_name("last")
        self.line(f"{target} = True")
        for statement in (f"{last} = {value}", f"{target} = {target} and {value} == {last}"):
            self.begin_lanes()
            names = {value} | ({mask} if mask else set())
            self.recomputed(names)
            self.fetch(names)
            self.line(f"if {mask}: {statement}" if mask else statement, place)
            self.end_lanes()

    def cast_votes(self, kind: str, votes: str, taking_part: str | None, value: str, mask: str | None) -> None:
        self.begin_lanes()
        names = {value} | ({mask} if mask else set())
        self.recomputed(names)
        self.fetch(names)
        vote = f"1 << {self.geometry.name('laneid')}" if kind == "ballot_sync" else "1"
        self.line(f"{votes} += {vote} if {f'{mask} and ' if mask else ''}{value} else 0")
        if taking_part is not None:
            self.line(f"{taking_part} += {f'1 if {mask} else 0' if mask else '1'}")
        self.end_lanes()

    def result_of(self, kind: str, votes: str, taking_part: str) -> str:
        int32 = self.storage.int32
        return {
            "any_sync": f"{votes} > 0",
            "all_sync": f"{votes} == {taking_part}",
            "ballot_sync": f"{int32}({votes})",
            "syncthreads_or": f"{int32}({votes} > 0)",
            "syncthreads_and": f"{int32}({votes} == {taking_part})",
            "syncthreads_count": f"{int32}({votes})",
        }[kind]

    def block_vote(self, node: BlockVote) -> None:
        votes = self.storage.new_name("votes")
        taking_part = self.storage.new_name("taking_part")
        self.line(f"{votes} = 0")
        needs_all = node.kind == "syncthreads_and"
        if needs_all:
            self.line(f"{taking_part} = 0")
        loops = self.geometry.chunk_loops()
        for header in loops:
            self.indented(header)
        for name, value in self.storage.chunk_start(node):
            self.line(f"{name} = {self.in_chunk(value)}")
        self.cast_votes(node.kind, votes, taking_part if needs_all else None, node.value, node.mask)
        self.depth -= len(loops)
        self.line(f"{node.target} = {self.result_of(node.kind, votes, taking_part)}")

    # Expressions.

    def in_thread(self, node: ast.AST) -> str:
        """A statement or expression of one thread, inside a loop over lanes."""
        return ast.unparse(_Rewrite(self, "thread").visit(copy.deepcopy(node)))

    def in_chunk(self, node: ast.AST) -> str:
        """One that is the same for all lanes of a chunk, outside the loop over lanes."""
        return ast.unparse(_Rewrite(self, "chunk").visit(copy.deepcopy(node)))

    def in_block(self, node: ast.AST) -> str:
        """One that is the same for all threads of a block."""
        return ast.unparse(_Rewrite(self, "block").visit(copy.deepcopy(node)))


class _Rewrite(ast.NodeTransformer):
    """Names of indices, elements of local arrays, and recomputed variables, as generated code writes them."""

    def __init__(self, emitter: Emitter, where: str) -> None:
        self.emitter = emitter
        self.where = where

    def visit_Name(self, node: ast.Name) -> ast.AST:
        storage = self.emitter.storage
        if node.id.startswith(PREFIX):
            return self.index(node)
        if isinstance(node.ctx, ast.Load) and node.id in storage.recomputed_variables:
            if self.where == "thread":
                return node
            if self.where == "chunk" and node.id in storage.at_chunk_start:
                return node
            return self.visit(copy.deepcopy(storage.recomputed_variables[node.id]))  # type: ignore[no-any-return]
        if isinstance(node.ctx, ast.Load) and self.where != "thread" and node.id in storage.thread_variables:
            raise NotTheSame(node.id)
        if isinstance(node.ctx, ast.Load) and node.id in storage.local_arrays:
            raise error_at(
                node,
                f"the local array {node.id} is used as a whole",
                "use its elements; device functions that take it are inlined, other functions cannot take it",
            )
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        function = division.FUNCTIONS.get(type(node.op).__name__)
        if function is None or self.emitter.uniformity.constant(node.right) is not None:
            return node
        name = self.emitter.storage.bind(function.__name__, function)
        return ast.copy_location(ast.Call(ast.Name(name, ast.Load()), [node.left, node.right], []), node)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if type(node.op).__name__ not in division.FUNCTIONS:
            return self.generic_visit(node)
        value = copy.deepcopy(node.target)
        value.ctx = ast.Load()
        divided = ast.copy_location(ast.BinOp(value, node.op, node.value), node)
        return self.visit(ast.copy_location(ast.Assign([node.target], divided), node))  # type: ignore[no-any-return]

    def index(self, node: ast.Name) -> ast.AST:
        what, _, axis = node.id.removeprefix(PREFIX).partition(".")
        geometry, uses = self.emitter.geometry, self.emitter.uses
        size = geometry.block["xyz".index(axis)] if axis in ("x", "y", "z") else 0
        first = self.where != "thread"

        def thread(name: str) -> str:
            return "0" if self.where == "block" else geometry.name(name, first_lane=first)

        if what in ("blockIdx", "grid"):
            uses.add(f"block_{axis}")
        if what in ("gridDim", "gridsize"):
            uses.add(f"grid_{axis}")
        if what == "threadIdx" and axis:
            text = thread(axis)
        elif what == "grid":
            text = f"block_{axis} * {size} + {thread(axis)}"
        elif what == "blockIdx" and axis:
            text = f"block_{axis}"
        elif what == "gridDim" and axis:
            text = f"grid_{axis}"
        elif what == "blockDim" and axis:
            text = str(size)
        elif what == "gridsize":
            text = f"grid_{axis} * {size}"
        elif what in ("laneid", "lane"):
            text = thread(what)
        elif what == "warpsize":
            text = str(geometry.warp_size)
        elif what == "lanemask_lt":
            text = f"(1 << {thread('laneid')}) - 1"
        else:
            raise error_at(
                node, f"cuda.{node.id.removeprefix(PREFIX)} here", "use it as numba.cuda's documentation shows"
            )
        return ast.parse(text, mode="eval").body

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id == AT_FIRST_LANE:
            return _Rewrite(self.emitter, "block" if self.where == "block" else "chunk").visit(node.args[0])  # type: ignore[no-any-return]
        if isinstance(node.func, ast.Name) and node.func.id.startswith(PREFIX):
            if node.func.id == f"{PREFIX}lanemask_lt":
                return self.index(node.func)
            raise error_at(node, f"{node.func.id} is not supported on the CPU", "see numstack.simt for what is")
        if isinstance(node.func, ast.Name) and node.func.id == "len" and len(node.args) == 1:
            argument = node.args[0]
            if isinstance(argument, ast.Name) and argument.id in self.emitter.storage.local_arrays:
                return ast.Constant(self.emitter.storage.local_arrays[argument.id].shape[0])
        node.args = [self.visit(argument) for argument in node.args]
        for keyword in node.keywords:
            keyword.value = self.visit(keyword.value)
        node.func = self.visit(node.func)
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        local = self.emitter.storage.local_arrays
        if isinstance(node.value, ast.Name) and node.value.id in local:
            alloc = local[node.value.id]
            if node.attr == "shape":
                return ast.Tuple([ast.Constant(size) for size in alloc.shape], ast.Load())
            if node.attr == "ndim":
                return ast.Constant(len(alloc.shape))
            if node.attr == "dtype":
                return self.visit(copy.deepcopy(alloc.dtype))  # type: ignore[no-any-return]
            if node.attr == "size":
                size = 1
                for n in alloc.shape:
                    size *= n
                return ast.Constant(size)
            raise error_at(
                node, f"{node.value.id}.{node.attr} of a local array", "use its elements, shape, size or dtype"
            )
        node.value = self.visit(node.value)
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        storage = self.emitter.storage
        base: ast.expr = node.value
        indices = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
        while isinstance(base, ast.Subscript):  # acc[i][j] is acc[i, j]
            inner = list(base.slice.elts) if isinstance(base.slice, ast.Tuple) else [base.slice]
            indices = inner + indices
            base = base.value
        if isinstance(base, ast.Name) and base.id in storage.local_arrays:
            alloc = storage.local_arrays[base.id]
            if len(indices) != len(alloc.shape) or any(isinstance(i, ast.Slice) for i in indices):
                raise error_at(
                    node,
                    f"{base.id} is a local array of {len(alloc.shape)} dimensions, indexed with {len(indices)}",
                    "index single elements",
                )
            space = storage.tiles.get(base.id, "lanes")
            own = self.emitter.geometry.name("thread" if space == "threads" else "lane")
            parts = [self.visit(index) for index in indices] + [ast.parse(own, mode="eval").body]
            return ast.Subscript(base, ast.Tuple(parts, ast.Load()), node.ctx)
        node.value = self.visit(node.value)
        node.slice = self.visit(node.slice)
        return node
