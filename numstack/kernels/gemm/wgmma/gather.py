"""The second kernel of a product whose last tiles were cut along k: adds the parts of each tile, in the order of k.

Workers cut the steps of the tiles that are left evenly, so that a tile has parts of two workers or more. A part lies in
the workspace as its warpgroup held it, registers by fours, so that both kernels move 16 bytes a thread.
"""

from functools import cache
from typing import NamedTuple

from numba import cuda, float32, int32

from numstack.device import Kernel, kernel, narrow, widen
from numstack.device.ptx import integers, vectors
from numstack.kernels.gemm.wgmma.config import CONSUMERS, Config
from numstack.kernels.gemm.wgmma.schedule import make_tile_position, share_begin

BLOCK = 128  # a warpgroup
FOURS = 4  # of 16 bytes, that a thread gathers
TOTALS = 4 * FOURS


class Gathered(NamedTuple):
    """Constants of the kernel's source."""

    name: str
    adds_to_c: bool


@cache
def make_gather(form: Gathered, config: Config) -> Kernel:
    """The kernel that adds the parts of tiles cut by ``config``."""
    blocks, tile_m, tile_n = config.cluster, config.tile_m, config.tile_n
    fours = tile_n // 2 // 4
    adds_to_c = form.adds_to_c
    tile_position = make_tile_position(config.group)

    @kernel(name=form.name)
    def gather(partials, c, tiles_m, tiles_n, tiles, whole, k_steps, workers, alpha):
        rest = int32(cuda.blockIdx.x)
        block = int32(cuda.blockIdx.y // CONSUMERS)
        consumer = int32(cuda.blockIdx.y % CONSUMERS)
        thread = int32(cuda.threadIdx.x)
        units = integers.multiply(integers.subtract(tiles, whole), k_steps)
        begin = integers.multiply(rest, k_steps)
        first = integers.divide(int32((begin + 1) * workers - 1), units)
        last = integers.divide(int32((begin + k_steps) * workers - 1), units)
        if first != last:
            row_of_tiles, column_of_tiles = tile_position(int32(whole + rest), tiles_m, tiles_n)
            g = (thread & 31) >> 2
            t = thread & 3
            row = (row_of_tiles * blocks + block) * tile_m + consumer * (tile_m // CONSUMERS) + (thread >> 5) * 16 + g
            part = cuda.local.array(4, float32)
            total = cuda.local.array(TOTALS, float32)
            for i in range(TOTALS):
                total[i] = float32(0)
            for worker in range(first, last + 1):
                its_begin = share_begin(int32(worker), workers, units)
                its_tile = integers.divide(its_begin, k_steps)
                is_cut = its_begin != integers.multiply(its_tile, k_steps)
                which = 1 if is_cut and its_tile != rest else 0
                place = ((worker * blocks + block) * 2 + which) * CONSUMERS + consumer
                for four in range(FOURS):
                    number = place * fours + cuda.blockIdx.z * FOURS + four
                    vectors.load4(partials, (number * BLOCK + thread) * 4, part, 0)
                    for i in range(4):
                        total[4 * four + i] += part[i]
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
