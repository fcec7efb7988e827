"""Gradient of an embedding on GPUs: each block owns rows of the table. See :mod:`numstack.kernels.embedding`.

Of n blocks, block i owns rows i, i + n, ..., so that frequent tokens, whose numbers are often near, spread over blocks.
It needs nothing from the others, so that there is one launch, no workspace, and no counter that must be 0 before::

    tokens      7 3 7 7 5 1         block 1 of 2:   row   1       3       5       7
                                    positions             5       1       4       0, 2, 3

1. It looks through all tokens, which the cache has for all blocks, and puts the positions of its own into shared
   memory: up to SHORT of each row, in the order in which atomics come.
2. Rows with more positions than that are summed by all its warps together: they go through the tokens again, collect
   the positions in order, and share them out.
3. Its other rows are shared out to warps. A warp sorts the row's positions and adds their rows of dout in order.

So the order of every sum depends on the tokens alone. 32 x 1024 evenly spread tokens of 50,304 with 768 channels take
56 us on an H200: 3.5 TB/s, and 90% of what a copy of as many bytes reaches.

The gradient of the positions is made on the way, if a block's part of it fits in registers: while a warp waits for rows
of the table and of dout, a few texts' parts of dout for the positions are on their way as well. Both take 66 us.
"""

import functools
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint32

from numstack.device import Kernel, kernel, narrow, ptx, widen
from numstack.device.ptx.integers import divide, highest_bit, multiply, opaque, subtract
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


class Size(NamedTuple):
    """Warps of a block, and tokens that a thread of it has under way."""

    warps: int
    at_once: int


MANY = Size(20, 28)
FEW = Size(16, 24)  # with more registers, which positions take, and channels that are no multiple of 128


def shared_bytes(n_rows: int, warps: int) -> int:
    """Of a block of so many warps that owns so many rows."""
    return 4 * (n_rows * (SHORT + 2) + 2 * A_THREAD * WARP * warps)


def reciprocal(n: int) -> int:
    """What the high word of a product with x < 2^32 / n divides x by n."""
    return (1 << 32) // n + 1


def owners(V: int, multiprocessors: int) -> int:
    """Blocks that own the rows of a table: one for each multiprocessor, or a multiple."""
    least = max(multiprocessors, 3)  # else the reciprocal is no int32
    return least * ceil_div(V, least * MOST_ROWS)


def fours_of(C: int) -> tuple[int, bool]:
    """Of a lane at once, for C channels, and whether it always has all of them."""
    for fours in range(MOST_FOURS, 0, -1):
        if C % (WARP * FOUR * fours) == 0:
            return fours, True
    return 4, False


@functools.cache
def add_owned_rows(dtype: Any, size: Size, fours: int, *, is_exact: bool, columns: int) -> Kernel:
    """The kernel for a dout of a numba ``dtype``. Block (32, size.warps).

    Parameters
    ----------
    fours : int
        Times FOUR channels of a lane at once.
    is_exact : bool
        The channels are a multiple of 128 ``fours``.
    columns : int
        Vectors of the positions' gradient of a thread; 0: no gradient of positions.
    """
    load, low, high, elements = (getattr(words_of(dtype), name) for name in ("load", "low", "high", "elements"))
    warps, at_once = size
    vector = WORDS * elements
    threads = WARP * warps
    n_values = FOUR * fours
    n_pair = 2 * n_values
    channels = WARP * n_values
    window = A_THREAD * threads
    n_counts = WARP + 1
    n_words, n_column_values = WORDS * TEXTS * max(columns, 1), vector * max(columns, 1)
    texts = TEXTS

    @cuda.jit(device=True)
    def owns(token, own, n_blocks, magic):
        return subtract(token, multiply(int32((int64(token) * int64(magic)) >> 32), n_blocks)) == own

    @cuda.jit(device=True)
    def put_down(token, n, V, magic, lists, n_rows, found):
        """Note position n of a token whose row this block owns."""
        if token >= 0 and token < V:
            row = int32((int64(token) * int64(magic)) >> 32)
            place = cuda.atomic.add(lists, row, int32(1))
            if place < SHORT:
                lists[2 * n_rows + row * SHORT + place] = n
            if place == 0:
                lists[n_rows + cuda.atomic.add(found, 0, int32(1))] = row
            elif place == SHORT:
                cuda.atomic.add(found, 1, int32(1))

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
    def add_words(words, first, sums):
        """To sums the elements of ``columns`` vectors."""
        for w in range(WORDS * columns):
            sums[elements * w] += low(words[first + w])
            if elements == 2:
                sums[2 * w + 1] += high(words[first + w])

    @kernel(name="embedding.backward owned_rows")
    def owned_rows(tokens_N, dout_N, dtoken_table_VC, dpositions_P, B, n_rows, magic, n_vectors):
        """lists: of each row the number of positions; the rows that have any; SHORT positions of each; collected ones.

        n_vectors: of the positions' gradient that are a block's.
        """
        found = cuda.shared.array(2, int32)  # rows with positions, and of them those with more than SHORT
        counts = cuda.shared.array(n_counts, int32)
        sums = cuda.shared.array(channels, float32)
        lists = cuda.shared.array(0, int32)
        total = cuda.local.array(n_values, float32)
        values = cuda.local.array(n_pair, float32)
        tokens = cuda.local.array(at_once, int32)
        words = cuda.local.array(n_words, uint32)
        of_position = cuda.local.array(n_column_values, float32)
        lane = cuda.threadIdx.x
        warp = cuda.threadIdx.y
        thread = warp * WARP + lane
        own = int32(cuda.blockIdx.x)
        n_blocks = int32(cuda.gridDim.x)
        V, C = dtoken_table_VC.shape
        N = tokens_N.size
        positions = 2 * n_rows
        collected = positions + n_rows * SHORT
        for row in range(thread, n_rows, threads):
            lists[row] = int32(0)
        if thread < 2:
            found[thread] = int32(0)
        cuda.syncthreads()
        for n0 in range(0, N, threads * at_once):
            for k in range(at_once):
                n = n0 + k * threads + thread
                tokens[k] = tokens_N[n] if n < N else int32(-1)
            mine = uint32(0)
            for k in range(at_once):
                if owns(tokens[k], own, n_blocks, magic):
                    mine |= uint32(1 << k)
            while mine != uint32(0):
                k = highest_bit(mine)
                mine = uint32(mine ^ (uint32(1) << uint32(k)))
                n = n0 + k * threads + thread
                if n < N:
                    put_down(tokens_N[n], int32(n), V, magic, lists, n_rows, found)
        cuda.syncthreads()
        n_found = found[0]
        n_long = found[1]
        for r in range(n_found if n_long > 0 else int32(0)):
            row = lists[n_rows + r]
            if lists[row] > SHORT:
                token = row * n_blocks + own
                n_collected = 0
                for n0 in range(0, N, window):
                    start = n0 + thread * A_THREAD
                    stop = min(start + A_THREAD, N)
                    n_mine = int32(0)
                    for n in range(start, stop):
                        if tokens_N[n] == token:
                            n_mine += int32(1)
                    place = collected + n_collected + places(n_mine, counts)
                    for n in range(start, stop):
                        if tokens_N[n] == token:
                            lists[place] = n
                            place += 1
                    n_collected += counts[WARP]
                    cuda.syncthreads()
                    if n_collected + window > 2 * window or n0 + window >= N:
                        for c0 in range(0, C, channels):
                            c = c0 + lane * FOUR
                            for e in range(n_values):
                                total[e] = float32(0)
                            for i in range(warp, n_collected, warps):
                                n = lists[collected + i]
                                for k in range(0, n_values, FOUR):
                                    if is_exact:
                                        ptx.load4(dout_N, int64(n) * C + c + WARP * k, values, k)
                                    else:
                                        ptx.load4(dout_N, int64(n) * C + min(c + WARP * k, C - FOUR), values, k)
                                for e in range(n_values):
                                    total[e] += values[e]
                            for y in range(warps):
                                if y == warp:
                                    for k in range(0, n_values, FOUR):
                                        for e in range(FOUR):
                                            before = sums[lane * FOUR + WARP * k + e] if y > 0 else float32(0)
                                            sums[lane * FOUR + WARP * k + e] = before + total[k + e]
                                cuda.syncthreads()
                            for i in range(thread, min(channels, C - c0), threads):
                                gradient = widen(dtoken_table_VC[token, c0 + i]) + sums[i]
                                dtoken_table_VC[token, c0 + i] = narrow(gradient, dtoken_table_VC.dtype)
                            cuda.syncthreads()
                        n_collected = 0
        n_turns = max(divide(int32(n_found + warps - 1), int32(warps)), int32(1))
        P = dpositions_P.size
        column = (cuda.blockIdx.x * n_vectors + thread) * vector
        end = min((cuda.blockIdx.x + 1) * n_vectors * vector, P)  # of the block's columns
        for e in range(n_column_values):
            of_position[e] = float32(0)
        for j in range(columns):
            at = column + j * threads * vector
            if at < end:
                for e in range(0, vector, FOUR):
                    ptx.load4(dpositions_P, at + e, of_position, j * vector + e)
        for turn in range(n_turns):
            # The turn's texts, for the positions: under way before the rows are, and waited for after them.
            b0 = divide(int32(turn * B), n_turns)
            stop = divide(int32((turn + 1) * B), n_turns)
            for k in range(texts if columns > 0 else 0):
                for j in range(columns):
                    at = min(column + j * threads * vector, end - vector)
                    load(dout_N, int64(min(b0 + k, B - 1)) * P + at, words, WORDS * (k * columns + j))
            r = turn * warps + warp
            if r < n_found:
                row = lists[n_rows + r]
                count = lists[row]
                first = positions + row * SHORT
                if count <= SHORT:
                    if count > 1:
                        position = lists[first + lane] if lane < count else int32(0)
                        rank = int32(0)
                        for i in range(opaque(count)):
                            if lists[first + i] < position:
                                rank += int32(1)
                        cuda.syncwarp()
                        if lane < count:
                            lists[first + rank] = position
                        cuda.syncwarp()
                    start = (row * n_blocks + own) * C
                    for c0 in range(0, C, channels):
                        c = c0 + lane * FOUR
                        at = start + c
                        if not is_exact:
                            for e in range(n_values):
                                total[e] = float32(0)
                        for k in range(0, n_values, FOUR):
                            if is_exact or at < start + C:
                                ptx.load4(dtoken_table_VC, at, total, k)
                            at += FOUR * WARP
                        n = lists[first]
                        for k in range(0, n_values, FOUR):
                            if is_exact:
                                ptx.load4(dout_N, int64(n) * C + c + WARP * k, values, k)
                            else:
                                ptx.load4(dout_N, int64(n) * C + min(c + WARP * k, C - FOUR), values, k)
                        for e in range(n_values):
                            total[e] += values[e]
                        for i in range(1, opaque(count), 2):
                            n = lists[first + i]
                            other = lists[first + min(i + 1, count - 1)]
                            for k in range(0, n_values, FOUR):
                                if is_exact:
                                    ptx.load4(dout_N, int64(n) * C + c + WARP * k, values, k)
                                    ptx.load4(dout_N, int64(other) * C + c + WARP * k, values, n_values + k)
                                else:
                                    ptx.load4(dout_N, int64(n) * C + min(c + WARP * k, C - FOUR), values, k)
                                    ptx.load4(
                                        dout_N, int64(other) * C + min(c + WARP * k, C - FOUR), values, n_values + k
                                    )
                            # Not a condition: the compiler would wait for the first row before it asks for the second.
                            is_counted = float32(1) if i + 1 < count else float32(0)
                            for e in range(n_values):
                                total[e] += values[e]
                            for e in range(n_values):
                                total[e] += is_counted * values[n_values + e]
                        at = start + c
                        for k in range(0, n_values, FOUR):
                            if is_exact or at < start + C:
                                ptx.store4(dtoken_table_VC, at, total, k)
                            at += FOUR * WARP
            if columns > 0:
                for k in range(texts):
                    if b0 + k < stop:
                        add_words(words, WORDS * k * columns, of_position)
                for b in range(b0 + texts, stop):
                    for j in range(columns):
                        at = min(column + j * threads * vector, end - vector)
                        load(dout_N, int64(b) * P + at, words, WORDS * j)
                    add_words(words, 0, of_position)
        for j in range(columns):
            at = column + j * threads * vector
            if at < end:
                for e in range(0, vector, FOUR):
                    ptx.store4(dpositions_P, at + e, of_position, j * vector + e)

    return owned_rows
