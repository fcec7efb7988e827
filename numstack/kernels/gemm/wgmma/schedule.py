"""Which tile of c a block works on, and when: tiles are numbered so that those worked on together share operands."""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32

from numstack.device.ptx import integers
from numstack.kernels.launch import ceil_div

SHORTEST_PART = 8  # steps of k: shorter parts cost more to store and gather than they save


@cache
def make_tile_position(group: int, is_batch: bool) -> Any:
    """A device function from a tile's number to its row and column of tiles, and the matrix of a batch.

    Tiles go down ``group`` rows, then to the next column, and when all columns are done to the next ``group`` rows.
    """
    rows_of_group = int32(group)

    @cuda.jit(device=True)
    def tile_position(tile, tiles_m, tiles_n):
        matrix = int32(0)
        if is_batch:
            of_matrix = integers.multiply(tiles_m, tiles_n)
            matrix = integers.divide(tile, of_matrix)
            tile = integers.subtract(tile, integers.multiply(matrix, of_matrix))
        in_group = integers.multiply(rows_of_group, tiles_n)
        number = integers.divide(tile, in_group)
        first_row = integers.multiply(number, rows_of_group)
        rest = integers.subtract(tile, integers.multiply(number, in_group))
        rows = int32(min(rows_of_group, integers.subtract(tiles_m, first_row)))
        column = integers.divide(rest, rows)
        row = integers.add(first_row, integers.subtract(rest, integers.multiply(column, rows)))
        return row, column, matrix

    return tile_position


@cuda.jit(device=True)
def share_begin(worker, workers, units):
    """Where the worker's share of ``units`` starts, if they are cut evenly; less than 2**31 / workers of them."""
    return integers.divide(integers.multiply(worker, units), workers)


class Plan(NamedTuple):
    """How W workers share the tiles of c, each a sum over K steps.

    First whole tiles, W at a time. R < W tiles are left; each is cut along k into ``heads`` parts of ``head`` steps and
    a tail. A worker has one head: those that work on the same stretch of k at the same time find what they load in the
    L2 cache. E workers are left for the R tails: each takes one of the first E tails, then its share of the steps of
    the others, so that all workers have as many steps in the end.

    Attributes
    ----------
    whole : int
        Tiles that are not cut.
    rest : int
        R; 0 if all tiles are whole.
    heads, head : int
    tails : int
        E; 0 if the heads fill all workers, and then the last head has the rest of the steps.
    slots : int
        Parts that a worker with tails may have.
    """

    whole: int
    rest: int
    heads: int
    head: int
    tails: int
    slots: int

    @property
    def parts(self) -> int:
        """Room for parts that a workspace needs."""
        return self.heads * self.rest + self.tails * self.slots


def make_plan(tiles: int, k_steps: int, workers: int, spread: bool) -> Plan:
    """Cut the tiles that are left over if asked to, and if their parts are of some length."""
    rest = tiles % workers
    heads = workers // rest if rest else 0
    head = rest * k_steps // workers
    tails = workers - heads * rest
    shared_steps = (rest - tails) * (k_steps - heads * head)  # of the tails that several workers share
    if not spread or not rest or head < SHORTEST_PART or shared_steps < tails:
        return Plan(tiles, 0, 0, 0, 0, 0)
    shares = ceil_div(rest - tails, tails) + 1 if tails else 0
    return Plan(tiles - rest, rest, heads, head, tails, 1 + shares)
