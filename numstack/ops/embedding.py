"""Rows of a table chosen by ids."""

from __future__ import annotations

import numpy as np

from numstack import memory
from numstack.autograd import Node, is_recorded, record
from numstack.errors import ShapeError
from numstack.kernels import dropout as dropout_kernels
from numstack.kernels import embedding as kernels
from numstack.ops import ids
from numstack.ops.dropout import Dropout
from numstack.tensor import Tensor


def embedding(
    tokens: np.ndarray | Tensor,
    token_table: Tensor,
    position_table: Tensor | None = None,
    *,
    n_ids: int | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """dropout(token_table[tokens] + position_table[position]).

    Parameters
    ----------
    tokens : integer array or int32 Tensor, shape (B, T)
        Ids; an array on the host is checked and copied to the device.
    token_table : Tensor, shape (V, C)
    position_table : Tensor, shape (at least T, C), optional
    n_ids : int, optional
        How many rows of ``token_table`` belong to ids, if not all V: those after them are padding.
    dropout : Dropout, optional

    Returns
    -------
    Tensor, shape (B, T, C)
        In the format of ``token_table``.

    Raises
    ------
    ShapeError
        If shapes do not fit, or there are more positions than rows in ``position_table``.
    DataError
        If an id on the host is not below ``n_ids``.
    """
    if token_table.ndim != 2 or len(tokens.shape) != 2:
        raise ShapeError(
            f"embedding: tokens have shape {tokens.shape} and token_table {token_table.shape}; "
            "expected (B, T) and (V, C)"
        )
    n_rows, n_channels = token_table.shape
    n_batch, n_time = tokens.shape
    if position_table is not None:
        if position_table.ndim != 2 or position_table.shape[1] != n_channels:
            raise ShapeError(
                f"embedding: position_table has shape {position_table.shape} but token_table {token_table.shape}; "
                "make their second axes equal"
            )
        if n_time > position_table.shape[0]:
            raise ShapeError(
                f"embedding: {n_time} tokens in a sequence, but position_table {position_table.shape} has "
                f"{position_table.shape[0]} positions; cut the sequences"
            )
    tokens_BT = ids.to_device("embedding", "tokens", tokens, n_rows if n_ids is None else n_ids).array
    # The kernels want exactly T positions: the rows that are used.
    positions_TC = None if position_table is None else position_table.array[:n_time]
    has_positions = position_table is not None
    out = memory.empty((n_batch, n_time, n_channels), token_table.array.dtype, scope="forward")
    groups = None  # of the tokens, which backward adds by
    if is_recorded(token_table, position_table):
        groups = memory.empty((kernels.groups_size(n_batch, n_time, n_rows),), np.int32, scope="forward")
    kernels.forward(tokens_BT, token_table.array, positions_TC, out, groups)
    if dropout is not None:
        dropout_kernels.forward(out, out, p=dropout.p, seed=dropout.seed, offset=0)

    def backward(node: Node) -> None:
        if dropout is not None:
            dropout_kernels.backward(node.gradient, node.gradient, p=dropout.p, seed=dropout.seed, offset=0)
        dtokens_VC = node.add_into(0)
        dpositions_TC = node.add_into(1)[:n_time] if has_positions else None
        assert groups is not None  # as there is a node
        kernels.backward(tokens_BT, node.gradient, dtokens_VC, dpositions_TC, groups)

    return record("embedding", out, (token_table, position_table), backward)
