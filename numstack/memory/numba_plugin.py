"""A user's own ``numba.cuda`` arrays, from our regions: an External Memory Management plug-in for numba.

>>> from numstack.memory.numba_plugin import use_our_memory
>>> use_our_memory()                    # before numba first touches the GPU
>>> numba.cuda.device_array(1000)       # lives in numstack's "persistent" scope, and in its statistics

NumPy arrays passed straight to a numba kernel bypass it: numba copies those through memory of its own.
"""

from __future__ import annotations

import ctypes
import weakref
from typing import Any

import numpy as np
from numba import cuda

from numstack.device import current_device
from numstack.memory.arrays import empty, statistics


class RegionMemoryManager(cuda.GetIpcHandleMixin, cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc]
    """Hands numba blocks of our regions; pinned host memory stays numba's own."""

    interface_version = 1

    def initialize(self) -> None:
        """numba calls this many times; there is nothing to do."""

    def memalloc(self, size: int) -> Any:
        """A block of ``size`` bytes; back in our hands when numba drops its last reference."""
        kept = [empty((size,), np.uint8, scope="persistent")]
        pointer = ctypes.c_void_p(current_device().address(kept[0]))
        return cuda.MemoryPointer(weakref.proxy(self.context), pointer, size, finalizer=kept.clear)

    def get_memory_info(self) -> Any:
        """Free and total bytes, as far as our regions go."""
        now = statistics()
        return cuda.MemoryInfo(free=now.reserved - now.live, total=now.reserved)


def use_our_memory() -> None:
    """Let numba take device memory from us, in this process.

    Call it before numba makes its first context; numba ignores it afterwards.
    """
    cuda.set_memory_manager(RegionMemoryManager)
