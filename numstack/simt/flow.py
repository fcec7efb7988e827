"""Jumps out of the middle of a function or a loop body, rewritten so that only structure is left.

    if i >= n:                 if i >= n:
        return                     pass
    x[i] = 0             ->    else:
                                   x[i] = 0

Where a jump sits too deep for that, a flag records it and guards what follows. ``break`` stays as it is.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass

Statements = list[ast.stmt]

NEVER, MAYBE, ALWAYS = 0, 1, 2


def lower_returns(
    body: Statements, flag: str, result: Callable[[ast.Return], Statements], *, leaves_kernel: bool
) -> Statements:
    """Remove every ``return``.

    Parameters
    ----------
    flag : str
        An unused name, for "has returned".
    result : function
        The statements that keep a return's value.
    leaves_kernel : bool
        A thread that returns is gone for good (not just back in its caller): an ``if`` of which one branch returns is
        marked with ``exits``, the name of that branch, for barriers in the other one need not wait for those threads.
    """
    return _Lowering(ast.Return, flag, result, leaves_kernel).whole(body)


def lower_continues(body: Statements, new_name: Callable[[str], str]) -> Statements:
    """Remove every ``continue``."""
    for statement in body:
        for block in blocks(statement):
            block[:] = lower_continues(block, new_name)
        if isinstance(statement, (ast.For, ast.While)) and _jumps(statement.body, ast.Continue):
            statement.body = _Lowering(ast.Continue, new_name("skip"), lambda _: [], False).whole(statement.body)
    return body


def blocks(statement: ast.stmt) -> list[Statements]:
    """The statement lists inside a compound statement."""
    return [block for block in (getattr(statement, "body", None), getattr(statement, "orelse", None)) if block]


def placed(node: ast.AST, place: ast.AST) -> ast.AST:
    """``node``, with the file and line of ``place`` for whatever in it has none."""
    for child in ast.walk(node):
        if not hasattr(child, "lineno"):
            ast.copy_location(child, place)
        if not hasattr(child, "file"):
            child.file = getattr(place, "file", "<unknown>")  # type: ignore[attr-defined]
    return node


def assign(name: str, value: ast.expr, place: ast.AST) -> ast.Assign:
    """``name = value``."""
    return placed(ast.Assign([ast.Name(name, ast.Store())], value), place)  # type: ignore[return-value]


def _jumps(statements: Statements, jump: type[ast.stmt]) -> bool:
    """Whether a jump of these statements' own loop or function is among them."""
    for statement in statements:
        if isinstance(statement, jump):
            return True
        if jump is ast.Continue and isinstance(statement, (ast.For, ast.While)):
            continue
        if any(_jumps(block, jump) for block in blocks(statement)):
            return True
    return False


@dataclass
class _Lowering:
    jump: type[ast.stmt]
    flag: str
    result: Callable[[ast.Return], Statements]
    leaves_kernel: bool

    def whole(self, body: Statements) -> Statements:
        lowered, _ = self.sequence(list(body), in_loop=False)
        lowered = lowered or [placed(ast.Pass(), body[0])]  # type: ignore[list-item]
        tested = any(
            isinstance(node, ast.Name) and node.id == self.flag and isinstance(node.ctx, ast.Load)
            for statement in lowered
            for node in ast.walk(statement)
        )
        if tested:
            return [assign(self.flag, ast.Constant(False), body[0]), *lowered]
        return self.without_flag(lowered)

    def sequence(self, statements: Statements, in_loop: bool) -> tuple[Statements, int]:
        """The statements without jumps, and whether running them may or will have jumped.

        In a loop a return has become a break, so what follows it there does not run and needs no guard.
        """
        out: Statements = []
        jumped = NEVER
        for index, statement in enumerate(statements):
            rest = statements[index + 1 :]
            if isinstance(statement, self.jump):
                if isinstance(statement, ast.Return):
                    out += self.result(statement)
                out.append(assign(self.flag, ast.Constant(True), statement))
                if in_loop:
                    out.append(placed(ast.Break(), statement))  # type: ignore[arg-type]
                return out, ALWAYS
            out.append(statement)
            if not any(_jumps(block, self.jump) for block in blocks(statement)):
                continue
            if isinstance(statement, ast.If):
                statement.body, body_jumps = self.sequence(statement.body, in_loop)
                statement.orelse, else_jumps = self.sequence(statement.orelse, in_loop)
                statement.body = statement.body or [placed(ast.Pass(), statement)]  # type: ignore[list-item]
                if body_jumps == else_jumps == ALWAYS:
                    return out, ALWAYS
                jumped = MAYBE
                if in_loop:
                    continue
                if MAYBE in (body_jumps, else_jumps):
                    return [*out, *self.unless_jumped(rest, statement)], MAYBE
                tail, tail_jumps = self.sequence(rest, in_loop)
                if body_jumps == ALWAYS:
                    statement.orelse += tail
                else:
                    statement.body += tail
                if self.leaves_kernel:
                    statement.exits = "body" if body_jumps == ALWAYS else "orelse"  # type: ignore[attr-defined]
                return out, ALWAYS if tail_jumps == ALWAYS else MAYBE
            if isinstance(statement, (ast.For, ast.While)):
                statement.body, _ = self.sequence(statement.body, in_loop=True)
                jumped = MAYBE
                if not in_loop:
                    return [*out, *self.unless_jumped(rest, statement)], MAYBE
                leave = ast.If(ast.Name(self.flag, ast.Load()), [ast.Break()], [])
                out.append(placed(leave, statement))  # type: ignore[arg-type]
        return out, jumped

    def unless_jumped(self, rest: Statements, place: ast.stmt) -> Statements:
        tail, _ = self.sequence(rest, in_loop=False)
        if not tail:
            return []
        guard = ast.If(ast.UnaryOp(ast.Not(), ast.Name(self.flag, ast.Load())), tail, [])
        if self.leaves_kernel:
            guard.exits = "orelse"  # type: ignore[attr-defined]
        return [placed(guard, place)]  # type: ignore[list-item]

    def without_flag(self, statements: Statements) -> Statements:
        """Drop assignments to the flag, which nothing reads."""
        kept: Statements = []
        for statement in statements:
            for block in blocks(statement):
                block[:] = self.without_flag(block) or [placed(ast.Pass(), statement)]  # type: ignore[list-item]
            if not (isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", None) == self.flag):
                kept.append(statement)
        return kept
