"""Run a kernel in Python, all threads of a block side by side, with checks that no GPU makes.

Each thread is a Python generator (see ``threaded``) that runs until it must meet others (a barrier, a warp operation)
or ends. What the threads then wait for is compared, so that a barrier that some of them never reach is seen at once.
Blocks run one after another, the threads of a block in the order of their indices from one meeting to the next.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from math import isfinite
from types import FunctionType
from typing import Any

import numpy as np

from numstack.errors import KernelError
from numstack.simt.arrays import Array
from numstack.simt.block import Block, Dim, Dim3, Thread
from numstack.simt.checks import Fault, GlobalMemory, KernelFault, Site
from numstack.simt.scalars import Int32, dtype_of, hold
from numstack.simt.source import plain_function
from numstack.simt.threaded import Program


def interpret(
    py_func: Callable[..., None],
    grid: Dim,
    block: Dim,
    args: tuple[Any, ...],
    *,
    shared_bytes: int = 0,
    checks: bool = True,
    name: str | None = None,
) -> None:
    """Run one launch of a kernel in Python.

    Parameters
    ----------
    py_func : function
        As for ``numba.cuda.jit``, a kernel, or a dispatcher.
    grid, block : tuple of 3 ints
        x, y, z.
    args : tuple of np.ndarray and scalars
        Arrays are written in place.
    shared_bytes : int
        Dynamic shared memory of a block.
    checks : bool
        Whether to look for races, reads of what nothing wrote, barriers that not all threads reach, and non-finite
        results. Accesses out of bounds and divergent warp operations are errors in any case.
    name : str, optional
        What errors call the kernel; by default its name in Python.

    Raises
    ------
    KernelFault
        At a broken rule, naming kernel, file, line, block and threads; see ``numstack.simt.checks`` for the rules.
    KernelError
        If the source has something that kernels cannot have, or ``args`` are not as many as its parameters.

    Notes
    -----
    Threads take turns only where they meet: a loop that waits for what another thread will write never ends here.
    """
    launch = Launch(py_func, grid, block, args, shared_bytes=shared_bytes, checks=checks, name=name)
    with np.errstate(all="ignore"):
        for z, y, x in np.ndindex(grid[::-1]):
            launch.run_block((x, y, z))


class Launch:
    """A kernel, its launch shape and its arguments; runs blocks one by one.

    Attributes
    ----------
    thread : Thread
        The one that is running.
    """

    thread: Thread

    def __init__(
        self,
        py_func: Callable[..., None],
        grid: Dim,
        block: Dim,
        args: tuple[Any, ...],
        *,
        shared_bytes: int = 0,
        checks: bool = True,
        name: str | None = None,
        stop_at_lines: bool = False,
    ) -> None:
        function: FunctionType = plain_function(py_func)
        self.name = name or function.__name__.lstrip("_")
        parameters = inspect.signature(function).parameters
        if len(args) != len(parameters):
            raise KernelError(f"{self.name}: {len(args)} arguments for the parameters ({', '.join(parameters)})")
        self.program = Program(function, stop_at_lines=stop_at_lines)
        self.block = block
        self.blockDim = Dim3(*map(Int32, block))
        self.gridDim = Dim3(*map(Int32, grid))
        self.shared_bytes = shared_bytes
        self.checks = checks
        scalars = [value for value in args if dtype_of(value) is not None]
        self.memory = GlobalMemory(
            self,
            non_finite_arguments=not all(isfinite(value) for value in scalars),
            compare_blocks=not self.program.uses_threadfence,
        )
        self.args = tuple(self._argument(value, parameter) for value, parameter in zip(args, parameters, strict=True))

    def _argument(self, value: Any, name: str) -> Any:
        if isinstance(value, tuple):
            parts = [self._argument(part, f"{name}[{i}]") for i, part in enumerate(value)]
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        if isinstance(value, np.ndarray):
            return Array(value, name, self.memory if self.checks else None)
        if value.__class__ is float:  # 32 bits wide in a kernel, as in a compiled launch
            return np.float32(value)
        return Int32(value) if value.__class__ is int else hold(value)

    def start_block(self, index: Dim) -> Block:
        """A block whose threads have not run yet."""
        self.memory.start_block()
        return Block(self, index)

    def run_block(self, index: Dim) -> None:
        """Run one block to its end."""
        block = self.start_block(index)
        runnable: Iterable[Thread] = block.threads
        while runnable:
            for thread in runnable:
                self.resume(thread)
            runnable = self.guarded(block.release)

    def resume(self, thread: Thread) -> None:
        """Run a thread to the next point where it waits, or to its end."""
        self.thread = thread
        kernel = self.program.kernel
        try:
            if not kernel.is_generator:
                kernel.call(thread, *self.args)
                thread.done = True
                return
            if thread.generator is None:
                thread.generator = kernel.call(thread, *self.args)
            reply, thread.reply = thread.reply, None
            thread.request = thread.generator.send(reply)
        except StopIteration:
            thread.done, thread.request = True, None
        except Exception as error:
            raise self.located(error) from error

    def guarded(self, action: Callable[[], Any]) -> Any:
        """``action()``, an exception in it told of with its place."""
        try:
            return action()
        except Exception as error:
            raise self.located(error) from error

    def located(self, error: Exception) -> KernelFault:
        """An exception in a kernel's own code as a `KernelFault`."""
        site = None
        trace = error.__traceback__
        while trace is not None:
            if self.program.owns(trace.tb_frame):
                site = Site(trace.tb_frame.f_code.co_filename, trace.tb_lineno)
            trace = trace.tb_next
        site = site or self.thread.stack()[-1]
        kind, text = "error", f"{type(error).__name__}: {error}"
        others: tuple[tuple[int, ...], ...] = ()
        if isinstance(error, Fault):
            kind, text, others = error.kind, str(error), error.others
        elif isinstance(error, ZeroDivisionError):
            kind, text = "undefined", "divides an integer by zero, which gives anything on a GPU"
        return KernelFault(kind, text, self.name, site, self.thread.block, (self.thread.index, *others))
