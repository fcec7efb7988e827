"""How positions of a batch are grouped by token: what :mod:`numstack.kernels.embedding_groups` makes.

A position n = b T + t is time t of text b; a *place* t B + b puts positions in the order of times, and of texts of a
time. A *tile* is up to ROWS texts of a time. ``groups`` is one array of int32; :func:`layout` says where its parts
begin:

header
    NEXT_ITEM, NEXT_FREQUENT: what blocks of a backward kernel have claimed; zero before it, and after it again.
    N_FREQUENT: tokens with more than MANY positions.
order_N
    Positions of each token side by side, by place.
frequent
    Token, start and count of each token with more than MANY positions, OF_FREQUENT words each.
plans
    Of each tile, by time and then by texts, PLAN words: N_FEW rows of the table whose first position is in the tile
    and that have up to FEW, and N_MANY that have more, up to MANY. Then WORDS_OF_ROW words at each of ROWS places: the
    former from the first place on, the latter from the last one back. TOKEN; COUNT, 32 times the positions plus the row
    of the tile; START in the order; and MEMBER, what the order has next to the first, or 0 if there is only one.
scratch
    Of whoever makes groups.

Tokens outside [0, V) are in no group. In what order rows of a plan and frequent tokens come, and whose positions lie
where in the order, has no bearing on a sum.
"""

from typing import NamedTuple

from numstack.device import Array
from numstack.kernels.launch import ceil_div
from numstack.kernels.warp import WARP

ROWS = WARP
FEW = 8
MANY = 32
NEXT_ITEM, N_FREQUENT, NEXT_FREQUENT = 0, 1, 2
HEADER = 32
OF_FREQUENT = 4
N_FEW, N_MANY = 0, 1
HEAD_OF_TILE = 4
TOKEN, COUNT, START, MEMBER = 0, 1, 2, 3
WORDS_OF_ROW = 4
PLAN = HEAD_OF_TILE + ROWS * WORDS_OF_ROW


class Layout(NamedTuple):
    """Where parts of ``groups`` begin, in words; plans at a multiple of 16 bytes."""

    order: int
    frequent: int
    plans: int
    scratch: int
    size: int


def layout(B: int, T: int, V: int) -> Layout:
    """For T tokens of each of B texts, and V rows of the table."""
    N = B * T
    sizes = (N, OF_FREQUENT * (N // (MANY + 1)), T * ceil_div(B, ROWS) * PLAN, 2 * N + 2 * V)
    begins = [HEADER]
    for size in sizes:
        begins.append(4 * ceil_div(begins[-1] + size, 4))
    return Layout(*begins)


def parts(groups: Array, B: int, T: int, V: int) -> tuple[Array, Array, Array, Array]:
    """Header, order, frequent and plans of groups."""
    at = layout(B, T, V)
    frequent, plans = groups[at.frequent : at.plans], groups[at.plans : at.scratch]
    return groups[:HEADER], groups[at.order :][: B * T], frequent, plans
