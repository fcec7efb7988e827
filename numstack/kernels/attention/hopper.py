"""Pieces of attention on Hopper: what a warpgroup does with a 64 x n tile of scores in the registers of wgmma.

A thread holds two rows of the tile, g and g + 8 of its warp's 16 (g = lane // 4): registers 4 j, 4 j + 1 are columns
8 j + 2 t and the next of the first (t = lane % 4), registers 4 j + 2, 4 j + 3 the same columns of the second. The four
lanes of a quad share their rows. Exponentials are powers of two: ``factor`` is the scale times log2(e), which one
multiply-add brings in together with the maximum.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, uint32

from numstack.device import Array, current_device
from numstack.device.ptx import math as ptx_math
from numstack.device.ptx import packing, shared, sync
from numstack.device.tensor_map import PITCH_BYTES, pitches_fit
from numstack.kernels.launch import dtype_name

ROWS = 64  # of a warpgroup's tile: what wgmma multiplies at once
SWIZZLED = 64  # columns of a tile in shared memory: 128 bytes, the period of the swizzle; wider tiles are several
SWIZZLED_BYTES = ROWS * SWIZZLED * 2
MASKED = float32(-1e30)
"""A score that counts for nothing. Finite, so that a row of nothing else gives no NaN."""
LN2 = float32(0.6931471805599453)

WIDTHS = (64, 128)
"""The widths that kernels are compiled for; others are padded by the copy engine, with zeros."""

device: Callable[..., Any] = cuda.jit(device=True, forceinline=True)


class Operands(NamedTuple):
    """Arrays of [B, H, T, D] that a kernel reads and writes by tensor maps, and the factor on the scores."""

    arrays: tuple[Array, ...]
    scale: float

    @property
    def dtype(self) -> np.dtype[Any]:
        dtype: np.dtype[Any] = self.arrays[0].dtype
        return dtype

    def fit_copy_engine(self) -> bool:
        """Whether tensor maps can describe all arrays, and wgmma multiplies their dtype."""
        return self.dtype.itemsize == 2 and all(
            a.dtype == self.dtype
            and a.size > 0
            and min(a.strides) > 0  # neither broadcast nor turned round
            and pitches_fit(a)
            and current_device().address(a) % PITCH_BYTES == 0
            for a in self.arrays
        )

    def __repr__(self) -> str:
        kinds = ", ".join(f"{a.shape} {dtype_name(a.dtype)} strides {a.strides}" for a in self.arrays)
        return f"{kinds}, scale {self.scale}"


def padded_width(width: int) -> int:
    """The width that a kernel is compiled for."""
    return WIDTHS[0] if width <= WIDTHS[0] else WIDTHS[1]


def wgmma_dtype(dtype: np.dtype[Any]) -> str:
    """As PTX calls it: uint16 holds bfloat16."""
    return "bf16" if dtype == np.uint16 else "f16"


def pack_of(dtype: str) -> Any:
    """The function that packs two float32 as ``bf16`` or ``f16``."""
    return packing.pack_bf16 if dtype == "bf16" else packing.pack_f16


@device
def quad_max(x):
    """The largest x of four lanes that share their rows."""
    x = ptx_math.maximum(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, 1))
    return ptx_math.maximum(x, cuda.shfl_xor_sync(0xFFFFFFFF, x, 2))


@device
def quad_sum(x):
    """The sum of x over four lanes that share their rows."""
    x += cuda.shfl_xor_sync(0xFFFFFFFF, x, 1)
    return x + cuda.shfl_xor_sync(0xFFFFFFFF, x, 2)


class Softmax(NamedTuple):
    """Device functions for tiles of scores of one number of columns; see :func:`make_softmax`."""

    mask: Any
    row_maxima: Any
    exponentials: Any
    pack: Any


@functools.cache
def make_softmax(columns: int, dtype: str) -> Softmax:
    """Device functions for 64 x ``columns`` scores.

    ``mask(scores, first, second)``: columns from ``first`` on of the first row, from ``second`` on of the second, no
    longer count; both are relative to the thread's first column.

    ``row_maxima(scores, m0, m1) -> m0, m1``: the larger of m and the row's largest score.

    ``exponentials(scores, m0, m1, factor, l0, l1) -> l0, l1``: replaces scores by 2^(factor score - m) (m comes
    multiplied by ``factor``) and adds this thread's to the sums l.

    ``pack(scores, packed)``: as operand A of wgmma, two to a register.
    """
    groups = columns // 8
    pack_two = pack_of(dtype)

    @device
    def mask(scores, first, second):
        for j in range(groups):
            for i in range(2):
                if int32(8 * j + i) >= first:
                    scores[4 * j + i] = MASKED
                if int32(8 * j + i) >= second:
                    scores[4 * j + 2 + i] = MASKED

    @device
    def row_maxima(scores, m0, m1):
        for j in range(groups):
            m0 = ptx_math.maximum(ptx_math.maximum(m0, scores[4 * j]), scores[4 * j + 1])
            m1 = ptx_math.maximum(ptx_math.maximum(m1, scores[4 * j + 2]), scores[4 * j + 3])
        return quad_max(m0), quad_max(m1)

    @device
    def exponentials(scores, m0, m1, factor, l0, l1):
        for j in range(groups):
            for i in range(2):
                e0 = ptx_math.exp2(scores[4 * j + i] * factor - m0)
                e1 = ptx_math.exp2(scores[4 * j + 2 + i] * factor - m1)
                l0 += e0
                l1 += e1
                scores[4 * j + i] = e0
                scores[4 * j + 2 + i] = e1
        return l0, l1

    @device
    def pack(scores, packed):
        for i in range(columns // 4):
            packed[i] = pack_two(scores[2 * i], scores[2 * i + 1])

    return Softmax(mask, row_maxima, exponentials, pack)


@functools.cache
def make_put_tile(columns: int, dtype: str, rows: int) -> Any:
    """A device function that puts a warpgroup's 64 x ``columns`` accumulators into shared memory, as 16-bit values.

    ``put_tile(values, factor0, factor1, packed, tile)``: each row is multiplied by its factor; ``tile`` is where the
    warpgroup's first row is, in a tile of ``rows`` rows; 64 columns, swizzled, then the next 64. ``packed`` is a local
    array of columns // 4 uint32 to work with.
    """
    pack_two = pack_of(dtype)
    row_bytes = SWIZZLED * 2

    @device
    def put_tile(values, factor0, factor1, packed, tile):
        lane = uint32(cuda.threadIdx.x) & uint32(31)
        warp = (uint32(cuda.threadIdx.x) >> uint32(5)) & uint32(3)
        row = uint32(tile + (warp * uint32(16) + (lane & uint32(15))) * uint32(row_bytes))
        half = uint32((lane >> uint32(4)) ^ (lane & uint32(7)))
        for i in range(columns // 8):
            packed[2 * i] = pack_two(values[4 * i] * factor0, values[4 * i + 1] * factor0)
            packed[2 * i + 1] = pack_two(values[4 * i + 2] * factor1, values[4 * i + 3] * factor1)
        for j in range(columns // 16):
            place = uint32((half ^ uint32(j % 4 * 2)) * uint32(16))
            shared.store_matrices(row + place + uint32(j // 4 * rows * row_bytes), packed, 4 * j)

    return put_tile


@functools.cache
def make_advance(stages: int) -> Any:
    """A device function ``advance(stage, parity)``: the next stage of a ring, and the parity of its phase."""

    @device
    def advance(stage, parity):
        stage = uint32(stage + uint32(1))
        if stage == uint32(stages):
            stage = uint32(0)
            parity = uint32(parity ^ uint32(1))
        return stage, parity

    return advance


def _by_group(functions: list[Any]) -> Any:
    """A device function that calls the one of (at most four) functions that has the number of the warpgroup."""
    n = len(functions)
    call_0, call_1, call_2, call_3 = (functions * 4)[:4]

    @device
    def call(group):
        if group == 0:
            call_0()
        elif n > 1 and group == 1:
            call_1()
        elif n > 2 and group == 2:
            call_2()
        elif n > 3 and group == 3:
            call_3()

    return call


@functools.cache
def make_meet(groups: int) -> Any:
    """A device function ``meet(group)``: the threads of a warpgroup wait for one another."""
    return _by_group([sync.make_barrier(1 + i, 128) for i in range(groups)])


@functools.cache
def make_turns(groups: int, used: bool) -> tuple[Any, Any]:
    """Device functions ``wait_turn(group)`` and ``give_turn(group)``, by which warpgroups take turns, round and round.

    The last one gives the first turn. If they are not ``used``, they do nothing.
    """
    if not used:

        @device
        def nothing(group):
            return

        return nothing, nothing
    first = 1 + groups  # numbers of barriers: meet() has those before
    waits = [sync.make_barrier(first + i, 256) for i in range(groups)]
    gives = [sync.make_barrier_arrive(first + (i + 1) % groups, 256) for i in range(groups)]
    return _by_group(waits), _by_group(gives)
