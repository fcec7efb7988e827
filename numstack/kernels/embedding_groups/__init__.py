"""Positions of a batch grouped by token, by which an embedding's gradient is summed: see
:mod:`numstack.kernels.embedding`, and for what ``groups`` has, :mod:`numstack.kernels.embedding_groups.format`.

Ladder: ``counting_sort`` counts the tokens, in which each position learns how many of its token came before it; lets
the first of each token take as much of the order as its token needs; puts places there as they come; and has each
position find its rank among its token's by comparing it with all. So what lies where is left to chance, and what it
says is not. The comparisons are the sum of squared group sizes: few for words, many where most tokens are the same.

On Hopper ``cluster`` (:mod:`numstack.kernels.embedding_groups.cluster`) does all in one kernel of eight blocks, so that
another has the other multiprocessors to itself: beside forward's, 32 x 1024 tokens cost 1 to 2 microseconds of an H200.
Five small kernels, each waiting for the one ahead, are as soon over (18 us), but who starts behind them starts 8 us
later. The same steps by one cluster, in global memory, take 45 us: eight multiprocessors wait too long for it.
"""

import numpy as np

from numstack.device import Array, Stream
from numstack.errors import ConfigError
from numstack.kernels.embedding_groups import cluster, counting_sort
from numstack.kernels.embedding_groups.format import layout
from numstack.kernels.launch import are_aligned, check_contiguous, check_dtype, check_ndim, check_workspace
from numstack.kernels.variants import Variant, Variants


def _takes_cluster(groups: Array, B: int, T: int, V: int) -> bool:
    return are_aligned(groups) and cluster.takes(B, T, V)


GROUP = Variants(
    "embedding.group",
    [
        Variant("counting_sort", counting_sort.group, note="Count, allot, fill, and sort by comparing."),
        Variant("cluster", cluster.group, "All in the shared memory of eight blocks.", _takes_cluster, "sm_90a"),
    ],
)


def group(tokens_BT: Array, groups: Array, V: int, *, variant: str | None = None, stream: Stream | None = None) -> None:
    """Group the positions of a batch by token.

    Parameters
    ----------
    tokens_BT : array, shape (B, T), int32, C-contiguous
        Those outside [0, V) are in no group.
    groups : array, one axis, int32
        At least ``layout(B, T, V).size`` elements, whatever they hold. Without positions it is left as it is.
    V : int
        Rows of the table, at least 1.
    variant : str, optional
        A name of ``GROUP``.

    Raises
    ------
    ShapeError, DTypeError
        If tokens_BT has not two axes of int32, or groups is too small.
    ConfigError
        If V is out of range.

    Notes
    -----
    Workspace: none but groups. Deterministic: order within a token, and what plans say but for
    starts and the order of rows, that have no bearing on a sum.
    """
    check_ndim("embedding.group", 2, tokens_BT=tokens_BT)
    check_dtype("embedding.group", np.int32, tokens_BT=tokens_BT)
    check_contiguous("embedding.group", tokens_BT=tokens_BT)
    if not 1 <= V < 1 << 31:
        raise ConfigError(f"embedding.group: V={V!r}; give the number of the table's rows, from 1 to 2^31 - 1")
    B, T = tokens_BT.shape
    check_workspace("embedding.group", groups, layout(B, T, V).size, np.int32, "groups")
    if B * T > 0:
        GROUP.pick(variant, groups, B, T, V).launch(tokens_BT, groups, V, stream)
