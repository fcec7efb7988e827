"""Gradient of an embedding on Hopper: clusters of blocks own rows of the table. See :mod:`numstack.kernels.embedding`.

As in :mod:`numstack.kernels.embedding_owned` block i of n owns rows i, i + n, ..., and there is one launch; but

1. the blocks of a cluster share the tokens: each looks through its part, and puts positions down where they belong, in
   its own shared memory or another block's;
2. a warp takes the next item of its block, and if there are none left, of the other blocks of its cluster: which rows
   have how many positions is left to chance, and blocks would be done at times that differ by a quarter;
3. an item is a row of the table, or a chunk of the positions' gradient: 512 bytes of each text, added up in order.
   Tokens are looked at by time, all texts of 32 times first, so that rows and chunks read a part of dout while the
   cache has it.

A row that a warp takes is summed by it alone, in the order of positions, whoever put them down and whoever takes it.

32 x 1024 evenly spread tokens of 50,304 with 768 channels on an H200, microseconds, and of an equal copy's rate:

================  ==============  ==============
dout              tokens alone    and positions
================  ==============  ==============
bfloat16          55.1, 0.92      63.6, 0.81
float32           66.9, 0.92      83.0, 0.77
================  ==============  ==============

owned_rows takes 59.0 and 68.2 of bfloat16. Tokens as frequent as words (10,385 rows) take 73 and 80 of bfloat16, 108
and 120 of float32, and the block that has the most frequent is the last. Two rows of dout at once, and the tokens that
a thread looks at in registers, are worth 14 and 9% there; of float32, with more registers a row, they double the time.

With positions the L2 cache is what limits (80% of its throughput, looking for tokens included): dout passes it twice.
Of float32 302 MB come from memory and go there, where 255 would do.

What did not help: the next item's rows prefetched (7% slower), dout prefetched while tokens are looked for (3 to 9%),
or the first chunks begun by half of the warps (0 to 4%), additions in the L2 cache (9%), rows evicted first (2% without
positions), 20 warps a block (7%), clusters of 4 (2%) or 2 (6%), chunks of 256 bytes (the same); rows of dout that a
chunk reads later marked to be evicted last (1%), and what chunks read to be evicted first (5%); chunks in step with the
times at which rows are found (2%; of float32, 12 MB less come from memory, and it is 0.5% faster); rows with more than
SHORT positions shared by all blocks of the cluster, whose sums meet in shared memory (words: 83% slower).

Nor did reading dout once: tiles of all texts of a time in shared memory, of which some warps make the positions' sums,
and others, where a token comes first, the row of the table; for that its other rows of dout are read once more. First
tokens are grouped. By a kernel of clusters, of whose 13 us 5 are hidden: 69 us (float32: 83). In one kernel, whose grid
meets while tiles come by copies of rows: 62.1 (74.2). Boxes of a tensor map come faster, but who meets waits behind
them, 9 us instead of 6: 63.1. With one or two tiles of a block under way until then, and the first of them planned by
all warps: 60.4 to 62.2 (71.6 to 74.6). By a small kernel, behind which the other starts early: 60.0 to 61.9 (73.6 to
75.5), 0.86 to 0.88 of an equal copy (0.84 to 0.87), words 75 to 76 (92 to 101). With tokens grouped by someone else it
would take 59.3 to 59.9 (71.6 to 72.7). Neither the copy engine nor the order of rows limits: plain warps read and write
those 24,146 rows, in any order, in 40 us, as fast as a copy. What is lost seem to be the 8 to 11 us until rows are
added, while shared memory has room for 26 MB of tiles, and 3 to 6 at the end, where blocks are done at different times.
What did not help: additions in the L2 cache by the copy engine (4 us; rows alone take 49), smaller tiles at the end (1
to 9) or throughout (1 to 20), rows of dout that are read again kept and tiles dropped (0 to 4), the first tiles or
their rows of the table fetched into the L2 cache ahead (1 to 6). Rows of the table kept in the L2 cache until they are
written were worth 0.6 us of bfloat16. All that would be 3 us (9) of a training step of 55,000, for 700 lines and lists
whose order is left to chance: not kept.
Nor did a kernel for the positions help, beside which this one starts and looks for tokens: 69 (91), as its registers
fill a multiprocessor.
"""

import functools
from typing import Any

from numba import cuda, float32, int32, int64, uint32

from numstack.device import Kernel, kernel
from numstack.device.ptx import cluster, load4, store4
from numstack.device.ptx.integers import divide, multiply, opaque, shared_address, subtract
from numstack.device.ptx.words import WORDS, words_of
from numstack.kernels.embedding_parts import A_THREAD, FOUR, MOST_FOURS, SHORT, parts
from numstack.kernels.warp import WARP

WARPS = 16
AT_ONCE = 8  # tokens of a thread that are under way
TEXTS_OF_CHUNK = 16  # whose parts of dout a lane has under way for the positions
LAST = 8  # what part of a block's items is rows only
# Words at the start of a block's lists: the next item to take, rows with positions, and those with more than SHORT.
NEXT, FOUND, LONG = 0, 1, 2
HEADER = 4


def shared_bytes(n_rows: int) -> int:
    """Of a block that owns so many rows."""
    return 4 * (HEADER + n_rows * (SHORT + 2) + WARP * WARPS + 2 * A_THREAD * WARP * WARPS)


@cuda.jit(device=True)
def chunks_before(i, n_chunks, n_items):
    """Of a block's first i items, rows and chunks of the positions' gradient, how many are chunks.

    One every few rows, so that both read a part of dout while the cache has it, and none among the last: they take
    longer.
    """
    lead = max(subtract(n_items, divide(n_items, int32(LAST))), n_chunks)
    return min(divide(int32(multiply(i, n_chunks) + lead - 1), lead), n_chunks)


@functools.cache
def add_rows(dtype: Any, fours: int, *, is_exact: bool, blocks: int) -> Kernel:
    """The kernel for a dout of a numba ``dtype``, in clusters of ``blocks`` blocks of (32, WARPS), as ``parts``."""
    load, low, high, elements = (getattr(words_of(dtype), name) for name in ("load", "low", "high", "elements"))
    in_pairs = elements == 2 and fours == MOST_FOURS  # of float32, and of 4 fours, registers are too few
    add_short_row, add_long_row, *_ = parts(dtype, WARPS, fours, is_exact=is_exact, columns=0, in_pairs=in_pairs)
    vector = WORDS * elements
    n_words = WORDS * TEXTS_OF_CHUNK
    threads = WARP * WARPS
    n_values = FOUR * fours
    n_pair = 2 * n_values
    channels = WARP * n_values
    n_counts = WARP + 1
    at_once = AT_ONCE
    of_step = threads * blocks
    of_turn = of_step * at_once

    @cuda.jit(device=True)
    def add_chunk(dout_N, positions_P, B, chunk, words, sums):
        """To 32 vectors of the positions' gradient those of all texts, in order, by a warp."""
        P = int32(positions_P.size)
        at = (chunk * WARP + cuda.threadIdx.x) * vector
        if at < P:
            for e in range(0, vector, FOUR):
                load4(positions_P, at + e, sums, e)
            for b0 in range(0, opaque(B), TEXTS_OF_CHUNK):
                for k in range(TEXTS_OF_CHUNK):
                    load(dout_N, int64(min(b0 + k, B - 1)) * P + at, words, WORDS * k)
                for k in range(TEXTS_OF_CHUNK):
                    if b0 + k < B:
                        for w in range(WORDS):
                            sums[elements * w] += low(words[WORDS * k + w])
                            if elements == 2:
                                sums[2 * w + 1] += high(words[WORDS * k + w])
            for e in range(0, vector, FOUR):
                store4(positions_P, at + e, sums, e)

    @cuda.jit(device=True)
    def position(i, B, T, N, by_time):
        """The i-th to be looked at, -1 if there is none there; by time: 32 times of all texts, then the next."""
        if by_time:
            group = int32(i >> 5)
            tile = divide(group, B)
            t = int32(tile * WARP + (i & 31))
            return int32(subtract(group, multiply(tile, B)) * T + t) if t < T else int32(-1)
        return int32(i) if i < N else int32(-1)

    @cuda.jit(device=True)
    def load_tokens(tokens_N, i0, B, T, by_time, tokens):
        for k in range(at_once):
            n = position(int32(i0 + k * of_step), B, T, tokens_N.size, by_time)
            tokens[k] = tokens_N[n] if n >= 0 else int32(-1)

    @cuda.jit(device=True)
    def word(lists, i):
        """The address of a word of lists."""
        return uint32(lists + uint32(4) * uint32(i))

    @kernel(name="embedding.backward rows_of_clusters", cluster=blocks)
    def rows_of_clusters(tokens_N, dout_N, dtoken_table_VC, dpositions_P, B, T, n_rows, magic, n_chunks):
        """lists: the header; of each row the number of positions; the rows that have any; SHORT positions of each;
        positions of a warp's row; collected ones.

        n_chunks: of the positions' gradient that are a block's. One kernel for both: that the chunks' registers are
        there without chunks as well keeps all loads of a row under way, which the compiler else makes wait in turn.
        """
        counts = cuda.shared.array(n_counts, int32)
        sums = cuda.shared.array(channels, float32)
        lists = cuda.shared.array(0, int32)
        total = cuda.local.array(n_values, float32)
        values = cuda.local.array(n_pair, float32)
        words = cuda.local.array(n_words, uint32)
        of_position = cuda.local.array(vector, float32)
        tokens = cuda.local.array(at_once, int32)
        owners = cuda.local.array(at_once, uint32)
        rows = cuda.local.array(at_once, int32)
        places = cuda.local.array(at_once, int32)
        indices = cuda.local.array(at_once, int32)
        lane = cuda.threadIdx.x
        warp = cuda.threadIdx.y
        thread = warp * WARP + lane
        n_blocks = int32(cuda.gridDim.x)
        own = int32(cuda.blockIdx.x)
        rank = int32(own % blocks)
        first_block = int32(own - rank)
        V = dtoken_table_VC.shape[0]
        order = HEADER + n_rows
        positions = order + n_rows
        of_warp = positions + n_rows * SHORT + warp * WARP
        collected = of_warp + (WARPS - warp) * WARP
        own_lists = shared_address(lists)
        by_time = n_chunks > 0  # as the positions' gradient is made: the cache has what both read
        n_all = multiply(int32((T + 31) >> 5), int32(B)) * WARP if by_time else tokens_N.size
        mine = rank * threads + thread
        load_tokens(tokens_N, mine, B, T, by_time, tokens)
        for i in range(thread, order, threads):
            lists[i] = int32(0)
        cluster.barrier()
        for i0 in range(0, n_all, of_turn):
            for k in range(at_once):
                row = int32((int64(tokens[k]) * int64(magic)) >> 32)
                owner = subtract(subtract(tokens[k], multiply(row, n_blocks)), first_block)
                is_ours = tokens[k] >= 0 and tokens[k] < V and owner >= 0 and owner < blocks
                rows[k] = row if is_ours else int32(0)
                owners[k] = cluster.address_of(own_lists, uint32(owner if is_ours else rank))
                places[k] = cluster.count_if(uint32(is_ours), word(owners[k], HEADER + rows[k]))
            for k in range(at_once):
                n = position(int32(i0 + mine + k * of_step), B, T, tokens_N.size, by_time)
                is_listed = places[k] >= 0 and places[k] < SHORT
                at = positions + rows[k] * SHORT + places[k]
                cluster.store_int32_if(uint32(is_listed), word(owners[k], at), n)
                indices[k] = cluster.count_if(uint32(places[k] == 0), word(owners[k], FOUND))
            for k in range(at_once):
                cluster.store_int32_if(uint32(places[k] == 0), word(owners[k], order + indices[k]), rows[k])
                cluster.count_if(uint32(places[k] == SHORT), word(owners[k], LONG))
            load_tokens(tokens_N, i0 + of_turn + mine, B, T, by_time, tokens)
        cluster.barrier()
        n_found = lists[FOUND]
        n_long = lists[LONG]
        for r in range(n_found if n_long > 0 else int32(0)):
            row = lists[order + r]
            if lists[HEADER + row] > SHORT:
                token = row * n_blocks + own
                add_long_row(
                    tokens_N, dout_N, dtoken_table_VC, token, lists, collected, counts, sums, tokens, total, values
                )
        owner = rank
        their_lists = own_lists
        n_items = int32(n_found + n_chunks)
        going = True
        while going:
            i = int32(0)
            if lane == 0:
                i = cluster.count_if(uint32(1), word(their_lists, NEXT))
            i = cuda.shfl_sync(0xFFFFFFFF, i, 0)
            if i < n_items:
                n_before = chunks_before(i, n_chunks, n_items)
                if chunks_before(int32(i + 1), n_chunks, n_items) > n_before:
                    chunk = n_before * n_blocks + first_block + owner
                    add_chunk(dout_N, dpositions_P, B, chunk, words, of_position)
                else:
                    row = cluster.load_int32(word(their_lists, order + i - n_before))
                    count = cluster.load_int32(word(their_lists, HEADER + row))
                    if count <= SHORT:
                        if lane < count:
                            at = positions + row * SHORT + lane
                            lists[of_warp + lane] = cluster.load_int32(word(their_lists, at))
                        cuda.syncwarp()
                        token = row * n_blocks + first_block + owner
                        add_short_row(dout_N, dtoken_table_VC, token, lists, of_warp, count, total, values)
                        cuda.syncwarp()
            else:
                # Who has items left? All are asked at once: one after another, the last answer would come late.
                place = int32((rank + warp + lane) % blocks)
                lists_there = cluster.address_of(own_lists, uint32(place))
                items_there = int32(cluster.load_int32(word(lists_there, FOUND)) + n_chunks)
                has_some = lane < blocks and items_there > cluster.load_int32(word(lists_there, NEXT))
                waiting = cuda.ballot_sync(0xFFFFFFFF, has_some)
                going = waiting != 0
                if going:
                    first = cuda.ffs(waiting) - 1
                    owner = cuda.shfl_sync(0xFFFFFFFF, place, first)
                    n_items = cuda.shfl_sync(0xFFFFFFFF, items_there, first)
                    their_lists = cluster.address_of(own_lists, uint32(owner))
        cluster.barrier()  # before its shared memory goes

    return rows_of_clusters
