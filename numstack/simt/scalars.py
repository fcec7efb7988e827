"""numba.cuda's arithmetic on single values, for kernels that run in Python.

NumPy's rules are not numba's: numba widens every integer operation to 64 bits, ``float32 * int32`` is float64 and
``float32 ** int`` float32, nothing warns and nothing raises on overflow. A kernel's values are held as

- ``bool``, ``int`` (an int64) and ``float`` (a float64), which Python computes with quickest;
- `Int32`, an ``int`` that remembers its width: arithmetic on it gives a plain ``int``, just as int32 widens to int64;
- NumPy scalars for the rest (float16, float32, int8, int16 and the unsigned integers);
- `Undefined`, what a GPU would leave to chance, for example a shuffle from a lane that takes no part. It passes
  through arithmetic, and becomes an error where it would decide something: a branch, an index, a store.

A variable has the type of what it was last given. numba gives it one type for all its assignments, so a kernel that
assigns float32 here and float64 there computes in float64 everywhere; in Python only where the float64 has arrived.
"""

import builtins
import math
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from numba import types
from numba.np.numpy_support import as_dtype

from numstack.simt.checks import Fault

BITS_64 = (1 << 64) - 1
TOP_BIT = 1 << 63


class Int32(int):
    """An int32; its arithmetic gives a plain int, as numba widens int32 to int64."""

    __slots__ = ()


class Undefined:
    """A value that the hardware does not define; ``why`` says where it came from."""

    __slots__ = ("why",)

    def __init__(self, why: str) -> None:
        self.why = why

    def __bool__(self) -> bool:
        raise Fault("undefined", f"a branch depends on {self.why}; its value is undefined")

    def __index__(self) -> int:
        raise Fault("undefined", f"an index or a trip count depends on {self.why}; its value is undefined")


class Cast:
    """A scalar type as kernels use it: called to convert, passed as the dtype of an array."""

    __slots__ = ("convert", "dtype")

    def __init__(self, dtype: np.dtype) -> None:
        self.dtype = dtype
        self.convert = caster(dtype)

    def __call__(self, value: Any = 0) -> Any:
        return self.convert(value)


_HELD: dict[np.dtype, type] = {
    np.dtype(t): t for t in (np.int8, np.int16, np.uint8, np.uint16, np.uint32, np.uint64, np.float16, np.float32)
}
_HELD |= {np.dtype(np.bool_): bool, np.dtype(np.int32): Int32, np.dtype(np.int64): int, np.dtype(np.float64): float}
_DTYPES: dict[type, np.dtype] = {held: dtype for dtype, held in _HELD.items()}
_DTYPES |= {dtype.type: dtype for dtype in _HELD}


def dtype_of(value: Any) -> np.dtype | None:
    """The NumPy dtype of a scalar, None for anything else (a tuple, an array)."""
    return _DTYPES.get(value.__class__)


def as_numpy_dtype(spec: Any) -> np.dtype:
    """The NumPy dtype meant by a numba type, a NumPy type or dtype, or a `Cast`."""
    if isinstance(spec, Cast):
        return spec.dtype
    dtype: np.dtype = np.dtype(as_dtype(spec) if isinstance(spec, types.Type) else spec)
    return dtype


def hold(value: Any) -> Any:
    """A NumPy or Python scalar as this module holds it; other things as they are."""
    if not isinstance(value, np.generic):
        return value
    held: Any = _HELD.get(value.dtype)
    return held(value) if held else value


def holder(dtype: np.dtype) -> Callable[[Any], Any] | None:
    """What turns an element of an array into a held value; None if it is one already."""
    held: type = _HELD.get(dtype, dtype.type)
    return None if held is dtype.type else held


def caster(dtype: np.dtype) -> Callable[[Any], Any]:
    """A function that converts any scalar to ``dtype`` as C does: wrapping integers, cutting off fractions."""
    held: Any = _HELD.get(dtype, dtype.type)
    if dtype.kind not in "iu":
        if held is bool:
            return lambda value: value if value.__class__ is Undefined else bool(value)
        return lambda value: value if value.__class__ is held or value.__class__ is Undefined else held(value)
    n_bits = 8 * dtype.itemsize
    mask, sign = (1 << n_bits) - 1, (1 << (n_bits - 1)) if dtype.kind == "i" else 0

    def to_integer(value: Any) -> Any:
        if value.__class__ is held or value.__class__ is Undefined:
            return value
        try:
            value = int(value)
        except (ValueError, OverflowError):  # nan, inf: undefined in C; a GPU gives 0 or the largest
            value = 0 if value != value else (mask >> bool(sign)) if value > 0 else -sign
        value &= mask
        return held(value - mask - 1 if value & sign else value)

    return to_integer


def _to_int64(value: int) -> int:
    return ((value + TOP_BIT) & BITS_64) - TOP_BIT


def _to_uint64(value: int) -> np.uint64:
    return np.uint64(value & BITS_64)


def _is_signed(dtype: np.dtype) -> bool:
    return dtype.kind != "u"


def common_float(a: np.dtype, b: np.dtype) -> np.dtype:
    """The floating type that numba computes ``a`` with ``b`` in, at least one of them floating."""
    integers = [d for d in (a, b) if d.kind != "f"]
    floats = [d for d in (a, b) if d.kind == "f"]
    # numba, unlike NumPy, takes uint16 beside float32 to float64.
    if integers == [np.dtype(np.uint16)] and floats == [np.dtype(np.float32)]:
        return np.dtype(np.float64)
    return np.result_type(*floats, *integers)


def _integer_power(base: int, exponent: int) -> int:
    if exponent >= 0:
        return pow(base, exponent, 1 << 64)
    return 0 if abs(base) > 1 else int(base**exponent)


_INTEGER: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": _integer_power,
    "and_": operator.and_,
    "or_": operator.or_,
    "xor": operator.xor,
}
_FLOATING: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": np.true_divide,
    "floordiv": np.floor_divide,
    "mod": np.remainder,
    "pow": np.power,
}
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def _binary_rule(name: str, ta: type, tb: type) -> Callable[[Any, Any], Any]:
    """How to compute the operation ``name`` on values of classes ``ta`` and ``tb``."""
    native: Callable[[Any, Any], Any] = getattr(operator, name)
    if ta is Undefined or tb is Undefined:
        return lambda a, b: a if ta is Undefined else b
    if ta not in _DTYPES or tb not in _DTYPES:
        return native
    a, b = _DTYPES[ta], _DTYPES[tb]
    integers = "f" not in (a.kind, b.kind)
    if name in ("lshift", "rshift") and integers:
        wrap = _to_int64 if _is_signed(a) else _to_uint64
        return lambda x, y: wrap(native(int(x), int(y)))
    if integers:
        if name in ("and_", "or_", "xor") and a.kind == b.kind == "b":
            return lambda x, y: native(bool(x), bool(y))
        if name == "truediv":
            return lambda x, y: float(np.true_divide(float(x), float(y)))
        if name in _COMPARISONS:
            return native if issubclass(ta, int) and issubclass(tb, int) else lambda x, y: native(int(x), int(y))
        compute = _INTEGER[name]
        if issubclass(ta, int) and issubclass(tb, int):
            return lambda x, y: z if -TOP_BIT <= (z := compute(x, y)) < TOP_BIT else _to_int64(z)
        if _is_signed(a) or _is_signed(b):
            return lambda x, y: _to_int64(compute(int(x), int(y)))
        return lambda x, y: _to_uint64(compute(int(x), int(y)))
    if name == "pow":
        # An integer exponent does not widen a float32 base, and float16 has no power of its own.
        common = a if a.kind == "f" and b.kind != "f" else common_float(a, b)
        common = max(common, np.dtype(np.float32), key=lambda dtype: dtype.itemsize)
    else:
        common = common_float(a, b)
        if common == np.float16 and name in ("floordiv", "mod"):
            common = np.dtype(np.float32)
    held: Any = _HELD[common]
    if name in _COMPARISONS:
        return native if ta is tb else lambda x, y: native(held(x), held(y))
    if name not in _FLOATING:
        return native  # a shift or a bit operation on floats: Python's own error says so
    arithmetic = _FLOATING[name]
    if ta is tb is held and name in ("add", "sub", "mul"):
        return arithmetic
    return lambda x, y: held(arithmetic(held(x), held(y)))


def _binary(name: str) -> Callable[[Any, Any], Any]:
    class Rules(dict[tuple[type, type], Callable[[Any, Any], Any]]):
        def __missing__(self, classes: tuple[type, type]) -> Callable[[Any, Any], Any]:
            rule = self[classes] = _binary_rule(name, *classes)
            return rule

    rules = Rules()

    def apply(a: Any, b: Any) -> Any:
        return rules[a.__class__, b.__class__](a, b)

    apply.__name__ = name
    return apply


def _unary(name: str) -> Callable[[Any], Any]:
    native = getattr(operator, name)

    def apply(a: Any) -> Any:
        dtype = dtype_of(a)
        if dtype is None:
            return a if a.__class__ is Undefined else native(a)
        if dtype.kind == "b" and name == "invert":
            return not a
        if dtype.kind == "u":
            return _to_uint64(native(int(a)))
        return native(a) if dtype.kind == "f" else _to_int64(native(int(a)))

    return apply


# One function for each Python operator, by the name of its class in ``ast``.
OPERATORS: dict[str, Callable[..., Any]] = {
    "Add": _binary("add"),
    "Sub": _binary("sub"),
    "Mult": _binary("mul"),
    "Div": _binary("truediv"),
    "FloorDiv": _binary("floordiv"),
    "Mod": _binary("mod"),
    "Pow": _binary("pow"),
    "LShift": _binary("lshift"),
    "RShift": _binary("rshift"),
    "BitAnd": _binary("and_"),
    "BitOr": _binary("or_"),
    "BitXor": _binary("xor"),
    "Lt": _binary("lt"),
    "LtE": _binary("le"),
    "Gt": _binary("gt"),
    "GtE": _binary("ge"),
    "Eq": _binary("eq"),
    "NotEq": _binary("ne"),
    "USub": _unary("neg"),
    "UAdd": _unary("pos"),
    "Invert": _unary("invert"),
}


def _extremum(native: Callable[..., Any], of_floats: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def pick(a: Any, b: Any) -> Any:
        da, db = dtype_of(a), dtype_of(b)
        if da is None or db is None:
            return a if a.__class__ is Undefined else b if b.__class__ is Undefined else native(a, b)
        if "f" not in (da.kind, db.kind):
            return native(a, b) if da == db else _to_int64(native(int(a), int(b)))
        held: Any = _HELD[common_float(da, db)]
        return held(of_floats(held(a), held(b)))  # as on a GPU, a NaN loses against a number

    def apply(*values: Any) -> Any:
        first, *rest = values if len(values) > 1 else values[0]
        for value in rest:
            first = pick(first, value)
        return first

    return apply


def _absolute(value: Any) -> Any:
    return value if value.__class__ is Undefined else hold(np.abs(value)) if dtype_of(value) else abs(value)


def _round(value: Any, n_digits: int | None = None) -> Any:
    if value.__class__ is Undefined:
        return value
    return round(int(value) if not isinstance(value, (float, np.floating)) else value, n_digits)


def _power(base: Any, exponent: Any) -> Any:
    return OPERATORS["Pow"](base, exponent)


def _real(name: str) -> Callable[..., Any]:
    """``math.name`` as numba.cuda has it: in float32 for float32, in float64 for integers; no domain errors."""
    ufunc_name = {"pow": "power", "atan2": "arctan2", "fabs": "absolute", "gamma": "", "remainder": ""}.get(name)
    if ufunc_name is None:
        ufunc_name = "arc" + name[1:] if name in ("asin", "acos", "atan", "asinh", "acosh", "atanh") else name
    function = getattr(np, ufunc_name, None) if ufunc_name else None
    scalar = getattr(math, name)

    def in_double(*values: Any) -> Any:
        try:
            return scalar(*(float(value) for value in values))
        except OverflowError:
            return math.inf
        except ValueError:  # outside the domain, or a pole
            return math.inf if name == "lgamma" else math.nan

    compute = function or in_double

    def apply(*values: Any) -> Any:
        common = None
        for value in values:
            if value.__class__ is Undefined:
                return value
            dtype = _DTYPES[value.__class__]
            dtype = dtype if dtype.kind == "f" else np.dtype(np.float64)
            common = dtype if common is None else common_float(common, dtype)
        assert common is not None
        held: Any = _HELD[common]
        result = compute(*(held(value) for value in values))
        if isinstance(result, tuple):
            return tuple(held(part) for part in result)
        return bool(result) if isinstance(result, (bool, np.bool_)) else held(result)

    return apply


def _frexp(value: Any) -> tuple[Any, Int32]:
    mantissa, exponent = np.frexp(value)
    return hold(mantissa), Int32(exponent)


def _ldexp(value: Any, exponent: int) -> Any:
    return hold(np.ldexp(value, int(exponent)))


_REAL = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "ceil", "copysign", "cos", "cosh", "degrees",
    "erf", "erfc", "exp", "exp2", "expm1", "fabs", "floor", "fmod", "gamma", "hypot", "isfinite", "isinf", "isnan",
    "lgamma", "log", "log10", "log1p", "log2", "modf", "nextafter",
    "pow", "radians", "remainder", "sin", "sinh", "sqrt", "tan", "tanh",
    "trunc",
)  # fmt: skip

# What stands in for a Python builtin or a function of math or NumPy inside a kernel, by the object it replaces.
STAND_INS: dict[Any, Any] = {getattr(math, name): _real(name) for name in _REAL}
STAND_INS |= {
    getattr(np, name): _real(name)
    for name in _REAL
    if isinstance(getattr(np, name, None), np.ufunc) and name not in ("gamma", "pow", "remainder")
}
STAND_INS |= {
    math.frexp: _frexp,
    math.ldexp: _ldexp,
    builtins.min: _extremum(min, np.fmin),
    builtins.max: _extremum(max, np.fmax),
    builtins.abs: _absolute,
    builtins.round: _round,
    builtins.pow: _power,
    builtins.int: Cast(np.dtype(np.int64)),
    builtins.float: Cast(np.dtype(np.float64)),
    builtins.bool: Cast(np.dtype(np.bool_)),
}


def _bits(value: Any) -> tuple[int, int]:
    """An integer's bits as an unsigned number, and how many there are: 32, or 64 for 64-bit types."""
    dtype = dtype_of(value)
    assert dtype is not None
    n_bits = 64 if dtype.itemsize == 8 else 32
    return int(value) & ((1 << n_bits) - 1), n_bits


def _popc(value: Any) -> Int32:
    return Int32(_bits(value)[0].bit_count())


def _clz(value: Any) -> Int32:
    bits, n_bits = _bits(value)
    return Int32(n_bits - bits.bit_length())


def _ffs(value: Any) -> Int32:
    bits, _ = _bits(value)
    return Int32((bits & -bits).bit_length())


def _brev(value: Any) -> Any:
    bits, n_bits = _bits(value)
    reverse = int(f"{bits:0{n_bits}b}"[::-1], 2)
    dtype = dtype_of(value)
    assert dtype is not None
    return caster(np.dtype(f"{dtype.kind if dtype.kind == 'u' else 'i'}{n_bits // 8}"))(reverse)


def _fma(a: Any, b: Any, c: Any) -> Any:
    if np.float32 is a.__class__ is b.__class__ is c.__class__:
        return np.float32(float(a) * float(b) + float(c))  # the product of two float32 is exact in float64
    return OPERATORS["Add"](OPERATORS["Mult"](a, b), c)


# Functions of numba.cuda that concern one thread only.
INTRINSICS: dict[str, Callable[..., Any]] = {
    "popc": _popc,
    "clz": _clz,
    "ffs": _ffs,
    "brev": _brev,
    "fma": _fma,
    "cbrt": lambda value: hold(np.cbrt(value)),
    "selp": lambda condition, a, b: a if condition else b,
    "nanosleep": lambda _: None,
    "threadfence": lambda: None,
    "threadfence_block": lambda: None,
    "threadfence_system": lambda: None,
}
