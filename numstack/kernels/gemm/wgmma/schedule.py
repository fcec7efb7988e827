"""Which tile of c a block works on, and when: tiles are numbered so that those worked on together share operands."""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32

from numstack.device.ptx import integers
from numstack.kernels.launch import ceil_div

SHORTEST_PART = 8  # steps of k: shorter parts cost more to store and gather than they save
PART_STEPS = 9  # what storing a part and starting on another costs, in steps


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


@cache
def make_piece(spread: bool) -> Any:
    """A device function for the i-th piece of a worker's work: a tile, or a part of one.

    It returns the tile's number (-1: there is no such piece), its first and last step, and a part's place in the
    workspace (else -1). See Plan for the numbers.
    """

    @cuda.jit(device=True)
    def piece(i, worker, workers, whole, steps, rest, heads, head, tails, slots):
        number = integers.add(worker, integers.multiply(i, workers))
        if number < whole:
            return number, int32(0), steps, int32(-1)
        if not spread or rest == 0:
            return int32(-1), int32(0), int32(0), int32(-1)
        mine = integers.subtract(i, integers.divide(whole, workers))
        n_heads = integers.multiply(heads, rest)
        if worker < n_heads:
            part = integers.divide(worker, rest)
            number = integers.add(whole, integers.subtract(worker, integers.multiply(part, rest)))
            begin = integers.multiply(part, head)
            end = steps if tails == 0 and part == heads - 1 else integers.add(begin, head)
            return number if mine == 0 else int32(-1), begin, end, worker
        own = integers.subtract(worker, n_heads)
        tail_begin = integers.multiply(heads, head)
        place = integers.add(integers.add(n_heads, integers.multiply(own, slots)), mine)
        if mine == 0:
            return integers.add(whole, own), tail_begin, steps, place
        tail = integers.subtract(steps, tail_begin)
        units = integers.multiply(integers.subtract(rest, tails), tail)
        unit = share_begin(own, tails, units)
        unit_end = share_begin(integers.add(own, int32(1)), tails, units)
        shared = integers.subtract(integers.add(integers.divide(unit, tail), mine), int32(1))  # which of those tiles
        first = integers.multiply(shared, tail)
        begin = int32(max(unit, first))
        end = int32(min(unit_end, integers.add(first, tail)))
        number = integers.add(integers.add(whole, tails), shared) if begin < end else int32(-1)
        offset = integers.subtract(tail_begin, first)
        return number, integers.add(begin, offset), integers.add(end, offset), place

    return piece


class Plan(NamedTuple):
    """How W workers share the tiles of c, each a sum over K steps.

    First whole tiles, W at a time. R < W tiles are left; each is cut along k into ``heads`` parts of ``head`` steps and
    a tail. A worker has one head: those that work on the same stretch of k at the same time find what they load in the
    L2 cache. E workers are left for the R tails: each takes one of the first E tails, then its share of the steps of
    the others. Heads are as long as lets all workers end together, what storing parts takes included.

    Attributes
    ----------
    whole : int
        Tiles that are not cut.
    steps : int
        K.
    rest : int
        R; 0 if all tiles are whole.
    heads, head : int
    tails : int
        E; 0 if the heads fill all workers, and then the last head has the rest of the steps.
    slots : int
        Parts that a worker with tails may have.
    """

    whole: int
    steps: int
    rest: int
    heads: int
    head: int
    tails: int
    slots: int

    @property
    def parts(self) -> int:
        """Room for parts that a workspace needs."""
        return self.heads * self.rest + self.tails * self.slots

    @property
    def longest(self) -> int:
        """Steps of the worker that has most to do of the tiles that are cut, with what storing its parts takes."""
        if not self.rest:
            return 0
        if not self.tails:
            return max(self.head, self.steps - (self.heads - 1) * self.head) + PART_STEPS
        tail = self.steps - self.heads * self.head
        shared = ceil_div((self.rest - self.tails) * tail, self.tails)
        parts = 1 + ceil_div(self.rest - self.tails, self.tails)
        return max(self.head + PART_STEPS, tail + shared + parts * PART_STEPS)


def make_plan(tiles: int, steps: int, workers: int, spread: bool) -> Plan:
    """Cut the tiles that are left over if asked to, and if their parts are of some length."""
    rest = tiles % workers
    uncut = Plan(tiles, steps, 0, 0, 0, 0, 0)
    if not spread or not rest:
        return uncut
    heads = workers // rest
    tails = workers - heads * rest
    slots = 1 + ceil_div(rest - tails, tails) + 1 if tails else 1
    plans = []
    for head in range(max(SHORTEST_PART, rest * steps // workers), ceil_div(steps, heads) + 1):
        left = steps - heads * head if tails else steps - (heads - 1) * head  # of a tail, or of the last head
        if left >= (1 if tails else SHORTEST_PART) and (rest - tails) * left >= tails:
            plans.append(Plan(tiles - rest, steps, rest, heads, head, tails, slots))
    return min(plans, key=lambda plan: plan.longest, default=uncut)
