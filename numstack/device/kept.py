"""What kernels keep on a device from one launch to the next."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numstack.device.base import Array, Device


class Kept:
    """Arrays of int32 that are zero at first and belong to a kernel: ``current_device().state(Kept)``.

    Launches that use the same one must follow each other on one stream.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._arrays: dict[tuple[str, int], Array] = {}

    def zeros(self, name: str, size: int) -> Array:
        """The one of this name and size; from the second call on as the last launch has left it."""
        array = self._arrays.get((name, size))
        if array is None:
            device = self._device
            region = device.allocate(4 * size)  # for good, as the table of tensor maps is
            array = self._arrays[name, size] = device.view(region.address, (size,), np.dtype(np.int32), owner=region)
            device.copy(array, np.zeros(size, np.int32))
            device.synchronize()
        return array
