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

from numstack.device import Kernel, kernel
from numstack.device.ptx.integers import divide, highest_bit, multiply, subtract
from numstack.device.ptx.words import WORDS, words_of
from numstack.kernels.embedding_parts import A_THREAD, FOUR, SHORT, TEXTS, parts
from numstack.kernels.warp import WARP


class Size(NamedTuple):
    """Warps of a block, and tokens that a thread of it has under way."""

    warps: int
    at_once: int


MANY = Size(20, 28)
FEW = Size(16, 24)  # with more registers, which positions take, and channels that are no multiple of 128


def shared_bytes(n_rows: int, warps: int) -> int:
    """Of a block of so many warps that owns so many rows."""
    return 4 * (n_rows * (SHORT + 2) + 2 * A_THREAD * WARP * warps)


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
    warps, at_once = size
    add_short_row, add_long_row, load_texts, add_texts, load_columns, store_columns = parts(
        dtype, warps, fours, is_exact=is_exact, columns=columns
    )
    vector = WORDS * words_of(dtype).elements
    threads = WARP * warps
    n_values = FOUR * fours
    n_pair = 2 * n_values
    channels = WARP * n_values
    n_counts = WARP + 1
    n_words, n_column_values = WORDS * TEXTS * max(columns, 1), vector * max(columns, 1)

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
        V = dtoken_table_VC.shape[0]
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
                add_long_row(
                    tokens_N, dout_N, dtoken_table_VC, token, lists, collected, counts, sums, tokens, total, values
                )
        n_turns = max(divide(int32(n_found + warps - 1), int32(warps)), int32(1))
        P = dpositions_P.size
        column = (cuda.blockIdx.x * n_vectors + thread) * vector
        end = min((cuda.blockIdx.x + 1) * n_vectors * vector, P)  # of the block's columns
        for e in range(n_column_values):
            of_position[e] = float32(0)
        load_columns(dpositions_P, column, end, of_position)
        for turn in range(n_turns):
            # The turn's texts, for the positions: under way before the rows are, and waited for after them.
            b0 = divide(int32(turn * B), n_turns)
            stop = divide(int32((turn + 1) * B), n_turns)
            load_texts(dout_N, b0, B, P, column, end, words)
            r = turn * warps + warp
            if r < n_found:
                row = lists[n_rows + r]
                count = lists[row]
                first = positions + row * SHORT
                if count <= SHORT:
                    add_short_row(dout_N, dtoken_table_VC, row * n_blocks + own, lists, first, count, total, values)
            if columns > 0:
                add_texts(dout_N, b0, stop, P, column, end, words, of_position)
        store_columns(dpositions_P, column, end, of_position)

    return owned_rows
