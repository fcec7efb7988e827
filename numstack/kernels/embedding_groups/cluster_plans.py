"""Keys in order, and plans, as a cluster groups positions: steps 3 to 5 of
:mod:`numstack.kernels.embedding_groups.cluster`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda, float32, int32, uint32, uint64

from numstack.device.ptx import cluster
from numstack.device.ptx.integers import multiply, subtract
from numstack.device.ptx.words import words_of
from numstack.kernels.embedding_groups.cluster_lists import (
    ALL,
    CLUSTER,
    COMPARED,
    FIRSTS,
    FREQUENT_BEFORE,
    KEYS,
    LISTED,
    MAPPED,
    OF_BITMAP,
    OF_CLUSTER,
    OF_TEAM,
    OWN,
    POSITIONS,
    POSITIONS_BEFORE,
    SUMS,
    TEAMS,
    THREADS,
    WARPS,
    WINDOW,
    WORDS_A_THREAD,
    add,
    bit,
    high,
    load_word,
    low,
    nth,
    prefix_sum,
    set_bits,
    store_word,
)
from numstack.kernels.embedding_groups.format import (
    COUNT,
    FEW,
    HEAD_OF_TILE,
    MANY,
    MEMBER,
    N_FEW,
    N_MANY,
    OF_FREQUENT,
    PLAN,
    ROWS,
    START,
    TOKEN,
    WORDS_OF_ROW,
)
from numstack.kernels.warp import WARP

_store_words = words_of(float32).store


@cuda.jit(device=True)
def _position(key, T, bits):
    return int32(multiply(low(key, bits), T) + (key >> bits))


@cuda.jit(device=True)
def _tile(key, tiles_of_time, bits):
    """The number of a key's tile."""
    return int32(multiply(int32(key >> bits), tiles_of_time) + (low(key, bits) >> 5))


@cuda.jit(device=True)
def _row_of_tile(key, bits):
    return int32(low(key, bits) & (ROWS - 1))


@cuda.jit(device=True)
def _mark(lists, key, count, tiles_of_time, first_tile, bits):
    """In the masks of a window's tiles, the row of the table whose first key this is."""
    tile = int32(_tile(key, tiles_of_time, bits) - first_tile)
    if tile >= 0 and tile < WINDOW:
        mask = int32(OWN + tile + (WINDOW if count > FEW else 0))
        set_bits(nth(lists, mask), bit(_row_of_tile(key, bits)))


@cuda.jit(device=True)
def clear_masks(lists, thread):
    i = thread
    while i < 2 * WINDOW:
        store_word(nth(lists, int32(OWN + i)), int32(0))
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
            few = int32(few | cluster.load_int32(nth(there, int32(OWN + tile))))
            many = int32(many | cluster.load_int32(nth(there, int32(OWN + WINDOW + tile))))
        for k in range(CLUSTER):
            there = cluster.address_of(lists, uint32(int32(rank + k) & (CLUSTER - 1)))
            cluster.store_int32_if(uint32(1), nth(there, int32(ALL + tile)), few)
            cluster.store_int32_if(uint32(1), nth(there, int32(ALL + WINDOW + tile)), many)
        tile = int32(tile + THREADS)


@cuda.jit(device=True)
def _plan_heads(lists, groups, words, thread, first, end, plans):
    """The same tiles' numbers of rows."""
    words[2] = uint32(0)
    words[3] = uint32(0)
    tile = int32(first + thread)
    while tile < end:
        words[N_FEW] = uint32(cuda.popc(load_word(nth(lists, int32(ALL + tile)))))
        words[N_MANY] = uint32(cuda.popc(load_word(nth(lists, int32(ALL + WINDOW + tile)))))
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
        at = add(nth(lists, int32(ends + 1 + row)), int32(1))
        store(lists, groups, int32(slots + at), int32((row << of_key) | key))

    @cuda.jit(device=True)
    def sort(lists, groups, words, rank, thread, tiles_of_time, bits, of_key, slots, ordered, ends, records):
        """Each key to its rank's place; rows whose keys are too many get the number of a bitmap.

        Rows are marked in the masks of the first window. Of those with more than MANY a record goes to groups.
        """
        positions = load_word(nth(lists, POSITIONS))
        i = thread
        while i < positions:
            word = load(lists, groups, int32(slots + i))
            key = low(word, of_key)
            row = high(word, of_key)
            start = load_word(nth(lists, int32(ends + row)))
            end = load_word(nth(lists, int32(ends + 1 + row)))
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
                words[1] = uint32(start + load_word(nth(lists, POSITIONS_BEFORE)))
                words[2] = uint32(count)
                words[3] = uint32(0)
                _store_words(groups, records + OF_FREQUENT * add(nth(lists, LISTED), int32(1)), words, 0)
                if count > COMPARED:
                    number = add(nth(lists, MAPPED), int32(1))
                    store(lists, groups, int32(ordered + start), int32(-1 - number))
            i = int32(i + THREADS)

    @cuda.jit(device=True)
    def whose(lists, groups, row, first_number, ordered, ends):
        """The team that has the row's bitmap; no team's number if it has none, or its turn is not now."""
        start = load_word(nth(lists, int32(ends + row)))
        if subtract(load_word(nth(lists, int32(ends + 1 + row))), start) <= COMPARED:
            return int32(-1)
        return int32(-1 - load(lists, groups, int32(ordered + start)) - first_number)

    @cuda.jit(device=True)
    def fill_bitmaps(lists, groups, thread, first_number, k0, of_key, slots, ordered, ends):
        """A bit for each key from k0 on."""
        positions = load_word(nth(lists, POSITIONS))
        i = thread
        while i < positions:
            word = load(lists, groups, int32(slots + i))
            team = whose(lists, groups, high(word, of_key), first_number, ordered, ends)
            key = int32(low(word, of_key) - k0)
            if team >= 0 and team < TEAMS and key >= 0 and key < KEYS:
                set_bits(nth(lists, int32(OWN + team * OF_BITMAP + (key >> 5))), bit(key & 31))
            i = int32(i + THREADS)

    @cuda.jit(device=True)
    def sum_bitmaps(lists, thread, lane, warp, placed):
        """Of each word of bitmaps, how many keys are before it; and how many the team has placed then."""
        own_words = nth(lists, int32(OWN + thread * WORDS_A_THREAD))
        own_sums = nth(own_words, ALL - OWN)
        total = int32(0)
        for w in range(WORDS_A_THREAD):
            total = int32(total + cuda.popc(load_word(nth(own_words, w))))
        up_to = prefix_sum(total, lane)
        if lane == WARP - 1:
            store_word(nth(lists, int32(SUMS + warp)), up_to)
        cuda.syncthreads()
        first_warp = int32((warp >> OF_TEAM) << OF_TEAM)
        below = int32(placed + up_to - total)
        for w in range(WARPS // TEAMS):
            of_warp = load_word(nth(lists, int32(SUMS + first_warp + w)))
            placed = int32(placed + of_warp)
            below = int32(below + (of_warp if first_warp + w < warp else int32(0)))
        for w in range(WORDS_A_THREAD):
            store_word(nth(own_sums, w), below)
            below = int32(below + cuda.popc(load_word(nth(own_words, w))))
        return placed

    @cuda.jit(device=True)
    def place_by_bitmaps(lists, groups, thread, first_number, k0, of_key, slots, ordered, ends):
        """A key's rank is the number of bits below. The smallest one's place still has the number of the bitmap."""
        positions = load_word(nth(lists, POSITIONS))
        i = thread
        while i < positions:
            word = load(lists, groups, int32(slots + i))
            row = high(word, of_key)
            team = whose(lists, groups, row, first_number, ordered, ends)
            key = int32(low(word, of_key) - k0)
            if team >= 0 and team < TEAMS and key >= 0 and key < KEYS:
                of_bitmap = nth(lists, int32(OWN + team * OF_BITMAP + (key >> 5)))
                smaller = int32(load_word(of_bitmap) & int32(bit(key & 31) - 1))
                place = int32(load_word(nth(of_bitmap, ALL - OWN)) + cuda.popc(smaller))
                start = load_word(nth(lists, int32(ends + row)))
                if place > 0:
                    store(lists, groups, int32(ordered + start + place), int32(key + k0))
                else:
                    first = nth(lists, int32(FIRSTS + 2 * team))
                    store_word(first, start)
                    store_word(nth(first, 1), int32(key + k0))
            i = int32(i + THREADS)

    @cuda.jit(device=True)
    def sort_by_bitmaps(lists, groups, thread, lane, warp, T, bits, of_key, slots, ordered, ends):
        """With more keys than bits there are some after the others."""
        mapped = load_word(nth(lists, MAPPED))
        first_number = int32(0)
        while first_number < mapped:
            placed = int32(0)
            k0 = int32(0)
            while k0 < int32(T << bits):
                clear_masks(lists, thread)
                cuda.syncthreads()
                fill_bitmaps(lists, groups, thread, first_number, k0, of_key, slots, ordered, ends)
                cuda.syncthreads()
                placed = sum_bitmaps(lists, thread, lane, warp, placed)
                cuda.syncthreads()
                place_by_bitmaps(lists, groups, thread, first_number, k0, of_key, slots, ordered, ends)
                cuda.syncthreads()
                k0 = int32(k0 + KEYS)
            if thread < TEAMS and int32(first_number + thread) < mapped:
                first = nth(lists, int32(FIRSTS + 2 * thread))
                store(lists, groups, int32(ordered + load_word(first)), load_word(nth(first, 1)))
            cuda.syncthreads()
            first_number = int32(first_number + TEAMS)

    @cuda.jit(device=True)
    def mark_rows(lists, groups, thread, tiles_of_time, first_tile, bits, of_key, slots, ordered, ends):
        """All rows in the masks of a window's tiles."""
        positions = load_word(nth(lists, POSITIONS))
        i = thread
        while i < positions:
            row = high(load(lists, groups, int32(slots + i)), of_key)
            count = subtract(load_word(nth(lists, int32(ends + 1 + row))), i)
            if i == load_word(nth(lists, int32(ends + row))) and count <= MANY:
                _mark(lists, load(lists, groups, int32(ordered + i)), count, tiles_of_time, first_tile, bits)
            i = int32(i + THREADS)

    @cuda.jit(device=True)
    def put_down(
        lists, groups, words, rank, thread, T, tiles_of_time, first_tile, bits, of_key, slots, ordered, ends, order,
        plans,
    ):  # fmt: skip
        """The order, with the first window; and what plans say of the block's rows."""
        before = load_word(nth(lists, POSITIONS_BEFORE))
        positions = load_word(nth(lists, POSITIONS))
        i = thread
        while i < positions:
            key = load(lists, groups, int32(ordered + i))
            position = _position(key, T, bits)
            if first_tile == 0:
                groups[uint32(order + before + i)] = position
            row = high(load(lists, groups, int32(slots + i)), of_key)
            count = subtract(load_word(nth(lists, int32(ends + 1 + row))), i)
            tile = int32(_tile(key, tiles_of_time, bits) - first_tile)
            if i == load_word(nth(lists, int32(ends + row))) and count <= MANY and tile >= 0 and tile < WINDOW:
                row_of_tile = _row_of_tile(key, bits)
                mask = load_word(nth(lists, int32(ALL + tile + (WINDOW if count > FEW else 0))))
                place = int32(cuda.popc(int32(mask & int32(bit(row_of_tile) - 1))))
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
        records = int32(frequent + OF_FREQUENT * load_word(nth(lists, FREQUENT_BEFORE)))
        sort(lists, groups, words, rank, thread, tiles_of_time, bits, of_key, slots, ordered, ends, records)
        cuda.syncthreads()
        if load_word(nth(lists, MAPPED)) > 0:
            sort_by_bitmaps(lists, groups, thread, lane, warp, T, bits, of_key, slots, ordered, ends)
        first_tile = int32(0)
        while first_tile < n_tiles:
            if first_tile > 0 or load_word(nth(lists, MAPPED)) > 0:  # else ``sort`` has marked them
                clear_masks(lists, thread)
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
    return load_word(nth(lists, i))


@cuda.jit(device=True)
def _store_shared(lists, groups, i, x):
    store_word(nth(lists, i), x)


@cuda.jit(device=True)
def _load_global(lists, groups, i):
    return groups[uint32(i)]


@cuda.jit(device=True)
def _store_global(lists, groups, i, x):
    groups[uint32(i)] = x


put, sort_and_plan = _steps(_load_shared, _store_shared)
put_in_scratch, sort_and_plan_in_scratch = _steps(_load_global, _store_global)
