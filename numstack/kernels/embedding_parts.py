"""What the two ways of summing an embedding's gradient by owners of rows share: see :mod:`numstack.kernels.embedding`.

A lane has FOUR neighbouring channels, and those 32 FOUR further on, and so on: ``fours`` of them at once.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64

from numstack.device import narrow, ptx, widen
from numstack.device.ptx.integers import opaque
from numstack.device.ptx.words import WORDS, words_of
from numstack.kernels.launch import ceil_div
from numstack.kernels.warp import WARP

FOUR = 4  # channels of a lane that lie side by side: 16 bytes of the table
SHORT = 32  # positions of a row that one warp sums
A_THREAD = 8  # neighbouring tokens that a thread looks at for a long list
TEXTS = 3  # whose parts of dout a thread has under way for the positions
MOST_COLUMNS = 2  # vectors of the positions' gradient of a thread
MOST_ROWS = 512  # of a block
MOST_FOURS = 6  # of a lane at once


def reciprocal(n: int) -> int:
    """What the high word of a product with x < 2^32 / n divides x by n."""
    return (1 << 32) // n + 1


def owners(V: int, blocks: int) -> int:
    """Blocks that own the rows of a table: so many, or a multiple."""
    least = max(blocks, 3)  # else the reciprocal is no int32
    return least * ceil_div(V, least * MOST_ROWS)


def fours_of(C: int) -> tuple[int, bool]:
    """Of a lane at once, for C channels, and whether it always has all of them."""
    for fours in range(MOST_FOURS, 0, -1):
        if C % (WARP * FOUR * fours) == 0:
            return fours, True
    return 3, False


class Parts(NamedTuple):
    """Device functions of blocks of (32, warps) threads.

    Attributes
    ----------
    add_short_row : callable
        ``add_short_row(dout_N, table_VC, token, lists, first, count, total, values)``: to the row of a token those of
        dout at ``count`` positions, 1 to SHORT, by one warp, which sorts them first: ``lists[first : first + count]``.
    add_long_row : callable
        ``add_long_row(tokens_N, dout_N, table_VC, token, lists, collected, counts, sums, tokens, total, values)``: to
        the row of a token all that belongs there, by all warps of the block together. ``lists`` has room for
        ``window`` twice from ``collected`` on, ``counts`` for 33 int32, ``sums`` for the channels of a warp,
        ``tokens`` for A_THREAD.
    load_texts : callable
        ``load_texts(dout_N, b, B, P, column, end, words)``: starts loading the thread's part of TEXTS texts from b on.
    add_texts : callable
        ``add_texts(dout_N, b, stop, P, column, end, words, sums)``: to sums those of texts b to stop - 1, of which the
        first TEXTS are in ``words``.
    load_columns, store_columns : callable
        ``load_columns(positions_P, column, end, sums)`` and the inverse.
    """

    add_short_row: Callable[..., Any]
    add_long_row: Callable[..., Any]
    load_texts: Callable[..., Any]
    add_texts: Callable[..., Any]
    load_columns: Callable[..., Any]
    store_columns: Callable[..., Any]


@functools.cache
def parts(dtype: Any, warps: int, fours: int, *, is_exact: bool, columns: int, in_pairs: bool = False) -> Parts:
    """For a dout of a numba ``dtype``.

    Parameters
    ----------
    fours : int
        Times FOUR channels of a lane at once.
    is_exact : bool
        The channels are a multiple of 128 ``fours``.
    columns : int
        Vectors of the positions' gradient of a thread; 0: no gradient of positions.
    in_pairs : bool
        Of a long row a warp has two rows of dout under way, and a thread its A_THREAD tokens in registers.
    """
    load, low, high, elements = (getattr(words_of(dtype), name) for name in ("load", "low", "high", "elements"))
    vector = WORDS * elements
    threads = WARP * warps
    n_values = FOUR * fours
    channels = WARP * n_values
    window = A_THREAD * threads
    texts = TEXTS if columns > 0 else 0

    @cuda.jit(device=True)
    def load_row(dout_N, n, C, c, values, first):
        """A lane's channels of row n from c on; past the end of the row its last ones once more."""
        for k in range(0, n_values, FOUR):
            channel = c + WARP * k
            if not is_exact:
                channel = min(channel, C - FOUR)
            ptx.load4(dout_N, int64(n) * C + channel, values, first + k)

    @cuda.jit(device=True)
    def sort(lists, first, count):
        lane = cuda.threadIdx.x
        position = lists[first + lane] if lane < count else int32(0)
        rank = int32(0)
        for i in range(opaque(count)):
            if lists[first + i] < position:
                rank += int32(1)
        cuda.syncwarp()
        if lane < count:
            lists[first + rank] = position
        cuda.syncwarp()

    @cuda.jit(device=True)
    def add_short_row(dout_N, table_VC, token, lists, first, count, total, values):
        if count > 1:
            sort(lists, first, count)
        C = table_VC.shape[1]
        start = token * C
        for c0 in range(0, C, channels):
            c = c0 + cuda.threadIdx.x * FOUR
            at = start + c
            if not is_exact:
                for e in range(n_values):
                    total[e] = float32(0)
            for k in range(0, n_values, FOUR):
                if is_exact or at < start + C:
                    ptx.load4(table_VC, at, total, k)
                at += FOUR * WARP
            load_row(dout_N, lists[first], C, c, values, 0)
            for e in range(n_values):
                total[e] += values[e]
            for i in range(1, opaque(count), 2):
                load_row(dout_N, lists[first + i], C, c, values, 0)
                load_row(dout_N, lists[first + min(i + 1, count - 1)], C, c, values, n_values)
                # Not a condition: the compiler would wait for the first row before it asks for the second.
                is_counted = float32(1) if i + 1 < count else float32(0)
                for e in range(n_values):
                    total[e] += values[e]
                for e in range(n_values):
                    total[e] += is_counted * values[n_values + e]
            at = start + c
            for k in range(0, n_values, FOUR):
                if is_exact or at < start + C:
                    ptx.store4(table_VC, at, total, k)
                at += FOUR * WARP

    @cuda.jit(device=True)
    def places(found, counts):
        """How many positions the threads before this one found; counts[WARP] becomes the number of all."""
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        with_own = found
        for distance in (1, 2, 4, 8, 16):
            other = cuda.shfl_up_sync(0xFFFFFFFF, with_own, distance)
            if lane >= distance:
                with_own += other
        if lane == WARP - 1:
            counts[warp] = with_own
        cuda.syncthreads()
        for y in range(warps):
            if y < warp:
                with_own += counts[y]
        if warp == warps - 1 and lane == WARP - 1:
            counts[WARP] = with_own
        cuda.syncthreads()
        return with_own - found

    @cuda.jit(device=True)
    def add_collected(dout_N, table_VC, token, lists, collected, n_collected, sums, total, values):
        """To the row of a token the rows of dout that are listed, shared out to warps whose sums are added in order."""
        lane, warp = cuda.threadIdx.x, cuda.threadIdx.y
        C = table_VC.shape[1]
        for c0 in range(0, C, channels):
            c = c0 + lane * FOUR
            for e in range(n_values):
                total[e] = float32(0)
            if in_pairs:
                for i in range(warp, n_collected, 2 * warps):
                    load_row(dout_N, lists[collected + i], C, c, values, 0)
                    load_row(dout_N, lists[collected + min(i + warps, n_collected - 1)], C, c, values, n_values)
                    is_counted = float32(1) if i + warps < n_collected else float32(0)  # as for a short row
                    for e in range(n_values):
                        total[e] += values[e]
                    for e in range(n_values):
                        total[e] += is_counted * values[n_values + e]
            else:
                for i in range(warp, n_collected, warps):
                    load_row(dout_N, lists[collected + i], C, c, values, 0)
                    for e in range(n_values):
                        total[e] += values[e]
            for y in range(warps):
                if y == warp:
                    for k in range(0, n_values, FOUR):
                        for e in range(FOUR):
                            before = sums[lane * FOUR + WARP * k + e] if y > 0 else float32(0)
                            sums[lane * FOUR + WARP * k + e] = before + total[k + e]
                cuda.syncthreads()
            for i in range(warp * WARP + lane, min(channels, C - c0), threads):
                table_VC[token, c0 + i] = narrow(widen(table_VC[token, c0 + i]) + sums[i], table_VC.dtype)
            cuda.syncthreads()

    @cuda.jit(device=True)
    def add_long_row(tokens_N, dout_N, table_VC, token, lists, collected, counts, sums, tokens, total, values):
        thread = cuda.threadIdx.y * WARP + cuda.threadIdx.x
        N = tokens_N.size
        n_collected = 0
        for n0 in range(0, N, window):
            start = n0 + thread * A_THREAD
            stop = min(start + A_THREAD, N)
            n_mine = int32(0)
            if in_pairs:
                for k in range(A_THREAD):
                    tokens[k] = tokens_N[start + k] if start + k < N else int32(-1)
                for k in range(A_THREAD):
                    if tokens[k] == token:
                        n_mine += int32(1)
            else:
                for n in range(start, stop):
                    if tokens_N[n] == token:
                        n_mine += int32(1)
            place = collected + n_collected + places(n_mine, counts)
            if in_pairs:
                for k in range(A_THREAD):
                    if tokens[k] == token:
                        lists[place] = int32(start + k)
                        place += 1
            else:
                for n in range(start, stop):
                    if tokens_N[n] == token:
                        lists[place] = n
                        place += 1
            n_collected += counts[WARP]
            cuda.syncthreads()
            if n_collected > window or n0 + window >= N:
                add_collected(dout_N, table_VC, token, lists, collected, n_collected, sums, total, values)
                n_collected = 0

    @cuda.jit(device=True)
    def load_text(dout_N, b, P, column, end, words, first):
        for j in range(columns):
            at = min(column + j * threads * vector, end - vector)
            load(dout_N, int64(b) * P + at, words, first + WORDS * j)

    @cuda.jit(device=True)
    def add_words(words, first, sums):
        for w in range(WORDS * columns):
            sums[elements * w] += low(words[first + w])
            if elements == 2:
                sums[2 * w + 1] += high(words[first + w])

    @cuda.jit(device=True)
    def load_texts(dout_N, b, B, P, column, end, words):
        for k in range(texts):
            load_text(dout_N, min(b + k, B - 1), P, column, end, words, WORDS * k * columns)

    @cuda.jit(device=True)
    def add_texts(dout_N, b, stop, P, column, end, words, sums):
        for k in range(texts):
            if b + k < stop:
                add_words(words, WORDS * k * columns, sums)
        for more in range(b + texts, stop):
            load_text(dout_N, more, P, column, end, words, 0)
            add_words(words, 0, sums)

    @cuda.jit(device=True)
    def load_columns(positions_P, column, end, sums):
        for j in range(columns):
            at = column + j * threads * vector
            if at < end:
                for e in range(0, vector, FOUR):
                    ptx.load4(positions_P, at + e, sums, j * vector + e)

    @cuda.jit(device=True)
    def store_columns(positions_P, column, end, sums):
        for j in range(columns):
            at = column + j * threads * vector
            if at < end:
                for e in range(0, vector, FOUR):
                    ptx.store4(positions_P, at + e, sums, j * vector + e)

    return Parts(add_short_row, add_long_row, load_texts, add_texts, load_columns, store_columns)
