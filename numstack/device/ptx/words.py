"""16 bytes as four 32-bit words, which wait in registers as they lie in memory.

``vectors`` widens what it loads, and so has to wait for it; words are widened when they are needed: what is loaded for
a later turn of a loop costs half the registers of 16-bit elements, and no wait.

Source: PTX ISA 9.7.9.8 (ld), 9.7.9.11 (st).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import float32, types, uint32

from numstack.device.conversions import narrow, widen
from numstack.device.ptx import packing
from numstack.device.ptx.assembly import GlobalSource, GlobalTarget, In, Index, Out, SharedArray, ptx

WORDS = 4


class Words(NamedTuple):
    """Functions of arrays of one dtype. Indices count elements, and are multiples of 16 bytes.

    Attributes
    ----------
    elements : int
        Of a word: 2 of 16 bits, or 1.
    load, load_shared : callable
        ``load(x, i, words, first)``: ``words[first : first + 4]``, uint32, = 16 bytes of x from element i on.
    store : callable
        ``store(y, i, words, first)``: the inverse.
    low, high : callable
        The elements of a word as float32; of float32 both are the same.
    pack : callable
        ``pack(low, high)``: the word of two float32, rounded to nearest even; of float32 that of the first.
    add : callable
        ``add(a, b)``: the word of the sums of two words' elements, rounded to nearest even: one instruction.
    """

    elements: int
    load: Callable[..., None]
    load_shared: Callable[..., None]
    store: Callable[..., None]
    low: Callable[..., Any]
    high: Callable[..., Any]
    pack: Callable[..., Any]
    add: Callable[..., Any]


@functools.cache
def words_of(dtype: Any) -> Words:
    """The functions for arrays of this dtype of numba: uint16 that is bfloat16, float16, or float32."""
    elements = 32 // dtype.bitwidth
    low, high, pack, add = _ARITHMETIC[dtype]

    def load(x: GlobalSource, i: Index, words: Out[uint32, WORDS], first: Index) -> None:
        """16 bytes from global memory."""
        for k in range(WORDS):
            words[first + k] = pack(widen(x[i + elements * k]), widen(x[i + elements * k + elements - 1]))

    def load_shared(x: SharedArray, i: Index, words: Out[uint32, WORDS], first: Index) -> None:
        """16 bytes from shared memory."""
        for k in range(WORDS):
            words[first + k] = pack(widen(x[i + elements * k]), widen(x[i + elements * k + elements - 1]))

    def store(y: GlobalTarget, i: Index, words: In[uint32, WORDS], first: Index) -> None:
        """16 bytes to global memory."""
        for k in range(WORDS):
            y[i + elements * k] = narrow(low(words[first + k]), y.dtype)
            y[i + elements * k + elements - 1] = narrow(high(words[first + k]), y.dtype)

    return Words(
        elements,
        ptx("ld.global.v4.b32 {$words}, [$x];", touches_memory=True)(load),
        ptx("ld.shared.v4.b32 {$words}, [$x];", touches_memory=True)(load_shared),
        ptx("st.global.v4.b32 [$y], {$words};", touches_memory=True)(store),
        low,
        high,
        pack,
        add,
    )


@functools.cache
def make_load_four(dtype: Any) -> Callable[..., None]:
    """``load(x, i, words, first)``: the words of four elements of x in global memory from element i on.

    Of this dtype of numba; ``i`` is a multiple of 4: 8 or 16 bytes.
    """
    elements, pack = words_of(dtype).elements, words_of(dtype).pack
    n_words = 4 // elements

    @ptx(f"ld.global.v{n_words}.b32 {{$words}}, [$x];", touches_memory=True)
    def load(x: GlobalSource, i: Index, words: Out[uint32, n_words], first: Index) -> None:
        """Four elements."""
        for k in range(n_words):
            words[first + k] = pack(widen(x[i + elements * k]), widen(x[i + elements * k + elements - 1]))

    return load


@ptx("mov.b32 $result, $low;")
def _only(low: float32, high: float32) -> uint32:
    """The bits of the first."""
    return packing.bits_of(low)


@ptx("{ .reg .b32 one; mov.b32 one, 0x3f803f80; fma.rn.bf16x2 $result, $a, one, $b; }")
def _add_bf16(a: uint32, b: uint32) -> uint32:
    """a + b, twice. Before Hopper only fma does it."""
    low, high = packing.low_bf16(a) + packing.low_bf16(b), packing.high_bf16(a) + packing.high_bf16(b)
    return packing.pack_bf16(low, high)


@ptx("add.rn.f16x2 $result, $a, $b;")
def _add_f16(a: uint32, b: uint32) -> uint32:
    """a + b, twice."""
    low, high = packing.low_f16(a) + packing.low_f16(b), packing.high_f16(a) + packing.high_f16(b)
    return packing.pack_f16(low, high)


@ptx("add.rn.f32 $result, $a, $b;")
def _add_f32(a: uint32, b: uint32) -> uint32:
    """a + b."""
    return packing.bits_of(packing.value_of(a) + packing.value_of(b))


_ARITHMETIC = {
    types.uint16: (packing.low_bf16, packing.high_bf16, packing.pack_bf16, _add_bf16),
    types.float16: (packing.low_f16, packing.high_f16, packing.pack_f16, _add_f16),
    types.float32: (packing.value_of, packing.value_of, _only, _add_f32),
}
