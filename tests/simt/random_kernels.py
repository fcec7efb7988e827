"""Random kernels, each run compiled and in Python under checks: both must leave the same integers.

    python -m tests.simt.random_kernels --seed 0 --count 200

A kernel is made of assignments, conditions, loops, early exits, shared memory, local arrays, shuffles and votes. What
it does is defined: barriers and operations of a warp stand only where all threads come by, every variable has a value,
indices are taken modulo the size, and numbers are kept small, so that none overflows.
"""

from __future__ import annotations

import argparse
import linecache
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import typeof

from numstack import simt
from numstack.errors import KernelError
from tests.support import poisoned

N_BLOCKS = 2
N_INPUTS = 50
BLOCKS = ((32, 1, 1), (64, 1, 1), (16, 4, 1), (8, 8, 1), (40, 1, 1), (7, 3, 1), (4, 4, 2))
MAX_DEPTH = 3


@dataclass(frozen=True)
class RandomKernel:
    """The source of ``kernel(x, out, n)``, with the block that it is made for."""

    seed: int
    block: tuple[int, int, int]
    source: str

    def function(self) -> Callable[..., None]:
        """The kernel as a function whose source can be found."""
        filename = f"<random kernel {self.seed}>"
        namespace: dict[str, Any] = {}
        exec(compile(self.source, filename, "exec"), namespace)
        linecache.cache[filename] = (len(self.source), None, self.source.splitlines(keepends=True), filename)
        kernel: Callable[..., None] = namespace["kernel"]
        return kernel

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        """What the kernel leaves, compiled and in Python.

        Raises
        ------
        KernelError
            If the compiler refuses the kernel.
        """
        kernel = self.function()
        x = np.random.default_rng(self.seed).integers(0, 1000, N_INPUTS).astype(np.int32)
        n = np.int32(N_INPUTS)
        compiled = poisoned(N_BLOCKS * int(np.prod(self.block)), np.int64)
        checked = compiled.copy()
        run = simt.compile_kernel(kernel, (typeof(x), typeof(compiled), typeof(n)), self.block)
        simt.interpret(kernel, (N_BLOCKS, 1, 1), self.block, (x, checked, n))
        run((N_BLOCKS, 1, 1), 0, N_BLOCKS, 0, x, compiled, n)
        return compiled, checked


def random_kernel(seed: int) -> RandomKernel:
    """The kernel of a seed."""
    choose = random.Random(seed)
    block = choose.choice(BLOCKS)
    return RandomKernel(seed, block, _Generator(choose, block).kernel())


@dataclass(frozen=True)
class _Place:
    """Where a statement stands: how deep, and whether all threads of the block come by together."""

    depth: int = 0
    together: bool = True

    def inside(self, together: bool) -> _Place:
        return _Place(self.depth + 1, self.together and together)

    @property
    def indent(self) -> str:
        return "    " * (self.depth + 1)


class _Generator:
    def __init__(self, choose: random.Random, block: tuple[int, int, int]) -> None:
        self.choose = choose
        self.block = block
        self.n_threads = block[0] * block[1] * block[2]
        self.has_whole_warps = self.n_threads % 32 == 0
        #: Whether some threads may have returned, so that the others must not wait for them.
        self.some_return = False
        self.lines: list[str] = []
        self.n_names = 0
        #: Variables of single threads, and those that are the same for all threads of a block.
        self.own = ["a", "b", "c"]
        self.common = ["u", "v"]
        self.counters: list[str] = []

    def kernel(self) -> str:
        x, y, _ = self.block
        self.lines = [
            "from numba import cuda, int64",
            "",
            "",
            "def kernel(x, out, n):",
            f"    shared = cuda.shared.array({self.n_threads}, int64)",
            "    local = cuda.local.array(4, int64)",
            f"    t = (cuda.threadIdx.z * {y} + cuda.threadIdx.y) * {x} + cuda.threadIdx.x",
            f"    i = cuda.blockIdx.x * {self.n_threads} + t",
            "    for k in range(4):",
            "        local[k] = (i * 7 + k) % 1009",
            "    a, b, c = t, int64(x[i % n]), int64(0)",
            "    u, v = cuda.blockIdx.x + 3, n % 10",
        ]
        place = _Place()
        self.some_return = self.chance(0.2)
        if self.some_return:
            self.line(place, f"if i >= {self.integer(self.n_threads // 2, 3 * self.n_threads)}:")
            self.line(place.inside(False), "return")
        for _ in range(self.integer(3, 8)):
            self.statement(place)
        self.line(place, "out[i] = ((a * 31 + b) * 31 + c) * 31 + u + v + local[0] + local[3]")
        return "\n".join(self.lines) + "\n"

    # Chance.

    def chance(self, probability: float) -> bool:
        return self.choose.random() < probability

    def integer(self, least: int, most: int) -> int:
        return self.choose.randint(least, most)

    def new_name(self, wish: str) -> str:
        self.n_names += 1
        return f"{wish}{self.n_names}"

    # Expressions: all are from 0 to a few thousand.

    def expression(self, depth: int = 0) -> str:
        kind = self.choose.random()
        if depth > 2 or kind < 0.35:
            atoms = [*self.own, *self.common, *self.counters, "t", "i", "n", str(self.integer(0, 40))]
            return self.choose.choice(atoms)
        one, other = self.expression(depth + 1), self.expression(depth + 1)
        if kind < 0.75:
            return f"({one} {self.choose.choice('+-*^&')} {other}) % 1009"
        if kind < 0.85:
            return f"({one} if {self.condition(depth + 1)} else {other})"
        if kind < 0.9:
            return f"local[({one}) % 4]"
        return f"x[({one}) % n]"

    def condition(self, depth: int = 0) -> str:
        compare = self.choose.choice(("<", ">", "==", "<="))
        condition = f"{self.expression(depth + 1)} {compare} {self.expression(depth + 1)}"
        if self.chance(0.2):
            both = self.choose.choice(("and", "or"))
            return f"({condition}) {both} {self.expression(2)} > {self.integer(0, 500)}"
        return condition

    def common_expression(self) -> str:
        """The same for all threads of a block."""
        one = self.choose.choice([*self.common, "n", "cuda.blockIdx.x"])
        return f"({one} * {self.integer(1, 5)} + {self.choose.choice(self.common)}) % 97"

    # Statements.

    def line(self, place: _Place, text: str) -> None:
        self.lines.append(place.indent + text)

    def block_of_statements(self, place: _Place) -> None:
        for _ in range(self.integer(1, 4)):
            self.statement(place)

    def statement(self, place: _Place) -> None:
        anywhere: dict[Callable[[_Place], None], float] = {self.assignment: 30}
        if place.depth < MAX_DEPTH:
            anywhere |= {self.branch: 12, self.for_loop: 12, self.while_loop: 5, self.local_array: 6}
            if place.together:
                anywhere |= {self.common_assignment: 8, self.common_branch: 6}
            if place.together and not self.some_return:
                anywhere |= {self.exchange: 9, self.block_vote: 4}
                if self.has_whole_warps:
                    anywhere |= {self.shuffle: 10, self.ballot: 4}
        [write] = self.choose.choices(list(anywhere), list(anywhere.values()))
        write(place)

    def assignment(self, place: _Place) -> None:
        name = self.choose.choice([*self.own, *self.counters])
        if self.chance(0.3):
            self.line(place, f"{name} += {self.expression()}")
            self.line(place, f"{name} %= 1009")
        else:
            self.line(place, f"{name} = {self.expression()}")

    def common_assignment(self, place: _Place) -> None:
        self.line(place, f"{self.choose.choice(self.common)} = {self.common_expression()}")

    def local_array(self, place: _Place) -> None:
        self.line(place, f"local[({self.expression(1)}) % 4] = {self.expression(1)}")

    def branch(self, place: _Place) -> None:
        self.if_else(place, self.condition(), place.inside(together=False))

    def common_branch(self, place: _Place) -> None:
        self.if_else(place, f"{self.common_expression()} > {self.integer(0, 90)}", place.inside(together=True))

    def if_else(self, place: _Place, condition: str, inside: _Place) -> None:
        self.line(place, f"if {condition}:")
        self.block_of_statements(inside)
        if self.chance(0.5):
            self.line(place, "else:")
            self.block_of_statements(inside)

    def for_loop(self, place: _Place) -> None:
        together = self.chance(0.5)
        if together:
            items = self.choose.choice(
                (str(self.integer(1, 6)), f"{self.common_expression()} % 7", f"2, n, {self.integer(7, 20)}")
            )
        else:
            strided = f"t, {self.integer(1, 120)}, cuda.blockDim.x"
            items = self.choose.choice((strided, f"({self.expression()}) % 6"))
        leaves = self.chance(0.3)
        leaves_together = leaves and together and place.together and self.chance(0.4)
        inside = place.inside(together and (leaves_together or not leaves))  # after a jump of some, threads have parted
        counter = self.new_name("k")
        self.line(place, f"for {counter} in range({items}):")
        self.counters.append(counter)
        self.block_of_statements(inside)
        if leaves:
            self.line(inside, f"if {f'{self.common_expression()} > 40' if leaves_together else self.condition()}:")
            self.line(inside.inside(False), self.choose.choice(("break", "continue")))
            self.line(inside, f"{self.choose.choice(self.own)} = {self.expression()}")
        self.counters.remove(counter)

    def while_loop(self, place: _Place) -> None:
        left = self.new_name("w")
        inside = place.inside(together=False)
        self.line(place, f"{left} = {self.integer(1, 6)}")
        self.line(place, f"while {left} > 0:")
        self.block_of_statements(inside)
        self.line(inside, f"{left} -= 1")

    # Threads that meet.

    def exchange(self, place: _Place) -> None:
        source = f"(t * {self.integer(1, 5)} + {self.integer(0, 9)}) % {self.n_threads}"
        self.line(place, f"shared[t] = {self.expression()}")
        self.line(place, "cuda.syncthreads()")
        self.line(place, f"{self.choose.choice(self.own)} = shared[{source}]")
        self.line(place, "cuda.syncthreads()")

    def block_vote(self, place: _Place) -> None:
        self.line(place, f"{self.choose.choice(self.own)} = cuda.syncthreads_count({self.condition()})")

    def shuffle(self, place: _Place) -> None:
        name = self.choose.choice(("shfl_xor_sync", "shfl_up_sync", "shfl_down_sync", "shfl_sync"))
        lane = self.choose.choice((str(self.integer(0, 31)), "u % 32"))
        self.line(place, f"{self.choose.choice(self.own)} = cuda.{name}(0xFFFFFFFF, {self.expression()}, {lane})")

    def ballot(self, place: _Place) -> None:
        votes = f"cuda.ballot_sync(0xFFFFFFFF, {self.condition()})"
        self.line(place, f"{self.choose.choice(self.own)} += cuda.popc({votes})")


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare random kernels, compiled and in Python.")
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--show", action="store_true", help="print the source of each kernel that differs")
    options = parser.parse_args()
    counts = {"agree": 0, "refused": 0, "differ": 0}
    start = time.perf_counter()
    for seed in range(options.seed, options.seed + options.count):
        kernel = random_kernel(seed)
        try:
            compiled, checked = kernel.run()
        except simt.KernelFault:
            print(f"{seed}: the kernel itself is wrong\n{kernel.source}")
            raise
        except KernelError as error:
            print(f"{seed}: refused: {error}".splitlines()[0], flush=True)
            counts["refused"] += 1
            continue
        wrong = np.flatnonzero(compiled != checked)
        counts["differ" if len(wrong) else "agree"] += 1
        if len(wrong):
            print(f"{seed}: differ: block {kernel.block}, elements {wrong[:8]}", flush=True)
            if options.show:
                print(kernel.source)
    print(f"{counts} in {time.perf_counter() - start:.0f} s")
    raise SystemExit(counts["differ"] > 0)


if __name__ == "__main__":
    main()
