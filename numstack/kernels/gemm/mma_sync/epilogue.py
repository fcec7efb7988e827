"""How a warp's accumulators become c: through the epilogue, straight from registers, 16 bytes a lane.

``mma.sync`` leaves two neighbours of a row in a lane, and eight columns in four lanes. For 16-bit c the pairs of four
blocks are packed, and the four lanes transpose them among themselves (:func:`_transpose`): each ends up with eight
neighbours, and can store, or load what the epilogue takes, as fast as memory allows. float32 needs no such thing: four
pairs fill a sector of 32 bytes.
"""

from functools import cache
from typing import Any

from numba import cuda, float32, int32, int64, uint16, uint32

from numstack.device import widen
from numstack.device.ptx import integers, mma, packing
from numstack.kernels import gelu
from numstack.kernels.gemm.mma_sync.cut import ROWS, Tiles
from numstack.kernels.gemm.problem import Spec

GROUP = 4  # pairs that are handled together: of four blocks in a row, or of two blocks in two rows


@cuda.jit(device=True)
def _transpose(words, lane):
    """Word j of lane i, of each four lanes, to word i of lane j."""
    is_odd = (lane & 1) != 0
    is_high = (lane & 2) != 0
    for q in range(0, 4, 2):
        sent = words[q] if is_odd else words[q + 1]
        got = uint32(cuda.shfl_xor_sync(0xFFFFFFFF, int32(sent), 1))
        if is_odd:
            words[q] = got
        else:
            words[q + 1] = got
    for q in range(2):
        sent = words[q] if is_high else words[q + 2]
        got = uint32(cuda.shfl_xor_sync(0xFFFFFFFF, int32(sent), 2))
        if is_high:
            words[q] = got
        else:
            words[q + 2] = got


def _make_access(kind: str, is_wide: bool, is_square: bool) -> tuple[Any, Any]:
    """Device functions on c, or on what is like it: put and get four pairs.

    ``kind`` is bf16, f16 or f32; 16-bit elements come as bits. ``is_wide``: rows can be accessed by 16 bytes.
    ``is_square``: the pairs are those of two blocks in rows i, and of the same blocks in rows i + 8; else of four
    blocks side by side.
    """
    is_packed = kind != "f32"
    pack, low, high = (
        (packing.pack_f16, packing.low_f16, packing.high_f16)
        if kind == "f16"
        else (packing.pack_bf16, packing.low_bf16, packing.high_bf16)
    )

    @cuda.jit(device=True)
    def place_of(number, i, j):
        """Row and first column of a block, of which each lane has a pair."""
        if is_square:
            return i + (number >> 1) * 8, j + (number & 1) * 8
        return i, j + number * 8

    @cuda.jit(device=True)
    def put(values, words, x, begin, i, j, lane, m, n):
        t = lane & 3
        if is_wide and is_packed:
            for number in range(GROUP):
                words[number] = pack(values[2 * number], values[2 * number + 1])
            _transpose(words, lane)
            row, column = place_of(t, i, j)
            if row < m and column < n:
                mma.store_words(x, begin + int64(row) * n + column, words, 0)
        else:
            for number in range(GROUP):
                row, column = place_of(number, i, j)
                at = begin + int64(row) * n + column + 2 * t
                if is_wide:
                    if row < m and column < n:
                        mma.store_pair(x, at, values[2 * number], values[2 * number + 1])
                else:
                    for y in range(2):
                        if row < m and column + 2 * t + y < n:
                            if is_packed:
                                x[at + y] = uint16(pack(values[2 * number + y], float32(0)) & uint32(0xFFFF))
                            else:
                                x[at + y] = values[2 * number + y]

    @cuda.jit(device=True)
    def get(values, words, x, i, j, lane, m, n):
        t = lane & 3
        if is_wide and is_packed:
            for number in range(GROUP):
                words[number] = uint32(0)
            row, column = place_of(t, i, j)
            if row < m and column < n:
                mma.load_words(words, 0, x, int64(row) * n + column)
            _transpose(words, lane)
            for number in range(GROUP):
                values[2 * number] = low(words[number])
                values[2 * number + 1] = high(words[number])
        else:
            for number in range(GROUP):
                row, column = place_of(number, i, j)
                at = int64(row) * n + column + 2 * t
                values[2 * number] = float32(0)
                values[2 * number + 1] = float32(0)
                if is_wide:
                    if row < m and column < n:
                        values[2 * number], values[2 * number + 1] = mma.load_pair(x, at)
                else:
                    for y in range(2):
                        if row < m and column + 2 * t + y < n:
                            values[2 * number + y] = low(uint32(x[at + y])) if is_packed else x[at + y]

    return put, get


def make_store(spec: Spec, kinds: tuple[str, str, str], is_wide: bool, tiles: Tiles) -> Any:
    """A device function: what a warp has accumulated, from row i0 and column j0 on, to c, from element ``begin`` on.

    Its last parameter, ``number``, is zero, as an int64.
    ``kinds`` are those of c, the residual and the pre-activation.
    """
    has_bias, has_gelu, has_residual = spec.has_bias, spec.has_gelu, spec.has_residual
    has_gelu_backward, keeps_preactivation = spec.has_gelu_backward, spec.keeps_preactivation
    gelu_tanh, gelu_slope = gelu.gelu_tanh_approximate, gelu.gelu_tanh_slope_approximate
    is_square = tiles.strip == 16
    blocks_n, strip_blocks, strip_step = tiles.warp_n // 8, tiles.strip // 8, tiles.strip * tiles.warps_n
    put, _ = _make_access(kinds[0], is_wide, is_square)
    _, get_residual = _make_access(kinds[1], is_wide, is_square)
    put_preactivation, get_preactivation = _make_access(kinds[2], is_wide, is_square)

    strips, halves = tiles.warp_n // tiles.strip, 1 if is_square else 2
    row_step = ROWS * tiles.warps_m
    rows = tiles.warp_m // 16 * halves  # of a strip: eights, or sixteens if is_square

    @cuda.jit(device=True)
    def first_of(i, h, block):
        """Of a block's pair in rows h * 8 to h * 8 + 8 of the i-th 16."""
        return (i * blocks_n + block) * 4 + 2 * h

    @cuda.jit(device=True)
    def load_bias(bias_8, lane, j0, n, bias):
        for number in range(GROUP):
            block = number & 1 if is_square else number
            for y in range(2):
                column = j0 + block * 8 + 2 * (lane & 3) + y
                bias_8[2 * number + y] = widen(bias[column]) if column < n else float32(0)

    @cuda.jit(device=True)
    def store_rows(total, bias_8, lane, alpha, i0, j0, begin, m, n, c, bias, residual, preactivation, number):
        p, i, h = number // rows, number % rows // halves, number % halves
        block = p * strip_blocks
        column = j0 + p * strip_step
        if has_bias and number % rows == 0:
            load_bias(bias_8, lane, column, n, bias)
        values = cuda.local.array(8, float32)
        more = cuda.local.array(8, float32)
        words = cuda.local.array(4, uint32)
        lane = integers.opaque(int32(lane))  # addresses are computed anew: registers are scarce
        row = i0 + (i // 2 * row_step + i % 2 * 16 + h * 8) + (lane >> 2)
        for y in range(2):
            if is_square:
                values[y] = total[first_of(i, 0, block) + y] * alpha
                values[2 + y] = total[first_of(i, 0, block + 1) + y] * alpha
                values[4 + y] = total[first_of(i, 1, block) + y] * alpha
                values[6 + y] = total[first_of(i, 1, block + 1) + y] * alpha
            else:
                values[y] = total[first_of(i, h, block) + y] * alpha
                values[2 + y] = total[first_of(i, h, block + 1) + y] * alpha
                values[4 + y] = total[first_of(i, h, block + 2) + y] * alpha
                values[6 + y] = total[first_of(i, h, block + 3) + y] * alpha
        if has_bias:
            for x in range(8):
                values[x] += bias_8[x]
        if keeps_preactivation:
            put_preactivation(values, words, preactivation, int64(0), row, column, lane, m, n)
        if has_gelu:
            for x in range(8):
                values[x] = gelu_tanh(values[x])
        if has_gelu_backward:
            get_preactivation(more, words, preactivation, row, column, lane, m, n)
            for x in range(8):
                values[x] *= gelu_slope(more[x])
        if has_residual:
            get_residual(more, words, residual, row, column, lane, m, n)
            for x in range(8):
                values[x] += more[x]
        put(values, words, c, begin, row, column, lane, m, n)

    @cache
    def repeated(count: int) -> Any:
        """A device function that stores so many, from ``number`` on; in halves, since no compiler is to unroll a loop:
        registers are numbered by constants.
        """
        if count == 1:
            return store_rows
        half = count // 2
        before, after = repeated(half), repeated(count - half)

        @cuda.jit(device=True)
        def both(total, bias_8, lane, alpha, i0, j0, begin, m, n, c, bias, residual, preactivation, number):
            before(total, bias_8, lane, alpha, i0, j0, begin, m, n, c, bias, residual, preactivation, number)
            after(total, bias_8, lane, alpha, i0, j0, begin, m, n, c, bias, residual, preactivation, number + half)

        return both

    return repeated(strips * rows)
