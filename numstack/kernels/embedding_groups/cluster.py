"""Positions grouped by token by one cluster of eight blocks: see :mod:`numstack.kernels.embedding_groups`.

Block r has tokens r, r + 8, ...; its rows of the table are numbered 0, 1, ... It

1. looks for its own tokens among all, and keeps row and position of each;
2. counts each row's, and from the counts knows where its positions begin (a scan);
3. puts a key of each there, as they come: t 2^bits + b, which is easily turned into the position and is in the order of
   places;
4. finds each key's rank among its row's: the number of smaller ones, by comparing. A row with more than COMPARED has a
   bitmap, in which ranks are numbers of bits below;
5. sets a bit for each row of the table in the masks of the tile where it comes first; all blocks' masks together say
   which place of the tile's plan it has.

Blocks meet three times: to learn how many positions the others have; before masks are merged; and after. All is in
shared memory, so that little waits for global memory, which a kernel beside this one keeps busy; if a block has more
positions than room, they are in the scratch from step 3 on. Blocks find about as many tokens each, as frequent ones
have neighbouring numbers.

Microseconds on an H200, tokens of 50,304:

=============  ====  ==================  ===============  ============  ============
tokens         even  frequent as words   1,000 different  65 different  all the same
=============  ====  ==================  ===============  ============  ============
32 x 1024      15.0  18.5                15.5             20.3          114
8 x 1024        9.0  11.3                 8.8             12.8           22
=============  ====  ==================  ===============  ============  ============

In cycles of 27,800: looking for tokens 6,200, counting and the scan 3,200, sorting 5,200, each meeting 1,200 to 1,700,
and writing the order and plans 7,200, 16 bytes at a time to 3,000 places.

What was slower: counts and starts by row instead of by position, half of the rows having none (sorting 11,500 cycles,
marking 5,500, plans 8,000); masks of all tiles read by each block (6,200 cycles instead of 1,000, merged by one block
each). Scattered words of other blocks' shared memory come one in 5 cycles, so that each block's looking through an
eighth of the tokens, and sending what it finds to the owner, would take longer than looking through all. Up to 64
positions compared instead of 128: words 2 us more; up to 32: 7 us.

Words of shared memory are read and written by address (:mod:`numstack.kernels.embedding_groups.cluster_lists`): by
indices of an array it took 22.6 us, as there were twice the instructions, and instructions are what the time goes into.
"""

import numpy as np
from numba import cuda, int32, uint32, uint64

from numstack.device import Array, Stream, current_device, kernel
from numstack.device.ptx import cluster
from numstack.device.ptx.integers import divide, shared_address
from numstack.device.ptx.sync import uniform
from numstack.kernels.embedding_groups.cluster_lists import (
    ALL_LANES,
    AT_ONCE,
    CLUSTER,
    FOUND,
    FREQUENT,
    FREQUENT_BEFORE,
    LISTS,
    OF_CLUSTER,
    OWN,
    POSITIONS,
    POSITIONS_BEFORE,
    SUMS,
    THREADS,
    WARPS,
    add,
    append,
    high,
    increment,
    load_word,
    low,
    nth,
    prefix_sum,
    rotate,
    store_word,
)
from numstack.kernels.embedding_groups.cluster_plans import (
    clear_masks,
    put,
    put_in_scratch,
    sort_and_plan,
    sort_and_plan_in_scratch,
)
from numstack.kernels.embedding_groups.format import MANY, N_FREQUENT, NEXT_FREQUENT, NEXT_ITEM, layout
from numstack.kernels.launch import ceil_div, flat
from numstack.kernels.warp import WARP

LEAST_ROOM = 2048  # positions of a block that its shared memory must have room for


@cuda.jit(device=True)
def _load_tokens(tokens_N, n0, tokens):
    """Each 1,024th token from n0 on, -1 where there is none."""
    left = int32(int32(tokens_N.size) - n0)
    if left > (AT_ONCE - 1) * THREADS:
        for k in range(AT_ONCE):
            tokens[k] = tokens_N[uint64(uint64(n0) + uint64(k * THREADS))]
    else:
        for k in range(AT_ONCE):
            tokens[k] = tokens_N[uint64(uint64(n0) + uint64(k * THREADS))] if left > k * THREADS else int32(-1)


@cuda.jit(device=True)
def _find(tokens_N, lists, tokens, ahead, rank, lane, thread, n_rows, of_n, found, room):
    """Own tokens, as row and position, from word ``found`` of lists on, if there is room. The first are under way."""
    i0 = int32(0)
    while i0 < int32(tokens_N.size):
        n0 = int32(i0 + thread)
        _load_tokens(tokens_N, int32(n0 + AT_ONCE * THREADS), ahead)
        n_own = int32(0)
        for k in range(AT_ONCE):
            tokens[k] = int32(rotate(int32(tokens[k] - rank)))
            is_less = int32(int32(tokens[k] - n_rows) & int32(tokens[k] ^ -1))  # by its sign, which costs no predicate
            n_own = int32(n_own + (uint32(is_less) >> uint32(31)))
        up_to = prefix_sum(n_own, lane)
        at = int32(0)
        if lane == WARP - 1:
            at = add(nth(lists, FOUND), up_to)
        at = cuda.shfl_sync(ALL_LANES, at, WARP - 1)
        if int32(at + cuda.shfl_sync(ALL_LANES, up_to, WARP - 1)) <= room:
            address = nth(lists, int32(found + at + up_to - n_own))
            for k in range(AT_ONCE):
                word = int32(int32(tokens[k] << of_n) + n0 + k * THREADS)
                address = append(address, word, uint32(tokens[k]), uint32(n_rows))
        for k in range(AT_ONCE):
            tokens[k] = ahead[k]
        i0 = int32(i0 + AT_ONCE * THREADS)


@cuda.jit(device=True)
def _count(tokens_N, lists, rank, thread, n_rows, of_n, found, room, ends):
    """ends[row + 1] += positions of the row: of tokens found, or if there was no room for them, of all."""
    counts = nth(lists, int32(ends + 1))
    n_found = load_word(nth(lists, FOUND))
    i = thread
    if n_found <= room:
        while i < n_found:
            increment(nth(counts, high(load_word(nth(lists, int32(found + i))), of_n)))
            i = int32(i + THREADS)
    else:
        while i < int32(tokens_N.size):
            row = rotate(int32(tokens_N[uint32(i)] - rank))
            if row < uint32(n_rows):
                increment(nth(counts, row))
            i = int32(i + THREADS)


@cuda.jit(device=True)
def _scan(lists, lane, warp, n_rows, ends):
    """Counts become sums of those before; a thread takes a stretch of them, of odd length: each its own bank."""
    stretch = int32(divide(int32(n_rows + THREADS - 1), int32(THREADS)) | 1)
    begin = min(int32((warp * WARP + lane) * stretch), n_rows)
    end = nth(lists, int32(ends + 1 + min(int32(begin + stretch), n_rows)))
    begin = nth(lists, int32(ends + 1 + begin))
    total, frequent = int32(0), int32(0)
    at = begin
    while at < end:
        count = load_word(at)
        total = int32(total + count)
        frequent = int32(frequent + (1 if count > MANY else 0))
        at = uint32(at + uint32(4))
    up_to = prefix_sum(total, lane)
    if lane == WARP - 1:
        store_word(nth(lists, int32(SUMS + warp)), up_to)
    if frequent > 0:
        add(nth(lists, FREQUENT), frequent)
    cuda.syncthreads()
    of_warps = prefix_sum(load_word(nth(lists, int32(SUMS + lane))), lane)
    if lane == WARP - 1 and warp == 0:
        store_word(nth(lists, POSITIONS), of_warps)
    before = cuda.shfl_sync(ALL_LANES, of_warps, max(warp - 1, 0))
    before = int32((before if warp > 0 else int32(0)) + up_to - total)
    at = begin
    while at < end:
        count = load_word(at)
        store_word(at, before)
        before = int32(before + count)
        at = uint32(at + uint32(4))


@cuda.jit(device=True)
def _learn_of_others(lists, groups, rank, lane):
    """A warp: what blocks before this one have; and the header."""
    positions, frequent = int32(0), int32(0)
    if lane < CLUSTER:
        there = cluster.address_of(lists, uint32(lane))
        positions = cluster.load_int32(nth(there, POSITIONS))
        frequent = cluster.load_int32(nth(there, FREQUENT))
    positions_before = int32(prefix_sum(positions, lane) - positions)
    up_to = prefix_sum(frequent, lane)
    if lane == rank:
        store_word(nth(lists, POSITIONS_BEFORE), positions_before)
        store_word(nth(lists, FREQUENT_BEFORE), int32(up_to - frequent))
    if rank == 0 and lane == CLUSTER - 1:
        groups[NEXT_ITEM] = int32(0)
        groups[NEXT_FREQUENT] = int32(0)
        groups[N_FREQUENT] = up_to


@kernel(name="embedding.group cluster", cluster=CLUSTER, starts_early=True)
def _group(
    tokens_N, groups, B, T, V, order, frequent, plans, scratch, bits, of_n, of_key, of_division, magic, room
):  # fmt: skip
    """Shared memory: the words above; own tokens that were found, and later keys in order; rows and keys; a zero, and
    of each row where its keys end.

    There is ``room`` for so many of a block; others are in the scratch. A text has ``bits`` bits, a position ``of_n``,
    a key ``of_key``. A product with ``magic`` without ``of_division`` bits is divided by T.
    """
    shared = cuda.shared.array(0, int32)
    tokens = cuda.local.array(AT_ONCE, int32)
    ahead = cuda.local.array(AT_ONCE, int32)
    words = cuda.local.array(4, uint32)
    lane = int32(cuda.threadIdx.x)
    warp = int32(cuda.threadIdx.y)
    thread = int32(warp * WARP + lane)
    rank = int32(cuda.blockIdx.x)
    _load_tokens(tokens_N, thread, tokens)
    lists = uniform(shared_address(shared))  # anew: else the compiler finds it out again for each access
    n_rows = int32((V + CLUSTER - 1 - rank) >> OF_CLUSTER)
    found = int32(LISTS)
    slots = int32(found + room)
    ends = int32(slots + room)
    if thread < OWN:
        store_word(nth(lists, thread), int32(0))
    clear_masks(lists, thread)
    i = thread
    while i <= n_rows:
        store_word(nth(lists, int32(ends + i)), int32(0))
        i = int32(i + THREADS)
    cuda.syncthreads()
    _find(tokens_N, lists, tokens, ahead, rank, lane, thread, n_rows, of_n, found, room)
    cuda.syncthreads()
    _count(tokens_N, lists, rank, thread, n_rows, of_n, found, room, ends)
    cuda.syncthreads()
    _scan(lists, lane, warp, n_rows, ends)
    cluster.barrier()
    if warp == 0:
        _learn_of_others(lists, groups, rank, lane)
    n_found = load_word(nth(lists, FOUND))
    if n_found <= room:
        i = thread
        while i < n_found:
            word = load_word(nth(lists, int32(found + i)))
            put(lists, groups, high(word, of_n), low(word, of_n), T, of_division, magic, bits, of_key, slots, ends)
            i = int32(i + THREADS)
        cuda.syncthreads()
        sort_and_plan(
            lists, groups, words, rank, lane, warp, B, T, bits, of_key, slots, found, ends, order, frequent, plans
        )
    else:
        cuda.syncthreads()
        slots = int32(scratch + 2 * load_word(nth(lists, POSITIONS_BEFORE)))
        i = thread
        while i < int32(tokens_N.size):
            row = rotate(int32(tokens_N[uint32(i)] - rank))
            if row < uint32(n_rows):
                put_in_scratch(lists, groups, int32(row), i, T, of_division, magic, bits, of_key, slots, ends)
            i = int32(i + THREADS)
        cuda.syncthreads()
        sort_and_plan_in_scratch(
            lists, groups, words, rank, lane, warp, B, T, bits, of_key, slots, int32(slots + n_found), ends, order,
            frequent, plans,
        )  # fmt: skip


# --- launcher --------------------------------------------------------------------------------------------------------


def _bits(n: int) -> int:
    """Of numbers less than n."""
    return (n - 1).bit_length()


def _room(N: int, V: int) -> int:
    """Positions of a block of which its shared memory has all."""
    free = current_device().properties.shared_bytes_per_block // 4 - LISTS - 1 - ceil_div(V, CLUSTER)
    return min(free // 2, N)


def takes(B: int, T: int, V: int) -> bool:
    """Whether counts have room in shared memory, and a row and a key in a word."""
    of_row = _bits(ceil_div(V, CLUSTER))
    is_one_word = of_row + max(_bits(B) + _bits(T), _bits(B * T)) < 32
    return _room(B * T, V) >= min(LEAST_ROOM, B * T) and is_one_word


def group(tokens: Array, groups: Array, V: int, stream: Stream | None) -> None:
    """As :func:`numstack.kernels.embedding_groups.group`; groups begins at a multiple of 16 bytes."""
    B, T = tokens.shape
    at, room = layout(B, T, V), _room(B * T, V)
    nbytes = 4 * (LISTS + 2 * room + 1 + ceil_div(V, CLUSTER))
    of_division = 31 + _bits(T)
    magic = np.uint32(ceil_div(1 << of_division, T))  # exact for positions, which have 31 bits
    _group[CLUSTER, (WARP, WARPS), stream, nbytes](
        flat(tokens), groups, B, T, V, at.order, at.frequent, at.plans, at.scratch, _bits(B), _bits(B * T),
        _bits(B) + _bits(T), of_division, magic, room,
    )  # fmt: skip
