"""What warps add to the table of an embedding's gradient by tiles: see :mod:`numstack.kernels.embedding_tiles`.

Also how a block is divided, and its shared memory.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64

from numstack.device import narrow, widen
from numstack.device.ptx import load4, load4_once, store4_once, sync
from numstack.device.ptx.integers import divide, multiply, opaque, subtract
from numstack.device.ptx.lines import load4_kept, store4_released
from numstack.device.ptx.words import make_load_four, words_of
from numstack.kernels.embedding_groups.format import (
    COUNT,
    HEAD_OF_TILE,
    MEMBER,
    N_FREQUENT,
    NEXT_FREQUENT,
    OF_FREQUENT,
    PLAN,
    ROWS,
    START,
    TOKEN,
    WORDS_OF_ROW,
)
from numstack.kernels.warp import WARP

FOUR = 4  # channels of a lane that lie side by side: 16 bytes of a float32 table
BOX = WARP * FOUR  # channels of a warp at once
SUMMED = 8  # rows of a tile that a summer has under way
# Of a tile that a block has: time (-1: there are no more), first channel, group of texts.
TIME, FIRST, GROUP = 0, 1, 2
HEAD = 4
SHARED_BYTES = 226 << 10  # of a block


class Size(NamedTuple):
    """Of a block.

    Attributes
    ----------
    fours : int
        Times FOUR channels of a lane; as many warps sum.
    deep : int
        Rows of the table that an adder has under way.
    adders : int
        Warps.
    ahead : int
        Tiles that are claimed before the first of them is given back.
    """

    fours: int
    deep: int
    adders: int
    ahead: int

    @property
    def channels(self) -> int:
        return BOX * self.fours

    @property
    def warps(self) -> int:
        """Adders, summers, and the one that loads."""
        return self.adders + self.fours + 1


class Layout(NamedTuple):
    """Where things lie in a block's shared memory: tiles first, then their plans.

    Attributes
    ----------
    stages : int
        Tiles that there is room for.
    plans, heads, share, sums : int
        Of PLAN words of each tile, HEAD words of each tile, the share that was claimed last, and sums of a frequent
        token: in words.
    landed, empty : int
        Of barriers, 8 bytes for each tile: come, given back by adders and summers; in bytes.
    """

    stages: int
    plans: int
    heads: int
    share: int
    sums: int
    landed: int
    empty: int
    nbytes: int


def layout(size: Size, itemsize: int) -> Layout:
    """For elements of dout of so many bytes."""
    tile_bytes = ROWS * size.channels * itemsize
    stage_bytes = tile_bytes + 4 * (PLAN + HEAD) + 2 * 8
    rest_bytes = 4 * (1 + size.channels)
    stages = (SHARED_BYTES - rest_bytes) // stage_bytes
    plans = stages * tile_bytes // 4
    heads = plans + stages * PLAN
    landed = 4 * (heads + stages * HEAD)
    empty = landed + 8 * stages
    end = empty + 8 * stages
    return Layout(stages, plans, heads, end // 4, end // 4 + 1, landed, empty, end + rest_bytes)


class Adders(NamedTuple):
    """Device functions of adders. ``c0``: the first of the tile's channels.

    Attributes
    ----------
    add_few : callable
        ``add_few(dout_N, table_VC, order_N, tile, ints, stage, unit, n_few, c0, total, values, words, rows)``: to the
        ``deep`` rows of the table of a unit, each with up to FEW positions, what belongs there.
    add_many : callable
        ``add_many(dout_N, table_VC, order_N, tile, ints, stage, row, c0, total, values, words)``: to a row of the
        table with up to MANY positions; ``row``: where its words of the plan begin.
    add_frequent : callable
        ``add_frequent(dout_N, table_VC, order_N, frequent_N, header, ints, floats, n_slices, total, words)``: by all
        adders of the block together, to rows of tokens with more, until no share is left.
    place_of : callable
        ``place_of(item, n_slices)``: time and first channel of an item.
    more : int
        Rows of dout under way where one after another is added: ``words`` of all but ``add_few`` has room for them.
    """

    add_few: Callable[..., Any]
    add_many: Callable[..., Any]
    add_frequent: Callable[..., Any]
    place_of: Callable[..., Any]
    more: int


@functools.cache
def adders_of(dtype: Any, size: Size, *, is_exact: bool, keeps_rows: bool) -> Adders:
    """For a dout of a numba ``dtype``.

    Parameters
    ----------
    is_exact : bool
        The channels of a row are those of whole tiles.
    keeps_rows : bool
        Rows of the table, which is of float32, are kept in the L2 cache until they are written.
    """
    low, high, elements = (getattr(words_of(dtype), name) for name in ("low", "high", "elements"))
    fours, deep, adders, _ahead = size
    channels = size.channels
    load_line = load4_kept if keeps_rows else load4_once
    store_line = store4_released if keeps_rows else store4_once
    n_values = FOUR * fours
    words_of_four = FOUR // elements
    n_words = words_of_four * fours  # of a lane's share of a row of dout
    load_four = make_load_four(dtype)
    more = max(24 // n_words, 1)  # as registers allow
    places = layout(size, 4 // elements)
    plans_at, share_at, sums_at = places.plans, places.share, places.sums
    adders_meet = sync.make_barrier(2, WARP * adders)

    @cuda.jit(device=True)
    def load_row(dout_N, n, C, c, words, first):
        """Past the end of the row a lane has its last channels once more, which is quicker than to ask."""
        for k in range(fours):
            at = int32(c + BOX * k)
            at = at if is_exact else min(at, int32(C - FOUR))
            load_four(dout_N, int64(n) * C + at, words, first + words_of_four * k)

    @cuda.jit(device=True)
    def add_row(words, first, total, to):
        for w in range(n_words):
            total[to + elements * w] += low(words[first + w])
            if elements == 2:
                total[to + 2 * w + 1] += high(words[first + w])

    @cuda.jit(device=True)
    def load_table(table_VC, token, C, c, total, to):
        for k in range(fours):
            if is_exact or c + BOX * k < C:
                load_line(table_VC, int64(token) * C + c + BOX * k, total, to + FOUR * k)

    @cuda.jit(device=True)
    def store_table(table_VC, token, C, c, total, to):
        for k in range(fours):
            if is_exact or c + BOX * k < C:
                store_line(table_VC, int64(token) * C + c + BOX * k, total, to + FOUR * k)

    @cuda.jit(device=True)
    def add_own(tile, ints, stage, row, values, total, to):
        """The row that is in the tile."""
        first = int32(int32(stage) * fours * ROWS + (ints[row + COUNT] & (ROWS - 1)))
        for k in range(fours):
            load4(tile, (first + k * ROWS) * BOX + cuda.threadIdx.x * FOUR, values, FOUR * k)
        for e in range(n_values):
            total[to + e] += values[e]

    @cuda.jit(device=True)
    def place_of(item, n_slices):
        """Time and first channel of an item."""
        t = divide(item, int32(n_slices))
        return t, int32(subtract(item, multiply(t, int32(n_slices))) * channels)

    @cuda.jit(device=True)
    def add_few(dout_N, table_VC, order_N, tile, ints, stage, unit, n_few, c0, total, values, words, rows):
        """Rows of the table with up to FEW positions, ``deep`` at once, by a warp."""
        C = int32(table_VC.shape[1])
        c = int32(c0 + cuda.threadIdx.x * FOUR)
        first = int32(plans_at + int32(stage) * PLAN + HEAD_OF_TILE)
        for j in range(deep):
            rows[j] = first + min(unit * deep + j, n_few - 1) * WORDS_OF_ROW
            load_table(table_VC, ints[rows[j] + TOKEN], C, c, total, j * n_values)
        for j in range(deep):
            if ints[rows[j] + COUNT] >= 2 * ROWS:
                load_row(dout_N, ints[rows[j] + MEMBER], C, c, words, j * n_words)
        for j in range(deep):
            add_own(tile, ints, stage, rows[j], values, total, j * n_values)
        for j in range(deep):
            count = int32(ints[rows[j] + COUNT] // ROWS)
            if count > 1:
                add_row(words, j * n_words, total, j * n_values)
                start = ints[rows[j] + START]
                for k in range(2, opaque(count)):
                    load_row(dout_N, order_N[start + k], C, c, words, j * n_words)
                    add_row(words, j * n_words, total, j * n_values)
        for j in range(deep):
            if unit * deep + j < n_few:
                store_table(table_VC, ints[rows[j] + TOKEN], C, c, total, j * n_values)

    @cuda.jit(device=True)
    def add_stretch(dout_N, order_N, start, stop, C, c, total, words):
        """Rows of dout at positions ``order_N[start:stop]``, in order, by a warp."""
        lane = int32(cuda.threadIdx.x)
        for first in range(start, stop, WARP):
            n_here = min(stop - first, WARP)
            position = order_N[first + min(lane, n_here - 1)]
            for k in range(0, opaque(int32(n_here)), more):
                for j in range(more):
                    n = cuda.shfl_sync(0xFFFFFFFF, position, min(k + j, n_here - 1))
                    load_row(dout_N, n, C, c, words, j * n_words)
                for j in range(more):
                    if k + j < n_here:
                        add_row(words, j * n_words, total, 0)

    @cuda.jit(device=True)
    def add_many(dout_N, table_VC, order_N, tile, ints, stage, row, c0, total, values, words):
        """A row of the table with up to MANY positions, by a warp."""
        C = int32(table_VC.shape[1])
        c = int32(c0 + cuda.threadIdx.x * FOUR)
        token = ints[row + TOKEN]
        start = ints[row + START]
        load_table(table_VC, token, C, c, total, 0)
        add_own(tile, ints, stage, row, values, total, 0)
        add_stretch(dout_N, order_N, start + 1, start + ints[row + COUNT] // ROWS, C, c, total, words)
        store_table(table_VC, token, C, c, total, 0)

    @cuda.jit(device=True)
    def claim(header, n_shares):
        """Another share, by one thread. Each block claims one too many, and the last of them clears the counter."""
        claimed = int32(cuda.atomic.add(header, NEXT_FREQUENT, int32(1)))
        if claimed == n_shares + int32(cuda.gridDim.x) - 1:
            header[NEXT_FREQUENT] = int32(0)
        return claimed

    @cuda.jit(device=True)
    def add_frequent(dout_N, table_VC, order_N, frequent_N, header, ints, floats, n_slices, total, words):
        """Shares of tokens with more than MANY positions, ``channels`` of one at a time, by all adders together."""
        warp = int32(cuda.threadIdx.y)
        lane = int32(cuda.threadIdx.x)
        C = int32(table_VC.shape[1])
        n_shares = int32(multiply(header[N_FREQUENT], int32(n_slices)))
        going = n_shares > 0
        while going:
            if warp == 0 and lane == 0:
                ints[share_at] = claim(header, n_shares)
            adders_meet()
            share = ints[share_at]
            going = share < n_shares
            if going:
                which, c0 = place_of(share, n_slices)
                token = frequent_N[which * OF_FREQUENT]
                start = frequent_N[which * OF_FREQUENT + 1]
                count = frequent_N[which * OF_FREQUENT + 2]
                stretch = divide(int32(count + adders - 1), int32(adders))
                begin = int32(start + min(warp * stretch, count))
                end = int32(start + min(warp * stretch + stretch, count))
                for e in range(n_values):
                    total[e] = float32(0)
                add_stretch(dout_N, order_N, begin, end, C, int32(c0 + lane * FOUR), total, words)
                for y in range(adders):
                    if y == warp:
                        for k in range(fours):
                            for e in range(FOUR):
                                at = sums_at + BOX * k + lane * FOUR + e
                                floats[at] = (floats[at] if y > 0 else float32(0)) + total[FOUR * k + e]
                    adders_meet()
                for i in range(warp * WARP + lane, min(channels, C - c0), WARP * adders):
                    total_i = widen(table_VC[token, c0 + i]) + floats[sums_at + i]
                    table_VC[token, c0 + i] = narrow(total_i, table_VC.dtype)
                adders_meet()

    return Adders(add_few, add_many, add_frequent, place_of, more)
