"""Launching kernels in the tests of simt, compiled or in Python under checks; and tables of such launches."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np

from numstack import simt

Kernel = Callable[..., None]


def dim(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    """One to three sizes as (x, y, z)."""
    x, y, z = (*(size if isinstance(size, tuple) else (size,)), 1, 1)[:3]
    return x, y, z


@functools.cache
def _compiled(kernel: Kernel, types: tuple[Any, ...], block: tuple[int, int, int]) -> Any:
    return simt.compile_kernel(kernel, types, block)


def as_numba(value: Any) -> Any:
    """An argument whose width is what ``numba.typeof`` gives it: a Python int or float, also in a tuple, has 64 bits.

    A launch through ``numstack.device`` takes them for 32 bits; the programs of numba-cuda were written for numba.
    """
    if isinstance(value, tuple):
        parts = [as_numba(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    widths = {int: np.int64, float: np.float64}
    return widths[value.__class__](value) if value.__class__ in widths else value


def launch(kernel: Kernel, grid: Any, block: Any, *args: Any, shared_bytes: int = 0) -> None:
    """Run a kernel through the compiler, all blocks on this thread."""
    grid, block, args = dim(grid), dim(block), as_numba(args)
    run = _compiled(kernel, tuple(numba.typeof(value) for value in args), block)
    run(grid, 0, int(np.prod(grid)), shared_bytes, *args)


def launch_checked(kernel: Kernel, grid: Any, block: Any, *args: Any, shared_bytes: int = 0) -> None:
    """Run a kernel in Python under checks."""
    simt.interpret(kernel, dim(grid), dim(block), as_numba(args), shared_bytes=shared_bytes)


WAYS = {"compiled": launch, "checked": launch_checked}


@dataclass
class Case:
    """One launch and what it must leave in its leading arguments.

    ``source`` names the test of numba-cuda that it was made from. Arguments are copied for each run; a callable makes
    its argument, so that it can be a view.
    """

    source: str
    kernel: Kernel
    grid: Any
    block: Any
    args: tuple[Any, ...]
    expected: tuple[Any, ...]
    shared_bytes: int
    rtol: float
    ways: tuple[str, ...]

    def run(self, way: str) -> None:
        """Launch on copies of the arguments and compare."""
        args = [_fresh(value) for value in self.args]
        WAYS[way](self.kernel, self.grid, self.block, *args, shared_bytes=self.shared_bytes)
        for position, (got, expected) in enumerate(zip(args, self.expected, strict=False)):
            _compare(got, expected, self.rtol, f"argument {position}")


def _fresh(value: Any) -> Any:
    if isinstance(value, tuple):
        parts = [_fresh(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if callable(value):
        return value()
    return value.copy(order="K") if isinstance(value, np.ndarray) else value


def _compare(got: Any, expected: Any, rtol: float, what: str) -> None:
    if isinstance(expected, tuple):
        for position, (one, other) in enumerate(zip(got, expected, strict=True)):
            _compare(one, other, rtol, f"{what}[{position}]")
    else:
        np.testing.assert_allclose(got, np.broadcast_to(expected, got.shape), rtol=rtol, err_msg=what)


class Cases:
    """A table of cases, filled by decorators on kernels."""

    def __init__(self) -> None:
        self.all: list[Case] = []

    def __call__(
        self,
        source: str,
        *args: Any,
        expected: Any,
        grid: Any = 1,
        block: Any = 1,
        shared_bytes: int = 0,
        rtol: float = 0,
        ways: tuple[str, ...] = tuple(WAYS),
    ) -> Callable[[Kernel], Kernel]:
        """Add a launch of the decorated kernel; ``expected``: what it leaves, for several arguments in a tuple."""

        def register(kernel: Kernel) -> Kernel:
            outcome = expected if isinstance(expected, tuple) else (expected,)
            self.all.append(Case(source, kernel, grid, block, args, outcome, shared_bytes, rtol, ways))
            return kernel

        return register

    def parameters(self) -> list[Any]:
        """For ``pytest.mark.parametrize("case, way", ...)``."""
        import pytest

        return [pytest.param(case, way, id=f"{case.source}-{way}") for case in self.all for way in case.ways]
