"""Tensor maps: how the copy engine of a GPU (TMA) is told of an array, as an argument of a kernel."""

from __future__ import annotations

from numstack.device.base import Array
from numstack.errors import DTypeError, ShapeError

# Of cuTensorMapEncodeTiled: alignment of pointer and pitches, most elements along an axis of a box, most axes.
PITCH_BYTES = 16
BOX_MOST = 256
NDIM_MOST = 5


class TensorMap:
    """An array with the box in which a kernel moves it; ``current_device().tensor_map(array, box)`` makes it.

    A kernel sees the address of the map (uint64), to pass on to ``numstack.device.ptx.tma``; the launch knows the
    array.
    """

    __slots__ = ("address", "array")

    def __init__(self, array: Array, address: int) -> None:
        self.array = array
        self.address = address

    def __repr__(self) -> str:
        return f"TensorMap(of {self.array!r})"


def pitches_fit(array: Array) -> bool:
    """Whether the strides of ``array`` are such that a tensor map can describe it: the last axis contiguous, the
    others multiples of 16 bytes. Its address must be one as well (``device.address``).
    """
    sizes, strides = array.shape, array.strides
    return strides[-1] == array.itemsize and all(
        s % PITCH_BYTES == 0 or n == 1 for n, s in zip(sizes[:-1], strides[:-1], strict=True)
    )


def check(array: Array, address: int, box: tuple[int, ...], swizzle_bytes: int) -> None:
    """Raise unless a tensor map can describe ``array`` and its box.

    Raises
    ------
    ShapeError, DTypeError
        Saying which rule of the copy engine is broken.
    """
    if not 1 <= array.ndim <= NDIM_MOST or len(box) != array.ndim or 0 in array.shape:
        raise ShapeError(
            f"tensor_map: an array of shape {array.shape} with a box {box}; give 1 to {NDIM_MOST} axes, none of them "
            "empty, and as many sizes of a box"
        )
    if not all(1 <= n <= BOX_MOST for n in box):
        raise ShapeError(f"tensor_map: box {box}; each side has 1 to {BOX_MOST} elements")
    inner = box[-1] * array.itemsize
    if inner % PITCH_BYTES or (swizzle_bytes and inner > swizzle_bytes):
        raise ShapeError(
            f"tensor_map: rows of a box of {inner} bytes; with a swizzle of {swizzle_bytes} bytes they are a multiple "
            f"of {PITCH_BYTES}" + (f", at most {swizzle_bytes}" if swizzle_bytes else "")
        )
    if address % PITCH_BYTES or not pitches_fit(array):
        raise DTypeError(
            f"tensor_map: an array at {address:#x} with strides {array.strides}; the address and the pitches must be "
            f"multiples of {PITCH_BYTES} bytes and the last axis contiguous"
        )
