"""Tensors: device memory with a shape and a number format, and what autograd needs to know about it.

A tensor holds an *array* (what kernels take: ``numpy.ndarray`` on the CPU, ``CudaArray`` on a GPU) that came from
``memory/`` and lives as long as the tensor or a view of it does. Operations are in ``numstack.ops``; a tensor itself
only moves between host and device and changes its shape.

>>> x = tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
>>> x.shape, x.dtype, x.reshape(3, 2).shape
((2, 3), dtype('float32'), (3, 2))
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from numstack import memory
from numstack.device import Array
from numstack.dtypes import FLOATING, bfloat16, float32, int32, storage
from numstack.errors import DataError, DTypeError, NumstackError, ShapeError

_NARROWED = {np.dtype(np.float64): float32, np.dtype(np.int64): int32}
_ALLOWED = (*FLOATING, int32)


class Tensor:
    """An array on the device, its place in the graph of operations, and its gradient.

    Parameters
    ----------
    array : array
        Device memory, shared and not copied. ``uint16`` elements are bfloat16.
    requires_grad : bool
        Whether ``backward`` computes its gradient.
    source : object
        What its gradient belongs to: the node of the operation that made it, the leaf that it is a view of, or None
        for a leaf. Only ``autograd`` sets it.

    Attributes
    ----------
    grad : Tensor or None
        Of a leaf (a tensor that no operation made): the sum of the gradients of every ``backward`` since it was
        cleared. None until there is one.
    overwrite_grad : bool
        The next ``backward`` writes ``grad`` instead of adding to it: it is known to be all zeros.
    """

    __slots__ = ("__weakref__", "array", "grad", "overwrite_grad", "requires_grad", "source")

    def __init__(self, array: Array, *, requires_grad: bool = False, source: object = None) -> None:
        self.array = array
        self.requires_grad = requires_grad
        self.source = source
        self.grad: Tensor | None = None
        self.overwrite_grad = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its size along each axis."""
        return self.array.shape

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Its number format: float32, float16, bfloat16 or int32."""
        dtype = self.array.dtype
        return bfloat16 if dtype == np.uint16 else dtype

    def numpy(self) -> np.ndarray:
        """A copy in host memory; waits until the device has computed it."""
        host = memory.to_host(self.array)
        return host.view(bfloat16) if host.dtype == np.uint16 else host

    def item(self) -> float:
        """Its only element; waits until the device has computed it.

        Raises
        ------
        ShapeError
            If it does not have exactly one element.
        """
        if self.size != 1:
            raise ShapeError(f"item: the tensor has shape {self.shape}; only one element is a number: use numpy()")
        return float(self.numpy().reshape(-1)[0])

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise NumstackError("np.asarray: a tensor is always copied to the host; leave out copy=False")
        return self.numpy().astype(dtype or self.dtype, copy=False)

    def reshape(self, *shape: int) -> Tensor:
        """The same memory seen with another shape; gradients flow through.

        Parameters
        ----------
        *shape : int
            At most one -1, which takes what is left.

        Raises
        ------
        ShapeError
            If the number of elements would change.
        DTypeError
            If the tensor is not C-contiguous: then no view has that shape.
        """
        known = math.prod(n for n in shape if n != -1)
        if shape.count(-1) == 1 and known and self.size % known == 0:
            shape = tuple(self.size // known if n == -1 else n for n in shape)
        if min(shape, default=0) < 0 or math.prod(shape) != self.size:
            raise ShapeError(
                f"reshape: the tensor has shape {self.shape}, {self.size} elements, which do not fill {shape}; "
                "give sizes whose product is the same"
            )
        if not self.array.flags.c_contiguous:
            raise DTypeError(f"reshape: the tensor of shape {self.shape} is not C-contiguous; copy it first")
        source = self if self.requires_grad and self.source is None else self.source
        return Tensor(self.array.reshape(shape), requires_grad=self.requires_grad, source=source)

    def detach(self) -> Tensor:
        """The same memory, unknown to autograd."""
        return Tensor(self.array)

    def __getitem__(self, key: Any) -> Tensor:
        """A view by integers and slices. Gradients do not flow through, so a tensor that needs them is refused.

        Raises
        ------
        NumstackError
            If the tensor requires a gradient.
        """
        if self.requires_grad:
            raise NumstackError(
                f"indexing a tensor of shape {self.shape} that requires a gradient would lose the gradient; "
                "call detach() first"
            )
        return Tensor(self.array[key])

    def __repr__(self) -> str:
        gradient = ", requires_grad" if self.requires_grad else ""
        return f"<Tensor {self.dtype.name} {self.shape}{gradient}>"


def tensor(
    data: ArrayLike, *, dtype: DTypeLike | None = None, scope: str | None = None, requires_grad: bool = False
) -> Tensor:
    """Copy host data to the device.

    Parameters
    ----------
    data : array_like
        Numbers; a ``ml_dtypes.bfloat16`` array makes a bfloat16 tensor.
    dtype : dtype, optional
        float32, float16, bfloat16 or int32. Without it, that of ``data``, where float64 becomes float32 and int64
        becomes int32, since kernels compute in neither.
    scope : str, optional
        Whose memory it is (``numstack.memory``); that of the surrounding ``with memory.scope(...)`` by default.
    requires_grad : bool
        Make it a leaf whose gradient ``backward`` computes.

    Raises
    ------
    DTypeError
        If the dtype is none of these.
    DataError
        If an integer does not fit int32.
    """
    host = np.asarray(data)
    wanted = np.dtype(dtype) if dtype is not None else _NARROWED.get(host.dtype, host.dtype)
    if wanted not in _ALLOWED:
        raise DTypeError(f"tensor: dtype {wanted.name}; tensors are float32, float16, bfloat16 or int32: cast it first")
    if requires_grad and wanted not in FLOATING:
        raise DTypeError(f"tensor: requires_grad with dtype {wanted.name}; only floating-point tensors have gradients")
    if wanted == int32 and host.dtype != int32 and host.size:
        limits = np.iinfo(np.int32)
        if host.min() < limits.min or host.max() > limits.max:
            raise DataError(f"tensor: values from {host.min()} to {host.max()} do not fit int32")
    host = np.ascontiguousarray(host, wanted).reshape(host.shape).view(storage(wanted))
    return Tensor(memory.from_host(host, scope=scope), requires_grad=requires_grad)
