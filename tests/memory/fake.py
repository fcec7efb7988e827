"""A device whose streams run only when a test says so, with real host memory, and which knows what must not happen.

Each stream counts the works submitted to it. An event holds a vector clock: what it comes after, on every stream. So
whether memory last used by a work of one stream may be used by the next work of another is a comparison.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from numstack.device import Region
from numstack.errors import OutOfMemory


class FakeEvent:
    def __init__(self, stream: FakeStream) -> None:
        self.clock = {**stream.known, stream: stream.submitted}

    def done(self) -> bool:
        return all(stream.completed >= at for stream, at in self.clock.items())

    def synchronize(self) -> None:
        for stream, at in self.clock.items():
            stream.complete(at)


class FakeStream:
    def __init__(self, name: str) -> None:
        self.name = name
        self.submitted = 0
        self.completed = 0
        self.known: dict[FakeStream, int] = {}
        self.on_complete: Callable[[], None] = lambda: None

    def work(self) -> int:
        """Submit a work; its number."""
        self.submitted += 1
        return self.submitted

    def complete(self, at: int | None = None) -> None:
        """Let works up to this number finish, by default all, and what they wait for."""
        self.completed = max(self.completed, self.submitted if at is None else at)
        self.on_complete()
        for stream, known in self.known.items():
            if stream.completed < known:
                stream.complete(known)

    def comes_after(self, stream: FakeStream, at: int) -> bool:
        """Whether the next work of this stream is sure to start after that work of another has finished."""
        return stream is self or stream.completed >= at or self.known.get(stream, 0) >= at

    def record(self) -> FakeEvent:
        return FakeEvent(self)

    def wait(self, event: FakeEvent) -> None:
        for stream, at in event.clock.items():
            self.known[stream] = max(self.known.get(stream, 0), at)

    def synchronize(self) -> None:
        self.complete()

    def __repr__(self) -> str:
        return self.name


class _Memory:
    __slots__ = ("__array_interface__", "owner")


class FakeDevice:
    """``capacity`` bytes in all; ``on_release(region)`` lets a test check each region that comes back."""

    def __init__(self, capacity: int = 1 << 30) -> None:
        self.properties = SimpleNamespace(alignment=512)
        self.default_stream = FakeStream("default")
        self.capacity = capacity
        self.granted: dict[int, Region] = {}
        self.on_release: Callable[[Region], None] = lambda region: None
        self._mapped: dict[int, mmap.mmap] = {}  # kept, so that use after release reads zeros

    @property
    def reserved(self) -> int:
        return sum(region.nbytes for region in self.granted.values())

    def allocate(self, nbytes: int) -> Region:
        if self.reserved + nbytes > self.capacity:
            raise OutOfMemory(f"the fake device has only {self.capacity} bytes")
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        address = np.frombuffer(memory, np.uint8).ctypes.data
        self._mapped[address] = memory
        self.granted[address] = Region(address, nbytes)
        return self.granted[address]

    def release(self, region: Region) -> None:
        assert self.granted.pop(region.address) == region
        self.on_release(region)
        self._mapped[region.address].madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Unmap everything; the test is over."""
        for memory in self._mapped.values():
            memory.close()

    def address(self, array: np.ndarray) -> int:
        return array.ctypes.data

    def view(self, address: int, shape: tuple[int, ...], dtype: Any, strides: Any = None, owner: object = None) -> Any:
        memory = _Memory()
        memory.owner = owner
        memory.__array_interface__ = {
            "data": (address, False),
            "shape": shape,
            "strides": strides,
            "typestr": np.dtype(dtype).str,
            "version": 3,
        }
        return np.asarray(memory)


def make(manager: Any, device: Any, nbytes: int, scope: str = "forward", stream: Any = None) -> Any:
    """An array of ``nbytes`` bytes, as ``memory.empty`` makes it."""
    lease = manager.allocate(nbytes, scope, stream)
    return device.view(lease.block.address, (nbytes,), np.uint8, None, lease)
