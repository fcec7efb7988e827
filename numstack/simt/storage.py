"""Where each variable of a plan is kept: a scalar of the block or chunk, an array over lanes or threads, or nowhere."""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from numba.core import types

from numstack.simt.geometry import Geometry
from numstack.simt.liveness import Liveness, flow_of
from numstack.simt.nodes import SHUFFLES, loaded, stored
from numstack.simt.plan import BlockVote, Branch, Guard, Lanes, Loop, Node, Planner, Region, Scalar, Together, Warp
from numstack.simt.recompute import Recomputed
from numstack.simt.uniform import BLOCK, Uniformity

MAX_UNROLLED_WARP_LOOP = 8


class Replan(Exception):
    """The plan rests on something that turned out otherwise.

    ``per_thread`` must be taken as different in each thread; ``chunk_variables`` are assigned by chunks.
    """

    def __init__(self, per_thread: set[str], chunk_variables: set[str]) -> None:
        super().__init__()
        self.per_thread = per_thread
        self.chunk_variables = chunk_variables


class Storage:
    """Places of the variables of a plan.

    Attributes
    ----------
    tiles : dict of str to str
        Variables of single threads that outlive a loop over lanes: ``"threads"`` if they live across regions (an
        element for each thread of the block), else ``"lanes"`` (an element for each lane of a chunk).
    thread_variables : set of str
    local_arrays : dict of str to Alloc
    recomputed_variables : dict of str to ast.expr
    """

    def __init__(
        self,
        planner: Planner,
        recomputed: Recomputed,
        uniformity: Uniformity,
        geometry: Geometry,
        namespace: dict[str, Any],
        new_name: Callable[[str], str],
    ) -> None:
        self.planner = planner
        self.uniformity = uniformity
        self.geometry = geometry
        self.namespace = namespace
        self.new_name = new_name
        self.recomputed_variables = recomputed.definitions
        self.at_chunk_start = recomputed.at_chunk_start
        self.local_arrays = {alloc.target: alloc for alloc in planner.allocations if alloc.space == "local"}
        self._assigned: dict[str, set[str]] = {"block": set(), "chunk": set(), "lanes": set()}
        self._collect(planner.plan, "block")
        self.thread_variables = (self._assigned["lanes"] | set(self.local_arrays)) - set(self.recomputed_variables)
        self._check_levels()
        self.liveness = Liveness(planner.plan, self.thread_variables, set(self.local_arrays))
        self.tiles: dict[str, str] = {}
        for name in set().union(*self.liveness.before.values()) if self.liveness.before else set():
            self.tiles[name] = "threads" if name in self.liveness.at_region else "lanes"
        for node in self._nodes(planner.plan):
            if isinstance(node, Warp) and node.operation.kind in SHUFFLES:
                target = node.operation.target
                if target is not None and target in self.liveness.after[node]:
                    self.tiles.setdefault(target, "lanes")
        self._guards: dict[Node, list[Guard]] = {}
        self._find_guards(planner.plan, [])

    @property
    def int32(self) -> str:
        return self.bind("int32", types.int32)

    def bind(self, wish: str, value: Any) -> str:
        """The name of an object in the generated code."""
        if self.namespace.get(wish) is value:
            return wish
        for name, known in self.namespace.items():
            if known is value:
                return name
        name = wish if wish not in self.namespace else self.new_name(wish)
        self.namespace[name] = value
        return name

    # Who assigns what.

    def _collect(self, nodes: list[Node], where: str) -> None:
        for node in nodes:
            if isinstance(node, Lanes):
                self._assigned["lanes"] |= stored([*node.statements, *node.masks])
            elif isinstance(node, Warp):
                kind = "chunk" if node.operation.kind not in SHUFFLES else "lanes"
                self._assigned[kind].add(node.operation.target or "")
            elif isinstance(node, Scalar):
                self._assigned[where] |= stored(node.statement)
            elif isinstance(node, BlockVote):
                self._assigned["block"].add(node.target)
            elif isinstance(node, Loop):
                if isinstance(node.header, ast.For):
                    self._assigned[where] |= stored(node.header.target)
                self._collect(node.body, where)
            elif isinstance(node, Region):
                self._collect(node.body, "chunk")
            elif isinstance(node, Branch):
                self._collect(node.body + node.orelse, where)
            elif isinstance(node, Guard):
                self._collect(node.body, where)

    def _check_levels(self) -> None:
        """A variable is assigned for the whole block, or by each chunk for itself, or by each thread."""
        by_thread = self._assigned["lanes"] & (self._assigned["block"] | self._assigned["chunk"])
        by_thread |= {n for n in self._assigned["lanes"] if self.uniformity.levels.get(n, BLOCK) == BLOCK}
        by_thread -= self.uniformity.per_thread
        by_chunk = self._assigned["chunk"] & self._assigned["block"]
        for region in self._regions(self.planner.plan):
            for name in self._exposed(region.body) & self._assigned["chunk"]:
                if self.uniformity.levels.get(name, BLOCK) > BLOCK:
                    by_thread.add(name)  # each chunk has its own value, which must outlive the region
        for name in self.at_chunk_start:  # what a chunk computes on its way is not there at its start
            by_chunk |= loaded(self.recomputed_variables[name]) & self._assigned["chunk"]
        if by_thread or by_chunk - self.planner.known_chunk_variables:
            raise Replan(by_thread, by_chunk | self._assigned["chunk"])

    def _regions(self, nodes: list[Node]) -> list[Region]:
        return [node for node in self._nodes(nodes) if isinstance(node, Region)]

    def _nodes(self, nodes: list[Node]) -> list[Node]:
        found: list[Node] = []
        for node in nodes:
            found.append(node)
            if isinstance(node, (Loop, Region, Guard)):
                found += self._nodes(node.body)
            elif isinstance(node, Branch):
                found += self._nodes(node.body + node.orelse)
        return found

    def _find_guards(self, nodes: list[Node], around: list[Guard]) -> None:
        for node in nodes:
            self._guards[node] = around
            if isinstance(node, Guard):
                self._find_guards(node.body, [*around, node])
            elif isinstance(node, (Loop, Region)):
                self._find_guards(node.body, around)
            elif isinstance(node, Branch):
                self._find_guards(node.body + node.orelse, around)

    # What the emitter asks.

    def is_kept(self, node: Lanes, name: str) -> bool:
        """Whether some lane must find the variable unchanged after ``node``, which may assign it."""
        flow = self.liveness.flows[node]
        return (
            name in flow.exposed
            or name not in flow.killed
            or any(name in self.liveness.kept[guard] for guard in self._guards[node])
        )

    def recomputed(self, names: set[str]) -> list[tuple[str, ast.expr]]:
        """Definitions of recomputed variables of single threads: of ``names`` and what they need, in order."""
        needed: set[str] = set()
        pending = [name for name in names if name in self.recomputed_variables]
        while pending:
            name = pending.pop()
            if name not in needed and name not in self.at_chunk_start:
                needed.add(name)
                pending += [n for n in loaded(self.recomputed_variables[name]) if n in self.recomputed_variables]
        return [(name, value) for name, value in self.recomputed_variables.items() if name in needed]

    def chunk_start(self, region: Region | BlockVote) -> list[tuple[str, ast.expr]]:
        """Variables that are computed at the start of each chunk of a region, in order."""
        needed = self._loads([region])
        return [(n, v) for n, v in self.recomputed_variables.items() if n in needed and n in self.at_chunk_start]

    def carried(self, region: Region) -> list[str]:
        """Variables that every chunk of a region changes, each beginning with the value from before the region."""
        changed: set[str] = set()
        for node in self._nodes(region.body):
            if isinstance(node, Scalar):
                changed |= stored(node.statement)
            elif isinstance(node, Loop) and isinstance(node.header, ast.For):
                changed |= stored(node.header.target)
        if not self.geometry.chunk_loops():
            return []
        return sorted(self._exposed(region.body) & changed)

    def is_short_warp_loop(self, loop: Loop) -> bool:
        """Whether a loop around shuffles is short enough to make each shuffle's distance a constant."""
        has_shuffle = any(isinstance(node, Warp) for node in self._nodes(loop.body))
        return has_shuffle and self.planner.trips(loop.header) <= MAX_UNROLLED_WARP_LOOP

    # What nodes read.

    def with_operands(self, names: set[str]) -> set[str]:
        """``names``, and what the recomputed variables among them are computed from."""
        found: set[str] = set()
        pending = list(names)
        while pending:
            name = pending.pop()
            if name not in found:
                found.add(name)
                pending += loaded(self.recomputed_variables[name]) if name in self.recomputed_variables else ()
        return found

    def _loads(self, nodes: list[Node]) -> set[str]:
        """Variables that nodes read."""
        names: set[str] = set()
        for node in nodes:
            if isinstance(node, Lanes):
                names |= loaded([*node.statements, *node.masks]) | ({node.mask} if node.mask else set())
            elif isinstance(node, Warp):
                names |= {node.value} | ({node.mask} if node.mask else set())
                names |= loaded(node.operation.extra) if node.operation.extra is not None else set()
            elif isinstance(node, Together):
                names |= loaded(node.operation)
            elif isinstance(node, Scalar):
                names |= loaded(node.statement)
            elif isinstance(node, BlockVote):
                names |= {node.value} | ({node.mask} if node.mask else set())
            elif isinstance(node, Loop):
                names |= loaded(node.header.iter if isinstance(node.header, ast.For) else node.header.test)
                names |= self._loads(node.body)
            elif isinstance(node, Branch):
                names |= loaded(node.test) | self._loads(node.body + node.orelse)
            elif isinstance(node, Guard):
                names |= {node.mask} | self._loads(node.body)
            elif isinstance(node, Region):
                names |= self._loads(node.body)
        return self.with_operands(names)

    def _exposed(self, nodes: list[Node]) -> set[str]:
        """Variables that nodes read before they surely assign them."""
        exposed: set[str] = set()
        killed: set[str] = set()
        for node in nodes:
            if isinstance(node, Scalar):
                flow = flow_of([node.statement], set())
                exposed |= self.with_operands(flow.exposed) - killed
                killed |= flow.killed
            elif isinstance(node, Loop):
                targets = stored(node.header.target) if isinstance(node.header, ast.For) else set()
                header = loaded(node.header.iter if isinstance(node.header, ast.For) else node.header.test)
                exposed |= (self.with_operands(header) | (self._exposed(node.body) - targets)) - killed
            elif isinstance(node, Branch):
                test = self.with_operands(loaded(node.test))
                exposed |= (test | self._exposed(node.body) | self._exposed(node.orelse)) - killed
            elif isinstance(node, Guard):
                exposed |= (self.with_operands({node.mask}) | self._exposed(node.body)) - killed
            else:
                exposed |= self._loads([node]) - killed
                if isinstance(node, Warp) and node.operation.kind not in SHUFFLES:
                    killed.add(node.operation.target or "")
        return exposed
