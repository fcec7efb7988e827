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

``lists`` is the address of a block's shared memory, by which words are read and written: by indices of an array it took
22.6 us, as there were twice the instructions, and instructions are what the time goes into.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, uint32, uint64

from numstack.device import Array, Stream, current_device, kernel
from numstack.device.ptx import cluster
from numstack.device.ptx.assembly import ptx
from numstack.device.ptx.integers import divide, multiply, shared_address, subtract
from numstack.device.ptx.sync import uniform
from numstack.device.ptx.words import words_of
from numstack.kernels.embedding_groups_format import (
    COUNT,
    FEW,
    HEAD_OF_TILE,
    MANY,
    MEMBER,
    N_FEW,
    N_FREQUENT,
    N_MANY,
    NEXT_FREQUENT,
    NEXT_ITEM,
    OF_FREQUENT,
    PLAN,
    ROWS,
    START,
    TOKEN,
    WORDS_OF_ROW,
    layout,
)
from numstack.kernels.launch import ceil_div, flat
from numstack.kernels.warp import WARP

CLUSTER = 8  # blocks
OF_CLUSTER = 3  # bits of a token that say whose it is
WARPS = 32  # of a block
THREADS = WARP * WARPS
AT_ONCE = 16  # tokens of a thread that it looks at together
COMPARED = 128  # positions of a row whose ranks are found by comparing them
WINDOW = 2048  # tiles that are planned together
KEYS = 1 << 15  # of a bitmap
OF_BITMAP = KEYS // 32  # words
TEAMS = 4  # of a block, each of which has a bitmap
OF_TEAM = 3  # bits of a warp's number that say which it is of its team
WORDS_A_THREAD = TEAMS * OF_BITMAP // THREADS
# What a block's lists begin with: how many positions it has, and how many are the blocks' before it; the same of tokens
# with more than MANY; how many of these are listed, and have a bitmap; own tokens that were found; of each bitmap,
# where the smallest key belongs, and that key; and sums of warps.
POSITIONS, POSITIONS_BEFORE, FREQUENT, FREQUENT_BEFORE, LISTED, MAPPED, FOUND, FIRSTS = range(8)
SUMS = WARP
# Then rows of tiles that the block's tokens have, and those that all blocks' have, a bit each: of few positions, and of
# many. Or bitmaps, and of each of their words, how many keys are before it.
OWN = SUMS + WARP
ALL = OWN + 2 * WINDOW
LISTS = ALL + 2 * WINDOW
LEAST_ROOM = 2048  # positions of a block that its shared memory must have room for
ALL_LANES = 0xFFFFFFFF

_store_words = words_of(float32).store


# --- words of shared memory ------------------------------------------------------------------------------------------


@ptx("ld.shared.b32 $result, [$address];", touches_memory=True)
def _load(address: uint32) -> int32:
    """A word."""


@ptx("st.shared.b32 [$address], $x;", touches_memory=True)
def _store(address: uint32, x: int32) -> None:
    """The inverse."""


@ptx("red.shared.add.u32 [$address], 1;", touches_memory=True)
def _increment(address: uint32) -> None:
    """Add 1."""


@ptx("atom.shared.add.u32 $result, [$address], $x;", touches_memory=True)
def _add(address: uint32, x: int32) -> int32:
    """Add x; what it was."""


@ptx("red.shared.or.b32 [$address], $x;", touches_memory=True)
def _set_bits(address: uint32, x: int32) -> None:
    """Those of x."""


@ptx(
    "{ .reg .pred p; setp.lt.u32 p, $row, $n_rows; @p st.shared.b32 [$address], $x; "
    "mov.b32 $result, $address; @p add.u32 $result, $result, 4; }",
    touches_memory=True,
)
def _append(address: uint32, x: int32, row: uint32, n_rows: uint32) -> uint32:
    """Put x there if there is such a row; where the next belongs."""


@ptx("shf.r.wrap.b32 $result, $x, $x, 3;")
def _rotate(x: int32) -> uint32:
    """x / 8, if it is a multiple and not negative; else more than any row's number."""


@ptx("shr.u32 $result, $x, $bits;")
def _high(x: int32, bits: int32) -> int32:
    """x without so many low bits."""


@cuda.jit(device=True)
def _low(x, bits):
    """So many low bits."""
    return int32(x & int32((int32(1) << bits) - 1))


@cuda.jit(device=True)
def _bit(i):
    return int32(int32(1) << i)


@cuda.jit(device=True)
def _word(lists, i):
    """The address of the i-th."""
    return uint32(lists + uint32(4) * uint32(i))


# --- steps 1 and 2 ---------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def _prefix(x, lane):
    """The sum of x over lanes up to this one."""
    below = cuda.shfl_up_sync(ALL_LANES, x, 1)
    x = int32(x + below) if lane >= 1 else x
    below = cuda.shfl_up_sync(ALL_LANES, x, 2)
    x = int32(x + below) if lane >= 2 else x
    below = cuda.shfl_up_sync(ALL_LANES, x, 4)
    x = int32(x + below) if lane >= 4 else x
    below = cuda.shfl_up_sync(ALL_LANES, x, 8)
    x = int32(x + below) if lane >= 8 else x
    below = cuda.shfl_up_sync(ALL_LANES, x, 16)
    return int32(x + below) if lane >= 16 else x


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
            tokens[k] = int32(_rotate(int32(tokens[k] - rank)))
            is_less = int32(int32(tokens[k] - n_rows) & int32(tokens[k] ^ -1))  # by its sign, which costs no predicate
            n_own = int32(n_own + (uint32(is_less) >> uint32(31)))
        up_to = _prefix(n_own, lane)
        at = int32(0)
        if lane == WARP - 1:
            at = _add(_word(lists, FOUND), up_to)
        at = cuda.shfl_sync(ALL_LANES, at, WARP - 1)
        if int32(at + cuda.shfl_sync(ALL_LANES, up_to, WARP - 1)) <= room:
            address = _word(lists, int32(found + at + up_to - n_own))
            for k in range(AT_ONCE):
                word = int32(int32(tokens[k] << of_n) + n0 + k * THREADS)
                address = _append(address, word, uint32(tokens[k]), uint32(n_rows))
        for k in range(AT_ONCE):
            tokens[k] = ahead[k]
        i0 = int32(i0 + AT_ONCE * THREADS)


@cuda.jit(device=True)
def _count(tokens_N, lists, rank, thread, n_rows, of_n, found, room, ends):
    """ends[row + 1] += positions of the row: of tokens found, or if there was no room for them, of all."""
    counts = _word(lists, int32(ends + 1))
    n_found = _load(_word(lists, FOUND))
    i = thread
    if n_found <= room:
        while i < n_found:
            _increment(_word(counts, _high(_load(_word(lists, int32(found + i))), of_n)))
            i = int32(i + THREADS)
    else:
        while i < int32(tokens_N.size):
            row = _rotate(int32(tokens_N[uint32(i)] - rank))
            if row < uint32(n_rows):
                _increment(_word(counts, row))
            i = int32(i + THREADS)


@cuda.jit(device=True)
def _scan(lists, lane, warp, n_rows, ends):
    """Counts become sums of those before; a thread takes a stretch of them, of odd length: each its own bank."""
    stretch = int32(divide(int32(n_rows + THREADS - 1), int32(THREADS)) | 1)
    begin = min(int32((warp * WARP + lane) * stretch), n_rows)
    end = _word(lists, int32(ends + 1 + min(int32(begin + stretch), n_rows)))
    begin = _word(lists, int32(ends + 1 + begin))
    total, frequent = int32(0), int32(0)
    at = begin
    while at < end:
        count = _load(at)
        total = int32(total + count)
        frequent = int32(frequent + (1 if count > MANY else 0))
        at = uint32(at + uint32(4))
    up_to = _prefix(total, lane)
    if lane == WARP - 1:
        _store(_word(lists, int32(SUMS + warp)), up_to)
    if frequent > 0:
        _add(_word(lists, FREQUENT), frequent)
    cuda.syncthreads()
    of_warps = _prefix(_load(_word(lists, int32(SUMS + lane))), lane)
    if lane == WARP - 1 and warp == 0:
        _store(_word(lists, POSITIONS), of_warps)
    before = cuda.shfl_sync(ALL_LANES, of_warps, max(warp - 1, 0))
    before = int32((before if warp > 0 else int32(0)) + up_to - total)
    at = begin
    while at < end:
        count = _load(at)
        _store(at, before)
        before = int32(before + count)
        at = uint32(at + uint32(4))


@cuda.jit(device=True)
def _learn_of_others(lists, groups, rank, lane):
    """A warp: what blocks before this one have; and the header."""
    positions, frequent = int32(0), int32(0)
    if lane < CLUSTER:
        there = cluster.address_of(lists, uint32(lane))
        positions = cluster.load_int32(_word(there, POSITIONS))
        frequent = cluster.load_int32(_word(there, FREQUENT))
    positions_before = int32(_prefix(positions, lane) - positions)
    up_to = _prefix(frequent, lane)
    if lane == rank:
        _store(_word(lists, POSITIONS_BEFORE), positions_before)
        _store(_word(lists, FREQUENT_BEFORE), int32(up_to - frequent))
    if rank == 0 and lane == CLUSTER - 1:
        groups[NEXT_ITEM] = int32(0)
        groups[NEXT_FREQUENT] = int32(0)
        groups[N_FREQUENT] = up_to


# --- steps 3 to 5 ----------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def _position(key, T, bits):
    return int32(multiply(_low(key, bits), T) + (key >> bits))


@cuda.jit(device=True)
def _tile(key, tiles_of_time, bits):
    """The number of a key's tile."""
    return int32(multiply(int32(key >> bits), tiles_of_time) + (_low(key, bits) >> 5))


@cuda.jit(device=True)
def _row_of_tile(key, bits):
    return int32(_low(key, bits) & (ROWS - 1))


@cuda.jit(device=True)
def _mark(lists, key, count, tiles_of_time, first_tile, bits):
    """In the masks of a window's tiles, the row of the table whose first key this is."""
    tile = int32(_tile(key, tiles_of_time, bits) - first_tile)
    if tile >= 0 and tile < WINDOW:
        mask = int32(OWN + tile + (WINDOW if count > FEW else 0))
        _set_bits(_word(lists, mask), _bit(_row_of_tile(key, bits)))


@cuda.jit(device=True)
def _clear_masks(lists, thread):
    i = thread
    while i < 2 * WINDOW:
        _store(_word(lists, int32(OWN + i)), int32(0))
        i = int32(i + THREADS)


@cuda.jit(device=True)
def _merge(lists, rank, thread, first, end):
    """Masks of tiles that are this block's to merge: from all blocks, for all blocks.

    Blocks begin with different ones: a multiprocessor answers one at a time.
    """
    tile = int32(first + thread)
    while tile < end:
        few, many = int32(0), int32(0)
        for k in range(CLUSTER):
            there = cluster.address_of(lists, uint32(int32(rank + k) & (CLUSTER - 1)))
            few = int32(few | cluster.load_int32(_word(there, int32(OWN + tile))))
            many = int32(many | cluster.load_int32(_word(there, int32(OWN + WINDOW + tile))))
        for k in range(CLUSTER):
            there = cluster.address_of(lists, uint32(int32(rank + k) & (CLUSTER - 1)))
            cluster.store_int32_if(uint32(1), _word(there, int32(ALL + tile)), few)
            cluster.store_int32_if(uint32(1), _word(there, int32(ALL + WINDOW + tile)), many)
        tile = int32(tile + THREADS)


@cuda.jit(device=True)
def _plan_heads(lists, groups, words, thread, first, end, plans):
    """The same tiles' numbers of rows."""
    words[2] = uint32(0)
    words[3] = uint32(0)
    tile = int32(first + thread)
    while tile < end:
        words[N_FEW] = uint32(cuda.popc(_load(_word(lists, int32(ALL + tile)))))
        words[N_MANY] = uint32(cuda.popc(_load(_word(lists, int32(ALL + WINDOW + tile)))))
        _store_words(groups, plans + tile * PLAN, words, 0)
        tile = int32(tile + THREADS)


class _Steps(NamedTuple):
    """Device functions: of a position that is put where its row's are; and of what is done when all are there."""

    put: Callable[..., Any]
    sort_and_plan: Callable[..., Any]


def _steps(load: Callable[..., Any], store: Callable[..., Any]) -> _Steps:
    """Where the block's rows and keys are, and its keys in order, says how words there are read and written."""

    @cuda.jit(device=True)
    def put(lists, groups, row, n, T, of_division, magic, bits, of_key, slots, ends):
        """A row's start moves on, and becomes its end."""
        b = int32((uint64(n) * uint64(magic)) >> uint64(of_division))
        key = int32((int32(n - multiply(b, T)) << bits) | b)
        at = _add(_word(lists, int32(ends + 1 + row)), int32(1))
        store(lists, groups, int32(slots + at), int32((row << of_key) | key))

    @cuda.jit(device=True)
    def sort(lists, groups, words, rank, thread, tiles_of_time, bits, of_key, slots, ordered, ends, records):
        """Each key to its rank's place; rows whose keys are too many get the number of a bitmap.

        Rows are marked in the masks of the first window. Of those with more than MANY a record goes to groups.
        """
        positions = _load(_word(lists, POSITIONS))
        i = thread
        while i < positions:
            word = load(lists, groups, int32(slots + i))
            key = _low(word, of_key)
            row = _high(word, of_key)
            start = _load(_word(lists, int32(ends + row)))
            end = _load(_word(lists, int32(ends + 1 + row)))
            count = subtract(end, start)
            if count <= COMPARED:
                place = start
                k = start
                while k < end:
                    other = load(lists, groups, int32(slots + k))
                    place = int32(place + (uint32(int32(other - word)) >> uint32(31)))
                    k = int32(k + 1)
                store(lists, groups, int32(ordered + place), key)
                if place == start and count <= MANY:
                    _mark(lists, key, count, tiles_of_time, int32(0), bits)
            if count > MANY and i == start:
                words[0] = uint32(row * CLUSTER + rank)
                words[1] = uint32(start + _load(_word(lists, POSITIONS_BEFORE)))
                words[2] = uint32(count)
                words[3] = uint32(0)
                _store_words(groups, records + OF_FREQUENT * _add(_word(lists, LISTED), int32(1)), words, 0)
                if count > COMPARED:
                    number = _add(_word(lists, MAPPED), int32(1))
                    store(lists, groups, int32(ordered + start), int32(-1 - number))
            i = int32(i + THREADS)

    @cuda.jit(device=True)
    def whose(lists, groups, row, first_number, ordered, ends):
        """The team that has the row's bitmap; no team's number if it has none, or its turn is not now."""
        start = _load(_word(lists, int32(ends + row)))
        if subtract(_load(_word(lists, int32(ends + 1 + row))), start) <= COMPARED:
            return int32(-1)
        return int32(-1 - load(lists, groups, int32(ordered + start)) - first_number)

    @cuda.jit(device=True)
    def fill_bitmaps(lists, groups, thread, first_number, k0, of_key, slots, ordered, ends):
        """A bit for each key from k0 on."""
        positions = _load(_word(lists, POSITIONS))
        i = thread
        while i < positions:
            word = load(lists, groups, int32(slots + i))
            team = whose(lists, groups, _high(word, of_key), first_number, ordered, ends)
            key = int32(_low(word, of_key) - k0)
            if team >= 0 and team < TEAMS and key >= 0 and key < KEYS:
                _set_bits(_word(lists, int32(OWN + team * OF_BITMAP + (key >> 5))), _bit(key & 31))
            i = int32(i + THREADS)

    @cuda.jit(device=True)
    def sum_bitmaps(lists, thread, lane, warp, placed):
        """Of each word of bitmaps, how many keys are before it; and how many the team has placed then."""
        own_words = _word(lists, int32(OWN + thread * WORDS_A_THREAD))
        own_sums = _word(own_words, ALL - OWN)
        total = int32(0)
        for w in range(WORDS_A_THREAD):
            total = int32(total + cuda.popc(_load(_word(own_words, w))))
        up_to = _prefix(total, lane)
        if lane == WARP - 1:
            _store(_word(lists, int32(SUMS + warp)), up_to)
        cuda.syncthreads()
        first_warp = int32((warp >> OF_TEAM) << OF_TEAM)
        below = int32(placed + up_to - total)
        for w in range(WARPS // TEAMS):
            of_warp = _load(_word(lists, int32(SUMS + first_warp + w)))
            placed = int32(placed + of_warp)
            below = int32(below + (of_warp if first_warp + w < warp else int32(0)))
        for w in range(WORDS_A_THREAD):
            _store(_word(own_sums, w), below)
            below = int32(below + cuda.popc(_load(_word(own_words, w))))
        return placed

    @cuda.jit(device=True)
    def place_by_bitmaps(lists, groups, thread, first_number, k0, of_key, slots, ordered, ends):
        """A key's rank is the number of bits below. The smallest one's place still has the number of the bitmap."""
        positions = _load(_word(lists, POSITIONS))
        i = thread
        while i < positions:
            word = load(lists, groups, int32(slots + i))
            row = _high(word, of_key)
            team = whose(lists, groups, row, first_number, ordered, ends)
            key = int32(_low(word, of_key) - k0)
            if team >= 0 and team < TEAMS and key >= 0 and key < KEYS:
                of_bitmap = _word(lists, int32(OWN + team * OF_BITMAP + (key >> 5)))
                smaller = int32(_load(of_bitmap) & int32(_bit(key & 31) - 1))
                place = int32(_load(_word(of_bitmap, ALL - OWN)) + cuda.popc(smaller))
                start = _load(_word(lists, int32(ends + row)))
                if place > 0:
                    store(lists, groups, int32(ordered + start + place), int32(key + k0))
                else:
                    first = _word(lists, int32(FIRSTS + 2 * team))
                    _store(first, start)
                    _store(_word(first, 1), int32(key + k0))
            i = int32(i + THREADS)

    @cuda.jit(device=True)
    def sort_by_bitmaps(lists, groups, thread, lane, warp, T, bits, of_key, slots, ordered, ends):
        """With more keys than bits there are some after the others."""
        mapped = _load(_word(lists, MAPPED))
        first_number = int32(0)
        while first_number < mapped:
            placed = int32(0)
            k0 = int32(0)
            while k0 < int32(T << bits):
                _clear_masks(lists, thread)
                cuda.syncthreads()
                fill_bitmaps(lists, groups, thread, first_number, k0, of_key, slots, ordered, ends)
                cuda.syncthreads()
                placed = sum_bitmaps(lists, thread, lane, warp, placed)
                cuda.syncthreads()
                place_by_bitmaps(lists, groups, thread, first_number, k0, of_key, slots, ordered, ends)
                cuda.syncthreads()
                k0 = int32(k0 + KEYS)
            if thread < TEAMS and int32(first_number + thread) < mapped:
                first = _word(lists, int32(FIRSTS + 2 * thread))
                store(lists, groups, int32(ordered + _load(first)), _load(_word(first, 1)))
            cuda.syncthreads()
            first_number = int32(first_number + TEAMS)

    @cuda.jit(device=True)
    def mark_rows(lists, groups, thread, tiles_of_time, first_tile, bits, of_key, slots, ordered, ends):
        """All rows in the masks of a window's tiles."""
        positions = _load(_word(lists, POSITIONS))
        i = thread
        while i < positions:
            row = _high(load(lists, groups, int32(slots + i)), of_key)
            count = subtract(_load(_word(lists, int32(ends + 1 + row))), i)
            if i == _load(_word(lists, int32(ends + row))) and count <= MANY:
                _mark(lists, load(lists, groups, int32(ordered + i)), count, tiles_of_time, first_tile, bits)
            i = int32(i + THREADS)

    @cuda.jit(device=True)
    def put_down(
        lists, groups, words, rank, thread, T, tiles_of_time, first_tile, bits, of_key, slots, ordered, ends, order,
        plans,
    ):  # fmt: skip
        """The order, with the first window; and what plans say of the block's rows."""
        before = _load(_word(lists, POSITIONS_BEFORE))
        positions = _load(_word(lists, POSITIONS))
        i = thread
        while i < positions:
            key = load(lists, groups, int32(ordered + i))
            position = _position(key, T, bits)
            if first_tile == 0:
                groups[uint32(order + before + i)] = position
            row = _high(load(lists, groups, int32(slots + i)), of_key)
            count = subtract(_load(_word(lists, int32(ends + 1 + row))), i)
            tile = int32(_tile(key, tiles_of_time, bits) - first_tile)
            if i == _load(_word(lists, int32(ends + row))) and count <= MANY and tile >= 0 and tile < WINDOW:
                row_of_tile = _row_of_tile(key, bits)
                mask = _load(_word(lists, int32(ALL + tile + (WINDOW if count > FEW else 0))))
                place = int32(cuda.popc(int32(mask & int32(_bit(row_of_tile) - 1))))
                place = int32(ROWS - 1 - place) if count > FEW else place
                words[TOKEN] = uint32(row * CLUSTER + rank)
                words[COUNT] = uint32(count * ROWS + row_of_tile)
                words[START] = uint32(before + i)
                words[MEMBER] = uint32(0)
                if count > 1:
                    words[MEMBER] = uint32(_position(load(lists, groups, int32(ordered + i + 1)), T, bits))
                _store_words(groups, plans + tile * PLAN + HEAD_OF_TILE + WORDS_OF_ROW * place, words, 0)
            i = int32(i + THREADS)

    @cuda.jit(device=True)
    def sort_and_plan(
        lists, groups, words, rank, lane, warp, B, T, bits, of_key, slots, ordered, ends, order, frequent, plans
    ):
        thread = int32(warp * WARP + lane)
        tiles_of_time = int32((B + ROWS - 1) >> 5)
        n_tiles = multiply(T, tiles_of_time)
        records = int32(frequent + OF_FREQUENT * _load(_word(lists, FREQUENT_BEFORE)))
        sort(lists, groups, words, rank, thread, tiles_of_time, bits, of_key, slots, ordered, ends, records)
        cuda.syncthreads()
        if _load(_word(lists, MAPPED)) > 0:
            sort_by_bitmaps(lists, groups, thread, lane, warp, T, bits, of_key, slots, ordered, ends)
        first_tile = int32(0)
        while first_tile < n_tiles:
            if first_tile > 0 or _load(_word(lists, MAPPED)) > 0:  # else ``sort`` has marked them
                _clear_masks(lists, thread)
                cuda.syncthreads()
                mark_rows(lists, groups, thread, tiles_of_time, first_tile, bits, of_key, slots, ordered, ends)
            cluster.barrier()
            n_here = min(int32(n_tiles - first_tile), int32(WINDOW))
            of_block = int32((n_here + CLUSTER - 1) >> OF_CLUSTER)
            first = int32(rank * of_block)
            end = min(int32(first + of_block), n_here)
            _merge(lists, rank, thread, first, end)
            cluster.barrier()
            here = int32(plans + first_tile * PLAN)
            _plan_heads(lists, groups, words, thread, first, end, here)
            put_down(
                lists, groups, words, rank, thread, T, tiles_of_time, first_tile, bits, of_key, slots, ordered, ends,
                order, here,
            )  # fmt: skip
            first_tile = int32(first_tile + WINDOW)

    return _Steps(put, sort_and_plan)


@cuda.jit(device=True)
def _load_shared(lists, groups, i):
    return _load(_word(lists, i))


@cuda.jit(device=True)
def _store_shared(lists, groups, i, x):
    _store(_word(lists, i), x)


@cuda.jit(device=True)
def _load_global(lists, groups, i):
    return groups[uint32(i)]


@cuda.jit(device=True)
def _store_global(lists, groups, i, x):
    groups[uint32(i)] = x


_put, _sort_and_plan = _steps(_load_shared, _store_shared)
_put_in_scratch, _sort_and_plan_in_scratch = _steps(_load_global, _store_global)


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
        _store(_word(lists, thread), int32(0))
    _clear_masks(lists, thread)
    i = thread
    while i <= n_rows:
        _store(_word(lists, int32(ends + i)), int32(0))
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
    n_found = _load(_word(lists, FOUND))
    if n_found <= room:
        i = thread
        while i < n_found:
            word = _load(_word(lists, int32(found + i)))
            _put(lists, groups, _high(word, of_n), _low(word, of_n), T, of_division, magic, bits, of_key, slots, ends)
            i = int32(i + THREADS)
        cuda.syncthreads()
        _sort_and_plan(
            lists, groups, words, rank, lane, warp, B, T, bits, of_key, slots, found, ends, order, frequent, plans
        )
    else:
        cuda.syncthreads()
        slots = int32(scratch + 2 * _load(_word(lists, POSITIONS_BEFORE)))
        i = thread
        while i < int32(tokens_N.size):
            row = _rotate(int32(tokens_N[uint32(i)] - rank))
            if row < uint32(n_rows):
                _put_in_scratch(lists, groups, int32(row), i, T, of_division, magic, bits, of_key, slots, ends)
            i = int32(i + THREADS)
        cuda.syncthreads()
        _sort_and_plan_in_scratch(
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
