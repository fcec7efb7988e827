"""From the arguments of a launch to numba's types, the same for every device.

Python scalars are 32 bits wide in a kernel (``int`` is int32, ``float`` is float32), so that neither float64 nor 64-bit
index arithmetic slips in unasked; a NumPy scalar keeps its own type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import from_dtype, types

from numstack.device.tensor_map import TensorMap
from numstack.dtypes import bfloat16
from numstack.errors import DTypeError

if TYPE_CHECKING:
    from numstack.device.kernel import Kernel


def type_key(kernel: Kernel, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the compiled code depends on, quick to compute: of an array its dtype, rank and layout, else the type.

    Raises
    ------
    DTypeError
        If a Python int does not fit the 32 bits it has in a kernel.
    """
    key: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is int:
            if not -(2**31) <= arg < 2**31:
                raise does_not_fit(kernel, len(key), arg)
            key.append(kind)
        elif kind is float or not hasattr(arg, "strides") or isinstance(arg, np.generic):
            key.append(kind)
        else:
            key.append((arg.dtype, arg.ndim, arg.flags.c_contiguous))
    return tuple(key)


def does_not_fit(kernel: Kernel, index: int, value: int) -> DTypeError:
    """The error for a Python int that is wider than the 32 bits it has in a kernel."""
    name = kernel.parameters[index] if index < len(kernel.parameters) else f"argument {index}"
    return DTypeError(f"{kernel.name}: {name}={value} does not fit int32; pass numpy.int64({value})")


def numba_types(kernel: Kernel, args: tuple[Any, ...]) -> tuple[types.Type, ...]:
    """The numba type of each argument.

    Raises
    ------
    DTypeError
        If an argument is neither an array nor a scalar, or an array of bfloat16 was not viewed as uint16.
    """
    names = kernel.parameters
    if len(args) != len(names):
        raise DTypeError(f"{kernel.name}: takes {len(names)} arguments ({', '.join(names)}) but {len(args)} were given")
    return tuple(_numba_type(kernel, name, arg) for name, arg in zip(names, args, strict=True))


def _numba_type(kernel: Kernel, name: str, arg: Any) -> types.Type:
    if isinstance(arg, (bool, np.bool_)):
        return types.boolean
    if isinstance(arg, np.generic):
        return from_dtype(arg.dtype)
    if isinstance(arg, int):
        return types.int32
    if isinstance(arg, float):
        return types.float32
    if isinstance(arg, TensorMap):
        return types.uint64
    if hasattr(arg, "__cuda_array_interface__"):  # ours, PyTorch's, CuPy's, numba's
        interface = arg.__cuda_array_interface__
        layout = "C" if interface.get("strides") is None else "A"
        return types.Array(from_dtype(np.dtype(interface["typestr"])), len(interface["shape"]), layout)
    if not hasattr(arg, "strides"):
        raise DTypeError(f"{kernel.name}: {name} is a {type(arg).__name__}; pass an array, a number or a bool")
    if arg.dtype == bfloat16:
        raise DTypeError(f"{kernel.name}: {name} has dtype bfloat16; pass its bits, {name}.view(numpy.uint16)")
    if arg.ndim == 0:
        raise DTypeError(f"{kernel.name}: {name} has no dimension; pass an array of shape (1,)")
    return types.Array(from_dtype(arg.dtype), arg.ndim, "C" if arg.flags.c_contiguous else "A")
