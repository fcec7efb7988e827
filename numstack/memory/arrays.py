"""Arrays in device memory: made, filled, copied in and out."""

from __future__ import annotations

import math
import operator
import os
import sys
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from numstack.device import current_device
from numstack.errors import DTypeError, ShapeError
from numstack.memory.block import Where
from numstack.memory.manager import MemoryManager
from numstack.memory.staging import Reading, Staging
from numstack.memory.statistics import Statistics

if TYPE_CHECKING:
    from numstack.device import Array, Stream

_HERE = os.path.join(os.path.dirname(__file__), "")


def manager() -> MemoryManager:
    """The memory manager of the current device."""
    return current_device().state(MemoryManager)


def empty(
    shape: int | tuple[int, ...], dtype: npt.DTypeLike, *, scope: str | None = None, stream: Stream | None = None
) -> Array:
    """A C-contiguous array with arbitrary contents. It and its views own its memory.

    Parameters
    ----------
    shape : int or tuple of int
    dtype : dtype
        Boolean, integer or floating; bfloat16 is stored as uint16 (``dtypes.storage``).
    scope : str, optional
        What it is for: ``"persistent"``, ``"forward"``, ``"backward"``, ``"workspace"`` or ``"comm"``. By default what
        ``with memory.scope(...)`` says, else ``"forward"``.
    stream : Stream, optional
        The stream whose works use it; the default stream if left out. Call ``record_use`` for each further one.

    Raises
    ------
    ShapeError, DTypeError, ConfigError
        If an argument is none of the above.
    OutOfMemory
        If there is no room; the message lists who holds it.
    """
    device = current_device()
    owner = device.state(MemoryManager)
    dtype = np.dtype(dtype)
    if dtype.kind not in "fiub":
        raise DTypeError(
            f"memory.empty: dtype is {dtype}; use a boolean, integer or floating one (bfloat16 is stored as uint16)"
        )
    shape = _checked_shape(shape)
    lease = owner.allocate(math.prod(shape) * dtype.itemsize, scope or owner.default_scope, stream, _caller())
    return device.view(lease.block.address, shape, dtype, None, lease)


def zeros(
    shape: int | tuple[int, ...], dtype: npt.DTypeLike, *, scope: str | None = None, stream: Stream | None = None
) -> Array:
    """As ``empty``, and filled with zeros in the order of ``stream``."""
    array = empty(shape, dtype, scope=scope, stream=stream)
    current_device().fill(array, 0, stream)
    return array


def from_host(values: npt.ArrayLike, *, scope: str | None = None, stream: Stream | None = None) -> Array:
    """A copy of host values in device memory, complete on return.

    Parameters
    ----------
    values : array_like
        Any strides; the copy is C-contiguous and of the same dtype.
    scope, stream
        As for ``empty``.
    """
    host = np.asarray(values, order="C")
    array = empty(host.shape, host.dtype, scope=scope, stream=stream)
    device = current_device()
    device.copy(array, host, stream)
    (stream or device.default_stream).synchronize()
    return array


def send(values: npt.ArrayLike, *, scope: str | None = None, stream: Stream | None = None) -> Array:
    """As ``from_host``, but returns at once: works on ``stream`` that are submitted later see the values.

    The values may change as soon as it returns.
    """
    host = np.asarray(values)
    array = empty(host.shape, host.dtype, scope=scope, stream=stream)
    device = current_device()
    device.state(Staging).send(host, array, stream or device.default_stream)
    return array


def fetch(array: Array, stream: Stream | None = None) -> Reading:
    """Ask for a copy in host memory, and return at once: ``fetch(array).wait()`` has the values.

    They are those that works on ``stream`` have left by now. Works that are submitted later may run meanwhile, and the
    host waits for none of them. ``array`` is C-contiguous, and its memory of the same stream.
    """
    device = current_device()
    return device.state(Staging).fetch(array, stream or device.default_stream)


def to_host(array: Array) -> np.ndarray[Any, np.dtype[Any]]:
    """A copy of an array in host memory, once all streams are done with their works."""
    return current_device().to_host(array)


def record_use(array: Array, stream: Stream) -> None:
    """Say that works on ``stream`` use ``array``, which was made for another stream.

    When its last reference is gone, its memory is not used again before the works that ``stream`` has by then are done.
    """
    manager().record_use(array, stream)


def scope(name: str) -> AbstractContextManager[None]:
    """``with memory.scope("backward"):`` - requests of this thread that name no scope are in this one."""
    return manager().scope(name)


def statistics() -> Statistics:
    """What device memory is used for: live, reserved, peak, fragmentation, by scope. Printing it gives a table."""
    return manager().statistics()


def reset_peak() -> None:
    """Start the peaks of ``statistics`` again from what is live now."""
    manager().reset_peak()


def set_limit(nbytes: int | None) -> None:
    """Let device memory in regions be at most ``nbytes``; ``None`` is no limit.

    ``NUMSTACK_MEMORY_LIMIT`` (``512MiB``, ``2GiB`` or bytes) sets it from outside.
    """
    manager().set_limit(nbytes)


def release_unused() -> int:
    """Give regions without live arrays back to the device, once all streams are done with them; returns bytes."""
    return manager().release_unused()


def _caller() -> Where:
    """Where the request came from: the nearest frame outside this room. No line number yet, which would cost more."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return frame.f_code, frame.f_lasti


def _checked_shape(shape: Any) -> tuple[int, ...]:
    if type(shape) is tuple:
        for n in shape:
            if type(n) is not int or n < 0:
                break
        else:
            return shape
    try:
        sizes = tuple(operator.index(n) for n in (shape if isinstance(shape, tuple | list) else (shape,)))
    except TypeError:
        raise ShapeError(f"memory.empty: shape is {shape!r}; pass an integer or a tuple of integers") from None
    if min(sizes, default=0) < 0:
        raise ShapeError(f"memory.empty: shape is {sizes}; sizes cannot be negative")
    return sizes
