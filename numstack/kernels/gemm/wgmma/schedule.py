"""Which tile of c a block works on, and when: tiles are numbered so that those worked on together share operands."""

from functools import cache
from typing import Any

from numba import cuda, int32

from numstack.device.ptx import integers


@cache
def make_tile_position(group: int) -> Any:
    """A device function from a tile's number to its row and column of tiles.

    Tiles go down ``group`` rows, then to the next column, and when all columns are done to the next ``group`` rows.
    """
    rows_of_group = int32(group)

    @cuda.jit(device=True)
    def tile_position(tile, tiles_m, tiles_n):
        in_group = integers.multiply(rows_of_group, tiles_n)
        number = integers.divide(tile, in_group)
        first_row = integers.multiply(number, rows_of_group)
        rest = integers.subtract(tile, integers.multiply(number, in_group))
        rows = int32(min(rows_of_group, integers.subtract(tiles_m, first_row)))
        column = integers.divide(rest, rows)
        row = integers.add(first_row, integers.subtract(rest, integers.multiply(column, rows)))
        return row, column

    return tile_position


@cuda.jit(device=True)
def share_begin(worker, workers, units):
    """Where the worker's share of ``units`` starts, if they are cut evenly; less than 2**31 / workers of them."""
    return integers.divide(integers.multiply(worker, units), workers)
