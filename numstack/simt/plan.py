"""From a program's statements to a plan: what runs once a block, once a chunk, and once a thread.

    Region                      # between two barriers
      Loop for k in range(n)    #   the same for all threads: outside the loop over lanes
        Lanes acc += ...        #     one loop over the lanes of a chunk
      Warp shuffled = ...       #   all lanes at once
      Lanes acc += shuffled

A region runs chunk by chunk. A loop with equal trips for all lanes goes outside the loop over lanes, so that lanes,
which are neighbours in memory, are innermost and become vectors; a condition that differs between lanes becomes a mask
there.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, field

from numstack.simt.flow import Statements, assign, blocks, placed
from numstack.simt.inline import Program
from numstack.simt.nodes import SHUFFLES, Alloc, Barrier, Collective, WarpOp, contains, loaded, stored, walk
from numstack.simt.recompute import Recomputed
from numstack.simt.source import error_at
from numstack.simt.uniform import BLOCK, CHUNK, THREAD, Uniformity

#: A constant loop is unrolled inside the lanes if that gives at most this many statements.
MAX_UNROLLED = 96


@dataclass(eq=False)
class Lanes:
    """Statements of single threads: one loop over the lanes of a chunk.

    ``mask`` is the variable that says which lanes take part; ``masks`` are the masks computed after the statements.
    """

    statements: Statements
    mask: str | None = None
    masks: list[ast.Assign] = field(default_factory=list)


@dataclass(eq=False)
class Warp:
    """A shuffle or a vote on the variable ``value``."""

    operation: WarpOp
    value: str
    mask: str | None


@dataclass(eq=False)
class Together:
    """A function of the registers of all lanes."""

    operation: Collective


@dataclass(eq=False)
class Scalar:
    """A statement whose variables are the same for all threads of the block or chunk."""

    statement: ast.stmt


@dataclass(eq=False)
class Loop:
    """A loop that all threads of the block or chunk run together."""

    header: ast.For | ast.While
    body: list[Node]


@dataclass(eq=False)
class Branch:
    """A condition that is the same for all threads of the block or chunk."""

    test: ast.expr
    body: list[Node]
    orelse: list[Node]
    place: ast.AST


@dataclass(eq=False)
class Guard:
    """Part of a chunk's plan that only the lanes with ``mask`` run; skipped if there are none and ``check`` is set."""

    mask: str
    body: list[Node]
    check: bool


@dataclass(eq=False)
class Leave:
    """``break`` out of a `Loop`."""

    statement: ast.stmt


@dataclass(eq=False)
class Region:
    """What a block does between two barriers, chunk by chunk."""

    body: list[Node]


@dataclass(eq=False)
class BlockVote:
    """``target = syncthreads_or(value)`` and the like, among the threads with ``mask``."""

    target: str
    kind: str
    value: str
    mask: str | None


Node = Lanes | Warp | Together | Scalar | Loop | Branch | Guard | Leave | Region | BlockVote


class Planner:
    """Plans a program.

    Attributes
    ----------
    plan : list of Node
    chunk_variables : set of str
        Variables that chunks assign, each for itself.
    allocations : list of Alloc
    """

    def __init__(
        self,
        program: Program,
        uniformity: Uniformity,
        recomputed: Recomputed,
        new_name: Callable[[str], str],
        chunk_variables: set[str],
    ) -> None:
        self.uniformity = uniformity
        self.recomputed = recomputed
        self.new_name = new_name
        self.known_chunk_variables = chunk_variables
        #: Assignments to variables that planning added.
        self.added: list[ast.Assign] = []
        self.allocations = [node for node in walk(program.body) if isinstance(node, Alloc)]
        self.plan = self.block(program.body, None, in_loop=False)

    def new_variable(self, wish: str) -> str:
        """A variable of single threads."""
        name = self.new_name(wish)
        self.uniformity.variables.add(name)
        self.uniformity.levels[name] = THREAD
        return name

    def is_recomputed(self, statement: ast.stmt) -> bool:
        """Whether a statement assigns a variable that is computed again wherever it is used."""
        return (
            isinstance(statement, ast.Assign)
            and isinstance(statement.targets[0], ast.Name)
            and statement.targets[0].id in self.recomputed.definitions
        )

    def mask(self, wish: str, test: ast.expr, body: Statements, level: int, place: ast.AST) -> tuple[str, list[Node]]:
        """A variable for a condition that guards ``body``, and what computes it, unless it is recomputed each time."""
        name = self.new_variable(wish)
        test = placed(test, place)  # type: ignore[assignment]
        if self.recomputed.repeats_in(test, body, level):
            self.recomputed.definitions[name] = test
            return name, []
        statement = assign(name, test, place)
        statement.is_mask = True  # type: ignore[attr-defined]
        self.added.append(statement)
        return name, [Lanes([], None, [statement])]

    # Once a block.

    def block(self, statements: Statements, mask: str | None, in_loop: bool) -> list[Node]:
        nodes: list[Node] = []
        run: Statements = []

        def flush() -> None:
            if run:
                body = self.chunk(list(run), mask)
                nodes.append(Region([Guard(mask, body, _needs_check(body))] if mask else body))
                run.clear()

        for statement in statements:
            if isinstance(statement, Barrier):
                self.barrier(statement, run, flush, nodes, mask)
            elif isinstance(statement, (ast.If, ast.For, ast.While)) and contains(statement, Barrier):
                self.around_barrier(statement, run, flush, nodes, mask, in_loop)
            elif in_loop and _breaks(statement):
                flush()
                nodes.append(self.leaving(statement, mask))
            elif isinstance(statement, (Alloc, ast.Pass)) or self.is_recomputed(statement):
                if isinstance(statement, Alloc) and statement.space == "local":
                    run.append(statement)
            elif self.is_scalar(statement, BLOCK) and not stored(statement) & self.known_chunk_variables:
                if not _may_move_before(statement, run):
                    flush()
                nodes.append(Scalar(statement))
            else:
                run.append(statement)
        flush()
        return nodes

    def barrier(
        self, barrier: Barrier, run: Statements, flush: Callable[[], None], nodes: list[Node], mask: str | None
    ) -> None:
        flush()
        if barrier.target is not None:
            assert isinstance(barrier.value, ast.Name)
            nodes.append(BlockVote(barrier.target, barrier.kind, barrier.value.id, mask))

    def around_barrier(
        self,
        statement: ast.If | ast.For | ast.While,
        run: Statements,
        flush: Callable[[], None],
        nodes: list[Node],
        mask: str | None,
        in_loop: bool,
    ) -> None:
        """A branch or loop with a barrier inside: all threads of the block must take it together."""
        inside = next(node for node in ast.walk(statement) if isinstance(node, Barrier))
        if isinstance(statement, ast.If):
            if self.uniformity.level(statement.test) == BLOCK:
                flush()
                body = self.block(statement.body, mask, in_loop)
                nodes.append(Branch(statement.test, body, self.block(statement.orelse, mask, in_loop), statement))
                return
            leaving = None if getattr(statement, "is_tail", False) else getattr(statement, "exits", None)
            staying = {"body": statement.orelse, "orelse": statement.body}.get(leaving or "", [])
            if leaving is None or contains(statement.body if leaving == "body" else statement.orelse, Barrier):
                raise error_at(
                    inside,
                    f"cuda.{inside.kind}() under the condition of line {statement.lineno}, which differs between "
                    "threads",
                    "every thread of the block must reach a barrier: move it out of the condition",
                )
            self.early_exit(statement, leaving, staying, run, flush, nodes, mask, in_loop)
            return
        if self.uniformity.loop_level(statement) != BLOCK:
            raise error_at(
                inside,
                f"cuda.{inside.kind}() in the loop of line {statement.lineno}, whose number of iterations could not be "
                "proven the same for all threads",
                "make its bounds, condition and breaks independent of threadIdx, or move the barrier out of it",
            )
        flush()
        nodes.append(Loop(statement, self.block(statement.body, mask, in_loop=True)))

    def early_exit(
        self,
        statement: ast.If,
        leaving: str,
        staying: Statements,
        run: Statements,
        flush: Callable[[], None],
        nodes: list[Node],
        mask: str | None,
        in_loop: bool,
    ) -> None:
        """``if c: return`` with barriers after it: the remaining threads go on under a mask."""
        test = statement.test
        if leaving == "body":
            test = placed(ast.UnaryOp(ast.Not(), test), statement)  # type: ignore[assignment]
            gone = statement.body
        else:
            gone = statement.orelse
        if mask is not None:
            test = ast.BoolOp(ast.And(), [ast.Name(mask, ast.Load()), test])
        flush()
        stays, computed = self.mask("stays", test, [*gone, *staying], BLOCK, statement)
        if computed:
            nodes.append(Region(computed))
        if not all(isinstance(inner, ast.Pass) for inner in gone):
            goes, computed = self.mask(
                "goes", ast.UnaryOp(ast.Not(), ast.Name(stays, ast.Load())), gone, BLOCK, statement
            )
            body = self.chunk(gone, goes)
            nodes.append(Region([*computed, Guard(goes, body, _needs_check(body))]))
        some = self.new_name("any_stays")
        nodes.append(BlockVote(some, "syncthreads_or", stays, None))
        body = self.block(staying, stays, in_loop)
        nodes.append(Branch(placed(ast.Name(some, ast.Load()), statement), body, [], statement))  # type: ignore[arg-type]

    def leaving(self, statement: ast.stmt, mask: str | None) -> Node:
        """A ``break``, or a condition with one inside, of a loop that the whole block or chunk runs."""
        if isinstance(statement, ast.Break):
            return Leave(statement)
        assert isinstance(statement, ast.If)
        return Branch(
            statement.test,
            self.block(statement.body, mask, in_loop=True),
            self.block(statement.orelse, mask, in_loop=True),
            statement,
        )

    # Once a chunk.

    def chunk(self, statements: Statements, mask: str | None, in_loop: bool = False) -> list[Node]:
        nodes: list[Node] = []
        run: Statements = []

        def flush() -> None:
            if run:
                nodes.append(Lanes(list(run), mask))
                run.clear()

        for statement in statements:
            if isinstance(statement, ast.Pass) or self.is_recomputed(statement):
                continue
            if self.is_scalar(statement, CHUNK):
                if not _may_move_before(statement, run):
                    flush()
                nodes.append(Scalar(statement))
            elif isinstance(statement, Collective):
                if mask is not None:
                    raise error_at(
                        statement,
                        f"{statement.kind} under a condition that differs between the lanes of a warp",
                        "let all lanes of the warp come here",
                    )
                assert isinstance(statement.extra, ast.Tuple)
                registers = [e for i, e in enumerate(statement.extra.elts) if i % 3]
                if any(self.uniformity.level(number) > CHUNK for number in registers):
                    raise error_at(
                        statement,
                        f"{statement.kind} of registers whose numbers differ between the lanes of a warp",
                        "number them by what all lanes agree on",
                    )
                flush()
                nodes.append(Together(statement))
            elif isinstance(statement, WarpOp):
                if statement.target is None:
                    flush()
                    continue
                value = self.with_tile(statement, run)
                flush()
                nodes.append(Warp(statement, value, mask))
            elif isinstance(statement, ast.Break) and in_loop:
                flush()
                nodes.append(Leave(statement))
            elif not self.splits(statement, in_loop):
                run.append(statement)
            elif isinstance(statement, ast.If):
                self.condition(statement, run, flush, nodes, mask, in_loop)
            else:
                assert isinstance(statement, (ast.For, ast.While))
                if self.uniformity.loop_level(statement) > CHUNK:
                    inside = next(node for node in ast.walk(statement) if isinstance(node, WarpOp))
                    raise error_at(
                        inside,
                        f"cuda.{inside.kind} in the loop of line {statement.lineno}, whose number of iterations "
                        "differs between the lanes of a warp",
                        "let all lanes run the same number of iterations, with a condition inside the loop",
                    )
                flush()
                nodes.append(Loop(statement, self.chunk(statement.body, mask, in_loop=True)))
        flush()
        return nodes

    def condition(
        self,
        statement: ast.If,
        run: Statements,
        flush: Callable[[], None],
        nodes: list[Node],
        mask: str | None,
        in_loop: bool,
    ) -> None:
        if self.uniformity.level(statement.test) <= CHUNK:
            flush()
            body = self.chunk(statement.body, mask, in_loop)
            nodes.append(Branch(statement.test, body, self.chunk(statement.orelse, mask, in_loop), statement))
            return
        test = statement.test
        if any(not isinstance(s, ast.Pass) for s in statement.orelse) and not isinstance(test, ast.Name):
            # Both branches see the condition as it was.
            condition = self.new_variable("condition")
            run.append(assign(condition, test, statement))
            self.added.append(run[-1])  # type: ignore[arg-type]
            test = placed(ast.Name(condition, ast.Load()), statement)  # type: ignore[assignment]
        flush()
        for branch, is_else in ((statement.body, False), (statement.orelse, True)):
            if all(isinstance(s, ast.Pass) for s in branch):
                continue
            part: ast.expr = ast.UnaryOp(ast.Not(), test) if is_else else test
            if mask is not None:
                part = ast.BoolOp(ast.And(), [ast.Name(mask, ast.Load()), part])
            name, computed = self.mask("mask", part, branch, CHUNK, statement)
            nodes += computed
            body = self.chunk(branch, name)
            nodes.append(Guard(name, body, _needs_check(body)))

    def with_tile(self, operation: WarpOp, run: Statements) -> str:
        """The variable that an operation reads; for a shuffle, one that is kept for every lane."""
        assert isinstance(operation.value, ast.Name)
        name = operation.value.id
        if operation.kind not in SHUFFLES:
            return name
        if self.uniformity.levels.get(name) != THREAD or name in self.recomputed.definitions:
            kept = self.new_variable("value")
            run.append(assign(kept, operation.value, operation))
            self.added.append(run[-1])  # type: ignore[arg-type]
            return kept
        return name

    def splits(self, statement: ast.stmt, in_loop: bool) -> bool:
        """Whether a statement cannot, or had better not, be inside a loop over lanes."""
        if contains(statement, WarpOp):
            return True
        if in_loop and _breaks(statement):
            return True
        if isinstance(statement, (ast.For, ast.While)):
            return self.uniformity.loop_level(statement) <= CHUNK and not self.is_unrolled(statement)
        if isinstance(statement, ast.If):
            return any(self.splits(inner, False) for inner in [*statement.body, *statement.orelse])
        return False

    def is_scalar(self, statement: ast.stmt, level: int) -> bool:
        """Whether a statement only assigns variables of at most this level, from values of at most this level."""
        if isinstance(statement, ast.Assign):
            return all(self.is_scalar_target(target, level) for target in statement.targets) and (
                self.uniformity.level(statement.value) <= level
            )
        if isinstance(statement, ast.AugAssign):
            return self.is_scalar_target(statement.target, level) and self.uniformity.level(statement.value) <= level
        if isinstance(statement, ast.If):
            return self.uniformity.level(statement.test) <= level and all(
                isinstance(inner, ast.Pass) or self.is_scalar(inner, level)
                for block in blocks(statement)
                for inner in block
            )
        if isinstance(statement, (ast.For, ast.While)):
            return self.uniformity.loop_level(statement) <= level and all(
                isinstance(inner, (ast.Pass, ast.Break)) or self.is_scalar(inner, level)
                for block in blocks(statement)
                for inner in block
            )
        return False

    def is_scalar_target(self, target: ast.expr, level: int) -> bool:
        if isinstance(target, (ast.Tuple, ast.List)):
            return all(self.is_scalar_target(element, level) for element in target.elts)
        return isinstance(target, ast.Name) and self.uniformity.levels[target.id] <= level

    def is_unrolled(self, statement: ast.stmt) -> bool:
        return self.unrolled_size([statement]) <= MAX_UNROLLED

    def unrolled_size(self, statements: Statements) -> float:
        """Statements after unrolling every loop; infinite if a loop has no constant trip count."""
        size = 0.0
        for statement in statements:
            inner = sum(self.unrolled_size(block) for block in blocks(statement))
            if isinstance(statement, (ast.For, ast.While)):
                size += self.trips(statement) * inner
            else:
                size += 1 + inner
        return size

    def trips(self, loop: ast.For | ast.While) -> float:
        """The constant number of iterations of a loop, else infinity."""
        if isinstance(loop, ast.For):
            call = loop.iter
            if isinstance(items := self.uniformity.constant(call), tuple):
                return len(items)
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range":
                bounds = [self.uniformity.constant(argument) for argument in call.args]
                if all(isinstance(bound, int) for bound in bounds) and bounds[2:] != [0]:
                    return len(range(*bounds))
        return float("inf")


def _breaks(statement: ast.stmt) -> bool:
    """Whether a statement leaves the loop that it is in."""
    if isinstance(statement, ast.Break):
        return True
    if isinstance(statement, (ast.For, ast.While)):
        return False
    return any(_breaks(inner) for block in blocks(statement) for inner in block)


def loads_memory(nodes: ast.AST) -> bool:
    """Whether evaluating something reads an element of an array."""
    return any(
        isinstance(node, ast.Subscript)
        and isinstance(node.ctx, ast.Load)
        and not (isinstance(node.value, ast.Attribute) and node.value.attr in ("shape", "strides"))
        for node in walk(nodes)
    )


def _changes_memory(statements: Statements) -> bool:
    from numstack.simt import atomics

    return any(
        (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store))
        or (isinstance(node, ast.Name) and node.id in atomics.NAMES)
        or isinstance(node, WarpOp)
        for node in walk(statements)
    )


def _may_move_before(statement: ast.stmt, run: Statements) -> bool:
    """Whether a statement that all threads agree on may run before statements of single threads."""
    if not run:
        return True
    if stored(statement) & (loaded(run) | stored(run)) or loaded(statement) & stored(run):
        return False
    return not (loads_memory(statement) and _changes_memory(run))


def _needs_check(nodes: list[Node]) -> bool:
    """Whether running this with no lane at all might read out of bounds or never end."""
    for node in nodes:
        if isinstance(node, Scalar) and (loads_memory(node.statement) or contains(node.statement, ast.While)):
            return True
        if isinstance(node, Loop):
            header = node.header.iter if isinstance(node.header, ast.For) else node.header.test
            if loads_memory(header) or isinstance(node.header, ast.While) or _needs_check(node.body):
                return True
        if isinstance(node, Branch) and (loads_memory(node.test) or _needs_check(node.body + node.orelse)):
            return True
        if isinstance(node, Guard) and _needs_check(node.body):
            return True
    return False
