"""32-bit integers: numba widens int32 + int32 to 64 bits, whose multiplications and divisions are slow on a GPU.

``add(a, b)`` and its like have the type of ``a``, which is int32 or uint32, and wrap around; the compiler sees plain
arithmetic, so that it folds constants. For unsigned sums and products ``uint32(a + b)`` compiles to the same.
"""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import cuda, int32, types, uint32
from numba.core.extending import overload as cpu_overload
from numba.cuda.extending import intrinsic as cuda_intrinsic
from numba.cuda.extending import overload as cuda_overload

from numstack.device.ptx.assembly import SharedArray, ptx

I32 = ir.IntType(32)


def add(a: Any, b: Any) -> Any:
    """a + b in 32 bits."""
    return _wrapped(a, int(a) + int(b))


def subtract(a: Any, b: Any) -> Any:
    """a - b in 32 bits."""
    return _wrapped(a, int(a) - int(b))


def multiply(a: Any, b: Any) -> Any:
    """The low 32 bits of a b."""
    return _wrapped(a, int(a) * int(b))


def divide(a: Any, b: Any) -> Any:
    """a / b, rounded down; neither is negative, b is not zero."""
    return _wrapped(a, int(a) // int(b))


def remainder(a: Any, b: Any) -> Any:
    """What a / b leaves; neither is negative, b is not zero."""
    return _wrapped(a, int(a) % int(b))


def _wrapped(like: Any, value: int) -> Any:
    kind = np.uint32 if isinstance(like, np.uint32) else np.int32
    return np.uint32(value & 0xFFFFFFFF).astype(kind)


def _compile(public: Callable[..., Any], operation: Callable[..., Any], signed: str, unsigned: str) -> None:
    """Make numba know ``public``: as an LLVM instruction on GPUs, as 64-bit arithmetic cut to 32 bits on a CPU."""

    def typed(typingctx: Any, a: Any, b: Any) -> Any:
        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return getattr(builder, signed if a == types.int32 else unsigned)(*args)

        return a(a, a), codegen

    instruction = cuda_intrinsic(typed)

    def on_gpu(a, b):  # type: ignore[no-untyped-def]  # numba compares the bare signatures
        return (lambda a, b: instruction(a, b)) if a in _KINDS else None

    def on_cpu(a, b):  # type: ignore[no-untyped-def]
        kind = a
        return (lambda a, b: kind(operation(types.int64(a), types.int64(b)))) if a in _KINDS else None

    cuda_overload(public)(on_gpu)
    cpu_overload(public)(on_cpu)


_KINDS = (types.int32, types.uint32)
_compile(add, operator.add, "add", "add")
_compile(subtract, operator.sub, "sub", "sub")
_compile(multiply, operator.mul, "mul", "mul")
_compile(divide, operator.floordiv, "sdiv", "udiv")
_compile(remainder, operator.mod, "srem", "urem")


@ptx("mov.b32 $result, $x;")
def anew(x: int32) -> int32:
    """x; but the compiler does not know that, so that what depends on it is computed anew each time.

    Addresses that advance from one iteration to the next are otherwise all carried through the loop in registers.
    """
    return x


@ptx("mov.b32 $result, $array;")
def shared_address(array: SharedArray) -> uint32:
    """Address of an array in shared memory, as mbarriers, TMA and descriptors take it."""


@cuda.jit(device=True)
def round_up_1024(address):  # type: ignore[no-untyped-def]
    """The next multiple of 1024: tiles with a 128-byte swizzle start there."""
    return uint32((address + uint32(1023)) & uint32(0xFFFFFC00))


@ptx("mov.b32 $result, $x;", touches_memory=True)
def opaque(x: int32) -> int32:
    """x; but the compiler does not know that, so that it cannot tell how often a loop runs, and does not unroll it.

    Unrolled, the loops of a producer need more than the few registers that it has kept. Nor does the compiler compute
    what depends on x long before it is used, and keep it in registers.
    """
    return x


@ptx("bfind.u32 $result, $x;")
def highest_bit(x: uint32) -> int32:
    """The number of the highest bit that is set; -1 if none is."""
    n = -1
    while x != uint32(0):
        x = uint32(x >> uint32(1))
        n += 1
    return int32(n)
