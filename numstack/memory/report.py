"""What ``OutOfMemory`` says: what was asked for, who holds what, and what to do."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from numstack.memory.block import State, Where
from numstack.memory.sizes import format_size
from numstack.memory.statistics import Statistics

if TYPE_CHECKING:
    from numstack.memory.scope import Scope

# Rows of the table; whoever fills a device is nearly always among the first few.
N_HOLDERS = 10


def describe_where(where: Where | None) -> str:
    """``file:line`` of a request."""
    if where is None:
        return "unknown"
    code, instruction = where
    lines = (line for start, end, line in code.co_lines() if start <= instruction < end and line)
    path = min(code.co_filename, os.path.relpath(code.co_filename), key=len)
    return f"{path}:{next(lines, code.co_firstlineno)}"


def describe_full(
    nbytes: int, scope: str, where: Where | None, reason: str, scopes: Mapping[str, Scope], statistics: Statistics
) -> str:
    """The message of ``OutOfMemory``: one sentence, the table of the largest holders, advice."""
    return "\n".join(
        [
            f"memory: {format_size(nbytes)} in scope {scope!r} asked for at {describe_where(where)}, but {reason}; "
            f"{format_size(statistics.live)} are live and {format_size(statistics.free)} free in pieces of at most "
            f"{format_size(statistics.largest_free)}",
            "",
            *_holders(scopes),
            "",
            str(statistics),
            "",
            f"What to do: {_advice(nbytes, scope, statistics)}",
        ]
    )


def _holders(scopes: Mapping[str, Scope]) -> list[str]:
    held: dict[tuple[str, str], list[int]] = defaultdict(list)
    names: dict[Where | None, str] = {}
    for scope in scopes.values():
        for region in scope.regions:
            for block in region.blocks():
                if block.state is State.LIVE:
                    if block.where not in names:
                        names[block.where] = describe_where(block.where)
                    held[names[block.where], scope.name].append(block.nbytes)
    rows = sorted(held.items(), key=lambda row: -sum(row[1]))
    lines = [f"{'bytes':>12}{'blocks':>8}  {'scope':<12}allocated at"]
    for (where, name), sizes in rows[:N_HOLDERS]:
        lines.append(f"{format_size(sum(sizes)):>12}{len(sizes):>8}  {name:<12}{where}")
    rest = [nbytes for _, sizes in rows[N_HOLDERS:] for nbytes in sizes]
    if rest:
        lines.append(f"{format_size(sum(rest)):>12}{len(rest):>8}  in {len(rows) - N_HOLDERS} other places")
    return lines


# What makes each scope smaller.
_ADVICE = {
    "persistent": "use a smaller model, or fewer or narrower optimiser states",
    "forward": "use a smaller batch or a shorter context, and accumulate gradients over more steps",
    "backward": "use a smaller batch or a shorter context, and drop gradients as soon as they are used",
    "workspace": "keep no workspace beyond its operation, or choose a variant that needs less",
    "comm": "use smaller buckets",
}


def _advice(nbytes: int, scope: str, statistics: Statistics) -> str:
    advice = []
    largest = max(statistics.by_scope, key=lambda name: statistics.by_scope[name].live, default=scope)
    if statistics.limit is not None and statistics.reserved + nbytes > statistics.limit:
        advice.append("raise the limit (NUMSTACK_MEMORY_LIMIT or memory.set_limit) if the device has more")
    if statistics.free >= nbytes:
        advice.append(
            f"{format_size(statistics.free)} are free but scattered or in other scopes: make the large, long-lived "
            "arrays first"
        )
    advice.append(f"{largest!r} holds most: {_ADVICE[largest]}")
    return "; ".join(advice)
