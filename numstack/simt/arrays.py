"""Arrays as a kernel sees them when it runs in Python: every element read or written goes through here.

An `Array` is never out of bounds, whether or not anything else is checked. numba wraps a negative index around to the
end of the array; in a kernel, where indices come from thread indices, that is never what was meant, so it is out of
bounds too.
"""

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from numstack.simt.checks import Fault, Memory
from numstack.simt.scalars import OPERATORS, STAND_INS, Undefined, caster, holder

_as_index = operator.index


class Array:
    """A NumPy array with a name, in some memory that watches over it.

    Parameters
    ----------
    data : np.ndarray
    name : str
        What messages call it.
    memory : Memory or None
        Where it lies; None: reads and writes are not checked.
    constant : bool
        Whether a write is an error.
    """

    __slots__ = (
        "address",
        "cast",
        "constant",
        "data",
        "dtype",
        "hold",
        "itemsize",
        "memory",
        "name",
        "nbytes",
        "ndim",
        "shape",
        "size",
        "strides",
    )

    def __init__(self, data: np.ndarray, name: str, memory: Memory | None, constant: bool = False) -> None:
        self.data = data
        self.name = name
        self.memory = memory
        self.constant = constant
        self.dtype = data.dtype
        self.shape = data.shape
        self.strides = data.strides
        self.ndim, self.size, self.itemsize, self.nbytes = data.ndim, data.size, data.itemsize, data.nbytes
        self.address: int = data.__array_interface__["data"][0]
        self.hold = holder(data.dtype)
        self.cast = caster(data.dtype)

    def describe(self, index: Any) -> str:
        """An element in words: ``x_RC[3, 4]``."""
        indices = index if isinstance(index, tuple) else (index,)
        return f"{self.name}[{', '.join(_spell(i) for i in indices)}]"

    def locate(self, index: Any) -> int:
        """The address of the element at ``index``.

        Raises
        ------
        TypeError
            If ``index`` means more than one element, or is not made of integers.
        """
        if index.__class__ is not tuple:
            if self.ndim != 1:
                raise TypeError
            i = _as_index(index)
            if 0 <= i < self.shape[0]:
                return self.address + i * self.strides[0]
            raise self._out_of_bounds(index)
        if len(index) != self.ndim:
            raise TypeError
        if len(index) == 2:  # the general case below, unrolled: this is where checked kernels spend their time
            i, j = index
            n, m = self.shape
            if i.__class__ is not int or j.__class__ is not int:
                i, j = _as_index(i), _as_index(j)
            if 0 <= i < n and 0 <= j < m:
                across, along = self.strides
                return self.address + i * across + j * along
            raise self._out_of_bounds(index)
        address: int = self.address
        for i, n, stride in zip(map(_as_index, index), self.shape, self.strides, strict=True):
            if not 0 <= i < n:
                raise self._out_of_bounds(index)
            address += i * stride
        return address

    def view(self, index: Any) -> "Array":
        """The part of the array that slices, or fewer integers than dimensions, choose."""
        indices = index if isinstance(index, tuple) else (index,)
        n_given = sum(i is not Ellipsis for i in indices)
        if n_given > self.ndim:
            raise Fault("error", f"{self.describe(index)} has {n_given} indices, but the array {self.ndim} dimensions")
        sizes = self.shape if Ellipsis not in indices else ()
        plain: list[Any] = []
        for axis, i in enumerate(indices):
            if isinstance(i, slice) or i is Ellipsis:
                plain.append(i)
                continue
            try:
                plain.append(_as_index(i))
            except TypeError:
                raise Fault("error", f"{self.describe(index)}: an index must be an integer, not {i!r}") from None
            if sizes and not 0 <= plain[-1] < sizes[axis]:
                raise self._out_of_bounds(index)
        return Array(self.data[tuple(plain)], self.describe(index), self.memory, self.constant)

    def _out_of_bounds(self, index: Any) -> Fault:
        where = f" ({self.memory.where})" if self.memory is not None else ""
        return Fault("out of bounds", f"{self.describe(index)} is outside its shape {self.shape}{where}")

    @property
    def T(self) -> "Array":
        return Array(self.data.T, f"{self.name}.T", self.memory, self.constant)

    def reshape(self, *shape: Any) -> "Array":
        return Array(self.data.reshape(*shape), self.name, self.memory, self.constant)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: Any) -> Any:
        return load(self, index, ("", 0))

    def __setitem__(self, index: Any, value: Any) -> None:
        store(self, index, value, ("", 0))

    def __iter__(self) -> Iterator[Any]:
        return (self[i] for i in range(self.shape[0]))


def _spell(index: Any) -> str:
    if isinstance(index, slice):
        return ":".join("" if part is None else str(part) for part in (index.start, index.stop))
    return "..." if index is Ellipsis else str(index)


def load(array: Any, index: Any, site: Any) -> Any:
    """``array[index]`` at ``site``; ``array`` may also be a tuple."""
    if array.__class__ is not Array:
        return array[index]
    try:
        address = array.locate(index)
    except TypeError:
        return array.view(index)
    value = array.data[index]
    if array.memory is not None:
        array.memory.read(array, index, address, site, value)
    hold = array.hold
    return value if hold is None else hold(value)


def store(array: Any, index: Any, value: Any, site: Any) -> None:
    """``array[index] = value`` at ``site``; for a part of an array, element by element."""
    if array.__class__ is not Array:
        raise Fault("error", f"assigns to an element of a {type(array).__name__}; only arrays can be written")
    try:
        address = array.locate(index)
    except TypeError:
        return _store_part(array.view(index), value, site)
    if array.constant:
        raise Fault("error", f"writes to {array.describe(index)}, a constant array")
    if value.__class__ is Undefined:
        raise Fault("undefined", f"writes {value.why} to {array.describe(index)}; its value is undefined")
    value = array.cast(value)
    if array.memory is not None:
        array.memory.write(array, index, address, site, value)
    array.data[index] = value


def _store_part(part: Array, value: Any, site: Any) -> None:
    source = value if isinstance(value, Array) else None
    if source is not None:
        shape = np.broadcast_shapes(source.shape, part.shape)
        if shape != part.shape:
            raise Fault("out of bounds", f"{part.name} has shape {part.shape}, but what is assigned {source.shape}")
        source = Array(np.broadcast_to(source.data, shape), source.name, source.memory)
    for index in np.ndindex(part.shape):
        store(part, index, load(source, index, site) if source is not None else value, site)


def _wrap_up(old: Any, value: Any) -> Any:
    return 0 if old >= value else old + 1


def _wrap_down(old: Any, value: Any) -> Any:
    return value if old == 0 or old > value else old - 1


_ATOMIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": OPERATORS["Add"],
    "sub": OPERATORS["Sub"],
    "and_": OPERATORS["BitAnd"],
    "or_": OPERATORS["BitOr"],
    "xor": OPERATORS["BitXor"],
    "inc": _wrap_up,
    "dec": _wrap_down,
    "exch": lambda old, value: value,
    "max": lambda old, value: value if value > old else old,  # a NaN changes nothing
    "min": lambda old, value: value if value < old else old,
    "nanmax": STAND_INS[max],
    "nanmin": STAND_INS[min],
}
ATOMIC_NAMES = (*_ATOMIC, "cas", "compare_and_swap")


def atomic(name: str, site: Any, array: Array, *operands: Any) -> Any:
    """``cuda.atomic.name(array, *operands)`` at ``site``; returns the element's old value."""
    if name == "compare_and_swap":
        return atomic("cas", site, array, (0,) * array.ndim, *operands)
    index, *values = operands
    try:
        address = array.locate(index)
    except TypeError:
        raise Fault("error", f"atomic.{name} needs an index of one element, not {array.describe(index)}") from None
    if array.constant:
        raise Fault("error", f"writes to {array.describe(index)}, a constant array")
    data, hold = array.data, array.hold
    for value in values:
        if value.__class__ is Undefined:
            raise Fault("undefined", f"atomic.{name} of {value.why} on {array.describe(index)}; its value is undefined")
    before = data[index]
    old = before if hold is None else hold(before)
    if name == "cas":
        expected, new = values
        new = new if old == array.cast(expected) else old
    else:
        new = _ATOMIC[name](old, array.cast(values[0]))
    data[index] = array.cast(new)
    if array.memory is not None:
        array.memory.atomic(array, index, address, site, before, data[index])
    return old
