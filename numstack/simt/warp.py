"""Shuffles of whole warps as vector permutations.

``shuffle_xor(to, to_offset, values, offset, mask)`` does ``to[to_offset + lane] = values[offset + (lane ^ mask)]`` for
the 32 lanes of a warp. Any mask is made of five permutations known in advance, one for each of its bits, so that it
needs no gather; LLVM keeps one of them when the mask is a constant.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import types
from numba.core.extending import intrinsic

from numstack.simt.tile import Tile

WARP = 32
I32 = ir.IntType(32)


def _shuffle(builder: Any, vector: Any, lanes: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(I32, WARP), lanes)
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _by_bits(builder: Any, vector: Any, amount: Any, lanes_for: Callable[[int], list[int]]) -> Any:
    """Permute by each bit of ``amount`` in turn."""
    for bit in (16, 8, 4, 2, 1):
        is_set = builder.icmp_unsigned("!=", builder.and_(amount, amount.type(bit)), amount.type(0))
        vector = builder.select(is_set, _shuffle(builder, vector, lanes_for(bit)), vector)
    return vector


def _splat(builder: Any, value: Any) -> Any:
    vector = builder.insert_element(ir.Constant(ir.VectorType(value.type, WARP), ir.Undefined), value, I32(0))
    return _shuffle(builder, vector, [0] * WARP)


def _lane_numbers() -> Any:
    return ir.Constant(ir.VectorType(I32, WARP), list(range(WARP)))


def _xor(builder: Any, vector: Any, mask: Any) -> Any:
    return _by_bits(builder, vector, mask, lambda bit: [lane ^ bit for lane in range(WARP)])


def _down(builder: Any, vector: Any, delta: Any) -> Any:
    moved = _by_bits(builder, vector, delta, lambda bit: [(lane + bit) % WARP for lane in range(WARP)])
    # A lane whose source is past the end keeps its own value; a delta of 32 and more leaves none.
    limit = builder.select(builder.icmp_unsigned("<", delta, I32(WARP)), builder.sub(I32(WARP), delta), I32(0))
    return builder.select(builder.icmp_unsigned("<", _lane_numbers(), _splat(builder, limit)), moved, vector)


def _up(builder: Any, vector: Any, delta: Any) -> Any:
    moved = _by_bits(builder, vector, delta, lambda bit: [(lane - bit) % WARP for lane in range(WARP)])
    return builder.select(builder.icmp_unsigned(">=", _lane_numbers(), _splat(builder, delta)), moved, vector)


def _make(permute: Callable[[Any, Any, Any], Any]) -> Any:
    def typed(typingctx: Any, to: Any, to_offset: Any, values: Any, offset: Any, amount: Any) -> Any:
        if not (isinstance(to, Tile) and isinstance(values, Tile) and to.dtype == values.dtype):
            return None

        def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            target, target_offset, source, source_offset, by = args
            element = target.type.pointee
            vector = ir.VectorType(element, WARP)
            align = min(64, WARP * context.get_abi_sizeof(element))

            def at(pointer: Any, start: Any) -> Any:
                return builder.bitcast(builder.gep(pointer, [start], inbounds=True), vector.as_pointer())

            loaded = builder.load(at(source, source_offset), align=align)
            by = builder.trunc(by, I32)
            builder.store(permute(builder, loaded, by), at(target, target_offset), align=align)
            return context.get_dummy_value()

        return types.none(to, types.intp, values, types.intp, types.intp), codegen

    typed.__name__ = f"shuffle{permute.__name__}"
    return intrinsic(typed)


shuffle_xor = _make(_xor)
shuffle_down = _make(_down)
shuffle_up = _make(_up)
FUNCTIONS = {"shfl_xor_sync": shuffle_xor, "shfl_down_sync": shuffle_down, "shfl_up_sync": shuffle_up}
