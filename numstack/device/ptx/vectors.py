"""Several neighbouring elements by one access: 16 bytes a lane, which is what saturates a GPU's memory.

A warp whose lanes each ask for 16 contiguous bytes moves 512 bytes by one instruction (``LDG.E.128``); by elements of
bfloat16 it would take eight. The functions widen what they load to float32, and narrow what they store::

    x = cuda.local.array(16, float32)
    load8(x_N, i, x, 0)            # x[0:8]  = float32 of elements i ... i + 7
    load8(x_N, i + 2048, x, 8)     # x[8:16], on its way before anything waits for the first
    store8(y_N, i, x, 0)

====================  ===============================================================================================
load8, store8         8 elements: 16 bytes of bfloat16 or float16, twice 16 of float32
load4, store4         4 elements: 8 bytes of bfloat16 or float16, 16 of float32
load2, store2         2 elements: 4 bytes of bfloat16 or float16, 8 of float32
..._once              the same, of data that the kernel does not touch again: the cache gives its line up first
====================  ===============================================================================================

The index counts elements in C order, whatever the array's rank, and the address must be a multiple of what one access
moves: ``is_aligned`` tells a launcher whether an array begins at one. Arrays hold float32, float16, or bfloat16 as
uint16 bits, in global or shared memory (``_once``: global). The registers are a ``cuda.local.array`` of float32, filled
from an element on that must be a constant once loops are unrolled: else they would not be registers.

PTX: ``ld.global.v4.b32``, ``st.global.v4.b32``, with ``.cs`` for data used once; ``cvt.rn.bf16x2.f32``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import cuda, types
from numba.core.extending import intrinsic as cpu_intrinsic
from numba.core.extending import overload as cpu_overload
from numba.cuda.extending import intrinsic as cuda_intrinsic
from numba.cuda.extending import overload as cuda_overload

from numstack.device.conversions import lower_bits_as_float, lower_float_as_bits, narrow, widen
from numstack.errors import KernelError
from numstack.simt import Accesses
from numstack.simt.tile import Tile

I16, I32, I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
FLOAT, HALF = ir.FloatType(), ir.HalfType()
WIDEST = 16  # bytes that one access moves at most
_FLOATING = (types.float32, types.float16, types.uint16)


def is_aligned(address: int) -> bool:
    """Whether an array that begins there can be accessed 16 bytes at a time."""
    return address % WIDEST == 0


# --- on the host -----------------------------------------------------------------------------------------------------


def _position(x: Any, i: int) -> Any:
    """Element i in C order, as an index that is out of bounds if i is."""
    place: list[int] = []
    for size in reversed(x.shape[1:]):
        i, rest = divmod(i, size)
        place.append(rest)
    return (i, *reversed(place)) if place else i


def _check_alignment(x: Any, i: int, nbytes: int) -> None:
    address = x.address if hasattr(x, "address") else x.ctypes.data
    width = min(nbytes, WIDEST)
    if (address + i * x.itemsize) % width:
        name = getattr(x, "name", "the array")
        raise KernelError(f"element {i} of {name} is not at a multiple of {width} bytes, as a vector access must be")


def _read(x: Any, i: int, n: int) -> tuple[Any, ...]:
    i = int(i)
    _check_alignment(x, i, n * x.itemsize)
    return tuple(widen(x[_position(x, i + k)]) for k in range(n))


def _write(x: Any, i: int, *values: Any) -> None:
    i = int(i)
    _check_alignment(x, i, len(values) * x.itemsize)
    for k, value in enumerate(values):
        x[_position(x, i + k)] = narrow(value, x.dtype)


# --- in machine code -------------------------------------------------------------------------------------------------


def _holds_floats(x: Any) -> bool:
    return isinstance(x, types.Array | Tile) and x.dtype in _FLOATING


def _pointer(context: Any, builder: Any, kind: Any, x: Any, i: Any) -> Any:
    data = x if isinstance(kind, Tile) else context.make_array(kind)(context, builder, x).data
    return builder.gep(data, [i])


def _scalar_load(builder: Any, dtype: Any, pointer: Any, n: int) -> list[Any]:
    values = []
    for k in range(n):
        value = builder.load(builder.gep(pointer, [I64(k)]))
        if dtype == types.uint16:
            value = lower_bits_as_float(builder, value)
        elif dtype == types.float16:
            value = builder.fpext(value, FLOAT)
        values.append(value)
    return values


def _scalar_store(builder: Any, dtype: Any, pointer: Any, values: list[Any]) -> None:
    for k, value in enumerate(values):
        if dtype == types.uint16:
            value = lower_float_as_bits(builder, value)
        elif dtype == types.float16:
            value = builder.fptrunc(value, HALF)
        builder.store(value, builder.gep(pointer, [I64(k)]))


def _load_words(builder: Any, pointer: Any, n: int, once: bool) -> list[Any]:
    """n words of 32 bits, at most four by one instruction."""
    words: list[Any] = []
    for start in range(0, n, 4):
        count = min(4, n - start)
        address = builder.add(builder.ptrtoint(pointer, I64), I64(4 * start))
        if once:
            letters = f"ld.global.cs.v{count}.b32" if count > 1 else "ld.global.cs.b32"
            numbers = ", ".join(f"${k}" for k in range(count))
            kind = ir.LiteralStructType([I32] * count) if count > 1 else I32
            text = f"{letters} {{{numbers}}}, [${count}];" if count > 1 else f"{letters} $0, [$1];"
            # An access of memory to LLVM, so that it stays behind stores that come before it.
            assembly = ir.InlineAsm(
                ir.FunctionType(kind, [I64]), text, ",".join(["=r"] * count + ["l", "~{memory}"]), side_effect=True
            )
            got = builder.call(assembly, [address])
            words += [builder.extract_value(got, k) for k in range(count)] if count > 1 else [got]
        elif count > 1:
            vector = ir.VectorType(I32, count)
            got = builder.load(_at(builder, pointer, vector, start), align=4 * count)
            words += [builder.extract_element(got, I32(k)) for k in range(count)]
        else:
            words.append(builder.load(_at(builder, pointer, I32, start), align=4))
    return words


def _store_words(builder: Any, pointer: Any, words: list[Any], once: bool) -> None:
    for start in range(0, len(words), 4):
        group = words[start : start + 4]
        count = len(group)
        if once:
            address = builder.add(builder.ptrtoint(pointer, I64), I64(4 * start))
            numbers = ", ".join(f"${k + 1}" for k in range(count))
            text = f"st.global.cs.v{count}.b32 [$0], {{{numbers}}};" if count > 1 else "st.global.cs.b32 [$0], $1;"
            assembly = ir.InlineAsm(
                ir.FunctionType(ir.VoidType(), [I64] + [I32] * count),
                text,
                ",".join(["l"] + ["r"] * count + ["~{memory}"]),
                side_effect=True,
            )
            builder.call(assembly, [address, *group])
        elif count > 1:
            vector: Any = ir.Constant(ir.VectorType(I32, count), ir.Undefined)
            for k, word in enumerate(group):
                vector = builder.insert_element(vector, word, I32(k))
            builder.store(vector, _at(builder, pointer, vector.type, start), align=4 * count)
        else:
            builder.store(group[0], _at(builder, pointer, I32, start), align=4)


def _at(builder: Any, pointer: Any, kind: Any, word: int) -> Any:
    """The address of a 32-bit word after ``pointer``, as a pointer to ``kind``."""
    words = builder.bitcast(pointer, ir.PointerType(I32))
    return builder.bitcast(builder.gep(words, [I64(word)]), ir.PointerType(kind))


def _packed_load(builder: Any, dtype: Any, pointer: Any, n: int, once: bool) -> list[Any]:
    words = _load_words(builder, pointer, n * dtype.bitwidth // 32, once)
    if dtype == types.float32:
        return [builder.bitcast(word, FLOAT) for word in words]
    values = []
    for word in words:
        if dtype == types.uint16:
            values.append(builder.bitcast(builder.shl(word, I32(16)), FLOAT))
            values.append(builder.bitcast(builder.and_(word, I32(0xFFFF0000)), FLOAT))
        else:
            pair = builder.bitcast(word, ir.VectorType(HALF, 2))
            values += [builder.fpext(builder.extract_element(pair, I32(k)), FLOAT) for k in range(2)]
    return values


def _packed_store(builder: Any, dtype: Any, pointer: Any, values: list[Any], once: bool) -> None:
    if dtype == types.float32:
        words = [builder.bitcast(value, I32) for value in values]
    else:
        kind = "bf16x2" if dtype == types.uint16 else "f16x2"
        convert = ir.InlineAsm(ir.FunctionType(I32, [FLOAT, FLOAT]), f"cvt.rn.{kind}.f32 $0, $1, $2;", "=r,f,f")
        # The first source becomes the upper half.
        words = [builder.call(convert, [values[k + 1], values[k]]) for k in range(0, len(values), 2)]
    _store_words(builder, pointer, words, once)


def _teach_load(function: Callable[..., Any], n: int, once: bool) -> None:
    """Both of numba's targets: n separate elements on a CPU, as few accesses as there can be on a GPU."""

    def typed_by(load: Callable[..., list[Any]]) -> Callable[..., Any]:
        def typed(typingctx: Any, x: Any, i: Any) -> Any:
            returned = types.UniTuple(types.float32, n)

            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                kind = signature.args[0]
                pointer = _pointer(context, builder, kind, *args)
                return context.make_tuple(builder, returned, load(builder, kind.dtype, pointer))

            return returned(x, types.int64), codegen

        return typed

    on_cpu = cpu_intrinsic(typed_by(lambda builder, dtype, p: _scalar_load(builder, dtype, p, n)))
    on_gpu = cuda_intrinsic(typed_by(lambda builder, dtype, p: _packed_load(builder, dtype, p, n, once)))
    cpu_overload(function)(lambda x, i: (lambda x, i: on_cpu(x, i)) if _holds_floats(x) else None)
    cuda_overload(function)(lambda x, i: (lambda x, i: on_gpu(x, i)) if _holds_floats(x) else None)
    function.accesses = Accesses(reads=(0,), writes=())  # type: ignore[attr-defined]


def _teach_store(function: Callable[..., None], n: int, once: bool) -> None:
    names = ", ".join(f"v{k}" for k in range(n))  # numba looks at signatures, so each has the parameters of its own

    def typed_by(store: Callable[..., None]) -> Callable[..., Any]:
        def typed(x: Any, *values: Any) -> Any:
            def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
                kind = signature.args[0]
                store(builder, kind.dtype, _pointer(context, builder, kind, *args[:2]), list(args[2:]))
                return context.get_dummy_value()

            return types.none(x, types.int64, *(types.float32,) * n), codegen

        named: Callable[..., Any] = eval(f"lambda typingctx, x, i, {names}: typed(x, i, {names})", {"typed": typed})
        named.__name__ = function.__name__
        return named

    def store_packed(builder: Any, dtype: Any, pointer: Any, values: list[Any]) -> None:
        _packed_store(builder, dtype, pointer, values, once)

    for overload, instruction in (
        (cpu_overload, cpu_intrinsic(typed_by(_scalar_store))),
        (cuda_overload, cuda_intrinsic(typed_by(store_packed))),
    ):
        known = {"instruction": instruction, "holds_floats": _holds_floats}
        inner = f"lambda x, i, {names}: instruction(x, i, {names})"
        overload(function)(eval(f"lambda x, i, {names}: ({inner}) if holds_floats(x) else None", known))
    function.accesses = Accesses(reads=(), writes=(0,))  # type: ignore[attr-defined]


def _load2(x: Any, i: Any) -> Any:
    return _read(x, i, 2)


def _store2(x: Any, i: Any, v0: Any, v1: Any) -> None:
    _write(x, i, v0, v1)


def _load4(x: Any, i: Any) -> Any:
    return _read(x, i, 4)


def _store4(x: Any, i: Any, v0: Any, v1: Any, v2: Any, v3: Any) -> None:
    _write(x, i, v0, v1, v2, v3)


def _load4_once(x: Any, i: Any) -> Any:
    return _read(x, i, 4)


def _store4_once(x: Any, i: Any, v0: Any, v1: Any, v2: Any, v3: Any) -> None:
    _write(x, i, v0, v1, v2, v3)


def _load8(x: Any, i: Any) -> Any:
    return _read(x, i, 8)


def _store8(x: Any, i: Any, v0: Any, v1: Any, v2: Any, v3: Any, v4: Any, v5: Any, v6: Any, v7: Any) -> None:
    _write(x, i, v0, v1, v2, v3, v4, v5, v6, v7)


def _load8_once(x: Any, i: Any) -> Any:
    return _read(x, i, 8)


def _store8_once(x: Any, i: Any, v0: Any, v1: Any, v2: Any, v3: Any, v4: Any, v5: Any, v6: Any, v7: Any) -> None:
    _write(x, i, v0, v1, v2, v3, v4, v5, v6, v7)


_teach_load(_load2, 2, False)
_teach_store(_store2, 2, False)
_teach_load(_load4, 4, False)
_teach_store(_store4, 4, False)
_teach_load(_load4_once, 4, True)
_teach_store(_store4_once, 4, True)
_teach_load(_load8, 8, False)
_teach_store(_store8, 8, False)
_teach_load(_load8_once, 8, True)
_teach_store(_store8_once, 8, True)


# --- what kernels call -----------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def load2(x, i, values, first):
    """values[first], values[first + 1] = float32 of elements i and i + 1 of x."""
    values[first], values[first + 1] = _load2(x, i)


@cuda.jit(device=True)
def store2(x, i, values, first):
    """Elements i and i + 1 of x = values[first], values[first + 1], rounded to nearest even."""
    _store2(x, i, values[first], values[first + 1])


@cuda.jit(device=True)
def load4(x, i, values, first):
    """values[first : first + 4] = float32 of elements i to i + 3 of x."""
    values[first], values[first + 1], values[first + 2], values[first + 3] = _load4(x, i)


@cuda.jit(device=True)
def store4(x, i, values, first):
    """Elements i to i + 3 of x = values[first : first + 4], rounded to nearest even."""
    _store4(
        x,
        i,
        values[first],
        values[first + 1],
        values[first + 2],
        values[first + 3],
    )


@cuda.jit(device=True)
def load4_once(x, i, values, first):
    """values[first : first + 4] = float32 of elements i to i + 3 of x, which no one needs again soon."""
    values[first], values[first + 1], values[first + 2], values[first + 3] = _load4_once(x, i)


@cuda.jit(device=True)
def store4_once(x, i, values, first):
    """Elements i to i + 3 of x = values[first : first + 4], rounded to nearest even, which no one needs soon."""
    _store4_once(
        x,
        i,
        values[first],
        values[first + 1],
        values[first + 2],
        values[first + 3],
    )


@cuda.jit(device=True)
def load8(x, i, values, first):
    """values[first : first + 8] = float32 of elements i to i + 7 of x."""
    a, b, c, d, e, f, g, h = _load8(x, i)
    values[first], values[first + 1], values[first + 2], values[first + 3] = a, b, c, d
    values[first + 4], values[first + 5], values[first + 6], values[first + 7] = e, f, g, h


@cuda.jit(device=True)
def store8(x, i, values, first):
    """Elements i to i + 7 of x = values[first : first + 8], rounded to nearest even."""
    _store8(
        x,
        i,
        values[first],
        values[first + 1],
        values[first + 2],
        values[first + 3],
        values[first + 4],
        values[first + 5],
        values[first + 6],
        values[first + 7],
    )


@cuda.jit(device=True)
def load8_once(x, i, values, first):
    """values[first : first + 8] = float32 of elements i to i + 7 of x, which no one needs again soon."""
    a, b, c, d, e, f, g, h = _load8_once(x, i)
    values[first], values[first + 1], values[first + 2], values[first + 3] = a, b, c, d
    values[first + 4], values[first + 5], values[first + 6], values[first + 7] = e, f, g, h


@cuda.jit(device=True)
def store8_once(x, i, values, first):
    """Elements i to i + 7 of x = values[first : first + 8], rounded to nearest even, which no one needs soon."""
    _store8_once(
        x,
        i,
        values[first],
        values[first + 1],
        values[first + 2],
        values[first + 3],
        values[first + 4],
        values[first + 5],
        values[first + 6],
        values[first + 7],
    )
