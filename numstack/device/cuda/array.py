"""An array in GPU memory: a pointer with a shape. Views cost no copy and keep the memory's owner alive."""

from __future__ import annotations

import functools
import math
import struct
from types import SimpleNamespace
from typing import Any

import numpy as np

from numstack.device import dlpack
from numstack.device.cuda.streams import CudaStream
from numstack.device.current import current_device
from numstack.dtypes import storage
from numstack.errors import DTypeError, ShapeError


class CudaArray:
    """GPU memory seen as an n-dimensional array, with NumPy's names for shape, strides, views and slices.

    Parameters
    ----------
    address : int
        Device address of the first element.
    shape : tuple of int
    dtype : numpy dtype
    strides : tuple of int, optional
        Bytes; C order by default.
    owner : object, optional
        Kept alive as long as the array is: the block of memory, or another library's array.
    """

    __slots__ = (
        "_c_contiguous",
        "_packed",
        "address",
        "dtype",
        "itemsize",
        "ndim",
        "owner",
        "shape",
        "size",
        "strides",
        "type_key",
    )

    def __init__(
        self,
        address: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any] | type,
        strides: tuple[int, ...] | None = None,
        owner: object = None,
    ) -> None:
        dtype = np.dtype(dtype)
        itemsize = dtype.itemsize
        size = math.prod(shape)
        dense = c_strides(shape, itemsize)
        if strides is None:
            strides = dense
        self.address = address
        self.shape = shape
        self.dtype = dtype
        self.itemsize = itemsize
        self.ndim = len(shape)
        self.size = size
        self.strides = strides
        self.owner = owner
        self._c_contiguous = (
            strides == dense
            or all(n == 1 or s == d for n, s, d in zip(shape, strides, dense, strict=True))
            or size == 0
        )
        # What the compiled code depends on; the launcher wants it at every launch, so it is worked out once.
        self.type_key = _type_key(dtype, self.ndim, self._c_contiguous)
        self._packed: bytes | None = None

    @property
    def nbytes(self) -> int:
        return self.size * self.itemsize

    @property
    def packed(self) -> bytes:
        """numba's array structure, as a launch passes it: meminfo, parent, nitems, itemsize, data, shape, strides."""
        packed = self._packed
        if packed is None:
            fields = (0, 0, self.size, self.itemsize, self.address, *self.shape, *self.strides)
            packed = self._packed = struct.pack(f"={len(fields)}q", *fields)
        return packed

    @property
    def flags(self) -> Any:
        """``flags.c_contiguous``, as NumPy has it."""
        return SimpleNamespace(c_contiguous=self._c_contiguous)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "strides": None if self._c_contiguous else self.strides,
            "typestr": self.dtype.str,
            "data": (self.address, False),
            "version": 3,
        }

    @staticmethod
    def from_interface(other: Any) -> CudaArray:
        """Another library's GPU array (CuPy, PyTorch, numba), without a copy."""
        interface = other.__cuda_array_interface__
        return CudaArray(
            interface["data"][0], tuple(interface["shape"]), interface["typestr"], interface.get("strides"), other
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CUDA, current_device().index  # type: ignore[attr-defined]

    def __dlpack__(self, *, stream: int | None = None, **options: Any) -> Any:
        """A DLPack capsule; ``stream``, the consumer's, waits for what our default stream has been given so far."""
        if stream not in (None, -1, 0, 1):  # 0 and 1 are the default stream itself, -1 asks for no ordering
            device = current_device()
            CudaStream(device, stream).wait(device.default_stream.record())  # type: ignore[arg-type]
        device_of = self.__dlpack_device__()
        return dlpack.export(self.address, self.shape, self.strides, self.dtype, device_of, self)

    @staticmethod
    def from_dlpack(other: Any) -> CudaArray:
        """Another library's GPU array through DLPack, without a copy; bfloat16 becomes its bits in uint16.

        Raises
        ------
        DTypeError
            If it is not in GPU memory.
        """
        kind, _ = other.__dlpack_device__()
        if kind != dlpack.CUDA:
            raise DTypeError(f"from_dlpack: a {type(other).__name__} in host memory; copy it there (memory.from_host)")
        taken = dlpack.take(other.__dlpack__(stream=1))
        return CudaArray(taken.address, taken.shape, storage(taken.dtype), taken.strides, taken.owner)

    # views

    @property
    def T(self) -> CudaArray:
        return self.transpose()

    def transpose(self, *axes: Any) -> CudaArray:
        """The same memory with its axes in another order; reversed by default."""
        order = axes[0] if len(axes) == 1 and isinstance(axes[0], (tuple, list)) else axes
        order = tuple(order) or tuple(reversed(range(self.ndim)))
        if sorted(order) != list(range(self.ndim)):
            raise ShapeError(f"transpose: axes {order} do not name the {self.ndim} axes of shape {self.shape}")
        return CudaArray(
            self.address,
            tuple(self.shape[i] for i in order),
            self.dtype,
            tuple(self.strides[i] for i in order),
            self.owner,
        )

    def reshape(self, *shape: Any) -> CudaArray:
        """The same memory with another shape; one size may be -1.

        Raises
        ------
        ShapeError
            If the sizes do not fit, or a view cannot express it without a copy.
        """
        new = shape[0] if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        new = tuple(new)
        if -1 in new:
            known = -math.prod(new)
            new = tuple(self.size // known if n == -1 and known else n for n in new)
        if math.prod(new) != self.size:
            raise ShapeError(f"reshape: {self.shape} has {self.size} elements, {new} has {math.prod(new)}")
        if self._c_contiguous:
            return CudaArray(self.address, new, self.dtype, None, self.owner)
        try:
            view = np.reshape(self._ghost(), new, copy=False)
        except ValueError:
            raise ShapeError(
                f"reshape: {self.shape} with strides {self.strides} to {new} "
                "needs a copy; make it with elementwise.copy"
            ) from None
        return self._from_ghost(view)

    def view(self, dtype: Any) -> CudaArray:
        """The same bits as another dtype of the same size."""
        dtype = np.dtype(dtype)
        if dtype.itemsize != self.itemsize:
            raise DTypeError(f"view: {self.dtype} has {self.itemsize} bytes an element, {dtype} has {dtype.itemsize}")
        return CudaArray(self.address, self.shape, dtype, self.strides, self.owner)

    def __getitem__(self, key: Any) -> CudaArray:
        """Basic slices, as NumPy's; the result is a view."""
        return self._from_ghost(self._ghost()[key])

    def _ghost(self) -> np.ndarray:
        """A NumPy array of this shape over no memory: NumPy works out the views, nobody reads them."""
        holder = SimpleNamespace(
            __array_interface__={
                "data": (self.address, False),
                "shape": self.shape,
                "strides": self.strides,
                "typestr": self.dtype.str,
                "version": 3,
            }
        )
        return np.asarray(holder)

    def _from_ghost(self, view: np.ndarray) -> CudaArray:
        if not isinstance(view, np.ndarray):
            raise DTypeError("a GPU array gives no single elements to the host; slice it (x[i:i + 1]) and copy that")
        return CudaArray(view.__array_interface__["data"][0], view.shape, view.dtype, view.strides, self.owner)

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        return f"CudaArray(shape={self.shape}, dtype={self.dtype}, address={self.address:#x})"


@functools.cache
def _type_key(dtype: np.dtype[Any], ndim: int, c_contiguous: bool) -> str:
    """One string object for each kind of array: its hash is computed once, that of a dtype at every look-up."""
    return f"{dtype.str}{ndim}{'C' if c_contiguous else 'A'}"


@functools.lru_cache(maxsize=4096)
def c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Strides in bytes of a C-contiguous array."""
    strides = []
    step = itemsize
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))
