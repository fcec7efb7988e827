"""What a warp does in a step of k, one stage deep: in which order it multiplies, loads fragments and starts copies.

Registers are numbered by constants, so that a loop over them would have to be unrolled, and compilers cannot be relied
on to do it. So device functions call each other (:func:`repeated`, :func:`in_turn`): few of them, since numba takes a
few hundredths of a second for each. A *row* is the products of 16 rows of the warp's part with all its columns, for 16
steps of k. What the order sees to:

- A row's fragment of a is loaded while the row before is multiplied, into the registers of the row before that; those
  of b in the last row that uses them, each after its last product. Since registers must become free first, no compiler
  moves all loads to one place, and accumulators can take three quarters of all registers.
- Copies of a stage that warps start themselves are started a few at a time, in the second 16 steps of k: all at once
  they would fill the queue of the memory pipeline, in which loads wait behind them.
- The last row of a stage is multiplied after the wait for the next stage, whose first loads it hides.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, int32, int64, uint32

from numstack.device.ptx import mbarrier, mma
from numstack.kernels.gemm.mma_sync.copies import PANEL, Operand, make_copy, make_swizzle
from numstack.kernels.gemm.mma_sync.cut import ROWS, Tiles

# What all these functions share: a cuda.local.array(N_STATE, int32), the same in all threads but for the first two.
(
    A_FROM, B_FROM,  # elements of the ring from which this lane loads fragments
    EMPTY,  # the barrier on which warps arrive that have read the stage; none where a block meets at each
    WRITING,  # where in the ring the next stage is copied to
    A_EDGE, B_EDGE, DEPTH,  # what is left of m, n and k from the tile's corner on, and from the next stage on
    A_STRIDE, B_STRIDE,  # elements from row to row of the operands
    A_CURSOR, B_CURSOR,  # see copies.make_copy
    STEPS, TILE,  # stages left to copy of a tile
    N_STATE,
) = range(14)  # fmt: skip
A_AT, B_AT, N_AT = range(3)  # elements of the operands where the tile begins


class Steps(NamedTuple):
    """Device functions of (total, a_fragments, b_fragments, ring_U, a, b, at, state, x, y).

    Attributes
    ----------
    copy_stage
        Start all copies of a stage; None if the copy engine makes them.
    enter
        Load the first fragments of a stage, the x-th of a tile, and multiply the last row of the one before.
    rest
        All other rows of a stage, and the copies of another; then the stage is read.
    finish
        Multiply the last row of a tile.
    """

    copy_stage: Any
    enter: Any
    rest: Any
    finish: Any


def make_lane_starts(tiles: Tiles, a_tile: Operand, b_tile: Operand) -> Any:
    """A device function: where in a stage the rows of a and b begin that this lane names to ldmatrix.

    Of the first block of its warp's part; loads find others by what they add to it, or which bits they flip.
    """
    strip, warps_n, a_size = tiles.strip, tiles.warps_n, tiles.m * tiles.k
    a_columns, b_columns, a_panel, b_panel = a_tile.columns, b_tile.columns, a_tile.panel, b_tile.panel
    a_is_KM, b_is_NK = a_tile.k_is_down, not b_tile.k_is_down
    swizzle_a, swizzle_b = make_swizzle(a_columns), make_swizzle(b_columns)

    @cuda.jit(device=True)
    def lane_starts():
        lane = cuda.threadIdx.x & 31
        warp_i = (cuda.threadIdx.x >> 5) // warps_n * ROWS
        warp_j = (cuda.threadIdx.x >> 5) % warps_n * strip
        low = lane & 15
        high = lane >> 4
        near = (lane & 7) + (high << 3)
        far = (lane >> 3) & 1
        if a_is_KM:
            chunk = (warp_i % a_columns >> 3) + far
            a_lane = int32(warp_i // a_columns * a_panel + near * a_columns + ((chunk ^ swizzle_a(near)) << 3))
        else:
            a_lane = int32((warp_i + low) * a_columns + ((high ^ swizzle_a(low)) << 3))
        if b_is_NK:
            b_lane = int32(a_size + (warp_j + near) * b_columns + ((far ^ swizzle_b(near)) << 3))
        else:
            chunk = (warp_j % PANEL >> 3) + high
            b_lane = int32(a_size + warp_j // PANEL * b_panel + low * b_columns + ((chunk ^ swizzle_b(low)) << 3))
        return a_lane, b_lane

    return lane_starts


@cache
def make_steps(
    tiles: Tiles, a_tile: Operand, b_tile: Operand, is_float16: bool, widths: tuple[int, int] | None
) -> Steps:
    """The steps of a kernel; kernels that differ in their epilogues share them, which are most of what is compiled.

    ``widths``: elements by which warps copy a and b; None if the copy engine does.
    """
    blocks_m, blocks_n, steps_k = tiles.warp_m // 16, tiles.warp_n // 8, tiles.k // 16
    pairs_n = blocks_n // 2  # of blocks of b, which one ldmatrix loads
    strip_pairs, strip_step = tiles.strip // 16, tiles.strip * tiles.warps_n
    a_size = tiles.m * tiles.k
    row_step = ROWS * tiles.warps_m
    a_columns, b_columns, a_panel, b_panel = a_tile.columns, b_tile.columns, a_tile.panel, b_tile.panel
    a_is_KM, b_is_NK = a_tile.k_is_down, not b_tile.k_is_down
    load_a_block = mma.ldmatrix_x4_trans if a_is_KM else mma.ldmatrix_x4
    load_b_block = mma.ldmatrix_x4 if b_is_NK else mma.ldmatrix_x4_trans
    multiply = mma.mma_m16n8k16_f16 if is_float16 else mma.mma_m16n8k16_bf16
    assert tiles.warp_m % ROWS == 0, "strips are whole, and fragments of a take turns in two places"
    last = blocks_m - 1

    # Where a lane loads from: along a row of chunks bits of the chunk are flipped, down a panel a constant is added.

    @cuda.jit(device=True)
    def load_a(a_fragments, ring_U, state, s, i):
        """Of the s-th 16 steps of k of a stage, the i-th 16 rows of a."""
        strip, aside = i // 2, i % 2 * 16
        if a_is_KM:
            element = (state[A_FROM] ^ aside) + strip * (row_step // PANEL * a_panel) + s * (16 * a_columns)
        else:
            element = (state[A_FROM] ^ (s * 16)) + (strip * row_step + aside) * a_columns
        load_a_block(a_fragments, i % 2 * 4, ring_U, element)

    @cuda.jit(device=True)
    def load_b(b_fragments, ring_U, state, s, j):
        """Of the s-th 16 steps of k of a stage, the j-th 16 of the warp's columns of b."""
        strip, aside = j // strip_pairs, j % strip_pairs * 16
        if b_is_NK:
            element = (state[B_FROM] ^ (s * 16)) + (strip * strip_step + aside) * b_columns
        else:
            element = (state[B_FROM] ^ aside) + strip * (strip_step // PANEL * b_panel) + s * (16 * b_columns)
        load_b_block(b_fragments, j * 4, ring_U, element)

    @cuda.jit(device=True)
    def multiply_pair(total, a_fragments, b_fragments, i, j):
        multiply(total, (i * blocks_n + 2 * j) * 4, a_fragments, i % 2 * 4, b_fragments, j * 4)
        multiply(total, (i * blocks_n + 2 * j + 1) * 4, a_fragments, i % 2 * 4, b_fragments, j * 4 + 2)

    # From here on all have the same parameters, so that one can call any other; what x and y are is theirs.

    @cuda.jit(device=True)
    def multiply_in_row(total, a_fragments, b_fragments, ring_U, a, b, at, state, x, y):
        multiply_pair(total, a_fragments, b_fragments, x, y)

    @cuda.jit(device=True)
    def multiply_and_replace(total, a_fragments, b_fragments, ring_U, a, b, at, state, x, y):
        multiply_pair(total, a_fragments, b_fragments, int64(last), y)
        load_b(b_fragments, ring_U, state, x, y)

    @cuda.jit(device=True)
    def first_b(total, a_fragments, b_fragments, ring_U, a, b, at, state, x, y):
        load_b(b_fragments, ring_U, state, x, y)

    multiply_row, multiply_and_replace_row = repeated(multiply_in_row, pairs_n), repeated(multiply_and_replace, pairs_n)
    every_first_b = repeated(first_b, pairs_n)

    @cuda.jit(device=True)
    def begin(total, a_fragments, b_fragments, ring_U, a, b, at, state, x, y):
        """The last row of the 16 steps before the x-th, and the first fragments of the x-th."""
        load_a(a_fragments, ring_U, state, x, int64(0))
        multiply_and_replace_row(total, a_fragments, b_fragments, ring_U, a, b, at, state, x, int64(0))

    @cuda.jit(device=True)
    def enter(total, a_fragments, b_fragments, ring_U, a, b, at, state, x, y):
        if x > 0:
            begin(total, a_fragments, b_fragments, ring_U, a, b, at, state, int64(0), int64(0))
        else:
            load_a(a_fragments, ring_U, state, int64(0), int64(0))
            every_first_b(total, a_fragments, b_fragments, ring_U, a, b, at, state, int64(0), int64(0))

    @cuda.jit(device=True)
    def row(total, a_fragments, b_fragments, ring_U, a, b, at, state, x, y):
        """Row y of the x-th 16 steps, which is not the last one."""
        load_a(a_fragments, ring_U, state, x, y + 1)
        multiply_row(total, a_fragments, b_fragments, ring_U, a, b, at, state, y, int64(0))

    @cuda.jit(device=True)
    def finish(total, a_fragments, b_fragments, ring_U, a, b, at, state, x, y):
        multiply_row(total, a_fragments, b_fragments, ring_U, a, b, at, state, int64(last), int64(0))

    @cuda.jit(device=True)
    def leave_stage(total, a_fragments, b_fragments, ring_U, a, b, at, state, x, y):
        """This warp has loaded the last fragment of a stage."""
        cuda.syncwarp()
        if cuda.threadIdx.x & 31 == 0:
            mbarrier.arrive(uint32(state[EMPTY]))

    all_rows = repeated(row, last)
    if widths is None:
        calls = [Call(all_rows, 0, 0)]
        for s in range(1, steps_k):
            calls += [Call(begin, s, 0), Call(all_rows, s, 0)]
        return Steps(None, enter, in_turn([*calls, Call(leave_stage, 0, 0)]), finish)

    copy_of_a, a_passes = make_copy(a_tile, widths[0], tiles.threads)
    copy_of_b, b_passes = make_copy(b_tile, widths[1], tiles.threads)

    @cuda.jit(device=True)
    def copy_pass(total, a_fragments, b_fragments, ring_U, a, b, at, state, x, y):
        if y < a_passes:
            copy_of_a(
                ring_U, state[WRITING], a, at[A_AT], state, A_CURSOR, state[A_STRIDE], state[A_EDGE], state[DEPTH], y
            )
        else:
            start = state[WRITING] + a_size
            copy_of_b(
                ring_U, start, b, at[B_AT], state, B_CURSOR, state[B_STRIDE], state[B_EDGE], state[DEPTH], y - a_passes
            )

    def share(i: int) -> list[Call]:
        """The i-th of the shares in which copies are started."""
        first, end = (x * (a_passes + b_passes) // n_shares for x in (i, i + 1))
        return [Call(repeated(copy_pass, end - first), 0, first)] if end > first else []

    n_shares = blocks_m if steps_k > 2 else last  # the last row of a stage comes later
    calls = [Call(all_rows, 0, 0), Call(begin, 1, 0)]
    for i in range(last):
        calls += [Call(row, 1, i), *share(i)]
    for s in range(2, steps_k):
        calls += [Call(begin, s, 0), *(share(last) if s == 2 else []), Call(all_rows, s, 0)]
    return Steps(repeated(copy_pass, a_passes + b_passes), enter, in_turn(calls), finish)


@cache
def repeated(function: Any, count: int) -> Any:
    """A device function that calls another with y, y + 1...: of each length one, in halves, so that they are few."""
    if count == 1:
        return function
    half = count // 2
    before, after = repeated(function, half), repeated(function, count - half)

    @cuda.jit(device=True)
    def both(total, a_fragments, b_fragments, ring_U, a, b, at, state, x, y):
        before(total, a_fragments, b_fragments, ring_U, a, b, at, state, x, y)
        after(total, a_fragments, b_fragments, ring_U, a, b, at, state, x, y + half)

    return both


class Call(NamedTuple):
    """A device function with its x and y."""

    function: Any
    x: int
    y: int


def in_turn(calls: list[Call]) -> Any:
    """A device function that makes these calls, whatever its own x and y."""
    while len(calls) > 1:
        pairs = [Call(_both(first, second), 0, 0) for first, second in zip(calls[::2], calls[1::2], strict=False)]
        calls = pairs + calls[2 * len(pairs) :]
    return calls[0].function


def _both(first: Call, second: Call) -> Any:
    (call_first, first_x, first_y), (call_second, second_x, second_y) = first, second

    @cuda.jit(device=True)
    def both(total, a_fragments, b_fragments, ring_U, a, b, at, state, x, y):
        call_first(total, a_fragments, b_fragments, ring_U, a, b, at, state, int64(first_x), int64(first_y))
        call_second(total, a_fragments, b_fragments, ring_U, a, b, at, state, int64(second_x), int64(second_y))

    return both
