"""DLPack: handing arrays to other libraries and taking theirs, without a copy.

The structures are those of DLPack 0.8 (``DLManagedTensor``), which every library reads. A capsule holds one; whoever
takes it renames the capsule and calls the structure's deleter when done.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

from numstack.dtypes import bfloat16
from numstack.errors import DTypeError

CPU, CUDA = 1, 2
_CODES = {"i": 0, "u": 1, "f": 2, "b": 6}
_BFLOAT = 4


class _Device(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int32), ("index", ctypes.c_int32))


class _DType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_Managed))
_Managed._fields_ = (("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter))

_NEW, _USED = b"dltensor", b"used_dltensor"
_CapsuleDestructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_api = ctypes.pythonapi
_api.PyCapsule_New.restype = ctypes.py_object
_api.PyCapsule_New.argtypes = (ctypes.c_void_p, ctypes.c_char_p, _CapsuleDestructor)
_api.PyCapsule_GetPointer.restype = ctypes.c_void_p
_api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_api.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)
# The destructor sees the capsule while it dies, so by address: a reference would bring it back to life.
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))

_api.Py_IncRef.argtypes = _api.Py_DecRef.argtypes = (ctypes.py_object,)


# ``context`` is a reference to a tuple of the structure itself and of all that it points to; the deleter drops it.
@_Deleter
def _delete(managed: Any) -> None:
    _api.Py_DecRef(ctypes.cast(managed.contents.context, ctypes.py_object))


@_CapsuleDestructor
def _destroy(capsule: int) -> None:
    if _is_valid(capsule, _NEW):  # nobody took it
        _give_back(_pointer_of(capsule, _NEW))


@dataclass(frozen=True, slots=True)
class Description:
    """Memory of another library, as DLPack describes it; ``owner`` gives it back when it is collected."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    dtype: np.dtype[Any]
    device: tuple[int, int]
    owner: object


def export(
    address: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: np.dtype[Any],
    device: tuple[int, int],
    owner: object,
) -> Any:
    """A capsule over memory that ``owner`` keeps alive; strides in bytes, ``dtype`` may be bfloat16.

    Raises
    ------
    DTypeError
        If DLPack has no code for the dtype.
    """
    if dtype == bfloat16:
        code = _BFLOAT
    elif dtype.kind in _CODES:
        code = _CODES[dtype.kind]
    else:
        raise DTypeError(f"DLPack has no code for dtype {dtype}; cast it first")
    ndim = len(shape)
    sizes = (ctypes.c_int64 * ndim)(*shape)
    steps = (ctypes.c_int64 * ndim)(*(s // dtype.itemsize for s in strides))
    managed = _Managed(
        _Tensor(address, _Device(*device), ndim, _DType(code, dtype.itemsize * 8, 1), sizes, steps, 0), None, _delete
    )
    kept = (managed, sizes, steps, owner)
    managed.context = id(kept)
    _api.Py_IncRef(kept)
    return _api.PyCapsule_New(ctypes.addressof(managed), _NEW, _destroy)


def take(capsule: Any) -> Description:
    """Take over a capsule of another library.

    Raises
    ------
    DTypeError
        If its elements are of a kind that NumPy and numstack do not have.
    """
    at = _api.PyCapsule_GetPointer(capsule, _NEW)
    managed = _Managed.from_address(at)
    tensor = managed.tensor
    dtype = _dtype(tensor.dtype)
    shape = tuple(tensor.shape[i] for i in range(tensor.ndim))
    if tensor.strides:
        strides = tuple(tensor.strides[i] * dtype.itemsize for i in range(tensor.ndim))
    else:
        strides = tuple(dtype.itemsize * int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(tensor.ndim))
    _api.PyCapsule_SetName(capsule, _USED)
    owner = _Taken()
    weakref.finalize(owner, _give_back, at)
    return Description(
        (tensor.data or 0) + tensor.byte_offset,
        shape,
        strides,
        dtype,
        (tensor.device.type, tensor.device.index),
        owner,
    )


class _Taken:
    """Lives as long as somebody uses another library's memory."""


def _give_back(at: int) -> None:
    managed = _Managed.from_address(at)
    if managed.deleter:
        managed.deleter(ctypes.pointer(managed))


def _dtype(described: Any) -> np.dtype[Any]:
    if described.lanes == 1:
        if described.code == _BFLOAT and described.bits == 16:
            return bfloat16
        for kind, code in _CODES.items():
            if code == described.code and described.bits in (8, 16, 32, 64):
                return np.dtype(f"{kind}{described.bits // 8}")
    raise DTypeError(
        f"DLPack elements of code {described.code}, {described.bits} bits, {described.lanes} lanes: "
        "only plain integers, floats, bool and bfloat16 can be taken"
    )
