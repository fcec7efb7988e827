"""What every device offers. A CUDA back end and a CPU back end implement it; nothing above knows which one runs."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np

from numstack.errors import DeviceError, DTypeError, ShapeError

if TYPE_CHECKING:
    from numstack.device.kernel import Kernel
    from numstack.device.tensor_map import TensorMap
    from numstack.device.work import Observer, Work

StateT = TypeVar("StateT")


class Array(Protocol):
    """Device memory with a shape: ``numpy.ndarray`` on the CPU, ``CudaArray`` on a GPU. Kernels take these."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def strides(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def ndim(self) -> int: ...
    @property
    def size(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def itemsize(self) -> int: ...
    @property
    def flags(self) -> Any: ...
    @property
    def T(self) -> Array: ...
    def reshape(self, *shape: Any) -> Array: ...
    def transpose(self, *axes: Any) -> Array: ...
    def view(self, dtype: Any) -> Array: ...
    def __getitem__(self, key: Any) -> Array: ...


@dataclass(frozen=True, slots=True)
class Region:
    """A piece of a device's address space, as the device hands it out; only ``memory/`` holds these."""

    address: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Properties:
    """Facts about a device that choices depend on.

    Attributes
    ----------
    alignment : int
        Bytes; every allocation starts at a multiple.
    warp_size : int
        Threads.
    multiprocessors : int
        Blocks run on these at the same time; threads of the pool on a CPU.
    shared_bytes_per_block : int
        Most shared memory that one block can have.
    memory_bytes : int
        Device memory in all.
    compute_capability : tuple of int
        ``(9, 0)`` for Hopper; ``(0, 0)`` on a CPU.
    """

    alignment: int
    warp_size: int
    multiprocessors: int
    shared_bytes_per_block: int
    memory_bytes: int
    compute_capability: tuple[int, int]


class Event(ABC):
    """A point in a stream."""

    @abstractmethod
    def done(self) -> bool:
        """Whether everything before the point has finished."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until everything before the point has finished."""

    @abstractmethod
    def elapsed_s(self, later: Event) -> float:
        """Seconds from this point to ``later``, as the device saw them; both must be done."""


class Stream(ABC):
    """Works in order; works of different streams may run at the same time."""

    device: Device

    @abstractmethod
    def execute(self, work: Work) -> None:
        """Enqueue ``work``; only ``submit`` calls this."""

    @abstractmethod
    def record(self) -> Event:
        """Mark the present end of the stream. Never blocks; any thread may call it."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let later works start only once ``event`` is done. Does not block the host."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until the stream is empty; raises what a work of it raised."""


class Device(ABC):
    """A GPU or this machine's CPU: memory, streams, copies and kernels."""

    kind: str
    name: str
    n_threads: int
    properties: Properties
    default_stream: Stream

    def __init__(self) -> None:
        self.observers: list[Observer] = []
        self._state: dict[Callable[[Device], Any], Any] = {}
        self._state_lock = threading.RLock()  # reentrant: one factory may ask for another's state

    # what upper rooms keep for a device

    def state(self, factory: Callable[[Device], StateT]) -> StateT:
        """The one ``factory(device)`` of this device, made at the first call."""
        found = self._state.get(factory)
        if found is None:
            with self._state_lock:
                found = self._state.get(factory)
                if found is None:
                    found = self._state[factory] = factory(self)
        return found  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def observe(self, observer: Observer) -> Iterator[Observer]:
        """Let ``observer`` see every work submitted inside the ``with`` block."""
        self.observers.append(observer)
        try:
            yield observer
        finally:
            self.observers.remove(observer)

    # streams

    @abstractmethod
    def create_stream(self, priority: int = 0) -> Stream:
        """A new stream; a higher ``priority`` is served first where the device can."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until all streams are empty."""

    # memory

    @abstractmethod
    def allocate(self, nbytes: int) -> Region:
        """Device memory straight from the driver or the system; ``memory/`` alone calls this.

        Raises
        ------
        OutOfMemory
            If the device cannot give ``nbytes``.
        """

    @abstractmethod
    def release(self, region: Region) -> None:
        """Give a region back; nothing may use it any more."""

    @abstractmethod
    def view(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any] | type,
        strides: tuple[int, ...] | None = None,
        owner: object = None,
    ) -> Array:
        """An array over memory at ``address``, which keeps ``owner`` alive; strides in bytes, C order by default."""

    @abstractmethod
    def address(self, array: Array) -> int:
        """Where the first element of ``array`` lies in device memory."""

    @abstractmethod
    def pinned(self, shape: tuple[int, ...], dtype: np.dtype[Any] | type) -> np.ndarray:
        """Host memory that asynchronous copies can use directly."""

    @abstractmethod
    def to_host(self, array: Array) -> np.ndarray:
        """A copy of ``array`` in host memory, once all streams are empty."""

    @abstractmethod
    def copy(self, dst: Array | np.ndarray, src: Array | np.ndarray, stream: Stream | None = None) -> None:
        """Copy ``src`` to ``dst``, device or host on either side, in the order of ``stream``.

        Host memory must not change until the copy is done (``stream.synchronize()`` or an event).

        Raises
        ------
        ShapeError, DTypeError
            If shapes or dtypes differ.
        """

    @abstractmethod
    def fill(self, dst: Array, value: float, stream: Stream | None = None) -> None:
        """Set every element of ``dst`` to ``value`` (in its storage dtype)."""

    # kernels

    @abstractmethod
    def bind(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        shared_bytes: int,
        args: tuple[Any, ...],
    ) -> Callable[[Stream], None]:
        """Compile ``kernel`` for these arguments if needed, and pack them: what a Work runs."""

    def tensor_map(self, array: Array, box: tuple[int, ...], *, swizzle_bytes: int = 128) -> TensorMap:
        """A kernel argument by which the copy engine moves boxes of ``array``; always the same for a view.

        Parameters
        ----------
        array : array of 1 to 5 axes
            May be strided: the last axis contiguous, the other strides and the address multiples of 16 bytes.
        box : tuple of int
            Elements along each axis, 1 to 256, in the order of ``array.shape`` (coordinates in a kernel are in the
            opposite order, as in PTX). Where it sticks out of the array, zeros are read and nothing is written.
        swizzle_bytes : {128, 64, 32, 0}
            Period of the swizzle in shared memory; rows of the box are at most as long. 0 for none.

        Raises
        ------
        DeviceError
            If the device has no copy engine.
        ShapeError, DTypeError
            If the copy engine cannot move such an array or box.
        """
        raise DeviceError(f"{self.name} has no tensor maps; they are for GPUs of compute capability 9.0 and later")


def check_same(operation: str, dst: Array | np.ndarray, src: Array | np.ndarray) -> None:
    """Raise unless two arrays have one shape and one dtype."""
    if dst.shape != src.shape:
        raise ShapeError(f"{operation}: dst has shape {dst.shape} but src has {src.shape}; make them equal")
    if dst.dtype != src.dtype:
        raise DTypeError(f"{operation}: dst is {dst.dtype} but src is {src.dtype}; cast first (elementwise.cast)")
