"""Positions grouped by token by a kernel for each step: see :mod:`numstack.kernels.embedding_groups`."""

from numba import cuda, int32

from numstack.device import Array, Stream, kernel
from numstack.device.ptx.integers import divide, multiply, subtract
from numstack.kernels.embedding_groups.format import (
    COUNT,
    FEW,
    HEAD_OF_TILE,
    MANY,
    MEMBER,
    N_FEW,
    N_FREQUENT,
    N_MANY,
    OF_FREQUENT,
    PLAN,
    ROWS,
    START,
    TOKEN,
    WORDS_OF_ROW,
    layout,
    parts,
)
from numstack.kernels.launch import ceil_div, flat

BLOCK = 256  # threads
ALLOTTED = 3  # of the header: positions of the order that are taken
NONE = 0x7FFFFFFF  # later than any place


@kernel(name="embedding.group clear")
def _clear(header_H, plans_P, counts_V):
    i = cuda.grid(1)
    if i < header_H.size:
        header_H[i] = int32(0)
    if i * PLAN < plans_P.size:
        plans_P[i * PLAN + N_FEW] = int32(0)
        plans_P[i * PLAN + N_MANY] = int32(0)
    if i < counts_V.size:
        counts_V[i] = int32(0)


@kernel(name="embedding.group count")
def _count(tokens_N, counts_V, arrivals_N):
    """Each position learns how many of its token came before it."""
    n = cuda.grid(1)
    if n < tokens_N.size:
        token = tokens_N[n]
        if token >= 0 and token < counts_V.size:
            arrivals_N[n] = cuda.atomic.add(counts_V, token, int32(1))


@kernel(name="embedding.group allot")
def _allot(tokens_N, counts_V, arrivals_N, header_H, starts_V, frequent_F):
    """The first of each token takes what its token needs; a block asks once for all that its threads do."""
    wanted = cuda.shared.array(2, int32)
    n = cuda.grid(1)
    token = tokens_N[n] if n < tokens_N.size else int32(-1)
    is_first = token >= 0 and token < counts_V.size
    if is_first:
        is_first = arrivals_N[n] == 0
    count = counts_V[token] if is_first else int32(0)
    if cuda.threadIdx.x == 0:
        wanted[0] = int32(0)
    cuda.syncthreads()
    before = cuda.atomic.add(wanted, 0, count)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        wanted[1] = cuda.atomic.add(header_H, ALLOTTED, wanted[0])
    cuda.syncthreads()
    if is_first:
        start = wanted[1] + before
        starts_V[token] = start
        if count > MANY:
            at = OF_FREQUENT * cuda.atomic.add(header_H, N_FREQUENT, int32(1))
            frequent_F[at] = token
            frequent_F[at + 1] = start
            frequent_F[at + 2] = count


@cuda.jit(device=True)
def _place(n, B, T):
    b = divide(n, int32(T))
    return int32(multiply(subtract(n, multiply(b, int32(T))), int32(B)) + b)


@cuda.jit(device=True)
def _position(place, B, T):
    t = divide(place, int32(B))
    return int32(multiply(subtract(place, multiply(t, int32(B))), int32(T)) + t)


@kernel(name="embedding.group fill")
def _fill(tokens_N, counts_V, starts_V, arrivals_N, B, T, places_N):
    """Places of each token side by side, as they came."""
    n = int32(cuda.grid(1))
    if n < tokens_N.size:
        token = tokens_N[n]
        if token >= 0 and token < counts_V.size:
            places_N[starts_V[token] + arrivals_N[n]] = _place(n, B, T)


@kernel(name="embedding.group plan")
def _plan(tokens_N, counts_V, starts_V, places_N, B, T, order_N, plans_P):
    """A position's rank is the number of its token's smaller places; the first adds a row to its tile's plan."""
    n = int32(cuda.grid(1))
    token = tokens_N[n] if n < tokens_N.size else int32(-1)
    count = counts_V[token] if token >= 0 and token < counts_V.size else int32(0)
    if count > 0:
        start = starts_V[token]
        place = _place(n, B, T)
        rank = int32(0)
        following = int32(NONE)
        for k in range(start, start + count):
            other = places_N[k]
            rank = int32(rank + (1 if other < place else 0))
            following = min(following, other) if other > place else following
        order_N[start + rank] = n
        if rank == 0 and count <= MANY:
            t = divide(place, int32(B))
            b = int32(place - multiply(t, int32(B)))
            plan = int32(multiply(t, int32((B + ROWS - 1) // ROWS)) + b // ROWS) * PLAN
            if count <= FEW:
                row = cuda.atomic.add(plans_P, plan + N_FEW, int32(1))
            else:
                row = ROWS - 1 - cuda.atomic.add(plans_P, plan + N_MANY, int32(1))
            at = plan + HEAD_OF_TILE + row * WORDS_OF_ROW
            plans_P[at + TOKEN] = token
            plans_P[at + COUNT] = count * ROWS + b % ROWS
            plans_P[at + START] = start
            plans_P[at + MEMBER] = _position(following, B, T) if count > 1 else int32(0)


def group(tokens: Array, groups: Array, V: int, stream: Stream | None) -> None:
    """As :func:`numstack.kernels.embedding_groups.group`."""
    B, T = tokens.shape
    N = B * T
    tokens = flat(tokens)
    header, order, frequent, plans = parts(groups, B, T, V)
    scratch = groups[layout(B, T, V).scratch :]
    counts, starts, places, arrivals = scratch[:V], scratch[V:][:V], scratch[2 * V :][:N], scratch[2 * V + N :][:N]
    over_table, over_tokens = ceil_div(max(V, plans.size // PLAN, header.size), BLOCK), ceil_div(N, BLOCK)
    _clear[over_table, BLOCK, stream](header, plans, counts)
    _count[over_tokens, BLOCK, stream](tokens, counts, arrivals)
    _allot[over_tokens, BLOCK, stream](tokens, counts, arrivals, header, starts, frequent)
    _fill[over_tokens, BLOCK, stream](tokens, counts, starts, arrivals, B, T, places)
    _plan[over_tokens, BLOCK, stream](tokens, counts, starts, places, B, T, order, plans)
