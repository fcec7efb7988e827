"""Whether any of many values is infinite or NaN, at one operation for each register of them.

``largest`` keeps the larger magnitude, or NaN if there is one, whatever the sign; at the end ``is_nonfinite`` looks at
what was kept: an infinity is larger than every number.

Source: PTX ISA 9.7.4.9, 9.7.3.12 (max).
"""

from numba import cuda, uint32

from numstack.device.ptx.assembly import ptx


@ptx("max.NaN.xorsign.abs.bf16x2 $result, $kept, $pair;")
def largest_bf16(kept: uint32, pair: uint32) -> uint32:
    """Of two bfloat16, each for itself."""


@ptx("max.NaN.xorsign.abs.f16x2 $result, $kept, $pair;")
def largest_f16(kept: uint32, pair: uint32) -> uint32:
    """Of two float16, each for itself."""


@ptx("{ .reg .f32 a, b; mov.b32 a, $kept; mov.b32 b, $bits; max.NaN.xorsign.abs.f32 a, a, b; mov.b32 $result, a; }")
def largest_f32(kept: uint32, bits: uint32) -> uint32:
    """Of the bits of a float32."""


@cuda.jit(device=True)
def is_nonfinite_bf16(kept):  # type: ignore[no-untyped-def]
    """Whether one of what ``largest_bf16`` saw was infinite or NaN."""
    return (kept & uint32(0x7F80)) == uint32(0x7F80) or (kept & uint32(0x7F800000)) == uint32(0x7F800000)


@cuda.jit(device=True)
def is_nonfinite_f16(kept):  # type: ignore[no-untyped-def]
    """Whether one of what ``largest_f16`` saw was infinite or NaN."""
    return (kept & uint32(0x7C00)) == uint32(0x7C00) or (kept & uint32(0x7C000000)) == uint32(0x7C000000)


@cuda.jit(device=True)
def is_nonfinite_f32(kept):  # type: ignore[no-untyped-def]
    """Whether one of what ``largest_f32`` saw was infinite or NaN."""
    return (kept & uint32(0x7F800000)) == uint32(0x7F800000)
