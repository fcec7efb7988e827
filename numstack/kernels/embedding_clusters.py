"""Gradient of an embedding on Hopper: clusters of blocks own rows of the table. See :mod:`numstack.kernels.embedding`.

As in :mod:`numstack.kernels.embedding_owned` block i of n owns rows i, i + n, ..., and there is one launch; but

1. the blocks of a cluster share the tokens: each looks through its part, and puts positions down where they belong, in
   its own shared memory or another block's;
2. a warp takes the next row of its block, and if there are none left, of the other blocks of its cluster: which rows
   have how many positions is left to chance, and blocks would be done at times that differ by a quarter.

A row that a warp takes is summed by it alone, in the order of positions, whoever put them down and whoever takes it.

32 x 1024 evenly spread tokens of 50,304 with 768 channels take 57.8 us on an H200 where owned_rows takes 59.0, and
tokens as frequent as words 102 us where it takes 109. With the gradient of positions on the way it was no faster.
"""

import functools
from typing import Any

from numba import cuda, float32, int32, int64, uint32

from numstack.device import Kernel, kernel
from numstack.device.ptx import cluster
from numstack.device.ptx.integers import multiply, shared_address, subtract
from numstack.kernels.embedding_parts import A_THREAD, FOUR, SHORT, parts
from numstack.kernels.warp import WARP

AT_ONCE = 8  # tokens of a thread that are under way
# Words at the start of a block's lists: the next row to take, rows with positions, and those with more than SHORT.
NEXT, FOUND, LONG = 0, 1, 2
HEADER = 4


def shared_bytes(n_rows: int, warps: int) -> int:
    """Of a block of so many warps that owns so many rows."""
    return 4 * (HEADER + n_rows * (SHORT + 2) + WARP * warps + 2 * A_THREAD * WARP * warps)


@functools.cache
def add_rows(dtype: Any, warps: int, fours: int, *, is_exact: bool, blocks: int) -> Kernel:
    """The kernel for a dout of a numba ``dtype``, in clusters of ``blocks`` blocks of (32, warps), as ``parts``."""
    add_short_row, add_long_row, *_ = parts(dtype, warps, fours, is_exact=is_exact, columns=0)
    threads = WARP * warps
    n_values = FOUR * fours
    n_pair = 2 * n_values
    channels = WARP * n_values
    n_counts = WARP + 1
    at_once = AT_ONCE
    of_block, of_cluster = threads * at_once, threads * at_once * blocks

    @cuda.jit(device=True)
    def load_tokens(tokens_N, n0, tokens):
        for k in range(at_once):
            n = n0 + k * threads + cuda.threadIdx.y * WARP + cuda.threadIdx.x
            tokens[k] = tokens_N[n] if n < tokens_N.size else int32(-1)

    @cuda.jit(device=True)
    def word(lists, i):
        """The address of a word of lists."""
        return uint32(lists + uint32(4) * uint32(i))

    @kernel(name="embedding.backward rows_of_clusters", cluster=blocks)
    def rows_of_clusters(tokens_N, dout_N, dtoken_table_VC, n_rows, magic):
        """lists: the header; of each row the number of positions; the rows that have any; SHORT positions of each;
        positions of a warp's row; collected ones.
        """
        counts = cuda.shared.array(n_counts, int32)
        sums = cuda.shared.array(channels, float32)
        lists = cuda.shared.array(0, int32)
        total = cuda.local.array(n_values, float32)
        values = cuda.local.array(n_pair, float32)
        tokens = cuda.local.array(at_once, int32)
        next_tokens = cuda.local.array(at_once, int32)
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
        N = tokens_N.size
        order = HEADER + n_rows
        positions = order + n_rows
        of_warp = positions + n_rows * SHORT + warp * WARP
        collected = of_warp + (warps - warp) * WARP
        own_lists = shared_address(lists)
        n0 = rank * of_block
        load_tokens(tokens_N, n0, next_tokens)
        for i in range(thread, order, threads):
            lists[i] = int32(0)
        cluster.barrier()
        while n0 < N:
            for k in range(at_once):
                tokens[k] = next_tokens[k]
            load_tokens(tokens_N, n0 + of_cluster, next_tokens)
            for k in range(at_once):
                row = int32((int64(tokens[k]) * int64(magic)) >> 32)
                owner = subtract(subtract(tokens[k], multiply(row, n_blocks)), first_block)
                is_ours = tokens[k] >= 0 and tokens[k] < V and owner >= 0 and owner < blocks
                rows[k] = row if is_ours else int32(0)
                owners[k] = cluster.address_of(own_lists, uint32(owner if is_ours else rank))
                places[k] = cluster.count_if(uint32(is_ours), word(owners[k], HEADER + rows[k]))
            for k in range(at_once):
                n = int32(n0 + k * threads + thread)
                is_listed = places[k] >= 0 and places[k] < SHORT
                at = positions + rows[k] * SHORT + places[k]
                cluster.store_int32_if(uint32(is_listed), word(owners[k], at), n)
                indices[k] = cluster.count_if(uint32(places[k] == 0), word(owners[k], FOUND))
            for k in range(at_once):
                cluster.store_int32_if(uint32(places[k] == 0), word(owners[k], order + indices[k]), rows[k])
                cluster.count_if(uint32(places[k] == SHORT), word(owners[k], LONG))
            n0 += of_cluster
        cluster.barrier()
        n_found = lists[FOUND]
        n_long = lists[LONG]
        for r in range(n_found if n_long > 0 else int32(0)):
            row = lists[order + r]
            if lists[HEADER + row] > SHORT:
                token = row * n_blocks + own
                add_long_row(tokens_N, dout_N, dtoken_table_VC, token, lists, collected, counts, sums, total, values)
        visited = int32(0)
        owner = rank
        their_lists = cluster.address_of(own_lists, uint32(rank))
        n_theirs = n_found
        while visited < blocks:
            r = int32(0)
            if lane == 0:
                r = cluster.count_if(uint32(1), word(their_lists, NEXT))
            r = cuda.shfl_sync(0xFFFFFFFF, r, 0)
            if r < n_theirs:
                row = cluster.load_int32(word(their_lists, order + r))
                count = cluster.load_int32(word(their_lists, HEADER + row))
                if count <= SHORT:
                    if lane < count:
                        lists[of_warp + lane] = cluster.load_int32(word(their_lists, positions + row * SHORT + lane))
                    cuda.syncwarp()
                    token = row * n_blocks + first_block + owner
                    add_short_row(dout_N, dtoken_table_VC, token, lists, of_warp, count, total, values)
                    cuda.syncwarp()
            else:
                visited += int32(1)
                owner = int32((rank + visited) % blocks)
                their_lists = cluster.address_of(own_lists, uint32(owner))
                n_theirs = cluster.load_int32(word(their_lists, FOUND))
        cluster.barrier()  # before its shared memory goes

    return rows_of_clusters
