"""Positions of a batch grouped by token, by which an embedding's gradient is summed: see
:mod:`numstack.kernels.embedding`, and for what ``groups`` has, :mod:`numstack.kernels.embedding_groups_format`.

Ladder: ``counting_sort`` counts the tokens, in which each position learns how many of its token came before it; lets
the first of each token take as much of the order as its token needs; puts places there as they come; and has each
position find its rank among its token's by comparing it with all. So what lies where is left to chance, and what it
says is not. The comparisons are the sum of squared group sizes: few for words, many where most tokens are the same.

On Hopper ``cluster`` (:mod:`numstack.kernels.embedding_groups_cluster`) does all in one kernel of eight blocks, so that
another has the other multiprocessors to itself: beside forward's, 32 x 1024 tokens cost 1 to 2 microseconds of an H200.
Five small kernels, each waiting for the one ahead, are as soon over (18 us), but who starts behind them starts 8 us
later. The same steps by one cluster, in global memory, take 45 us: eight multiprocessors wait too long for it.
"""

import numpy as np
from numba import cuda, int32

from numstack.device import Array, Stream, kernel
from numstack.device.ptx.integers import divide, multiply, subtract
from numstack.errors import ConfigError
from numstack.kernels import embedding_groups_cluster as by_cluster
from numstack.kernels.embedding_groups_format import (
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
from numstack.kernels.launch import (
    are_aligned,
    ceil_div,
    check_contiguous,
    check_dtype,
    check_ndim,
    check_workspace,
    flat,
)
from numstack.kernels.variants import Variant, Variants

BLOCK = 256  # threads
ALLOTTED = 3  # of the header: positions of the order that are taken
NONE = 0x7FFFFFFF  # later than any place


@kernel
def _clear(header_H, plans_P, counts_V):
    i = cuda.grid(1)
    if i < header_H.size:
        header_H[i] = int32(0)
    if i * PLAN < plans_P.size:
        plans_P[i * PLAN + N_FEW] = int32(0)
        plans_P[i * PLAN + N_MANY] = int32(0)
    if i < counts_V.size:
        counts_V[i] = int32(0)


@kernel
def _count(tokens_N, counts_V, arrivals_N):
    """Each position learns how many of its token came before it."""
    n = cuda.grid(1)
    if n < tokens_N.size:
        token = tokens_N[n]
        if token >= 0 and token < counts_V.size:
            arrivals_N[n] = cuda.atomic.add(counts_V, token, int32(1))


@kernel
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


@kernel
def _fill(tokens_N, counts_V, starts_V, arrivals_N, B, T, places_N):
    """Places of each token side by side, as they came."""
    n = int32(cuda.grid(1))
    if n < tokens_N.size:
        token = tokens_N[n]
        if token >= 0 and token < counts_V.size:
            places_N[starts_V[token] + arrivals_N[n]] = _place(n, B, T)


@kernel
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


def _by_counting_sort(tokens: Array, groups: Array, V: int, stream: Stream | None) -> None:
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


def _takes_cluster(groups: Array, B: int, T: int, V: int) -> bool:
    return are_aligned(groups) and by_cluster.takes(B, T, V)


GROUP = Variants(
    "embedding.group",
    [
        Variant("counting_sort", _by_counting_sort, note="Count, allot, fill, and sort by comparing."),
        Variant("cluster", by_cluster.group, "All in the shared memory of eight blocks.", _takes_cluster, "sm_90a"),
    ],
)


def group(tokens_BT: Array, groups: Array, V: int, *, variant: str | None = None, stream: Stream | None = None) -> None:
    """Group the positions of a batch by token.

    Parameters
    ----------
    tokens_BT : array, shape (B, T), int32, C-contiguous
        Those outside [0, V) are in no group.
    groups : array, one axis, int32
        At least ``layout(B, T, V).size`` elements, whatever they hold. Without positions it is left as it is.
    V : int
        Rows of the table, at least 1.
    variant : str, optional
        A name of ``GROUP``.

    Raises
    ------
    ShapeError, DTypeError
        If tokens_BT has not two axes of int32, or groups is too small.
    ConfigError
        If V is out of range.

    Notes
    -----
    Workspace: none but groups. Deterministic: order within a token, and what plans say but for
    starts and the order of rows, that have no bearing on a sum.
    """
    check_ndim("embedding.group", 2, tokens_BT=tokens_BT)
    check_dtype("embedding.group", np.int32, tokens_BT=tokens_BT)
    check_contiguous("embedding.group", tokens_BT=tokens_BT)
    if not 1 <= V < 1 << 31:
        raise ConfigError(f"embedding.group: V={V!r}; give the number of the table's rows, from 1 to 2^31 - 1")
    B, T = tokens_BT.shape
    check_workspace("embedding.group", groups, layout(B, T, V).size, np.int32, "groups")
    if B * T > 0:
        GROUP.pick(variant, groups, B, T, V).launch(tokens_BT, groups, V, stream)
