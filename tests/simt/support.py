"""Launching kernels in the tests of simt: compiled, and in Python under checks."""

import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from numstack import simt


def dim(size: int | tuple[int, ...]) -> tuple[int, int, int]:
    """One to three sizes as (x, y, z)."""
    x, y, z = (*(size if isinstance(size, tuple) else (size,)), 1, 1)[:3]
    return x, y, z


@functools.cache
def _compiled(kernel: Callable[..., None], types: tuple[Any, ...], block: tuple[int, int, int]) -> Any:
    return simt.compile_kernel(kernel, types, block)


def launch(kernel: Callable[..., None], grid: Any, block: Any, *args: Any, shared_bytes: int = 0) -> None:
    """Run a kernel through the compiler, all blocks on this thread."""
    grid, block = dim(grid), dim(block)
    run = _compiled(kernel, tuple(numba.typeof(value) for value in args), block)
    run(grid, 0, int(np.prod(grid)), shared_bytes, *args)


def launch_checked(kernel: Callable[..., None], grid: Any, block: Any, *args: Any, shared_bytes: int = 0) -> None:
    """Run a kernel in Python under checks."""
    simt.interpret(kernel, dim(grid), dim(block), args, shared_bytes=shared_bytes)
