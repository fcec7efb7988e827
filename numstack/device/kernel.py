"""``@kernel``: a plain numba.cuda function that runs on whatever device this process has."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, overload

from numstack import simt
from numstack.device.base import Stream
from numstack.device.current import current_device
from numstack.device.door import submit
from numstack.device.launch_types import numba_types, type_key
from numstack.device.work import Work
from numstack.errors import ConfigError

Dim = tuple[int, int, int]


class Kernel:
    """A kernel: its Python function, and launches of it.

    ``kernel[grid, block](*args)`` launches on the current device's default stream; ``kernel[grid, block, stream]`` and
    ``kernel[grid, block, stream, shared_bytes]`` name a stream and bytes of dynamic shared memory, as in numba.cuda.
    ``grid`` and ``block`` are an int or up to three (x, y, z).

    Arguments are device arrays and scalars. A Python int is int32 in the kernel, a float is float32; a NumPy scalar
    keeps its type. ``flops=`` tells observers how much arithmetic the launch does.

    Attributes
    ----------
    py_func : function
        The plain function; ``numba.cuda.jit(py_func)`` is the same kernel in any other project.
    name : str
        Module and function, without leading underscores: ``gelu.forward``.
    cluster : int
        Blocks that run together and see one another's shared memory (``numstack.device.ptx.cluster``).
    starts_early : bool
        Its blocks may be there before the kernel ahead of it on the stream is over.
    first_acts : tuple of str
        Functions of ``numstack.device.ptx.sync`` that a compiler for GPUs from Hopper on has it call first.
    """

    def __init__(
        self,
        py_func: Callable[..., None],
        name: str | None = None,
        cluster: int = 1,
        starts_early: bool = False,
        waits_itself: bool = False,
    ) -> None:
        self.__doc__ = py_func.__doc__
        self.__module__ = py_func.__module__
        self.py_func = py_func
        self.name = name or f"{py_func.__module__.rpartition('.')[2]}.{py_func.__name__.lstrip('_')}"
        self.cluster = cluster
        self.starts_early = starts_early or waits_itself
        waits = ("wait_for_kernel_before",) if starts_early else ()
        self.first_acts = () if waits_itself else (*waits, "let_next_kernel_start")
        self.parameters = tuple(inspect.signature(py_func).parameters)
        self._launches: dict[tuple[Any, ...], Launch] = {}

    @functools.cached_property
    def accesses(self) -> simt.Accesses:
        """Which parameters are arrays that the kernel reads, and which it writes, found in its source."""
        return simt.accesses(self.py_func)

    @property
    def check(self) -> CheckedLaunches:
        """Launches under ``numstack.simt``'s checks: ``kernel.check[grid, block](*args)``.

        Raises KernelError with file, line, block and threads at an access out of bounds, a race on shared memory, a
        read of what nothing wrote, a barrier that not all threads reach, or a non-finite value written.
        """
        return CheckedLaunches(self)

    def __getitem__(self, config: tuple[Any, ...]) -> Launch:
        launch = self._launches.get(config)
        if launch is None:
            grid, block, *rest = config
            launch = Launch(self, self._dim("grid", grid), self._dim("block", block), *rest)
            self._launches[config] = launch
        return launch

    def _dim(self, what: str, value: int | tuple[int, ...]) -> Dim:
        sizes = (value,) if isinstance(value, int) else tuple(int(v) for v in value)
        if not 1 <= len(sizes) <= 3 or min(sizes) < 0 or (what == "block" and min(sizes) < 1):
            raise ConfigError(f"{self.name}: {what}={value!r}; give one to three positive sizes (x, y, z)")
        x, y, z = (*sizes, 1, 1)[:3]
        if what == "block" and x * y * z > 1024:
            raise ConfigError(f"{self.name}: block={value!r} has {x * y * z} threads; a block has at most 1024")
        return x, y, z

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"


class Launch:
    """A kernel with its launch shape; calling it submits the launch."""

    __slots__ = ("block", "grid", "kernel", "shared_bytes", "stream")

    def __init__(
        self, kernel: Kernel, grid: Dim, block: Dim, stream: Stream | None = None, shared_bytes: int = 0
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.block = block
        self.stream = stream
        self.shared_bytes = shared_bytes

    def __call__(self, *args: Any, flops: int = 0) -> None:
        kernel, grid, block = self.kernel, self.grid, self.block
        if 0 in grid:
            return  # nothing to do: an empty array
        device = current_device()
        run = device.bind(kernel, grid, block, self.shared_bytes, args)
        stream = self.stream or device.default_stream
        submit(Work(kernel.name, "kernel", run, stream, (), (), flops, kernel, grid, block, self.shared_bytes, args))


class CheckedLaunches:
    """``kernel.check``: the same launches, in Python, under checks."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def __getitem__(self, config: tuple[Any, ...]) -> Callable[..., None]:
        launch = self._kernel[config]

        def run(*args: Any, flops: int = 0) -> None:
            device = current_device()
            type_key(launch.kernel, args)
            numba_types(launch.kernel, args)
            hosts = [device.to_host(a) if hasattr(a, "strides") and a.ndim else a for a in args]
            simt.interpret(
                launch.kernel.py_func,
                launch.grid,
                launch.block,
                tuple(hosts),
                shared_bytes=launch.shared_bytes,
                checks=True,
                name=launch.kernel.name,
            )
            for i in launch.kernel.accesses.writes:
                device.copy(args[i], hosts[i])
            device.synchronize()

        return run


@overload
def kernel(py_func: Callable[..., None]) -> Kernel: ...
@overload
def kernel(
    *, name: str, cluster: int = 1, starts_early: bool = False, waits_itself: bool = False
) -> Callable[[Callable[..., None]], Kernel]: ...
def kernel(
    py_func: Callable[..., None] | None = None,
    *,
    name: str | None = None,
    cluster: int = 1,
    starts_early: bool = False,
    waits_itself: bool = False,
) -> Any:
    """Make a kernel of a plain numba.cuda function.

    Parameters
    ----------
    py_func : function
        As for ``numba.cuda.jit``; it must return nothing.
    name : str, optional
        What traces and errors call it; by default module and function.
    cluster : int, optional
        Blocks of a cluster, for Hopper GPUs; the grid's x must be a multiple.
    starts_early : bool, optional
        From Hopper on its blocks are there before the kernel ahead of it on the stream is over (programmatic dependent
        launch), and wait for its end in their first instruction, which the compiler puts in: so what it takes to start
        a kernel is hidden. For kernels of many short blocks, or of few that do little. Blocks that stay to the end take
        multiprocessors as these become free, not in turn: only where place does not matter, and with so much shared
        memory that no more fit on one than are meant to (``numstack.kernels.reduce_vectors``).
    waits_itself : bool, optional
        Starts early, and nothing is put in: it calls ``ptx.wait_for_kernel_before()`` in each block, before it reads or
        writes what the kernel ahead writes or reads. Only that one can still run: whatever came before it was over when
        it let this one start. If it has nothing to do with that one, its last block waits at its end: who comes next
        must find both over.

    Examples
    --------
    >>> @kernel
    ... def double(x_N):
    ...     i = cuda.grid(1)
    ...     if i < x_N.size:
    ...         x_N[i] *= 2
    >>> double[1, 32](x)
    """
    if py_func is None:
        return lambda function: Kernel(function, name, cluster, starts_early, waits_itself)
    return Kernel(py_func, name)
