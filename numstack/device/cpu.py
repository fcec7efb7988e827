"""The CPU as a device: numba.cuda kernels compiled by ``numstack.simt``, streams that are threads.

The default stream runs each work at once, in the caller's thread. Every other stream is a worker thread with a queue,
so that works of two streams do overlap: compiled kernels, copies and MPI all release the interpreter's lock. Blocks of
one kernel are shared out among the threads of a pool.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from numstack import simt
from numstack.device.base import Array, Device, Event, Properties, Region, Stream, check_same
from numstack.device.door import submit
from numstack.device.launch_types import numba_types, type_key
from numstack.device.ranks import local_size, positive
from numstack.device.work import Work
from numstack.errors import DeviceError, OutOfMemory

if TYPE_CHECKING:
    from numstack.device.kernel import Kernel

# Below this a launch costs less than waking a second thread does.
MIN_PARALLEL_BYTES = 128 * 1024
# Pieces a kernel's blocks are cut into for each thread, so that uneven blocks (causal attention) even out.
PIECES_PER_THREAD = 4


class CpuEvent(Event):
    """Done once the worker thread has come by; carries the time at which it did, and what failed before it.

    ``after``: events of other streams that must be done as well.
    """

    def __init__(self, after: tuple[Event, ...] = ()) -> None:
        self._after = after
        self._reached = threading.Event()
        self._time_s = 0.0
        self._error: BaseException | None = None

    def reach(self, error: BaseException | None = None) -> None:
        """The stream has finished everything before the event, or skipped it because of ``error``."""
        self._time_s = time.perf_counter()
        self._error = error
        self._reached.set()

    def done(self) -> bool:
        return self._reached.is_set() and all(event.done() for event in self._after)

    def synchronize(self) -> None:
        for event in self._after:
            event.synchronize()
        self._reached.wait()
        if self._error is not None:
            raise self._error

    def elapsed_s(self, later: Event) -> float:
        assert isinstance(later, CpuEvent)
        if not (self.done() and later.done()):
            raise DeviceError("elapsed_s: an event is not done yet; synchronize the later one first")
        return later._time_s - self._time_s


class InlineStream(Stream):
    """The default stream: a work is finished when ``execute`` returns."""

    def __init__(self, device: CpuDevice) -> None:
        self.device = device
        self._awaited: list[Event] = []

    def _settle(self) -> None:
        while self._awaited:
            self._awaited.pop().synchronize()

    def execute(self, work: Work) -> None:
        if self._awaited:
            self._settle()
        work.run(self)

    def record(self) -> Event:
        event = CpuEvent(after=tuple(self._awaited))
        event.reach()
        return event

    def wait(self, event: Event) -> None:
        if event.done():
            event.synchronize()
        else:
            self._awaited.append(event)

    def synchronize(self) -> None:
        self._settle()

    def __repr__(self) -> str:
        return "the CPU's default stream"


class WorkerStream(Stream):
    """A thread that runs works in the order they were submitted.

    An exception in a work is kept: works after it are skipped, as on a GPU, and whoever waits for them gets it: a host
    or a stream that waits for a later event, and ``synchronize``, after which the stream works again.
    """

    def __init__(self, device: CpuDevice, index: int) -> None:
        self.device = device
        self._index = index
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._error: BaseException | None = None
        threading.Thread(target=self._loop, name=f"numstack-stream-{index}", daemon=True).start()

    def _loop(self) -> None:
        while True:
            self._queue.get()()

    def _enqueue(self, call: Callable[[], None]) -> None:
        def run() -> None:
            if self._error is None:
                try:
                    call()
                except BaseException as error:
                    self._error = error

        self._queue.put(run)

    def execute(self, work: Work) -> None:
        self._enqueue(lambda: work.run(self))

    def record(self) -> Event:
        event = CpuEvent()
        self._queue.put(lambda: event.reach(self._error))
        return event

    def wait(self, event: Event) -> None:
        self._enqueue(event.synchronize)

    def synchronize(self) -> None:
        try:
            self.record().synchronize()
        finally:
            self._error = None

    def __repr__(self) -> str:
        return f"CPU stream {self._index}"


class _BlockPool:
    """Threads that take pieces of a kernel's blocks; the caller takes pieces as well."""

    def __init__(self, n_threads: int) -> None:
        self._n_helpers = n_threads - 1
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        for i in range(self._n_helpers):
            threading.Thread(target=self._loop, name=f"numstack-blocks-{i}", daemon=True).start()

    def _loop(self) -> None:
        while True:
            self._calls.get()()

    def run(self, n_blocks: int, piece: Callable[[int, int], None]) -> None:
        """Call ``piece(first, last)`` until all of 0..n_blocks are covered; raise the first exception."""
        n_pieces = min(n_blocks, (self._n_helpers + 1) * PIECES_PER_THREAD)
        bounds = [n_blocks * i // n_pieces for i in range(n_pieces + 1)]
        todo = iter(range(n_pieces))  # next() on one iterator is atomic under the interpreter's lock
        errors: list[BaseException] = []
        finished = threading.Semaphore(0)

        def take() -> None:
            try:
                for i in todo:
                    piece(bounds[i], bounds[i + 1])
            except BaseException as error:
                errors.append(error)

        def help_out() -> None:
            take()
            finished.release()

        for _ in range(self._n_helpers):
            self._calls.put(help_out)
        take()
        for _ in range(self._n_helpers):
            finished.acquire()
        if errors:
            raise errors[0]


class _Memory:
    """What an array over device memory is a view of: NumPy keeps it, and so the owner, as the array's base."""

    __slots__ = ("__array_interface__", "owner")
    __array_interface__: dict[str, Any]
    owner: object


class CpuDevice(Device):
    """This machine's CPU. Arrays are ``numpy.ndarray``; ``NUMSTACK_CHECK=1`` runs every kernel under checks."""

    kind = "cpu"

    def __init__(self) -> None:
        super().__init__()
        self.n_threads = share_of_cores()
        self.name = f"CPU ({numba.core.config.CPU_NAME or 'host'}, {self.n_threads} threads)"
        self.properties = Properties(
            alignment=512,
            warp_size=32,
            multiprocessors=self.n_threads,
            shared_bytes_per_block=232_448,
            memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            compute_capability=(0, 0),
        )
        self.default_stream = InlineStream(self)
        self.checks = os.environ.get("NUMSTACK_CHECK", "") not in ("", "0")
        self._streams: list[WorkerStream] = []
        self._regions: dict[int, mmap.mmap] = {}
        self._compiled: dict[Any, Any] = {}
        self._pool = _BlockPool(self.n_threads) if self.n_threads > 1 else None

    def create_stream(self, priority: int = 0) -> Stream:
        stream = WorkerStream(self, len(self._streams) + 1)
        self._streams.append(stream)
        return stream

    def synchronize(self) -> None:
        for stream in self._streams:
            stream.synchronize()
        self.default_stream.synchronize()

    def allocate(self, nbytes: int) -> Region:
        try:
            memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise OutOfMemory(f"allocate: the system has no {nbytes} bytes of memory ({error})") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        region = Region(ctypes.addressof(ctypes.c_char.from_buffer(memory)), nbytes)
        self._regions[region.address] = memory
        return region

    def release(self, region: Region) -> None:
        self._regions.pop(region.address).close()

    def view(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any] | type,
        strides: tuple[int, ...] | None = None,
        owner: object = None,
    ) -> Array:
        memory = _Memory()
        memory.owner = owner
        memory.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": np.dtype(dtype).str,
            "version": 3,
        }
        return np.asarray(memory)  # type: ignore[return-value]

    def address(self, array: Array) -> int:
        return int(array.ctypes.data)  # type: ignore[attr-defined]

    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any] | type) -> np.ndarray:
        return np.empty(shape, dtype)

    def to_host(self, array: Array) -> np.ndarray:
        self.synchronize()
        return np.array(array)

    def copy(self, dst: Any, src: Any, stream: Stream | None = None) -> None:
        check_same("copy", dst, src)
        submit(Work("copy", "copy", lambda _: np.copyto(dst, src), stream or self.default_stream, (src,), (dst,)))

    def fill(self, dst: Any, value: float, stream: Stream | None = None) -> None:
        submit(Work("fill", "fill", lambda _: dst.fill(value), stream or self.default_stream, (), (dst,)))

    def bind(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        args: tuple[Any, ...],
    ) -> Callable[[Stream], None]:
        key = (kernel, block, type_key(kernel, args))
        if self.checks:
            return lambda _: simt.interpret(
                kernel.py_func, grid, block, args, shared_bytes=shared_bytes, checks=True, name=kernel.name
            )
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = simt.compile_kernel(kernel.py_func, numba_types(kernel, args), block)
            self._compiled[key] = compiled
        n_blocks = grid[0] * grid[1] * grid[2]
        pool = self._pool
        if pool is None or n_blocks == 1 or compiled.has_global_atomics or not _worth_sharing(args):
            return lambda _: compiled(grid, 0, n_blocks, shared_bytes, *args)
        return lambda _: pool.run(n_blocks, lambda first, last: compiled(grid, first, last, shared_bytes, *args))


def _worth_sharing(args: tuple[Any, ...]) -> bool:
    return sum(arg.nbytes for arg in args if isinstance(arg, np.ndarray)) >= MIN_PARALLEL_BYTES


def share_of_cores() -> int:
    """Threads for this process: ``NUMSTACK_THREADS``, or the cores it may use divided by the ranks of this machine."""
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if n_cores * local_size() > (os.cpu_count() or 1):  # the launcher did not bind each rank to cores of its own
        n_cores //= local_size()
    return positive("NUMSTACK_THREADS", max(1, n_cores))
