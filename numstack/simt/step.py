"""Walk through a kernel line by line, all threads of one block together."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from numstack.simt.arrays import Array
from numstack.simt.block import Dim, Thread
from numstack.simt.interpret import Launch


@dataclass(frozen=True)
class Stop:
    """Some threads of a block in front of a line that they are about to run.

    Attributes
    ----------
    line : int
        In the file of the kernel, or of the device function that they are in.
    source : str
        The line.
    threads : list of tuple of int
        ``threadIdx`` of the threads that are here; the others wait elsewhere, or have ended.
    variables : dict of str to list
        For each local variable its value in each of ``threads``, None where it has none yet; arrays as copies.
    shared : dict of str to np.ndarray
        Copies of the block's shared arrays; NaN or -1 where nothing was written.
    """

    line: int
    source: str
    threads: list[tuple[int, int, int]]
    variables: dict[str, list[Any]]
    shared: dict[str, np.ndarray]

    def __str__(self) -> str:
        count = len(self.threads)
        return f"{self.line:5d}  {self.source}   [{count} thread{'s' if count != 1 else ''}]"


def step(
    py_func: Callable[..., None],
    grid: Dim,
    block: Dim,
    args: tuple[Any, ...],
    block_index: Dim = (0, 0, 0),
    *,
    shared_bytes: int = 0,
    checks: bool = True,
) -> Iterator[Stop]:
    """Run one block of a launch, stopping in front of every statement.

    Threads that are at the same line go on together. Where they part, those that are behind go first, so that they
    meet again after an ``if`` or a loop; at a barrier all meet.

    Parameters
    ----------
    py_func, grid, block, args, shared_bytes, checks
        As for ``simt.interpret``; arrays are written in place.
    block_index : tuple of 3 ints
        Which block.

    Yields
    ------
    Stop
        Everything runs while the iterator is advanced.

    Examples
    --------
    >>> for stop in simt.step(kernel, (1, 1, 1), (32, 1, 1), (x, y)):
    ...     print(stop, stop.variables.get("i"))
    """
    launch = Launch(py_func, grid, block, args, shared_bytes=shared_bytes, checks=checks, stop_at_lines=True)
    group = launch.start_block(block_index)
    runnable = group.threads
    while runnable:
        with np.errstate(all="ignore"):
            for thread in runnable:
                launch.resume(thread)
        at_lines = [thread for thread in group.threads if thread.request == ("line",)]
        if at_lines:
            stacks = {thread: thread.stack() for thread in at_lines}
            behind = min(stacks.values())
            runnable = [thread for thread in at_lines if stacks[thread] == behind]
            shared = {array.name: array.data.copy() for array in group.shared.values()}
            yield Stop(behind[-1].line, behind[-1].source, [t.index for t in runnable], _variables(runnable), shared)
        else:
            runnable = launch.guarded(group.release)


def _variables(threads: list[Thread]) -> dict[str, list[Any]]:
    frames = [_innermost(thread.generator).f_locals for thread in threads]
    names = [name for name in {name: None for frame in frames for name in frame} if not name.startswith("_")]
    return {name: [_plain(frame.get(name)) for frame in frames] for name in names}


def _innermost(generator: Any) -> Any:
    while getattr(generator.gi_yieldfrom, "gi_frame", None) is not None:
        generator = generator.gi_yieldfrom
    return generator.gi_frame


def _plain(value: Any) -> Any:
    return value.data.copy() if isinstance(value, Array) else value
