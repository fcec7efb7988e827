"""Gradient of an embedding's tokens alone, by groups. See :mod:`numstack.kernels.embedding`.

A warp takes a row of a tile's plan (:mod:`numstack.kernels.embedding_groups.format`), and to that row of the table it
adds all that belongs there. So there is nothing to share out: the grid is one of short blocks, as of a copy, and while
a warp has a long row, others go on. The plan tells token, first position and second, so that the row of the table and
both rows of dout are under way together; longer rows go on in the order of positions.

Tokens with more than MANY positions are summed by the first blocks of the grid, a strip of 256 bytes of each row of
dout at a time: each half of a warp has a part of the positions, and the halves' sums are added in order.

So the order of every sum depends on the tokens alone.

32 x 1024 tokens of 50,304 with 768 channels on an H200, microseconds, and of an equal copy's rate:

================  ==============  ==============  =====================
dout              even            ten in a row    as frequent as words
================  ==============  ==============  =====================
bfloat16          53.7, 0.98      51.4, 1.02      37.8, 0.87
float32           64.9, 1.00      62.5, 1.03      47.9, 0.95
================  ==============  ==============  =====================

Blocks that looked for their tokens themselves took 58 and 70, for words 72 and 110.

What matters is how many warps are there: of bfloat16 at least 20 a multiprocessor. What did not help: blocks of 8 warps
(1% slower, words of float32 13%) or 16 (7%), smaller slices of the channels (0 to 14%), and rows read and written as
what no one needs soon (1% slower of bfloat16, 3% of float32; words of bfloat16 14% faster).
"""

import functools
from typing import Any

from numba import cuda, float32, from_dtype, int32, int64, uint32

from numstack.device import Array, Kernel, Stream, current_device, kernel, narrow, ptx, widen
from numstack.device.ptx import assembly
from numstack.device.ptx.assembly import GlobalSource, Index, Out
from numstack.device.ptx.integers import divide, multiply, opaque, subtract
from numstack.device.ptx.words import WORDS, make_load_four, words_of
from numstack.kernels.embedding_groups.format import (
    COUNT,
    HEAD_OF_TILE,
    MANY,
    MEMBER,
    N_FEW,
    N_FREQUENT,
    N_MANY,
    NEXT_FREQUENT,
    OF_FREQUENT,
    PLAN,
    ROWS,
    START,
    TOKEN,
    WORDS_OF_ROW,
    parts,
)
from numstack.kernels.launch import ceil_div, flat
from numstack.kernels.warp import WARP

WARPS = 4
SUMMERS = 4  # blocks a multiprocessor for frequent tokens
AT_ONCE = 2  # rows of dout that a warp has under way
STRIPS = 8  # of a frequent token that half a warp has under way
FOUR = 4  # channels of a lane that lie side by side: 16 bytes of the table
FOURS = WARP * FOUR  # channels of a warp
MOST_FOURS = 6  # of a lane
BYTES = 16  # of a strip that a lane has
LANES = 16  # that have a strip
PARTS = WARPS * WARP // LANES  # of a frequent token's positions
ALL_LANES = 0xFFFFFFFF


def slices_of(C: int) -> tuple[int, int]:
    """Slices of C channels, each a warp's, and times FOUR channels of a lane: as few slices as there can be."""
    n_slices = ceil_div(C, FOURS * MOST_FOURS)
    return n_slices, ceil_div(C, FOURS * n_slices)


@assembly.ptx("ld.global.v4.b32 {$words}, [$x];", touches_memory=True)
def load_four_words(x: GlobalSource, i: Index, words: Out[int32, 4], first: Index) -> None:
    """words[first : first + 4] = four of x from word i on: here, not where the compiler finds that one is needed."""
    for k in range(4):
        words[first + k] = x[i + k]


@functools.cache
def add_rows(dtype: Any, slices: int, fours: int, *, is_exact: bool) -> Kernel:
    """The kernel for a dout of a numba ``dtype``. Block (32, WARPS).

    Parameters
    ----------
    slices, fours : int
        Of ``slices_of``.
    is_exact : bool
        The channels are whole slices.
    """
    load, low, high, elements = (getattr(words_of(dtype), name) for name in ("load", "low", "high", "elements"))
    load_four = make_load_four(dtype)
    channels = FOURS * fours
    n_values = FOUR * fours
    of_four = FOUR // elements  # words
    of_row = of_four * fours
    vector = WORDS * elements
    strip = LANES * vector  # channels
    n_words, n_strip_words = AT_ONCE * of_row, STRIPS * WORDS
    n_sums = PARTS * strip

    @cuda.jit(device=True)
    def load_row(dout_N, n, C, c, words, first):
        """A lane's channels of a slice; past the end of the row its last ones once more."""
        for k in range(fours):
            at = c + FOURS * k if is_exact else min(c + FOURS * k, C - FOUR)
            load_four(dout_N, int64(n) * C + at, words, first + of_four * k)

    @cuda.jit(device=True)
    def add_words(words, first, n, total):
        for w in range(n):
            total[elements * w] += low(words[first + w])
            if elements == 2:
                total[2 * w + 1] += high(words[first + w])

    @cuda.jit(device=True)
    def add_others(dout_N, order_N, start, count, C, c, words, total):
        """Rows of dout from a token's third position on, in order."""
        mine = order_N[start + min(int32(cuda.threadIdx.x), count - 1)]
        for k in range(2, opaque(count), AT_ONCE):
            for i in range(AT_ONCE):
                load_row(dout_N, cuda.shfl_sync(ALL_LANES, mine, min(k + i, count - 1)), C, c, words, i * of_row)
            for i in range(AT_ONCE):
                if k + i < count:
                    add_words(words, i * of_row, of_row, total)

    @cuda.jit(device=True)
    def look_up(plans_N, tile, row, shift, head, info):
        """The row-th of a tile's rows of the table; of 2^shift, the last are those with many positions."""
        plan = int64(tile) * PLAN
        load_four_words(plans_N, plan, head, 0)
        load_four_words(plans_N, plan + HEAD_OF_TILE + row * WORDS_OF_ROW, info, 0)
        n_rows = int32(1) << shift
        is_many = row >= n_rows - head[N_MANY]
        if is_many:
            load_four_words(plans_N, plan + HEAD_OF_TILE + (row + ROWS - n_rows) * WORDS_OF_ROW, info, 0)
        count = divide(info[COUNT], int32(ROWS)) if is_many or row < head[N_FEW] else int32(0)
        # Counted once more: so a CPU sees that all lanes agree.
        return int32(cuda.popc(cuda.ballot_sync(ALL_LANES, int32(cuda.threadIdx.x) < count)))

    @cuda.jit(device=True)
    def add_row(dout_N, table_VC, order_N, plans_N, tile, row, c, T, n_groups, shift, head, info, total, words):
        """To a row of the table that a tile's plan has, if it does, what belongs there: a slice of the channels."""
        count = look_up(plans_N, tile, row, shift, head, info)
        if count > 0:
            C = int32(table_VC.shape[1])
            at = int64(info[TOKEN]) * C + c
            t = tile if n_groups == 1 else divide(tile, n_groups)
            text = subtract(tile, multiply(t, n_groups)) * ROWS + (info[COUNT] & (ROWS - 1))
            if not is_exact:
                for e in range(n_values):
                    total[e] = float32(0)
            for k in range(fours):
                if is_exact or c + FOURS * k < C:
                    ptx.load4(table_VC, at + FOURS * k, total, FOUR * k)
            load_row(dout_N, text * T + t, C, c, words, 0)
            if count > 1:
                load_row(dout_N, info[MEMBER], C, c, words, of_row)
            add_words(words, 0, of_row, total)
            if count > 1:
                add_words(words, of_row, of_row, total)
            if count > 2:
                add_others(dout_N, order_N, info[START], count, C, c, words, total)
            for k in range(fours):
                if is_exact or c + FOURS * k < C:
                    ptx.store4(table_VC, at + FOURS * k, total, FOUR * k)

    @cuda.jit(device=True)
    def add_stretch(dout_N, order_N, start, stop, C, c, words, total):
        """A lane's channels of a strip of the rows of dout at positions ``order_N[start:stop]``, which the halves of
        the warp take in turns."""
        lane = int32(cuda.threadIdx.x)
        half = int32(lane // LANES)
        following = order_N[min(start + lane, stop - 1)] if start < stop else int32(0)
        for first in range(start, stop, WARP):
            mine = following
            n_here = min(stop - first, WARP)
            following = order_N[min(first + WARP + lane, stop - 1)]
            for k in range(0, opaque(int32(n_here)), 2 * STRIPS):
                for i in range(STRIPS):
                    n = cuda.shfl_sync(ALL_LANES, mine, min(k + 2 * i + half, n_here - 1))
                    load(dout_N, int64(n) * C + c, words, i * WORDS)
                for i in range(STRIPS):
                    if k + 2 * i + half < n_here:
                        add_words(words, i * WORDS, WORDS, total)

    @cuda.jit(device=True)
    def claim(header, n_shares, n_summers):
        """Another share, by one thread; whoever gets the last that is claimed clears the counter."""
        claimed = int32(cuda.atomic.add(header, NEXT_FREQUENT, int32(1)))
        if claimed == n_shares - 1:
            header[NEXT_FREQUENT] = int32(0)
        return int32(claimed + n_summers)

    @cuda.jit(device=True)
    def add_frequent(dout_N, table_VC, header, order_N, frequent_N, n_strips, n_summers, sums, shared, words, total):
        """Strips of frequent tokens, by a block: the first is its own, others it claims."""
        lane = int32(cuda.threadIdx.x)
        warp = int32(cuda.threadIdx.y)
        thread = int32(warp * WARP + lane)
        C = int32(table_VC.shape[1])
        n_shares = multiply(header[N_FREQUENT], n_strips)
        share = int32(cuda.blockIdx.x)
        while share < n_shares:
            following = n_shares
            if thread == 0 and n_shares > n_summers:
                following = claim(header, n_shares, n_summers)
            which = divide(share, n_strips)
            c0 = int32(subtract(share, multiply(which, n_strips)) * strip)
            token = frequent_N[which * OF_FREQUENT]
            start = frequent_N[which * OF_FREQUENT + 1]
            count = frequent_N[which * OF_FREQUENT + 2]
            stretch = divide(int32(count + WARPS - 1), int32(WARPS))
            begin = int32(start + min(warp * stretch, count))
            end = int32(start + min(warp * stretch + stretch, count))
            is_there = thread < min(strip, C - c0)
            sum_c = widen(table_VC[token, c0 + thread]) if is_there else float32(0)
            for e in range(vector):
                total[e] = float32(0)
            c = min(c0 + int32(lane % LANES) * vector, C - vector)
            add_stretch(dout_N, order_N, begin, end, C, c, words, total)
            for e in range(0, vector, FOUR):
                ptx.store4(sums, thread * vector + e, total, e)
            if thread == 0:
                shared[0] = following
            cuda.syncthreads()
            share = shared[0]
            if is_there:
                for part in range(PARTS):
                    sum_c += sums[part * strip + thread]
                table_VC[token, c0 + thread] = narrow(sum_c, table_VC.dtype)
            cuda.syncthreads()

    @kernel(name="embedding.backward rows_of_groups", starts_early=True)
    def rows_of_groups(
        dout_N, table_VC, header, order_N, frequent_N, plans_N, T, n_tiles, n_groups, shift, n_strips, n_summers
    ):
        """The first ``n_summers`` blocks sum frequent tokens. n_groups: tiles of a time; rows: 2^shift of a tile."""
        sums = cuda.shared.array(n_sums, float32)
        shared = cuda.shared.array(1, int32)
        total = cuda.local.array(n_values, float32)
        words = cuda.local.array(n_words, uint32)
        of_strip = cuda.local.array(vector, float32)
        strip_words = cuda.local.array(n_strip_words, uint32)
        head = cuda.local.array(HEAD_OF_TILE, int32)
        info = cuda.local.array(WORDS_OF_ROW, int32)
        block = int32(cuda.blockIdx.x)
        if block < n_summers:
            add_frequent(
                dout_N, table_VC, header, order_N, frequent_N, int32(n_strips), int32(n_summers), sums, shared,
                strip_words, of_strip,
            )  # fmt: skip
        else:
            item = int32((block - n_summers) * WARPS + int32(cuda.threadIdx.y))
            place = int32(item // slices)
            c = int32((item - place * slices) * channels + int32(cuda.threadIdx.x) * FOUR)
            tile = int32(place >> shift)
            row = int32(subtract(place, tile << shift))
            if tile < n_tiles:
                add_row(
                    dout_N, table_VC, order_N, plans_N, tile, row, c, T, int32(n_groups), int32(shift), head, info,
                    total, words,
                )  # fmt: skip

    return rows_of_groups


def add(dout_BTC: Array, dtable_VC: Array, groups: Array, *, stream: Stream | None = None) -> None:
    """To the gradient of a table add that of its rows, by the groups of the tokens.

    Channels are a multiple of VECTOR, and arrays begin at a multiple of 16 bytes.
    """
    B, T, C = dout_BTC.shape
    n_slices, fours = slices_of(C)
    kernel_ = add_rows(from_dtype(dout_BTC.dtype), n_slices, fours, is_exact=n_slices * fours * FOURS == C)
    n_strips = ceil_div(C * dout_BTC.itemsize, LANES * BYTES)
    most_shares = B * T // (MANY + 1) * n_strips
    n_summers = min(most_shares, SUMMERS * current_device().properties.multiprocessors)
    n_groups = ceil_div(B, ROWS)
    shift = (min(B, ROWS) - 1).bit_length()  # room for so many rows in each tile: a shift instead of a division
    n_blocks = n_summers + ceil_div((T * n_groups << shift) * n_slices, WARPS)
    kernel_[n_blocks, (WARP, WARPS), stream](
        flat(dout_BTC), dtable_VC, *parts(groups, B, T, dtable_VC.shape[0]),
        T, T * n_groups, n_groups, shift, n_strips, n_summers, flops=dout_BTC.size,
    )  # fmt: skip
