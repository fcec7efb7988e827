"""What a warp does in a step of k, one stage deep: in which order it multiplies, loads fragments and starts copies.

It is a list of device functions with the same parameters, called one after the other: a loop over registers would have
to be unrolled, and compilers cannot be relied on to do it. A *row* is the products of 16 rows of the warp's part with
all its columns, for 16 steps of k. What the order sees to:

- A row's fragment of a is loaded while the row before is multiplied, into the registers of the row before that; those
  of b in the last row that uses them, each after its last product. Since registers must become free first, no compiler
  moves all loads to one place, and accumulators can take three quarters of all registers.
- The copies of a stage are started a few at a time, in the second 16 steps of k: not all at once, since they fill the
  queue of the memory pipeline, in which loads wait behind them, and not in the first, so that other warps have time to
  read what is overwritten.
- The last row of a stage is multiplied after the wait for the next stage, whose first loads it hides.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, uint32

from numstack.device.ptx import mbarrier, mma
from numstack.kernels.gemm.mma_sync.copies import PANEL, Operand, make_passes
from numstack.kernels.gemm.mma_sync.cut import Tiles

# What all these functions share: a cuda.local.array(N_STATE, int32), the same in all threads but for the first two.
(
    A_FROM, B_FROM,  # elements of the ring from which this lane loads fragments
    WRITING,  # where in the ring the next stage is copied to
    WRITE_BARRIER, WRITE_PARITY,  # its barriers, full and (8 bytes on) empty, and the phase of empty to wait for
    READ_BARRIER,  # the barriers of the stage that fragments are loaded from
    A_EDGE, B_EDGE, DEPTH,  # what is left of m, n and k from the tile's corner on, and from the next stage on
    A_STRIDE, B_STRIDE,  # elements from row to row of the operands
    A_CURSOR, B_CURSOR,  # see copies.make_passes
    STEPS, TILE,  # stages left to copy of a tile
    N_STATE,
) = range(16)  # fmt: skip
A_AT, B_AT, N_AT = range(3)  # elements of the operands where the tile begins


class Steps(NamedTuple):
    """Device functions of (total, a_fragments, b_fragments, ring_U, a, b, at, state).

    Attributes
    ----------
    copy_stage
        Start all copies of a stage.
    load_first
        Load the first fragments of a tile.
    begin
        Multiply the last row of the stage before, and load the first fragments of this one.
    rest
        All other rows of a stage, and the copies of another.
    finish
        Multiply the last row of a tile.
    """

    copy_stage: Any
    load_first: Any
    begin: Any
    rest: Any
    finish: Any


@cache
def make_steps(
    tiles: Tiles, a_tile: Operand, b_tile: Operand, widths: tuple[int, int], is_float16: bool, has_barriers: bool
) -> Steps:
    """The steps of a kernel; kernels that differ in their epilogues share them, which are most of what is compiled."""
    blocks_m, blocks_n, steps_k = tiles.warp_m // 16, tiles.warp_n // 8, tiles.k // 16
    pairs_n = blocks_n // 2  # of blocks of b, which one ldmatrix loads
    strip_pairs, strip_step = tiles.strip // 16, tiles.strip * tiles.warps_n
    a_size = tiles.m * tiles.k
    a_columns, b_columns, b_panel = a_tile.columns, b_tile.columns, b_tile.panel
    a_is_KM, b_is_NK = a_tile.k_is_down, not b_tile.k_is_down
    load_a_block = mma.ldmatrix_x4_trans if a_is_KM else mma.ldmatrix_x4
    load_b_block = mma.ldmatrix_x4 if b_is_NK else mma.ldmatrix_x4_trans
    multiply = mma.mma_m16n8k16_f16 if is_float16 else mma.mma_m16n8k16_bf16
    assert blocks_m % 2 == 0, "fragments of a take turns in two places"

    # Where a lane loads from: along a row of chunks bits of the chunk are flipped, down a panel a constant is added.

    def load_a(s: int, i: int) -> Any:
        """Of the s-th 16 steps of k of a stage, the i-th 16 rows of a."""
        flip, beyond = (i * 16, s * 16 * a_columns) if a_is_KM else (s * 16, i * 16 * a_columns)
        first = i % 2 * 4

        @cuda.jit(device=True)
        def load(total, a_fragments, b_fragments, ring_U, a, b, at, state):
            load_a_block(a_fragments, first, ring_U, (state[A_FROM] ^ flip) + beyond)

        return load

    def load_b(s: int, j: int) -> Any:
        """Of the s-th 16 steps of k of a stage, the j-th 16 of the warp's columns of b."""
        strip, aside = j // strip_pairs, j % strip_pairs * 16
        if b_is_NK:
            flip, beyond = s * 16, (strip * strip_step + aside) * b_columns
        else:
            flip, beyond = aside, strip * (strip_step // PANEL) * b_panel + s * 16 * b_columns
        first = j * 4

        @cuda.jit(device=True)
        def load(total, a_fragments, b_fragments, ring_U, a, b, at, state):
            load_b_block(b_fragments, first, ring_U, (state[B_FROM] ^ flip) + beyond)

        return load

    def product(i: int, j: int) -> Any:
        a_first, b_first, c_first = i % 2 * 4, j * 4, (i * blocks_n + 2 * j) * 4

        @cuda.jit(device=True)
        def multiply_pair(total, a_fragments, b_fragments, ring_U, a, b, at, state):
            multiply(total, c_first, a_fragments, a_first, b_fragments, b_first)
            multiply(total, c_first + 4, a_fragments, a_first, b_fragments, b_first + 2)

        return multiply_pair

    def copy_a(copy: Any) -> Any:
        @cuda.jit(device=True)
        def copy_pass(total, a_fragments, b_fragments, ring_U, a, b, at, state):
            copy(ring_U, state[WRITING], a, at[A_AT], state, A_CURSOR, state[A_STRIDE], state[A_EDGE], state[DEPTH])

        return copy_pass

    def copy_b(copy: Any) -> Any:
        @cuda.jit(device=True)
        def copy_pass(total, a_fragments, b_fragments, ring_U, a, b, at, state):
            start = state[WRITING] + a_size
            copy(ring_U, start, b, at[B_AT], state, B_CURSOR, state[B_STRIDE], state[B_EDGE], state[DEPTH])

        return copy_pass

    @cuda.jit(device=True)
    def wait_until_empty(total, a_fragments, b_fragments, ring_U, a, b, at, state):
        mbarrier.wait(uint32(state[WRITE_BARRIER] + 8), uint32(state[WRITE_PARITY]))

    @cuda.jit(device=True)
    def empty_stage(total, a_fragments, b_fragments, ring_U, a, b, at, state):
        """This warp has loaded the last fragment of a stage."""
        cuda.syncwarp()
        if cuda.threadIdx.x & 31 == 0:
            mbarrier.arrive(uint32(state[READ_BARRIER] + 8))

    def row(s: int, i: int) -> list[Any]:
        is_last = i == blocks_m - 1
        next_s, next_i = ((s + 1) % steps_k, 0) if is_last else (s, i + 1)
        functions = [load_a(next_s, next_i)]
        for j in range(pairs_n):
            functions += [product(i, j)] + ([load_b(next_s, j)] if is_last else [])
        return functions

    n_shares = blocks_m if steps_k > 2 else blocks_m - 1  # the last row of a stage comes later
    copies = [copy_a(x) for x in make_passes(a_tile, widths[0], tiles.threads)]
    copies += [copy_b(x) for x in make_passes(b_tile, widths[1], tiles.threads)]
    rows = [(s, i) for s in range(steps_k) for i in range(blocks_m)]
    rest: list[Any] = []
    for s, i in rows[:-1]:
        rest += [wait_until_empty] if has_barriers and (s, i) == (1, 0) else []
        rest += row(s, i)
        if s == 1:
            rest += copies[i * len(copies) // n_shares : (i + 1) * len(copies) // n_shares]
    rest += [empty_stage] if has_barriers else []
    return Steps(
        copy_stage=_in_turn(copies),
        load_first=_in_turn([load_a(0, 0), *(load_b(0, j) for j in range(pairs_n))]),
        begin=_in_turn(row(*rows[-1])),
        rest=_in_turn(rest),
        finish=_in_turn([product(blocks_m - 1, j) for j in range(pairs_n)]),
    )


def _in_turn(functions: list[Any]) -> Any:
    """A device function that calls others one after the other."""
    while len(functions) > 1:
        pairs = [_both(x, y) for x, y in zip(functions[::2], functions[1::2], strict=False)]
        functions = pairs + functions[2 * len(pairs) :]
    return functions[0]


def _both(first: Any, second: Any) -> Any:
    @cuda.jit(device=True)
    def both(total, a_fragments, b_fragments, ring_U, a, b, at, state):
        first(total, a_fragments, b_fragments, ring_U, a, b, at, state)
        second(total, a_fragments, b_fragments, ring_U, a, b, at, state)

    return both
