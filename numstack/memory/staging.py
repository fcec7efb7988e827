"""Host data on its way to the device, and back, without the host waiting for either.

The driver copies from and to pinned host memory on its own. For any other memory it uses pinned memory of its own in
between, and the host may have to wait until works before that are done. So values go through a pinned buffer here; an
event tells when the copy is done, and the buffer can be used again.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from numstack.memory.sizes import KIB

if TYPE_CHECKING:
    from numstack.device import Array, Device, Event, Stream

LEAST_NBYTES = 4 * KIB
N_BUFFERS = 8
"""Most buffers of one size: a sender that is further ahead of the device waits for the oldest."""


class Reading:
    """Values on their way to the host, as :func:`numstack.memory.fetch` has asked for them."""

    def __init__(self, event: Event, values: np.ndarray[Any, Any], give_back: Callable[[], None]) -> None:
        self._event = event
        self._values = values
        self._give_back: Callable[[], None] | None = give_back

    def wait(self) -> np.ndarray[Any, Any]:
        """The values, once the works are done that were submitted before they were asked for."""
        if self._give_back is not None:
            self._event.synchronize()
            self._values = self._values.copy()
            self._give_back()
            self._give_back = None
        return self._values


class Staging:
    """The pinned buffers of a device; sizes are powers of two.

    Parameters
    ----------
    device : Device
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._used: dict[int, deque[tuple[Event, np.ndarray]]] = {}

    def send(self, host: np.ndarray, array: Array, stream: Stream) -> None:
        """Copy ``host`` to ``array``, of its shape and dtype, in ``stream``'s order; ``host`` may change at once."""
        with self._lock:
            used = self._used_of(host.nbytes)
            buffer = self._buffer(host.nbytes)
            staged = buffer[: host.nbytes].view(host.dtype).reshape(host.shape)
            staged[...] = host
            self._device.copy(array, staged, stream)
            used.append((stream.record(), buffer))

    def fetch(self, array: Array, stream: Stream) -> Reading:
        """Copy ``array`` in ``stream``'s order; it may change by later works of ``stream``."""
        with self._lock:
            buffer = self._buffer(array.nbytes)
        values = buffer[: array.nbytes].view(array.dtype).reshape(array.shape)
        self._device.copy(values, array, stream)
        event = stream.record()
        return Reading(event, values, lambda: self._used_of(values.nbytes).append((event, buffer)))

    def _buffer(self, nbytes: int) -> np.ndarray:
        """One that is done with, or a new one."""
        used = self._used_of(nbytes)
        if used and (len(used) >= N_BUFFERS or used[0][0].done()):
            event, buffer = used.popleft()
            event.synchronize()
            return buffer
        return self._device.pinned((_rounded(nbytes),), np.uint8)

    def _used_of(self, nbytes: int) -> deque[tuple[Event, np.ndarray]]:
        return self._used.setdefault(_rounded(nbytes), deque())


def _rounded(nbytes: int) -> int:
    return max(LEAST_NBYTES, 1 << (nbytes - 1).bit_length())
