"""``Tile``: the type of shared arrays, local arrays and per-thread values in generated code.

A tile is a pointer to memory of constant shape, so that LLVM sees constant strides, distinct objects that alias nothing
else, and no reference counts. ``stack_tile((8, 256), float32)`` takes it from the stack, aligned for vectors.
Indices never wrap around: generated code asks for that where it is wanted (``wrap``).
"""

from __future__ import annotations

import math
import operator
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.core.datamodel import models
from numba.core.extending import intrinsic, lower_builtin, overload, register_model, type_callable
from numba.core.imputils import lower_getattr
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.np.arrayobj import populate_array

ALIGNMENT = 64


class Tile(types.Type):
    """An array of constant shape."""

    def __init__(self, dtype: types.Type, shape: tuple[int, ...]) -> None:
        self.dtype = dtype
        self.shape = shape
        super().__init__(f"Tile({dtype}, {shape})")

    @property
    def ndim(self) -> int:
        return len(self.shape)


@register_model(Tile)
class TileModel(models.PrimitiveModel):
    def __init__(self, manager: Any, tile: Tile) -> None:
        super().__init__(manager, tile, manager.lookup(tile.dtype).get_data_type().as_pointer())


def _shape_of(shape: Any) -> tuple[int, ...] | None:
    if isinstance(shape, types.IntegerLiteral):
        return (shape.literal_value,)
    if isinstance(shape, types.BaseTuple) and all(isinstance(n, types.IntegerLiteral) for n in shape):
        return tuple(n.literal_value for n in shape)
    return None


@intrinsic(prefer_literal=True)
def stack_tile(typingctx: Any, shape: Any, dtype: Any) -> Any:
    """A tile on the stack; its contents are undefined."""
    sizes = _shape_of(shape)
    if sizes is None:
        return None
    if isinstance(dtype, types.StringLiteral):
        element = getattr(types, dtype.literal_value.replace("bool", "boolean"))
    elif isinstance(dtype, (types.DType, types.NumberClass)):
        element = dtype.dtype
    else:
        return None
    tile = Tile(element, sizes)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        element = context.get_data_type(tile.dtype)
        with builder.goto_entry_block():
            memory = builder.alloca(ir.ArrayType(element, max(1, math.prod(sizes))))
            memory.align = ALIGNMENT
        return builder.bitcast(memory, element.as_pointer())

    return tile(shape, dtype), codegen


def tile_pointer(context: Any, builder: Any, tile: Tile, pointer: Any, index_type: Any, index: Any) -> Any:
    """The address of an element."""
    if isinstance(index_type, types.BaseTuple):
        indices = cgutils.unpack_tuple(builder, index, len(index_type))
        index_types = list(index_type)
    else:
        indices, index_types = [index], [index_type]
    word = context.get_value_type(types.intp)
    offset: Any = None
    for size, value, kind in zip(tile.shape, indices, index_types, strict=True):
        value = context.cast(builder, value, kind, types.intp)
        offset = (
            value
            if offset is None
            else builder.add(builder.mul(offset, word(size), flags=["nsw"]), value, flags=["nsw"])
        )
    return builder.gep(pointer, [offset], inbounds=True)


def _is_full_index(tile: Tile, index: Any) -> bool:
    parts = list(index) if isinstance(index, types.BaseTuple) else [index]
    return len(parts) == tile.ndim and all(isinstance(part, types.Integer) for part in parts)


@type_callable(operator.getitem)
def _type_getitem(context: Any) -> Any:
    def typer(tile: Any, index: Any) -> Any:
        if isinstance(tile, Tile) and _is_full_index(tile, index):
            return tile.dtype
        return None

    return typer


@lower_builtin(operator.getitem, Tile, types.Any)
def _getitem(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    tile, index_type = signature.args
    pointer = tile_pointer(context, builder, tile, args[0], index_type, args[1])
    return context.unpack_value(builder, tile.dtype, pointer)


@type_callable(operator.setitem)
def _type_setitem(context: Any) -> Any:
    def typer(tile: Any, index: Any, value: Any) -> Any:
        if isinstance(tile, Tile) and _is_full_index(tile, index):
            return types.none
        return None

    return typer


@lower_builtin(operator.setitem, Tile, types.Any, types.Any)
def _setitem(context: Any, builder: Any, signature: Any, args: Any) -> Any:
    tile, index_type, value_type = signature.args
    value = context.cast(builder, args[2], value_type, tile.dtype)
    pointer = tile_pointer(context, builder, tile, args[0], index_type, args[1])
    context.pack_value(builder, tile.dtype, value, pointer)
    return context.get_dummy_value()


@intrinsic
def dynamic_array(typingctx: Any, memory: Any, dtype: Any) -> Any:
    """Shared memory sized at launch, as an array of ``dtype``: however often it is declared, it is the same memory."""
    if not isinstance(dtype, (types.DType, types.NumberClass)):
        return None
    array = types.Array(dtype.dtype, 1, "C")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        raw = context.make_array(signature.args[0])(context, builder, args[0])
        result = context.make_array(array)(context, builder)
        element = context.get_data_type(array.dtype)
        size = context.get_constant(types.intp, context.get_abi_sizeof(element))
        [nbytes] = cgutils.unpack_tuple(builder, raw.shape)
        populate_array(
            result,
            data=builder.bitcast(raw.data, element.as_pointer()),
            shape=cgutils.pack_array(builder, [builder.udiv(nbytes, size)]),
            strides=cgutils.pack_array(builder, [size]),
            itemsize=size,
            meminfo=None,
        )
        return result._getvalue()

    return array(memory, dtype), codegen


@overload(len)
def _len(tile):  # type: ignore[no-untyped-def]
    if isinstance(tile, Tile):
        size = tile.shape[0]
        return lambda tile: size
    return None


@infer_getattr
class TileAttributes(AttributeTemplate):
    key = Tile

    def resolve_dtype(self, tile: Tile) -> types.Type:
        return types.DType(tile.dtype)

    def resolve_shape(self, tile: Tile) -> types.Type:
        return types.UniTuple(types.intp, tile.ndim)

    def resolve_size(self, tile: Tile) -> types.Type:
        return types.intp

    def resolve_ndim(self, tile: Tile) -> types.Type:
        return types.intp


@lower_getattr(Tile, "dtype")
def _dtype(context: Any, builder: Any, kind: Any, value: Any) -> Any:
    return context.get_dummy_value()


@lower_getattr(Tile, "shape")
def _shape(context: Any, builder: Any, tile: Tile, value: Any) -> Any:
    sizes = [context.get_constant(types.intp, size) for size in tile.shape]
    return context.make_tuple(builder, types.UniTuple(types.intp, tile.ndim), sizes)


@lower_getattr(Tile, "size")
def _size(context: Any, builder: Any, tile: Tile, value: Any) -> Any:
    return context.get_constant(types.intp, math.prod(tile.shape))


@lower_getattr(Tile, "ndim")
def _ndim(context: Any, builder: Any, tile: Tile, value: Any) -> Any:
    return context.get_constant(types.intp, tile.ndim)
