"""One block of a launch in Python: its threads, what they wait for, and the shared memory between them."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numba import njit

from numstack.simt.arrays import Array, load, store
from numstack.simt.checks import Fault, LocalMemory, SharedMemory, Site
from numstack.simt.scalars import Int32, Undefined, as_numpy_dtype
from numstack.simt.threaded import BARRIERS, WARP_OPERATIONS

if TYPE_CHECKING:
    from numstack.simt.interpret import Launch

WARP_SIZE = 32
Dim = tuple[int, int, int]


class Dim3(NamedTuple):
    """``threadIdx`` and its kind."""

    x: Int32
    y: Int32
    z: Int32


class Thread:
    """One thread: what ``cuda.*`` means to it, and where it waits.

    ``request`` is what it waits for (None before it starts), ``reply`` what it is told when it goes on. ``clock`` and
    ``seen`` order its accesses within its warp (see ``checks.Actor``).
    """

    __slots__ = (
        "block", "blockDim", "blockIdx", "clock", "done", "ended", "generator", "gridDim", "group", "index",
        "laneid", "reply", "request", "seen", "threadIdx", "warp",
    )  # fmt: skip
    warpsize = Int32(WARP_SIZE)

    def __init__(self, group: Block, position: int, index: Dim) -> None:
        launch = group.launch
        self.group = group
        self.block = group.index
        self.index = index
        self.threadIdx = Dim3(*map(Int32, index))
        self.blockIdx, self.blockDim, self.gridDim = group.blockIdx, launch.blockDim, launch.gridDim
        self.laneid = Int32(position % WARP_SIZE)
        self.warp = group.warps[position // WARP_SIZE]
        self.warp.append(self)
        self.clock = 0
        self.seen = [0] * WARP_SIZE
        self.generator: Any = None
        self.request: Any = None
        self.reply: Any = None
        self.ended: tuple[str, int] | None = None
        self.done = False

    @property
    def lane(self) -> int:
        return self.laneid

    def grid(self, n_dimensions: int) -> Any:
        """Position of the thread in the whole grid."""
        position = tuple(b * n + t for b, n, t in zip(self.blockIdx, self.blockDim, self.threadIdx, strict=True))
        return position[0] if n_dimensions == 1 else position[:n_dimensions]

    def gridsize(self, n_dimensions: int) -> Any:
        """Threads of the whole grid in each dimension."""
        size = tuple(b * g for b, g in zip(self.blockDim, self.gridDim, strict=True))
        return size[0] if n_dimensions == 1 else size[:n_dimensions]

    def shared_array(self, name: str, declared_at: Any, shape: Any, dtype: Any) -> Array:
        """The block's array of one declaration."""
        return self.group.shared_array(name, declared_at, _shape(shape), as_numpy_dtype(dtype))

    def local_array(self, name: str, shape: Any, dtype: Any) -> Array:
        """A new array of this thread's own."""
        dtype, shape = as_numpy_dtype(dtype), _shape(shape)
        memory = LocalMemory(self.group.launch, int(np.prod(shape)) * dtype.itemsize)
        return Array(memory.array(shape, dtype), name, memory if self.group.launch.checks else None)

    def lanemask_lt(self) -> Int32:
        """The lanes of the warp below this one."""
        return Int32((1 << self.laneid) - 1)

    def stack(self) -> tuple[Site, ...]:
        """Where it waits: a site in the kernel, then one in each device function that it is inside of."""
        sites, generator = [], self.generator
        while generator is not None and getattr(generator, "gi_frame", None) is not None:
            frame = generator.gi_frame
            sites.append(Site(frame.f_code.co_filename, frame.f_lineno))
            generator = generator.gi_yieldfrom
        return tuple(sites)

    def where(self) -> str:
        """In words, for messages."""
        if self.done:
            return f"has ended at {Site(*self.ended)}" if self.ended else "has ended"
        site = self.stack()[-1]
        return f"waits at {site} ({site.source})"


class Block:
    """The threads of one block and their shared memory."""

    def __init__(self, launch: Launch, index: Dim) -> None:
        self.launch = launch
        self.index = index
        self.blockIdx = Dim3(*map(Int32, index))
        nx, ny, nz = launch.block
        n_threads = nx * ny * nz
        self.warps: list[list[Thread]] = [[] for _ in range(-(-n_threads // WARP_SIZE))]
        self.threads = [Thread(self, i, (i % nx, i // nx % ny, i // (nx * ny))) for i in range(n_threads)]
        self.shared: dict[Any, Array] = {}
        self.dynamic: SharedMemory | None = None

    def shared_array(self, name: str, declared_at: Any, shape: tuple[int, ...], dtype: np.dtype) -> Array:
        array = self.shared.get(declared_at)
        if array is None:
            if 0 in shape:  # the whole dynamic shared memory, however often it is declared
                if self.dynamic is None:
                    self.dynamic = SharedMemory(self.launch, self.launch.shared_bytes, dynamic=True)
                memory, shape = self.dynamic, ()
            else:
                memory = SharedMemory(self.launch, int(np.prod(shape)) * dtype.itemsize)
            array = Array(memory.array(shape, dtype), name, memory if self.launch.checks else None)
            self.shared[declared_at] = array
        return array

    def release(self) -> list[Thread]:
        """The threads that may go on, with their replies set, now that all have stopped; none: the block is done.

        Raises
        ------
        Fault
            If they wait for something that cannot happen.
        """
        waiting = [thread for thread in self.threads if not thread.done]
        at_warp_operations = [thread for thread in waiting if thread.request and thread.request[0] not in BARRIERS]
        if at_warp_operations:
            return self._release_warps(at_warp_operations)
        if waiting:
            self._check_barrier(waiting)
            self._pass_barrier(waiting)
        return waiting

    def _check_barrier(self, waiting: list[Thread]) -> None:
        first = waiting[0]
        place = first.stack()
        other = next((t for t in waiting if t.request and t.request[0] != first.request[0]), None)
        if self.launch.checks and other is None:
            other = next((t for t in self.threads if t.done or t.stack() != place), None)
        if other is not None:
            self.launch.thread = first
            n = sum(not t.done and t.stack() == place for t in self.threads)
            text = f"only {n} of the block's {len(self.threads)} threads reach this barrier"
            raise Fault("divergence", f"{text}: thread {other.index} {other.where()}", (other.index,))

    def _pass_barrier(self, waiting: list[Thread]) -> None:
        self.launch.thread = waiting[0]
        requests: list[Any] = [thread.request for thread in waiting]
        if requests[0][0] != "syncthreads":
            flags = [bool(request[1]) for request in requests]
            reply = {"and": all(flags), "or": any(flags), "count": sum(flags)}[requests[0][0].rpartition("_")[2]]
            for thread in waiting:
                thread.reply = Int32(reply)
        for array in self.shared.values():
            if isinstance(array.memory, SharedMemory):
                array.memory.log.clear()
        self.launch.memory.log.clear()

    def _release_warps(self, waiting: list[Thread]) -> list[Thread]:
        released: list[Thread] = []
        for warp in {id(thread.warp): thread.warp for thread in waiting}.values():
            remaining = [t for t in warp if not t.done and t.request and t.request[0] not in BARRIERS]
            while remaining:
                first = self.launch.thread = remaining[0]  # whose place a fault below is told with
                operation, mask = first.request[:2]
                mask = int(mask) & 0xFFFFFFFF
                group = [t for t in warp if mask >> t.laneid & 1 and not t.done]
                here = [t for t in remaining if t.request[0] == operation and int(t.request[1]) & 0xFFFFFFFF == mask]
                remaining = [t for t in remaining if t not in here]
                if here == group:
                    if operation in WARP_OPERATIONS:
                        _answer(operation, group)
                    else:
                        self._compute(group)
                    _synchronise(warp, group)
                    released += group
        if not released:
            self._report_warp(waiting)
        return released

    def _compute(self, group: list[Thread]) -> None:
        """Call a `collective` function on the local arrays that the lanes of a warp came with."""
        requests: list[Any] = [thread.request for thread in group]
        name, _, function, *_ = requests[0]
        if len(group) < WARP_SIZE:
            raise Fault("divergence", f"{name} takes all 32 lanes of a warp, but only {len(group)} come to it")
        operands = []
        for position in range(len(requests[0][3:]) // 3):
            array, first, count = requests[0][3 + 3 * position :][:3]
            by_lane = np.empty((WARP_SIZE, count), array.dtype)
            if position in function.collective_reads:
                for lane, thread in enumerate(group):
                    self.launch.thread = thread
                    registers = requests[lane][3 + 3 * position].reshape(-1)
                    by_lane[lane] = [load(registers, first + i, ("", 0)) for i in range(count)]
            operands.append(by_lane)
        _compiled(function)(*operands)
        for position in function.collective_writes:
            for lane, thread in enumerate(group):
                self.launch.thread = thread
                registers, first = requests[lane][3 + 3 * position].reshape(-1), requests[lane][4 + 3 * position]
                for i, value in enumerate(operands[position][lane]):
                    store(registers, first + i, value, ("", 0))

    def _report_warp(self, waiting: list[Thread]) -> None:
        self.launch.thread = first = waiting[0]
        operation, mask = first.request[:2]
        mask = int(mask) & 0xFFFFFFFF
        if not mask >> first.laneid & 1:
            raise Fault("divergence", f"lane {first.laneid} calls {operation} with mask {mask:#x}, which leaves it out")
        group = [t for t in first.warp if mask >> t.laneid & 1 and not t.done]
        other = next(t for t in group if t.request[0] != operation or int(t.request[1]) & 0xFFFFFFFF != mask)
        text = f"{operation} with mask {mask:#x} waits for thread {other.index}, which {other.where()}"
        raise Fault("divergence", text, (other.index,))


@functools.cache
def _compiled(function: Any) -> Any:
    return njit(function)


def _synchronise(warp: list[Thread], group: list[Thread]) -> None:
    """Order what the threads of ``group`` did so far before what each of them does next."""
    if len(group) == len(warp):
        seen = [0] * WARP_SIZE
    else:
        seen = [max(clocks) for clocks in zip(*(thread.seen for thread in group), strict=True)]
    for thread in group:
        thread.clock += 1
        seen[thread.laneid] = thread.clock
    for thread in group:
        thread.seen = seen


def _answer(operation: str, group: list[Thread]) -> None:
    """Set each thread's reply to a shuffle or a vote."""
    if operation == "syncwarp":
        return
    requests: list[Any] = [thread.request for thread in group]
    values = {int(thread.laneid): request[2] for thread, request in zip(group, requests, strict=True)}
    if operation.startswith("shfl"):
        for thread, request in zip(group, requests, strict=True):
            source = _source_lane(operation, int(thread.laneid), int(request[3]))
            if source in values:
                thread.reply = values[source]
            else:
                thread.reply = Undefined(f"what {operation} got from lane {source}, which takes no part in it")
        return
    if operation.startswith("match"):
        masks = {lane: sum(1 << other for other, v in values.items() if v == value) for lane, value in values.items()}
        for thread in group:
            mask = Int32(_signed(masks[int(thread.laneid)]))
            everyone = len(set(values.values())) == 1
            thread.reply = mask if operation == "match_any_sync" else (mask if everyone else Int32(0), everyone)
        return
    ballot = sum(1 << lane for lane, value in values.items() if value)
    n_true = ballot.bit_count()
    reply: Any = {
        "ballot_sync": Int32(_signed(ballot)),
        "any_sync": n_true > 0,
        "all_sync": n_true == len(values),
        "eq_sync": n_true in (0, len(values)),
    }[operation]
    for thread in group:
        thread.reply = reply


def _source_lane(operation: str, lane: int, operand: int) -> int:
    if operation == "shfl_up_sync":
        return lane - operand if lane >= operand else lane
    if operation == "shfl_down_sync":
        return lane + operand if lane + operand < WARP_SIZE else lane
    return (lane ^ operand if operation == "shfl_xor_sync" else operand) % WARP_SIZE


def _signed(mask: int) -> int:
    return mask - (1 << 32) if mask >> 31 else mask


def _shape(shape: Any) -> tuple[int, ...]:
    return tuple(int(n) for n in shape) if isinstance(shape, tuple) else (int(shape),)
