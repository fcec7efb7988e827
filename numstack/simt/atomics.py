"""``cuda.atomic`` on the CPU: plain loads and stores, for the threads of a block run one after another.

Blocks of a kernel with atomics on global memory run in order on one thread (``CompiledKernel.has_global_atomics``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core import types
from numba.core.extending import overload

#: What each atomic stores, given the ``old`` value of the element and a ``value`` of the same type.
_UPDATES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda old, value: old + value,
    "sub": lambda old, value: old - value,
    "max": lambda old, value: value if value > old else old,
    "min": lambda old, value: value if value < old else old,
    "nanmax": lambda old, value: value if value > old or old != old else old,
    "nanmin": lambda old, value: value if value < old or old != old else old,
    "and_": lambda old, value: old & value,
    "or_": lambda old, value: old | value,
    "xor": lambda old, value: old ^ value,
    "exch": lambda old, value: value,
    "inc": lambda old, value: 0 if old >= value else old + 1,
    "dec": lambda old, value: value if old == 0 or old > value else old - 1,
}


def atomic_cas(array: Any, index: Any, expected: Any, value: Any) -> Any:
    """Store ``value`` if the element is ``expected``; return what it was."""
    raise NotImplementedError("only compiled kernels call this")


def atomic_compare_and_swap(array: Any, expected: Any, value: Any) -> Any:
    """``atomic_cas`` on the first element."""
    raise NotImplementedError("only compiled kernels call this")


@overload(atomic_cas, inline="never")
def _cas(array, index, expected, value):  # type: ignore[no-untyped-def]
    cast = array.dtype

    def implementation(array, index, expected, value):  # type: ignore[no-untyped-def]
        old = array[index]
        if old == cast(expected):
            array[index] = cast(value)
        return old

    return implementation


@overload(atomic_compare_and_swap, inline="never")
def _compare_and_swap(array, expected, value):  # type: ignore[no-untyped-def]
    cast = array.dtype
    first = 0 if array.ndim == 1 else (0,) * array.ndim

    def implementation(array, expected, value):  # type: ignore[no-untyped-def]
        old = array[first]
        if old == cast(expected):
            array[first] = cast(value)
        return old

    return implementation


def _make(name: str) -> Callable[..., Any]:
    from numba import njit

    def function(array: Any, index: Any, value: Any) -> Any:
        raise NotImplementedError("only compiled kernels call this")

    function.__name__ = function.__qualname__ = f"atomic_{name.removesuffix('_')}"
    update = njit(_UPDATES[name])

    @overload(function, inline="never")
    def implement(array, index, value):  # type: ignore[no-untyped-def]
        cast = getattr(array, "dtype", None)
        if not isinstance(cast, types.Type):
            return None

        def implementation(array, index, value):  # type: ignore[no-untyped-def]
            old = array[index]
            array[index] = cast(update(old, cast(value)))
            return old

        return implementation

    return function


#: numba.cuda's name of an atomic, and the function that does it.
FUNCTIONS: dict[str, Callable[..., Any]] = {name: _make(name) for name in _UPDATES}
FUNCTIONS["cas"] = atomic_cas
FUNCTIONS["compare_and_swap"] = atomic_compare_and_swap
NAMES = frozenset(function.__name__ for function in FUNCTIONS.values())
