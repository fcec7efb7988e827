"""Embedding by vectors, for GPUs: see :mod:`numstack.kernels.embedding` for what it computes.

Forward, slice by slice: all positions' first 256 bytes, then all positions' next. A quarter of 32 x 1024 even tokens of
50,304 come again; by whole rows, 3 KiB of float32, the L2 cache has lost a row by then, and 103 MB are read from DRAM;
a slice of all rows stays in it, and 78 MB are (77 is the least). So it takes 47.1 us of an H200, ten in a row, in place
of 50, and of bfloat16 24.8 in place of 25.7. Slices of 512 bytes: 47.5; of 1 KiB: 48.4; of half a row: 49.1.

A thread takes the same 16 bytes of the same time of several texts, so that it reads the position's once, and has all
their tokens' rows under way at once: eight texts take 2% longer than four. Writes that the cache drops first gain
nothing with slices. Elements are added two by two, as they lie in a word.

Backward, the positions; the table is :mod:`numstack.kernels.embedding_rows`'s.
"""

import functools
import math
from typing import Any

from numba import cuda, float32, int32, uint32

from numstack.device import Kernel, kernel
from numstack.device.ptx import load8, store8, wait_for_kernel_before
from numstack.device.ptx.words import WORDS, words_of

VECTOR = 8
SLICE = 16  # vectors of a row that a forward block takes
TIMES = 16  # that it takes
TEXTS = 4  # whose rows a forward thread has under way
ROWS = 8  # that a thread of the positions' gradient has under way
ROWS_VALUES = ROWS * VECTOR


@functools.cache
def forward(dtype: Any, *, has_positions: bool, texts: int = TEXTS, is_beside_groups: bool = False) -> Kernel:
    """out = the tokens' rows, plus the positions' rows, all of a numba ``dtype``.

    Block (SLICE, TIMES): a thread for one vector of 16 bytes at one time of ``texts`` texts. Grid: texts, then times,
    and slices last. ``is_beside_groups``: the kernel ahead groups the tokens, and nothing here depends on it. So none
    waits for it but the last block, at its end, that who comes next finds both done.
    """
    load, store, pack, add = (getattr(words_of(dtype), name) for name in ("load", "store", "pack", "add"))
    vector = WORDS * words_of(dtype).elements
    n_words = WORDS * texts

    name = "embedding.forward_positions" if has_positions else "embedding.forward"

    @kernel(
        name=f"{name} vectors beside groups" if is_beside_groups else f"{name} vectors",
        starts_early=not is_beside_groups,
        waits_itself=is_beside_groups,
    )
    def forward_vectors(tokens_N, token_table_N, position_table_N, out_N, B, T, V, C):
        words = cuda.local.array(n_words, uint32)
        position = cuda.local.array(WORDS, uint32)
        token = cuda.local.array(texts, int32)
        b0 = cuda.blockIdx.x * texts
        t = cuda.blockIdx.y * TIMES + cuda.threadIdx.y
        c = (cuda.blockIdx.z * SLICE + cuda.threadIdx.x) * vector
        unknown = pack(float32(math.nan), float32(math.nan))
        if t < T and c < C:
            for k in range(texts):
                token[k] = tokens_N[min(b0 + k, B - 1) * T + t]
            if has_positions:
                load(position_table_N, t * C + c, position, 0)
            for k in range(texts):
                known = token[k] >= 0 and token[k] < V
                load(token_table_N, (token[k] if known else 0) * C + c, words, WORDS * k)
            for k in range(texts):
                known = token[k] >= 0 and token[k] < V
                for w in range(WORDS):
                    word = add(words[WORDS * k + w], position[w]) if has_positions else words[WORDS * k + w]
                    words[WORDS * k + w] = word if known else unknown
                if b0 + k < B:
                    store(out_N, ((b0 + k) * T + t) * C + c, words, WORDS * k)
        is_last = cuda.blockIdx.x == cuda.gridDim.x - 1 and cuda.blockIdx.y == cuda.gridDim.y - 1
        if is_beside_groups and is_last and cuda.blockIdx.z == cuda.gridDim.z - 1:
            wait_for_kernel_before()

    return forward_vectors


@kernel
def add_positions(dout_BP, dposition_table_P):
    """One thread for each vector of the table, P = T C."""
    x = cuda.local.array(ROWS_VALUES, float32)
    total = cuda.local.array(VECTOR, float32)
    B, P = dout_BP.shape
    i = cuda.grid(1) * VECTOR
    if i < P:
        load8(dposition_table_P, i, total, 0)
        n_whole = B // ROWS * ROWS
        for b0 in range(0, n_whole, ROWS):
            for k in range(ROWS):
                load8(dout_BP, (b0 + k) * P + i, x, k * VECTOR)
            for k in range(ROWS):
                for e in range(VECTOR):
                    total[e] += x[k * VECTOR + e]
        for b in range(n_whole, B):
            load8(dout_BP, b * P + i, x, 0)
            for e in range(VECTOR):
                total[e] += x[e]
        store8(dposition_table_P, i, total, 0)
