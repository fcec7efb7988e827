"""What warps add to the table of an embedding's gradient by tiles: see :mod:`numstack.kernels.embedding_tiles`.

Also how a block is divided, and its shared memory.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda, float32, int32, int64, uint32

from numstack.device import narrow, widen
from numstack.device.ptx import load4, load4_once, store4_once, sync
from numstack.device.ptx.assembly import GlobalSource, Index, Out, ptx
from numstack.device.ptx.integers import divide, multiply, opaque, subtract
from numstack.device.ptx.words import words_of
from numstack.kernels.embedding_parts import FOUR
from numstack.kernels.warp import WARP

SLOTS = 32  # positions of a token that are put down
FEW = 8  # that one lane sorts
ROWS = WARP  # of a tile, at most
SUMMED = 8  # rows of a tile that a summer has under way
LOOKS = 8  # tokens that a lane has under way when it looks for a frequent one
NONE = 0x7FFFFFFF
# Kept from call to call, in int32: where the grid meets; counts of V tokens, twice; and counters, twice: of tokens with
# more than SLOTS positions, of items that were claimed, and of those tokens' shares that were.
MEETING, COUNTS = 0, 32
FREQUENT, NEXT_ITEM, NEXT_FREQUENT = 0, 1, 2
COUNTERS = 8
# Of a tile: item, group of texts; rows of the table with up to FEW positions, and with more.
ITEM, GROUP, N_FEW, N_MORE = 0, 1, 2, 3
HEAD = 4
# Of a row of the table: token, number of positions, row of the tile, and the positions after the first.
TOKEN, COUNT, ROW, MEMBERS = 0, 1, 2, 3
INFO = MEMBERS + FEW - 1
SHARED_BYTES = 232_448  # that a block can have


class Size(NamedTuple):
    """Of a block.

    Attributes
    ----------
    fours : int
        Times FOUR channels of a lane; as many warps sum.
    deep : int
        Rows of the table that an adder has under way.
    adders, planners : int
        Warps.
    ahead : int
        Tiles that are claimed before the first of them is given back, at least ``planners``.
    """

    fours: int
    deep: int
    adders: int
    planners: int
    ahead: int

    @property
    def channels(self) -> int:
        return WARP * FOUR * self.fours

    @property
    def warps(self) -> int:
        """Adders, summers, planners, and the one that loads."""
        return self.adders + self.fours + self.planners + 1


class Layout(NamedTuple):
    """Where things lie in a block's shared memory: tiles first.

    Attributes
    ----------
    stages : int
        Tiles that there is room for.
    infos, heads, half, share, sums : int
        Of INFO words of each row of each tile, HEAD words of each tile, which half of what is kept is this call's, the
        share that was claimed last, and sums of a frequent token: in words.
    full, empty, landed : int
        Of barriers, 8 bytes for each tile: planned, given back by adders and summers, come; in bytes.
    """

    stages: int
    infos: int
    heads: int
    half: int
    share: int
    sums: int
    full: int
    empty: int
    landed: int
    nbytes: int


def layout(size: Size, itemsize: int) -> Layout:
    """For elements of dout of so many bytes."""
    tile_bytes = ROWS * size.channels * itemsize
    stage_bytes = tile_bytes + 4 * (ROWS * INFO + HEAD) + 3 * 8
    rest_bytes = 4 * (2 + size.channels)
    stages = (SHARED_BYTES - rest_bytes) // stage_bytes
    infos = stages * tile_bytes // 4
    heads = infos + stages * ROWS * INFO
    full = 4 * (heads + stages * HEAD)
    empty, landed, words = (full + 8 * stages * i for i in (1, 2, 3))
    half = words // 4
    return Layout(stages, infos, heads, half, half + 1, half + 2, full, empty, landed, words + rest_bytes)


class Adders(NamedTuple):
    """Device functions of adders. ``c0``, ``width``: first of the tile's channels, and how many there are.

    Attributes
    ----------
    add_few : callable
        ``add_few(dout_N, table_VC, tile, ints, stage, unit, n_few, c0, width, total, values, words, infos)``: to the
        ``deep`` rows of the table of a unit, each with up to FEW positions, what belongs there.
    add_many : callable
        ``add_many(dout_N, table_VC, slots_N, tile, ints, stage, info, B, T, c0, width, total, values, words)``: to a
        row of the table with up to SLOTS positions.
    add_frequent : callable
        ``add_frequent(tokens_N, dout_N, table_VC, frequent_N, kept, counters, ints, floats, n_slices, total, words,
        found)``: by all adders of the block together, to rows of tokens with more, until no share is left.
    position_of : callable
        ``position_of(place, B, T)``: slots hold places in the order of times, and of texts of a time; dout has texts
        one after another.
    place_of : callable
        ``place_of(item, n_slices)``: time and first channel of an item.
    more : int
        Rows of dout under way where one after another is added: ``words`` of all but ``add_few`` has room for them.
    """

    add_few: Callable[..., Any]
    add_many: Callable[..., Any]
    add_frequent: Callable[..., Any]
    position_of: Callable[..., Any]
    place_of: Callable[..., Any]
    more: int


@functools.cache
def adders_of(dtype: Any, size: Size, *, is_exact: bool) -> Adders:
    """For a dout of a numba ``dtype``; ``is_exact``: the channels are a multiple of ``size.channels``."""
    low, high, elements = (getattr(words_of(dtype), name) for name in ("low", "high", "elements"))
    fours, deep, adders, *_ = size
    channels = size.channels
    n_values = FOUR * fours
    n_words = n_values // elements  # of a lane's share of a row of dout
    words_of_four = FOUR // elements
    more = max(24 // n_words, 1)  # as registers allow
    *_, infos_at, _heads, _half, share_at, sums_at, _full, _empty, _landed, _nbytes = layout(size, 4 // elements)
    adders_meet = sync.make_barrier(2, WARP * adders)

    @ptx(f"ld.global.v{words_of_four}.b32 {{$words}}, [$x];", touches_memory=True)
    def load_four(x: GlobalSource, i: Index, words: Out[uint32, words_of_four], first: Index) -> None:
        """FOUR elements as they are."""

    @cuda.jit(device=True)
    def channel_of(k, c, width):
        """A lane's k-th FOUR channels; past the end the last ones once more."""
        channel = c + WARP * FOUR * k
        return channel if is_exact else min(channel, width - FOUR)

    @cuda.jit(device=True)
    def load_row(dout_N, n, C, c0, c, width, words, first):
        for k in range(fours):
            load_four(dout_N, int64(n) * C + c0 + channel_of(k, c, width), words, first + words_of_four * k)

    @cuda.jit(device=True)
    def add_row(words, first, total, to):
        for w in range(n_words):
            total[to + elements * w] += low(words[first + w])
            if elements == 2:
                total[to + 2 * w + 1] += high(words[first + w])

    @cuda.jit(device=True)
    def load_table(table_VC, token, c0, c, width, total, to):
        for k in range(fours):
            load4_once(table_VC, int64(token) * table_VC.shape[1] + c0 + channel_of(k, c, width), total, to + FOUR * k)

    @cuda.jit(device=True)
    def store_table(table_VC, token, c0, c, width, total, to):
        for k in range(fours):
            at = c + WARP * FOUR * k
            if is_exact or at < width:
                store4_once(table_VC, int64(token) * table_VC.shape[1] + c0 + at, total, to + FOUR * k)

    @cuda.jit(device=True)
    def add_own(tile, ints, stage, info, c, width, values, total, to):
        """The row that is in the tile."""
        first = (int32(stage) * ROWS + ints[info + ROW]) * channels
        for k in range(fours):
            load4(tile, first + channel_of(k, c, width), values, FOUR * k)
        for e in range(n_values):
            total[to + e] += values[e]

    @cuda.jit(device=True)
    def place_of(item, n_slices):
        """Time and first channel of an item."""
        t = divide(item, int32(n_slices))
        return t, int32(subtract(item, multiply(t, int32(n_slices))) * channels)

    @cuda.jit(device=True)
    def position_of(place, B, T):
        t = divide(place, int32(B))
        return int32((place - t * B) * T + t)

    @cuda.jit(device=True)
    def add_few(dout_N, table_VC, tile, ints, stage, unit, n_few, c0, width, total, values, words, infos):
        """Rows of the table with up to FEW positions, ``deep`` at once, by a warp."""
        C = int32(table_VC.shape[1])
        c = int32(cuda.threadIdx.x * FOUR)
        for j in range(deep):
            infos[j] = infos_at + (int32(stage) * ROWS + min(unit * deep + j, n_few - 1)) * INFO
            load_table(table_VC, ints[infos[j] + TOKEN], c0, c, width, total, j * n_values)
        for j in range(deep):
            if ints[infos[j] + COUNT] > 1:
                load_row(dout_N, ints[infos[j] + MEMBERS], C, c0, c, width, words, j * n_words)
        for j in range(deep):
            add_own(tile, ints, stage, infos[j], c, width, values, total, j * n_values)
        for j in range(deep):
            count = ints[infos[j] + COUNT]
            if count > 1:
                add_row(words, j * n_words, total, j * n_values)
                for k in range(1, opaque(int32(count - 1))):
                    load_row(dout_N, ints[infos[j] + MEMBERS + k], C, c0, c, width, words, j * n_words)
                    add_row(words, j * n_words, total, j * n_values)
        for j in range(deep):
            if unit * deep + j < n_few:
                store_table(table_VC, ints[infos[j] + TOKEN], c0, c, width, total, j * n_values)

    @cuda.jit(device=True)
    def add_many(dout_N, table_VC, slots_N, tile, ints, stage, info, B, T, c0, width, total, values, words):
        """A row of the table with up to SLOTS positions, by a warp, a lane for each."""
        lane = int32(cuda.threadIdx.x)
        C = int32(table_VC.shape[1])
        c = int32(lane * FOUR)
        token = ints[info + TOKEN]
        count = ints[info + COUNT]
        place = slots_N[int64(token) * SLOTS + min(lane, count - 1)]
        load_table(table_VC, token, c0, c, width, total, 0)
        add_own(tile, ints, stage, info, c, width, values, total, 0)
        rank = int32(0)
        for k in range(opaque(count)):
            if cuda.shfl_sync(0xFFFFFFFF, place, k) < place:
                rank = int32(rank + 1)
        position = position_of(place, B, T)
        for k in range(1, opaque(count), more):
            for j in range(more):
                is_next = cuda.ballot_sync(0xFFFFFFFF, rank == min(k + j, count - 1))
                n = cuda.shfl_sync(0xFFFFFFFF, position, int32(cuda.ffs(is_next)) - int32(1))
                load_row(dout_N, n, C, c0, c, width, words, j * n_words)
            for j in range(more):
                if k + j < count:
                    add_row(words, j * n_words, total, 0)
        store_table(table_VC, token, c0, c, width, total, 0)

    @cuda.jit(device=True)
    def add_stretch(tokens_N, dout_N, token, start, stop, C, c0, width, total, words, found):
        """Rows of dout of a token at positions ``start`` to ``stop`` - 1, in order, by a warp."""
        lane = int32(cuda.threadIdx.x)
        for first in range(start, stop, WARP * WARP):
            here = uint32(0)  # which of 32 positions, those of this lane, have the token
            for k0 in range(0, WARP, LOOKS):
                for k in range(LOOKS):
                    n = int32(first + (k0 + k) * WARP + lane)
                    found[k] = tokens_N[n] if n < stop else int32(-1)
                for k in range(LOOKS):
                    has = uint32(cuda.ballot_sync(0xFFFFFFFF, found[k] == token))
                    if lane == k0 + k:
                        here = has
            lanes = uint32(cuda.ballot_sync(0xFFFFFFFF, here != uint32(0)))
            n = int32(0)
            while lanes != uint32(0):
                n_rows = int32(0)
                for j in range(more):
                    if lanes != uint32(0):
                        of_lane = int32(cuda.ffs(lanes)) - int32(1)
                        left = uint32(cuda.shfl_sync(0xFFFFFFFF, int32(here), of_lane))
                        n = int32(first + of_lane * WARP + cuda.ffs(left) - 1)
                        left = uint32(left & uint32(left - uint32(1)))
                        if lane == of_lane:
                            here = left
                        if left == uint32(0):
                            lanes = uint32(lanes & uint32(lanes - uint32(1)))
                        n_rows = int32(n_rows + 1)
                    load_row(dout_N, n, C, c0, int32(lane * FOUR), width, words, j * n_words)
                for j in range(more):
                    if j < n_rows:
                        add_row(words, j * n_words, total, 0)

    @cuda.jit(device=True)
    def add_frequent(
        tokens_N, dout_N, table_VC, frequent_N, kept, counters, ints, floats, n_slices, total, words, found
    ):
        """Shares of tokens with more than SLOTS positions, ``channels`` of one at a time, by all adders together."""
        warp = int32(cuda.threadIdx.y)
        lane = int32(cuda.threadIdx.x)
        N = int32(tokens_N.size)
        C = int32(table_VC.shape[1])
        stretch = divide(int32(N + adders - 1), int32(adders))
        n_shares = int32(multiply(kept[counters + FREQUENT], int32(n_slices)))
        going = n_shares > 0
        while going:
            if warp == 0 and lane == 0:
                ints[share_at] = cuda.atomic.add(kept, counters + NEXT_FREQUENT, int32(1))
            adders_meet()
            share = ints[share_at]
            going = share < n_shares
            if going:
                which, c0 = place_of(share, n_slices)
                width = min(channels, C - c0)
                token = frequent_N[which]
                for e in range(n_values):
                    total[e] = float32(0)
                start = warp * stretch
                add_stretch(tokens_N, dout_N, token, start, min(start + stretch, N), C, c0, width, total, words, found)
                for y in range(adders):
                    if y == warp:
                        for k in range(fours):
                            for e in range(FOUR):
                                at = sums_at + WARP * FOUR * k + lane * FOUR + e
                                floats[at] = (floats[at] if y > 0 else float32(0)) + total[FOUR * k + e]
                    adders_meet()
                for i in range(warp * WARP + lane, width, WARP * adders):
                    total_i = widen(table_VC[token, c0 + i]) + floats[sums_at + i]
                    table_VC[token, c0 + i] = narrow(total_i, table_VC.dtype)
                adders_meet()

    return Adders(add_few, add_many, add_frequent, position_of, place_of, more)
