"""Which values of single threads must survive from one loop over lanes to another, and from one region to another."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field

from numstack.simt.flow import Statements
from numstack.simt.nodes import Alloc, loaded, stored
from numstack.simt.plan import BlockVote, Branch, Guard, Lanes, Leave, Loop, Node, Region, Scalar, Together, Warp


@dataclass
class Flow:
    """What a sequence of statements does to variables: reads before assigning, may assign, surely assigns."""

    exposed: set[str] = field(default_factory=set)
    assigned: set[str] = field(default_factory=set)
    killed: set[str] = field(default_factory=set)


def flow_of(statements: Statements, arrays: set[str]) -> Flow:
    """The flow of statements of one thread. An element of a local array (of ``arrays``) counts as the whole array."""
    flow = Flow()

    def read(names: set[str]) -> None:
        flow.exposed |= names - flow.killed

    for statement in statements:
        if isinstance(statement, Alloc):
            flow.killed.add(statement.target)
        elif isinstance(statement, ast.If):
            read(loaded(statement.test))
            body, orelse = flow_of(statement.body, arrays), flow_of(statement.orelse, arrays)
            read(body.exposed | orelse.exposed)
            flow.assigned |= body.assigned | orelse.assigned
            flow.killed |= body.killed & orelse.killed
        elif isinstance(statement, (ast.For, ast.While)):
            inner = flow_of(statement.body, arrays)
            if isinstance(statement, ast.For):
                read(loaded(statement.iter))
                targets = stored(statement.target)
                read(inner.exposed - targets)
                flow.assigned |= targets
            else:
                read(loaded(statement.test))
                read(inner.exposed)
            flow.assigned |= inner.assigned
        else:
            read(loaded(statement))
            names = stored(statement)
            flow.assigned |= names
            if not isinstance(statement, ast.AugAssign):
                flow.killed |= names
            flow.assigned |= _stored_elements(statement) & arrays
    return flow


def _stored_elements(statement: ast.stmt) -> set[str]:
    return {
        node.value.id
        for node in ast.walk(statement)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name)
    }


class Liveness:
    """Live variables of single threads, over a plan.

    Parameters
    ----------
    plan : list of Node
    variables : set of str
        The variables (and local arrays) of single threads.
    arrays : set of str
        Those that are local arrays.

    Attributes
    ----------
    before, after : dict of Lanes or Warp to set of str
    kept : dict of Guard to set of str
        What lanes outside the guard must find unchanged behind it.
    at_region : set of str
        Variables that are live where some region begins.
    """

    def __init__(self, plan: list[Node], variables: set[str], arrays: set[str]) -> None:
        self.variables = variables
        self.arrays = arrays
        self.before: dict[Node, set[str]] = {}
        self.after: dict[Node, set[str]] = {}
        self.kept: dict[Node, set[str]] = {}
        self.flows: dict[Node, Flow] = {}
        self.at_region: set[str] = set()
        self._breaks: list[set[str]] = []
        self.sequence(plan, set())

    def reads(self, names: set[str], mask: str | None) -> set[str]:
        return (names | {mask or ""}) & self.variables

    def sequence(self, nodes: list[Node], live: set[str]) -> set[str]:
        """What is live before the nodes, given what is live after them."""
        for node in reversed(nodes):
            self.after[node] = set(live)
            live = self.node(node, live)
            self.before[node] = set(live)
        return live

    def node(self, node: Node, live: set[str]) -> set[str]:
        if isinstance(node, Lanes):
            flow = self.flows.get(node)
            if flow is None:
                flow = self.flows[node] = flow_of([*node.statements, *node.masks], self.arrays)
            return self.reads(flow.exposed, node.mask) | (live - flow.killed)
        if isinstance(node, Warp):
            operation = node.operation
            reads = {node.value} | (loaded(operation.extra) if operation.extra is not None else set())
            return self.reads(reads, node.mask) | (live - {operation.target or ""})
        if isinstance(node, Together):
            return live | self.reads(loaded(node.operation), None)
        if isinstance(node, BlockVote):
            reads = self.reads({node.value}, node.mask)
            self.at_region |= reads
            return live | reads
        if isinstance(node, Guard):
            self.kept[node] = set(live)
            return self.sequence(node.body, live) | live | self.reads(set(), node.mask)
        if isinstance(node, Branch):
            return self.sequence(node.body, live) | self.sequence(node.orelse, live)
        if isinstance(node, Loop):
            around = set(live)
            self._breaks.append(set(live))
            while True:
                before = self.sequence(node.body, around) | live
                if before <= around:
                    break
                around |= before
            self._breaks.pop()
            return around
        if isinstance(node, Region):
            before = self.sequence(node.body, live)
            self.at_region |= before
            return before
        if isinstance(node, Leave):
            return set(self._breaks[-1])
        assert isinstance(node, Scalar)
        return live
