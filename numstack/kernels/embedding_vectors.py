"""Embedding by vectors, for GPUs: see :mod:`numstack.kernels.embedding` for what it computes.

Forward: a warp takes the same time of several texts, so that it reads the position's row once, and has their tokens'
rows under way at once.

Backward: positions with one token form a linked list, made by one atomic exchange each::

    tokens     7  3  7  7  5            heads[7] = 3, heads[3] = 1, heads[5] = 4
    previous  -1 -1  0  2 -1            (or in another order, as the exchanges come)

The warp of a list's first member (previous = -1) walks down from the head, sorts the members, and adds their rows of
dout in the order of positions: whatever the exchanges did, the sum is the same. Nothing is sorted or scanned that spans
all tokens, and a token that occurs once, as most do, costs no more than its two rows: 66 us for 32 x 1024 evenly spread
tokens of 50,304 with 768 channels on an H200, 3.0 TB/s.

A list of more than 32 members is put down for a second kernel. There it is a block's, which goes through all tokens,
collects the positions in order, and shares the rows out to its warps, whose sums are added in order. All have 256
channels a warp, so that a frequent token's rows are read by several blocks.
"""

import functools
import math

from numba import cuda, float32, int32

from numstack.device import Kernel, kernel, narrow, widen
from numstack.device.ptx import load8, store8
from numstack.kernels.warp import WARP

VECTOR = 8
WARPS = 8  # of a block
TEXTS = 4  # whose rows a warp has under way
CHANNELS = WARP * VECTOR  # of a warp, backward
SHORT = 32  # members of a list that one warp sums
LONG_BLOCKS = 256  # that share the long lists
THREADS = WARP * WARPS
A_THREAD = 16  # tokens that a thread of a long list looks at at once
WINDOW = A_THREAD * THREADS
COLLECTED = 2 * WINDOW  # positions of a long list that are summed at once, at most
ROWS = 8  # of a long list that a warp has under way
ROWS_VALUES = ROWS * VECTOR


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
def add_lists(tokens_N, heads_V, previous_N, dout_NC, dtoken_table_VC, last_1, long_L):
    """Block (32, WARPS): a warp for each position and 256 channels. Long lists' tokens go to long_L[: last + 1]."""
    members = cuda.shared.array((WARPS, SHORT), int32)
    ordered = cuda.shared.array((WARPS, SHORT), int32)
    rows = cuda.local.array(VECTOR, float32)
    total = cuda.local.array(VECTOR, float32)
    lane = cuda.threadIdx.x
    warp = cuda.threadIdx.y
    N, C = dout_NC.shape
    n = cuda.blockIdx.x * WARPS + warp
    c = cuda.blockIdx.y * CHANNELS + lane * VECTOR
    token = int32(-1)
    member = int32(-1)
    if n < N:
        token = tokens_N[n]
        before = previous_N[n]
        if token >= 0 and token < heads_V.size and before < 0:
            member = heads_V[token]
    leads = member >= 0 and c < C
    if leads:  # both rows that are needed whatever the list holds
        load8(dtoken_table_VC, token * C + c, total, 0)
        load8(dout_NC, n * C + c, rows, 0)
    count = int32(0)
    while member >= 0 and count < SHORT:
        if lane == 0:
            members[warp, count] = member
        count += int32(1)
        member = previous_N[member] if member != n else int32(-1)
    cuda.syncwarp()
    if lane < count:
        mine = members[warp, lane]
        rank = int32(0)
        for i in range(count):
            if members[warp, i] < mine:
                rank += int32(1)
        ordered[warp, rank] = mine
    cuda.syncwarp()
    if member >= 0:
        if lane == 0 and cuda.blockIdx.y == 0:
            long_L[cuda.atomic.add(last_1, 0, int32(1)) + 1] = token
    elif leads:
        if count == 1:
            for e in range(VECTOR):
                total[e] += rows[e]
        else:
            for i in range(count):
                load8(dout_NC, ordered[warp, i] * C + c, rows, 0)
                for e in range(VECTOR):
                    total[e] += rows[e]
        store8(dtoken_table_VC, token * C + c, total, 0)


@kernel
def add_long_lists(tokens_N, dout_NC, dtoken_table_VC, last_1, long_L):
    """Block (32, WARPS), LONG_BLOCKS of them for each 256 channels: each sums long lists in turn."""
    counts = cuda.shared.array(WARPS, int32)
    collected = cuda.shared.array(COLLECTED, int32)
    partial = cuda.shared.array((WARPS, CHANNELS), float32)
    total = cuda.local.array(VECTOR, float32)
    rows = cuda.local.array(ROWS_VALUES, float32)
    lane = cuda.threadIdx.x
    warp = cuda.threadIdx.y
    thread = warp * WARP + lane
    N, C = dout_NC.shape
    first_channel = cuda.blockIdx.y * CHANNELS
    c = first_channel + lane * VECTOR
    for k in range(cuda.blockIdx.x, last_1[0] + 1, cuda.gridDim.x):
        token = long_L[k]
        n_collected = 0
        for n0 in range(0, N, WINDOW):
            # Each thread counts its tokens; sums over the threads before it say where its positions go.
            start = n0 + thread * A_THREAD
            stop = min(start + A_THREAD, N)
            found = int32(0)
            for i in range(start, stop):
                if tokens_N[i] == token:
                    found += int32(1)
            before = found
            for distance in (1, 2, 4, 8, 16):
                other = cuda.shfl_up_sync(0xFFFFFFFF, before, distance)
                if lane >= distance:
                    before += other
            if lane == WARP - 1:
                counts[warp] = before
            cuda.syncthreads()
            place = n_collected + before - found
            for y in range(WARPS):
                if y < warp:
                    place += counts[y]
            for y in range(WARPS):
                n_collected += counts[y]
            for i in range(start, stop):
                if tokens_N[i] == token:
                    collected[place] = i
                    place += 1
            cuda.syncthreads()
            if n_collected + WINDOW > COLLECTED or n0 + WINDOW >= N:
                for e in range(VECTOR):
                    total[e] = float32(0)
                if c < C:
                    for i0 in range(warp, n_collected, WARPS * ROWS):
                        for r in range(ROWS):
                            for e in range(VECTOR):
                                rows[r * VECTOR + e] = float32(0)
                            if i0 + r * WARPS < n_collected:
                                load8(dout_NC, collected[i0 + r * WARPS] * C + c, rows, r * VECTOR)
                        for r in range(ROWS):
                            for e in range(VECTOR):
                                total[e] += rows[r * VECTOR + e]
                store8(partial, warp * CHANNELS + lane * VECTOR, total, 0)
                cuda.syncthreads()
                if first_channel + thread < C:
                    of_block = float32(0)
                    for y in range(WARPS):
                        of_block += partial[y, thread]
                    of_block += widen(dtoken_table_VC[token, first_channel + thread])
                    dtoken_table_VC[token, first_channel + thread] = narrow(of_block, dtoken_table_VC.dtype)
                cuda.syncthreads()
                n_collected = 0


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
