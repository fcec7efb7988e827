"""Tensor maps encoded by the driver, in a table in GPU memory, each array and box once.

numba has no by-value parameter of 128 bytes, so a kernel gets the address of an entry. An entry is never rewritten:
a launch that is under way, or a captured one, may still use it, and an array that comes back at the same place with
the same shape (as they do in a training loop) finds its entry. The table therefore only grows, by 128 bytes for
each kind of view that was ever described.

The copy engine has a cache of its own for maps, which writes to memory do not reach: each block fences a map before its
first use (``ptx.tma.acquire_map``), as CUDA's programming guide asks.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
from cuda.bindings import driver

from numstack.device.cuda.driver import call
from numstack.device.tensor_map import PITCH_BYTES, TensorMap, check
from numstack.errors import DTypeError

if TYPE_CHECKING:
    from numstack.device.cuda.array import CudaArray

MAP_BYTES = 128
MAPS_A_PAGE = 512

_ELEMENT = {
    np.dtype(np.uint16): driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
    np.dtype(np.float16): driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
    np.dtype(np.float32): driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
    np.dtype(np.int32): driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_INT32,
    np.dtype(np.uint8): driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
}
_SWIZZLE = {
    0: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
    32: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_32B,
    64: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
    128: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
}


class TensorMaps:
    """The table of one GPU."""

    def __init__(self) -> None:
        self._entries: dict[Any, int] = {}
        self._lock = threading.Lock()
        self._next = self._end = 0
        self._stream: Any = None

    def of(self, array: CudaArray, box: tuple[int, ...], swizzle_bytes: int) -> TensorMap:
        """The map of ``array``, from the table or freshly encoded."""
        key = (array.address, array.shape, array.strides, array.type_key, box, swizzle_bytes)
        entry = self._entries.get(key)
        if entry is None:
            with self._lock:
                entry = self._entries.get(key)
                if entry is None:
                    entry = self._entries[key] = self._store(encode(array, box, swizzle_bytes))
        return TensorMap(array, entry)

    def _store(self, encoded: bytes) -> int:
        """Put a map into the table; complete on return, for whatever stream uses it."""
        if self._next == self._end:
            if self._stream is None:
                self._stream = call(driver.cuStreamCreate, driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
            self._next = int(call(driver.cuMemAlloc, MAPS_A_PAGE * MAP_BYTES))
            self._end = self._next + MAPS_A_PAGE * MAP_BYTES
        entry = self._next
        buffer = ctypes.create_string_buffer(encoded, MAP_BYTES)
        call(driver.cuMemcpyHtoDAsync, entry, ctypes.addressof(buffer), MAP_BYTES, self._stream)
        call(driver.cuStreamSynchronize, self._stream)
        self._next += MAP_BYTES
        return entry


def encode(array: CudaArray, box: tuple[int, ...], swizzle_bytes: int) -> bytes:
    """The 128 bytes of a tensor map; the driver writes them, no GPU takes part.

    Raises
    ------
    ShapeError, DTypeError
        If the copy engine cannot move such an array or box.
    """
    check(array, array.address, box, swizzle_bytes)
    if array.dtype not in _ELEMENT:
        raise DTypeError(f"tensor_map: {array.dtype}; the copy engine takes {', '.join(str(d) for d in _ELEMENT)}")
    sizes = [driver.cuuint64_t(n) for n in reversed(array.shape)]
    # An axis of one element may have any pitch in NumPy; the driver checks it all the same.
    pitches = [
        driver.cuuint64_t(stride if n > 1 else -(-stride // PITCH_BYTES) * PITCH_BYTES)
        for n, stride in zip(array.shape[-2::-1], array.strides[-2::-1], strict=True)
    ]
    encoded = call(
        driver.cuTensorMapEncodeTiled,
        _ELEMENT[array.dtype],
        array.ndim,
        array.address,
        sizes,
        pitches,
        [driver.cuuint32_t(n) for n in reversed(box)],
        [driver.cuuint32_t(1)] * array.ndim,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        _SWIZZLE[swizzle_bytes],
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return np.array([int(word) for word in encoded.opaque], np.uint64).tobytes()
