"""The second kernel of a product whose last tiles were cut along k: adds the parts of each tile, in the order of k.

A part lies in the workspace as its warpgroup held it, registers by fours, so that both kernels move 16 bytes a thread.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda, float32, int32

from numstack.device import Kernel, kernel, narrow, widen
from numstack.device.ptx import integers, vectors
from numstack.kernels.gemm.wgmma.config import Config
from numstack.kernels.gemm.wgmma.schedule import make_tile_position, share_begin

BLOCK = 128  # a warpgroup
FOURS = 2  # of 16 bytes, that a thread gathers
TOTALS = 4 * FOURS
AT_ONCE = 4  # parts whose loads are on their way together
LOADED = TOTALS * AT_ONCE


class Gathered(NamedTuple):
    """Constants of the kernel's source."""

    name: str
    adds_to_c: bool


@cache
def make_gather(form: Gathered, config: Config) -> Kernel:
    """The kernel that adds the parts of tiles cut by ``config``."""
    row_blocks, tile_n = config.tile_m // 64, config.tile_n
    fours = tile_n // 2 // 4
    adds_to_c = form.adds_to_c
    tile_position = make_tile_position(config.group, False)

    @kernel(name=form.name, starts_early=True)
    def gather(partials, c, tiles_m, tiles_n, whole, steps, rest, heads, head, tails, slots, alpha):
        tile = int32(cuda.blockIdx.x)  # of the rest
        rows = int32(cuda.blockIdx.y)  # 64 of them
        thread = int32(cuda.threadIdx.x)
        part = cuda.local.array(LOADED, float32)
        total = cuda.local.array(TOTALS, float32)
        for i in range(TOTALS):
            total[i] = float32(0)

        # Which workers have its tail, and at which of their places: see Plan.
        n_heads = integers.multiply(heads, rest)
        first = int32(0)
        last = int32(-1)
        tail = integers.subtract(steps, integers.multiply(heads, head))
        units = integers.multiply(integers.subtract(rest, tails), tail)
        if tile < tails:
            first = tile
            last = tile
        elif tails > 0:
            begin = integers.multiply(integers.subtract(tile, tails), tail)
            first = integers.divide(int32((begin + 1) * tails - 1), units)
            last = integers.divide(int32((begin + tail) * tails - 1), units)
        n = int32(heads + last - first + 1)
        for begin in range(0, n, AT_ONCE):
            for u in range(AT_ONCE):
                number = int32(min(begin + u, n - 1))
                place = number * rest + tile
                if number >= heads:
                    worker = int32(first + number - heads)
                    place = n_heads + worker * slots
                    if tile >= tails:
                        place += 1 + tile - tails - integers.divide(share_begin(worker, tails, units), tail)
                place = place * row_blocks + rows
                for four in range(FOURS):
                    at = place * fours + cuda.blockIdx.z * FOURS + four
                    vectors.load4(partials, (at * BLOCK + thread) * 4, part, 4 * (u * FOURS + four))
            for u in range(AT_ONCE):
                for i in range(TOTALS):
                    total[i] += part[u * TOTALS + i] if begin + u < n else float32(0)

        row_of_tiles, column_of_tiles, _ = tile_position(int32(whole + tile), tiles_m, tiles_n)
        g = (thread & 31) >> 2
        t = thread & 3
        row = (row_of_tiles * row_blocks + rows) * 64 + (thread >> 5) * 16 + g
        for four in range(FOURS):
            column = column_of_tiles * tile_n + (cuda.blockIdx.z * FOURS + four) * 8 + 2 * t
            for i in range(4):
                y = row + 8 * (i >> 1)
                x = column + (i & 1)
                if y < c.shape[0] and x < c.shape[1]:
                    value = alpha * total[4 * four + i]
                    if adds_to_c:
                        value += widen(c[y, x])
                    c[y, x] = narrow(value, c.dtype)

    return gather
