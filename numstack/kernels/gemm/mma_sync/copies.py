"""How a block copies tiles of the operands into shared memory, and how they lie there.

A tile lies in *panels*, matrices whose rows have 128 bytes: the 64 deep stage of an operand whose rows run along k is
one, the tile of an operand whose rows run along m or n is cut into several, 64 columns each. Rows consist of 16-byte
chunks, whose order is turned from row to row (xor), so that the eight rows that ``ldmatrix`` reads at once lie in
different banks, and so do those that a warp writes::

    row 0   0 1 2 3 4 5 6 7
    row 1   1 0 3 2 5 4 7 6
    row 2   2 3 0 1 6 7 4 5
    ...

Source: the swizzle is CUTLASS's for sm_75.
"""

from typing import Any, NamedTuple

from numba import cuda, int32, uint16

from numstack.device.ptx import integers, mma

PANEL = 64  # columns at most


def make_swizzle(columns: int) -> Any:
    """A device function: by what the chunks of a row are turned, in a panel of so many columns, 32 or 64.

    All 32 banks are 128 bytes wide: eight rows of 64 elements need eight turns, two rows of 32 share a line.
    """
    shift, turns = (0, 7) if columns == PANEL else (1, 3)

    @cuda.jit(device=True)
    def swizzle(row):
        return (row >> shift) & turns

    return swizzle


class Operand(NamedTuple):
    """How an operand's tile lies in shared memory.

    Attributes
    ----------
    rows, columns : int
        Of a panel.
    panels : int
    k_is_down : bool
        Whether rows run along m or n, and k goes from row to row.
    """

    rows: int
    columns: int
    panels: int
    k_is_down: bool

    @staticmethod
    def of(extent: int, depth: int, *, k_is_down: bool) -> "Operand":
        """That of a tile with so many rows or columns of c, and so deep."""
        if not k_is_down:
            return Operand(extent, depth, 1, False)
        columns = min(extent, PANEL)
        return Operand(depth, columns, extent // columns, True)

    @property
    def panel(self) -> int:
        """Elements of a panel."""
        return self.rows * self.columns


def make_copy(operand: Operand, width: int, threads: int) -> tuple[Any, int]:
    """A device function that copies a part of a tile, ``width`` elements a thread, and into how many it is cut.

    ``copy(tile, start, source, at, state, cursor, stride, edge, depth, number)``: to ``tile[start]`` and on. ``at`` is
    the element of the source where the tile begins, whose rows are ``stride`` apart; ``edge`` rows or columns of c are
    left from there, and ``depth`` of k. ``state[cursor]`` goes along from part to part, which must be copied in order;
    their numbers become constants.
    """
    rows, columns, panels, k_is_down = operand
    chunks = columns // width
    step = threads // chunks
    assert step * chunks == threads and rows % step == 0, "a block must copy a panel in whole parts"
    # Then what a thread copies lies in the same turned column in all parts, and its addresses differ by constants.
    is_regular = step % 8 == 0
    swizzle = make_swizzle(columns)
    copy_by: Any = {8: mma.cp_async_16, 4: mma.cp_async_8, 2: mma.cp_async_4}.get(width)
    nbytes, panel_size = 2 * width, operand.panel

    @cuda.jit(device=True)
    def place_of(row, column):
        return row * columns + (((column >> 3) ^ swizzle(row)) << 3) + (column & 7)

    @cuda.jit(device=True)
    def copy(tile, start, source, at, state, cursor, stride, edge, depth, number):
        down, panel = number // panels * step, number % panels
        aside, beyond = panel * columns, panel * panel_size
        # Computed anew each time: registers are scarce.
        thread = integers.opaque(int32(cuda.threadIdx.x))
        row = int32(thread // chunks)
        column = int32(thread % chunks * width)
        if k_is_down:
            is_inside = row < int32(depth - down) and column < int32(edge - aside)
        else:
            is_inside = row < int32(edge - down) and column < depth
        if is_regular:
            place = start + place_of(row, column) + (beyond + down * columns)
        else:
            place = start + place_of(row + down, column) + beyond
        if number == 0:
            state[cursor] = integers.add(integers.multiply(row, stride), column)
        elif panel == 0:
            state[cursor] += integers.multiply(stride, int32(step))
        first = at + state[cursor] + aside
        if width == 1:
            tile[place] = source[first] if is_inside else uint16(0)
        else:
            copy_by(tile, place, source, first, nbytes if is_inside else 0)

    return copy, rows // step * panels
