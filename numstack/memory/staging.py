"""Host data on its way to the device, without the host waiting for either.

The driver copies from pinned host memory on its own. From any other memory it first copies to pinned memory of its own,
and the host may have to wait until works before that are done. So values are put into a pinned buffer here; an event
tells when the copy out of it is done, and the buffer can be used again.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from numstack.memory.sizes import KIB

if TYPE_CHECKING:
    from numstack.device import Array, Device, Event, Stream

LEAST_NBYTES = 4 * KIB
N_BUFFERS = 8
"""Most buffers of one size: a sender that is further ahead of the device waits for the oldest."""


class Staging:
    """The pinned buffers of a device; sizes are powers of two.

    Parameters
    ----------
    device : Device
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._sent: dict[int, deque[tuple[Event, np.ndarray]]] = {}

    def send(self, host: np.ndarray, array: Array, stream: Stream) -> None:
        """Copy ``host`` to ``array``, of its shape and dtype, in ``stream``'s order; ``host`` may change at once."""
        nbytes = max(LEAST_NBYTES, 1 << (host.nbytes - 1).bit_length())
        with self._lock:
            sent = self._sent.setdefault(nbytes, deque())
            if sent and (len(sent) == N_BUFFERS or sent[0][0].done()):
                event, buffer = sent.popleft()
                event.synchronize()
            else:
                buffer = self._device.pinned((nbytes,), np.uint8)
            staged = buffer[: host.nbytes].view(host.dtype).reshape(host.shape)
            staged[...] = host
            self._device.copy(array, staged, stream)
            sent.append((stream.record(), buffer))
