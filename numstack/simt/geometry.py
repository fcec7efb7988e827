"""How the threads of a block are walked: chunk by chunk, and lane by lane inside a chunk.

A chunk is what one vectorised loop covers. Where threads of a warp talk to one another, a chunk is a warp; elsewhere it
is a row of the block (or 32 threads of a long row), so that neighbouring lanes are neighbours in ``threadIdx.x``.

    block (128, 4), chunks of 32            block (16, 16), a row at a time     block (16, 4), 2 rows a warp
    for thread_y in range(4):               for thread_y in range(16):          for first_y in range(0, 4, 2):
        for first_x in range(0, 128, 32):       for thread_x in range(16):          for this_row in range(2):
            for this_lane in range(32):                                                 for thread_x in range(16):
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

Dim = tuple[int, int, int]


@dataclass(frozen=True)
class Geometry:
    """The walk over a block.

    Attributes
    ----------
    block : (int, int, int)
    warp_size : int
    warps : bool
        Whether chunks must be warps.
    """

    block: Dim
    warp_size: int
    warps: bool

    @property
    def n_threads(self) -> int:
        x, y, z = self.block
        return x * y * z

    @cached_property
    def kind(self) -> str:
        """``row``: part of one row; ``rows``: a warp of several whole rows; ``linear``: any 32 threads in order."""
        x, y, z = self.block
        if not self.warps or x % self.warp_size == 0 or (x < self.warp_size and y == z == 1):
            return "row"
        if self.warp_size % x == 0 and y % (self.warp_size // x) == 0:
            return "rows"
        return "linear"

    @cached_property
    def n_lanes(self) -> int:
        """Threads of a (full) chunk."""
        x = self.block[0]
        if self.kind != "row":
            return self.warp_size
        if x % 32 == 0:
            return 32
        if x <= 64:
            return x
        return next((width for width in (64, 48, 32, 16) if x % width == 0), x)

    @property
    def tile_lanes(self) -> int:
        """Size of a per-chunk tile: shuffles work on whole warps."""
        return self.warp_size if self.warps else self.n_lanes

    @property
    def is_one_chunk(self) -> bool:
        return self.n_threads <= self.n_lanes

    # The index of each thread, in order of its linear index.

    @cached_property
    def thread(self) -> np.ndarray:
        return np.arange(self.n_threads)

    @cached_property
    def axes(self) -> dict[str, np.ndarray]:
        x, y, _ = self.block
        return {"x": self.thread % x, "y": self.thread // x % y, "z": self.thread // (x * y)}

    @cached_property
    def chunk(self) -> np.ndarray:
        if self.kind == "row":
            return self.thread // self.block[0] * (self.block[0] // self.n_lanes) + self.axes["x"] // self.n_lanes  # type: ignore[no-any-return]
        return self.thread // self.n_lanes

    @cached_property
    def lane(self) -> np.ndarray:
        return self.axes["x"] % self.n_lanes if self.kind == "row" else self.thread % self.n_lanes

    @cached_property
    def first(self) -> np.ndarray:
        """The first thread of each thread's chunk."""
        return self.thread - self.lane  # type: ignore[no-any-return]

    # Generated code.

    def chunk_loops(self) -> list[str]:
        """Headers of the loops over chunks, outermost first."""
        x, y, z = self.block
        loops = []
        if self.kind == "linear":
            if self.n_threads > self.n_lanes:
                loops.append(f"for first_thread in range(0, {self.n_threads}, {self.n_lanes}):")
            return loops
        if z > 1:
            loops.append(f"for thread_z in range({z}):")
        if self.kind == "rows":
            rows = self.n_lanes // x
            if y > rows:
                loops.append(f"for first_y in range(0, {y}, {rows}):")
            return loops
        if y > 1:
            loops.append(f"for thread_y in range({y}):")
        if x > self.n_lanes:
            loops.append(f"for first_x in range(0, {x}, {self.n_lanes}):")
        return loops

    def lane_loops(self) -> list[str]:
        """Headers of the loops over the lanes of a chunk; the last one is the one to vectorise."""
        x = self.block[0]
        if self.kind == "rows":
            return [f"for this_row in range({self.n_lanes // x}):", f"for thread_x in range({x}):"]
        if self.kind == "row":
            return [f"for {'this_lane' if x > self.n_lanes else 'thread_x'} in range({self.n_lanes}):"]
        if self.n_threads % self.n_lanes:
            whole = "" if self.n_threads < self.n_lanes else f"min({self.n_lanes}, {self.n_threads} - first_thread)"
            return [f"for this_lane in range({whole or self.n_threads}):"]
        return [f"for this_lane in range({self.n_lanes}):"]

    def name(self, what: str, *, first_lane: bool = False) -> str:
        """An index as an expression: ``x``, ``y``, ``z``, ``thread`` (linear), ``lane`` (in its chunk), ``laneid``.

        With ``first_lane`` it is that of the chunk's first lane, and can be computed outside the loop over lanes.
        """
        x, y, z = self.block
        if what in ("y", "z") and self.block["xyz".index(what)] == 1:
            return "0"
        if self.kind == "linear":
            return self._linear_name(what, first_lane)
        if what == "z":
            return "thread_z"
        if what == "y":
            if self.kind == "row":
                return "thread_y"
            start = "first_y" if y > self.n_lanes // x else "0"
            return start if first_lane else _sum(start, "this_row")
        start = "first_x" if self.kind == "row" and x > self.n_lanes else "0"
        if what == "x":
            if first_lane:
                return start
            return _sum(start, "this_lane") if start != "0" else "thread_x"
        if what == "lane" or (what == "laneid" and (self.warps or self.n_lanes == 32)):
            if first_lane:
                return "0"
            if self.kind == "rows":
                return f"(this_row * {x} + thread_x)"
            return "this_lane" if start != "0" else "thread_x"
        if what == "laneid":
            return f"({self.name('thread', first_lane=first_lane)} % {self.warp_size})"
        assert what == "thread"
        row = "0" if z == 1 else f"thread_z * {y}" if y > 1 else "thread_z"
        if y > 1:
            row = _sum(row, self.name("y", first_lane=True))
        base = _sum("0" if row == "0" else f"({row}) * {x}", start)
        return base if first_lane else _sum(base, self.name("lane"))

    #: Names that generated code uses.
    NAMES = frozenset(
        ["thread_x", "thread_y", "thread_z", "first_x", "first_y", "first_thread", "this_lane", "this_row"]
        + [f"{what}_{axis}" for what in ("block", "grid") for axis in "xyz"]
        + ["block", "first_block", "last_block", "shared_memory", "range", "min", "stack_tile"]
    )

    def _linear_name(self, what: str, first_lane: bool) -> str:
        x, y, z = self.block
        start = "first_thread" if self.n_threads > self.n_lanes else "0"
        thread = start if first_lane else _sum(start, "this_lane")
        if what in ("lane", "laneid"):
            return "0" if first_lane else "this_lane"
        if what == "thread":
            return thread
        if what == "x":
            return thread if y == z == 1 else f"({thread} % {x})"
        if what == "y":
            return f"({thread} // {x})" if z == 1 else f"({thread} // {x} % {y})"
        return f"({thread} // {x * y})"


def _sum(a: str, b: str) -> str:
    if a == "0":
        return b
    return a if b == "0" else f"({a} + {b})"
