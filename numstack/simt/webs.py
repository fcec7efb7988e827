"""One name for each independent use of a variable.

    for k in range(4): ...            for k in range(4): ...
    for k in range(n): ...     ->     for k_2 in range(n): ...

Names that are used again for something else would otherwise share one type and one place.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from numstack.simt.flow import Statements, assign, blocks
from numstack.simt.inline import Program
from numstack.simt.nodes import PREFIX, Alloc, Barrier, WarpOp, count_stores

#: The definitions of each variable that may have been the last.
Reaching = dict[str, frozenset[int]]


def split_variables(program: Program, new_name: Callable[[str], str]) -> None:
    """Rename variables so that two assignments share a name only if some use may see either."""
    changed = count_stores(program.body)
    for name in program.parameters:
        if name in changed:  # the parameter itself keeps its value, for the next block
            program.body.insert(0, assign(name, ast.Name(name, ast.Load()), program.body[0]))
    _Webs(program, new_name).rename(program.body)
    _free_loop_variables(program.body, count_stores(program.body), new_name)


def _free_loop_variables(statements: Statements, stores: dict[str, int], new_name: Callable[[str], str]) -> None:
    """Let nothing but the loop assign its variable: ``for k in items: k += 1`` gets one of its own, copied to k."""
    for statement in statements:
        for block in blocks(statement):
            _free_loop_variables(block, stores, new_name)
        if isinstance(statement, ast.For) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            if stores[name] > 1:
                statement.target.id = new_name(f"{name}_next")
                statement.body.insert(0, assign(name, ast.Name(statement.target.id, ast.Load()), statement))


class _Webs:
    def __init__(self, program: Program, new_name: Callable[[str], str]) -> None:
        self.new_name = new_name
        self.parent: list[int] = []
        self.variable: list[str] = []
        self.site: dict[int, int] = {}
        self.use: dict[int, int] = {}
        self.breaks: list[list[Reaching]] = []
        reaching: Reaching = {}
        self.fixed: dict[int, str] = {}
        for name in program.parameters:
            reaching[name] = frozenset([self.define(name)])
            self.fixed[len(self.parent) - 1] = name
        self.globals = set(program.namespace)
        self.sequence(program.body, reaching)
        self.names = self.choose_names()

    # Definitions are joined when a use may see either.

    def define(self, name: str) -> int:
        self.parent.append(len(self.parent))
        self.variable.append(name)
        return len(self.parent) - 1

    def root(self, definition: int) -> int:
        while self.parent[definition] != definition:
            self.parent[definition] = definition = self.parent[self.parent[definition]]
        return definition

    def join(self, definitions: frozenset[int]) -> int:
        roots = sorted(self.root(definition) for definition in definitions)
        for other in roots[1:]:
            self.parent[other] = roots[0]
        return roots[0]

    def definition_at(self, node: ast.AST, name: str) -> int:
        if id(node) not in self.site:
            self.site[id(node)] = self.define(name)
        return self.site[id(node)]

    # Walk in order of execution.

    def read(self, node: ast.AST | None, reaching: Reaching) -> None:
        if node is None:
            return
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Load) and part.id not in self.globals:
                if part.id.startswith(PREFIX):
                    continue
                seen = reaching.get(part.id)
                if seen is None:  # nothing assigned it yet: a read of an undefined value
                    seen = reaching[part.id] = frozenset([self.define(part.id)])
                self.use[id(part)] = self.join(seen)

    def write(self, target: ast.AST, reaching: Reaching) -> None:
        if isinstance(target, ast.Name):
            reaching[target.id] = frozenset([self.definition_at(target, target.id)])
        elif isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                self.write(element, reaching)
        else:
            self.read(target, reaching)

    def sequence(self, statements: Statements, reaching: Reaching) -> None:
        for statement in statements:
            if isinstance(statement, ast.Assign):
                self.read(statement.value, reaching)
                for target in statement.targets:
                    self.write(target, reaching)
            elif isinstance(statement, ast.AugAssign):
                self.read(statement.value, reaching)
                self.update(statement.target, reaching)
            elif isinstance(statement, ast.If):
                self.read(statement.test, reaching)
                other = dict(reaching)
                self.sequence(statement.body, reaching)
                self.sequence(statement.orelse, other)
                _merge(reaching, other)
            elif isinstance(statement, (ast.For, ast.While)):
                self.loop(statement, reaching)
            elif isinstance(statement, ast.Break):
                self.breaks[-1].append(dict(reaching))
            elif isinstance(statement, (Barrier, WarpOp, Alloc)):
                for field in statement._fields:
                    self.read(getattr(statement, field), reaching)
                if statement.target is not None:
                    reaching[statement.target] = frozenset([self.definition_at(statement, statement.target)])
            else:
                self.read(statement, reaching)

    def update(self, target: ast.AST, reaching: Reaching) -> None:
        if not isinstance(target, ast.Name):
            self.read(target, reaching)
            return
        own = self.definition_at(target, target.id)
        self.join(reaching.get(target.id, frozenset()) | {own})
        reaching[target.id] = frozenset([own])

    def loop(self, loop: ast.For | ast.While, reaching: Reaching) -> None:
        if isinstance(loop, ast.For):
            self.read(loop.iter, reaching)
        while True:
            before = dict(reaching)
            inside = dict(reaching)
            if isinstance(loop, ast.While):
                self.read(loop.test, inside)
            else:
                self.write(loop.target, inside)
            self.breaks.append([])
            self.sequence(loop.body, inside)
            _merge(reaching, inside)
            left = self.breaks.pop()
            if reaching == before:
                break
        for other in left:
            _merge(reaching, other)

    # Names.

    def choose_names(self) -> dict[int, str]:
        names: dict[int, str] = {}
        taken = set(self.fixed.values())
        for definition, name in self.fixed.items():
            names[self.root(definition)] = name
        for definition, variable in enumerate(self.variable):
            root = self.root(definition)
            if root not in names:
                names[root] = variable if variable not in taken else self.new_name(variable)
                taken.add(variable)
        return names

    def rename(self, statements: Statements) -> None:
        for statement in statements:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name):
                    definition = self.use.get(id(node), self.site.get(id(node)))
                    if definition is not None:
                        node.id = self.names[self.root(definition)]
                elif isinstance(node, (Barrier, WarpOp, Alloc)) and node.target is not None:
                    node.target = self.names[self.root(self.site[id(node)])]


def _merge(into: Reaching, other: Reaching) -> None:
    for name, definitions in other.items():
        into[name] = into.get(name, frozenset()) | definitions
