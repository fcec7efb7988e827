"""Embedding by vectors, for GPUs: see :mod:`numstack.kernels.embedding` for what it computes.

Forward: a thread takes the same 16 bytes of the same time of several texts, so that it reads the position's once, and
has all their tokens' rows under way at once. Elements are added two by two, as they lie in a word.

What else was tried: half or twice the texts, blocks of 128 or 512, neighbouring vectors or rows of a text a thread,
rows written as what the cache drops first (all within 2%); a text a thread (9% slower). Of float32 a row of the table
that comes again is not in the cache any more: 0.86 to 0.90 of an equal copy, which counts it once, and 0.97 to 0.98 of
what PyTorch compiles.

Backward, the positions; the table is :mod:`numstack.kernels.embedding_rows`'s.
"""

import functools
import math
from typing import Any

from numba import cuda, float32, int32, uint32

from numstack.device import Kernel, kernel
from numstack.device.ptx import load8, store8, wait_for_kernel_before
from numstack.device.ptx.integers import divide
from numstack.device.ptx.words import WORDS, words_of

VECTOR = 8
THREADS = 256  # of a forward block
TEXTS = 8  # whose rows a forward thread has under way
ROWS = 8  # that a thread of the positions' gradient has under way
ROWS_VALUES = ROWS * VECTOR


@functools.cache
def forward(dtype: Any, *, has_positions: bool, texts: int = TEXTS, is_beside_groups: bool = False) -> Kernel:
    """out = the tokens' rows, plus the positions' rows, all of a numba ``dtype``.

    Block THREADS: a thread for one vector of 16 bytes at one time of ``texts`` texts. Texts are the grid's y.
    ``is_beside_groups``: the kernel ahead groups the tokens, and nothing here depends on it. So none waits for it but
    the last block, at its end, that who comes next finds both done.
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
    def forward_vectors(tokens_N, token_table_N, position_table_N, out_N, B, T, V, n_vectors):
        words = cuda.local.array(n_words, uint32)
        position = cuda.local.array(WORDS, uint32)
        token = cuda.local.array(texts, int32)
        i = int32(cuda.blockIdx.x * THREADS + cuda.threadIdx.x)
        t = divide(i, n_vectors)
        c = (i - t * n_vectors) * vector
        C = n_vectors * vector
        b0 = cuda.blockIdx.y * texts
        unknown = pack(float32(math.nan), float32(math.nan))
        if t < T:
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
        if is_beside_groups and cuda.blockIdx.x == cuda.gridDim.x - 1 and cuda.blockIdx.y == cuda.gridDim.y - 1:
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
