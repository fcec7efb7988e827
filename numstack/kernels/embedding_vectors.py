"""Embedding by vectors, for GPUs: see :mod:`numstack.kernels.embedding` for what it computes.

Forward: a warp takes the same time of several texts, so that it reads the position's row once, and has their tokens'
rows under way at once.

Backward: positions with one token form a linked list, made by one atomic exchange each::

    tokens     7  3  7  7  5            heads[7] = 3, heads[3] = 1, heads[5] = 4
    previous  -1 -1  0  2 -1            (or in another order, as the exchanges come)

The warp of a list's first member (previous = -1) walks down from the head, sorts the members, and adds their
rows of dout in that order: whatever the exchanges did, the sum is the same. Nothing is sorted or scanned that spans all
tokens, and a token that occurs once, as most do, costs no more than its two rows.

A list of more than 32 members is a block's: it goes through all tokens, collects its positions in order, and shares the
rows out to its warps, whose sums are added in order. Each block has 256 channels, so that a frequent token's rows are
read by several.
"""

import functools
import math

from numba import cuda, float32, int32

from numstack.device import Kernel, kernel, narrow, widen
from numstack.device.ptx import load8, store8
from numstack.kernels.warp import WARP

VECTOR = 8
WARPS = 8  # of a block
TEXTS = 4  # rows that a warp has under way: forward, of texts; backward, of a long list
TEXTS_VALUES = TEXTS * VECTOR
CHANNELS = WARP * VECTOR  # of a block, backward
SHORT = 32  # members of a list that one warp sums
THREADS = WARP * WARPS
WINDOW = 8 * THREADS  # tokens that a block looks at at once, 8 a thread
COLLECTED = 2 * WINDOW  # positions of a long list that are summed at once, at most
POSITIONS_BLOCK = 128


@functools.cache
def forward(*, has_positions: bool, texts: int = TEXTS, warps: int = WARPS) -> Kernel:
    """out = the tokens' rows, plus the positions' rows. Block (32, warps): a warp for ``texts`` texts at one time."""
    n_values = VECTOR * texts

    @kernel(name="embedding.forward_positions vectors" if has_positions else "embedding.forward vectors")
    def forward_vectors(tokens_BT, token_table_VC, position_table_TC, out_NC):
        x = cuda.local.array(n_values, float32)
        position = cuda.local.array(VECTOR, float32)
        token = cuda.local.array(texts, int32)
        B, T = tokens_BT.shape
        V, C = token_table_VC.shape
        t = cuda.blockIdx.x * warps + cuda.threadIdx.y
        b0 = cuda.blockIdx.y * texts
        if t < T:
            for k in range(texts):
                token[k] = tokens_BT[b0 + k, t] if b0 + k < B else int32(-1)
            for c in range(cuda.threadIdx.x * VECTOR, C, WARP * VECTOR):
                if has_positions:
                    load8(position_table_TC, t * C + c, position, 0)
                for k in range(texts):
                    if token[k] >= 0 and token[k] < V:
                        load8(token_table_VC, token[k] * C + c, x, k * VECTOR)
                    else:
                        for e in range(VECTOR):
                            x[k * VECTOR + e] = float32(math.nan)
                for k in range(texts):
                    if has_positions:
                        for e in range(VECTOR):
                            x[k * VECTOR + e] += position[e]
                    if b0 + k < B:
                        store8(out_NC, ((b0 + k) * T + t) * C + c, x, k * VECTOR)

    return forward_vectors


@kernel
def link(tokens_N, heads_V, previous_N):
    """The list of each token, from heads of -1."""
    n = cuda.grid(1)
    if n < tokens_N.size:
        token = tokens_N[n]
        if token >= 0 and token < heads_V.size:
            previous_N[n] = cuda.atomic.exch(heads_V, token, int32(n))


@kernel
def add_lists(tokens_N, heads_V, previous_N, dout_NC, dtoken_table_VC):
    """Block (32, WARPS): a warp for each position, CHANNELS channels."""
    members = cuda.shared.array((WARPS, SHORT), int32)
    ordered = cuda.shared.array((WARPS, SHORT), int32)
    long = cuda.shared.array(WARPS, int32)  # the token of a warp's list if it is long, or -1
    counts = cuda.shared.array(THREADS, int32)
    collected = cuda.shared.array(COLLECTED, int32)
    partial = cuda.shared.array((WARPS, CHANNELS), float32)
    own = cuda.local.array(VECTOR, float32)
    total = cuda.local.array(VECTOR, float32)
    rows = cuda.local.array(TEXTS_VALUES, float32)
    lane = cuda.threadIdx.x
    warp = cuda.threadIdx.y
    N, C = dout_NC.shape
    V = heads_V.size
    n = cuda.blockIdx.x * WARPS + warp
    first_channel = cuda.blockIdx.y * CHANNELS
    c = first_channel + lane * VECTOR
    token = int32(-1)
    member = int32(-1)
    if n < N:
        token = tokens_N[n]
        if token >= 0 and token < V and previous_N[n] < 0:
            member = heads_V[token]
    leads = member >= 0 and c < C
    if leads:  # both rows that are needed whatever the list holds
        load8(dtoken_table_VC, token * C + c, total, 0)
        load8(dout_NC, n * C + c, own, 0)
    count = int32(0)
    while member >= 0 and count < SHORT:
        if lane == 0:
            members[warp, count] = member
        member = previous_N[member]
        count += int32(1)
    if lane == 0:
        long[warp] = token if member >= 0 else int32(-1)
    cuda.syncthreads()
    if lane < count:
        mine = members[warp, lane]
        rank = int32(0)
        for i in range(count):
            if members[warp, i] < mine:
                rank += int32(1)
        ordered[warp, rank] = mine
    cuda.syncthreads()
    if leads and member < 0:
        if count > 1:
            for e in range(VECTOR):
                own[e] = float32(0)
            for i in range(count):
                load8(dout_NC, ordered[warp, i] * C + c, rows, 0)
                for e in range(VECTOR):
                    own[e] += rows[e]
        for e in range(VECTOR):
            total[e] += own[e]
        store8(dtoken_table_VC, token * C + c, total, 0)
    thread = warp * WARP + lane
    for w in range(WARPS):
        v = long[w]
        if v >= 0:
            n_collected = 0
            for n0 in range(0, N, WINDOW):
                start = n0 + thread * 8
                stop = min(start + 8, N)
                found = int32(0)
                for i in range(start, stop):
                    if tokens_N[i] == v:
                        found += int32(1)
                counts[thread] = found
                cuda.syncthreads()
                offset = 1
                while offset < THREADS:  # Hillis-Steele: after step k a thread has the sum of 2^k threads
                    before = int32(0)
                    if thread >= offset:
                        before = counts[thread - offset]
                    cuda.syncthreads()
                    counts[thread] += before
                    cuda.syncthreads()
                    offset *= 2
                place = n_collected + counts[thread] - found
                for i in range(start, stop):
                    if tokens_N[i] == v:
                        collected[place] = i
                        place += 1
                n_collected += counts[THREADS - 1]
                cuda.syncthreads()
                if n_collected + WINDOW > COLLECTED or n0 + WINDOW >= N:
                    for e in range(VECTOR):
                        own[e] = float32(0)
                    if c < C:
                        for i0 in range(warp, n_collected, WARPS * TEXTS):
                            for k in range(TEXTS):
                                for e in range(VECTOR):
                                    rows[k * VECTOR + e] = float32(0)
                                if i0 + k * WARPS < n_collected:
                                    load8(dout_NC, collected[i0 + k * WARPS] * C + c, rows, k * VECTOR)
                            for k in range(TEXTS):
                                for e in range(VECTOR):
                                    own[e] += rows[k * VECTOR + e]
                    store8(partial, warp * CHANNELS + lane * VECTOR, own, 0)
                    cuda.syncthreads()
                    if first_channel + thread < C:
                        of_block = float32(0)
                        for y in range(WARPS):
                            of_block += partial[y, thread]
                        of_block += widen(dtoken_table_VC[v, first_channel + thread])
                        dtoken_table_VC[v, first_channel + thread] = narrow(of_block, dtoken_table_VC.dtype)
                    cuda.syncthreads()
                    n_collected = 0


@kernel
def add_positions(dout_BP, dposition_table_P):
    """One thread for each vector of the table, P = T C."""
    x = cuda.local.array(TEXTS_VALUES, float32)
    total = cuda.local.array(VECTOR, float32)
    B, P = dout_BP.shape
    i = cuda.grid(1) * VECTOR
    if i < P:
        load8(dposition_table_P, i, total, 0)
        n_whole = B // TEXTS * TEXTS
        for b0 in range(0, n_whole, TEXTS):
            for k in range(TEXTS):
                load8(dout_BP, (b0 + k) * P + i, x, k * VECTOR)
            for k in range(TEXTS):
                for e in range(VECTOR):
                    total[e] += x[k * VECTOR + e]
        for b in range(n_whole, B):
            load8(dout_BP, b * P + i, x, 0)
            for e in range(VECTOR):
                total[e] += x[e]
        store8(dposition_table_P, i, total, 0)
