"""What every launcher does before it launches: check its arguments, and size its grid.

The checks raise before anything is allocated or launched. They take the arrays by keyword, so that the message names
them as the caller knows them: ``check_shape("softmax", (4, 8), y_RC=y)`` says
``softmax: y_RC has shape (4, 7); expected (4, 8)``. Only attributes that both NumPy's and CUDA's arrays have are used.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import DTypeLike

from numstack.device import Array, current_device
from numstack.device.ptx.vectors import is_aligned
from numstack.dtypes import FLOATING, storage
from numstack.errors import ConfigError, DTypeError, ShapeError

FLOATS = frozenset(storage(dtype) for dtype in FLOATING)
"""The dtypes that ``widen`` and ``narrow`` know. bfloat16 is stored as its bits, in uint16."""


def dtype_name(dtype: DTypeLike) -> str:
    """The dtype as messages call it: uint16 holds bfloat16."""
    dtype = np.dtype(dtype)
    return "bfloat16 (uint16 bits)" if dtype == np.uint16 else dtype.name


def check_floats(operation: str, **arrays: Array) -> None:
    """Each array is float32, float16, or bfloat16 as uint16 bits; they may differ.

    Raises
    ------
    DTypeError
        Naming the first that is not.
    """
    for name, array in arrays.items():
        if array.dtype not in FLOATS:
            raise DTypeError(
                f"{operation}: {name} has dtype {dtype_name(array.dtype)}; "
                "expected float32, float16, or bfloat16 as uint16 bits: cast it first"
            )


def check_dtype(operation: str, dtype: DTypeLike, **arrays: Array) -> None:
    """Each array has exactly this dtype.

    Raises
    ------
    DTypeError
        Naming the first that has not.
    """
    for name, array in arrays.items():
        if array.dtype != dtype:
            raise DTypeError(
                f"{operation}: {name} has dtype {dtype_name(array.dtype)}; expected {dtype_name(dtype)}: cast it first"
            )


def check_contiguous(operation: str, **arrays: Array) -> None:
    """Each array is C-contiguous.

    Raises
    ------
    DTypeError
        Naming the first that is not.
    """
    for name, array in arrays.items():
        if not array.flags.c_contiguous:
            raise DTypeError(
                f"{operation}: {name} is not C-contiguous: shape {array.shape}, strides {array.strides}; copy it first"
            )


def check_ndim(operation: str, ndim: int, **arrays: Array) -> None:
    """Each array has this number of axes.

    Raises
    ------
    ShapeError
        Naming the first that has not.
    """
    for name, array in arrays.items():
        if array.ndim != ndim:
            raise ShapeError(
                f"{operation}: {name} has {array.ndim} axes (shape {array.shape}); expected {ndim}: reshape it"
            )


def check_shape(operation: str, shape: Iterable[int], **arrays: Array) -> None:
    """Each array has exactly this shape.

    Raises
    ------
    ShapeError
        Naming the first that has not.
    """
    shape = tuple(shape)
    for name, array in arrays.items():
        if array.shape != shape:
            raise ShapeError(f"{operation}: {name} has shape {array.shape}; expected {shape}")


def check_workspace(
    operation: str, workspace: Array, size: int, dtype: DTypeLike = np.float32, name: str = "workspace"
) -> None:
    """The workspace is one-dimensional, contiguous, of this dtype, and holds at least ``size`` elements.

    Raises
    ------
    DTypeError, ShapeError
        If it does not.
    """
    check_dtype(operation, dtype, **{name: workspace})
    check_contiguous(operation, **{name: workspace})
    if workspace.ndim != 1 or workspace.size < size:
        raise ShapeError(
            f"{operation}: {name} has shape {workspace.shape}; expected one axis of at least {size} elements: "
            f"ask the operation's {name}_size"
        )


def check_option(operation: str, option: str, value: object, allowed: Iterable[object]) -> None:
    """The option's value is one of those allowed.

    Raises
    ------
    ConfigError
        Naming the option, the value and the choices.
    """
    allowed = tuple(allowed)
    if value not in allowed:
        raise ConfigError(
            f"{operation}: {option}={value!r}; choose one of {', '.join(repr(choice) for choice in allowed)}"
        )


def ceil_div(n: int, d: int) -> int:
    """n / d, rounded up: how many blocks of d cover n elements."""
    return -(-n // d)


def flat(array: Array) -> Array:
    """A C-contiguous array as one axis, without a copy."""
    return array if array.ndim == 1 else array.reshape(-1)


def are_aligned(*arrays: Array) -> bool:
    """Whether each array begins where it can be accessed 16 bytes at a time: what kernels with vectors support."""
    address = current_device().address
    return all(is_aligned(address(array)) for array in arrays)
