"""Reductions on host memory: one step of two arrays, in NumPy.

bfloat16 (``uint16`` bits on the device) and float16 are added in float32 and rounded once a step, so a sum over n ranks
has n - 1 roundings. A NaN in either array comes out, of ``max`` and ``min`` as well.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, get_args

import numpy as np

from numstack.device import Array
from numstack.dtypes import bfloat16
from numstack.errors import ConfigError, DTypeError

Op = Literal["sum", "max", "min", "mean"]

_FLOATING = ("float32", "float64", "float16", "uint16")
_INTEGER = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
_STEP: dict[str, np.ufunc] = {"sum": np.add, "mean": np.add, "max": np.maximum, "min": np.minimum}


@functools.cache
def name_of(dtype: np.dtype[Any]) -> str:
    """``dtype.name``, which NumPy puts together anew every time."""
    return dtype.name


def check(operation: str, array: Array, op: str) -> None:
    """Raise unless ``op`` exists and can reduce the dtype of ``array``.

    Raises
    ------
    ConfigError, DTypeError
    """
    if op not in get_args(Op):
        raise ConfigError(f"{operation}: op={op!r} is no reduction; take one of {', '.join(get_args(Op))}")
    name = name_of(array.dtype)
    if name not in _FLOATING + _INTEGER:
        raise DTypeError(
            f"{operation}: cannot reduce {name}; take float32, float64, float16, uint16 (the bits of bfloat16), "
            f"{', '.join(_INTEGER)}"
        )
    if op == "mean" and name not in _FLOATING:
        raise DTypeError(f"{operation}: the mean of {name} is no {name}; take op='sum', or a floating dtype")


def numbers(array: np.ndarray) -> np.ndarray:
    """The same memory as NumPy computes with it: flat, and ``uint16`` bits as bfloat16."""
    flat = array.reshape(-1)
    return flat.view(bfloat16) if flat.dtype == np.uint16 else flat


def step(op: Op, a: np.ndarray, b: np.ndarray, out: np.ndarray, divide_by: int = 1) -> None:
    """``out = op(a, b) / divide_by``; ``out`` may be ``a`` or ``b``. The last step of a mean divides."""
    # A gradient that overflows is the loss scaler's business; inf - inf and comparing NaN are no news either.
    with np.errstate(over="ignore", invalid="ignore"):
        if divide_by == 1:
            _STEP[op](a, b, out=out)
        elif a.dtype.itemsize == 2:
            wide: Any = np.add(a, b, dtype=np.float32)  # the sum is not rounded before it is divided
            out[...] = np.divide(wide, np.float32(divide_by), out=wide)
        else:
            np.add(a, b, out=out)
            np.divide(out, out.dtype.type(divide_by), out=out)
