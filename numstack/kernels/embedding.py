"""Embedding: rows of a table picked by tokens, plus a row for each position.

Forward, for batch b, time t, channel c::

    out_btc = token_table[tokens_bt, c] + position_table[t, c]

Backward, added to what the gradients hold::

    dtoken_table[v, c]    += sum over (b, t) with tokens_bt = v of dout_btc
    dposition_table[t, c] += sum_b dout_btc

A token outside [0, V) gives a row of NaN in out and no gradient, and no access outside the table: the host checks
tokens before they get here, and the NaN watch sees what slips through.

Both sums are in the order of positions, or a fixed one: equal bits in every run.

Which positions have the same token is found out in the forward pass (:mod:`numstack.kernels.embedding_groups`): tokens
are all there is to know, and a kernel that groups them runs beside the one that reads their rows, almost for nothing.
What it leaves, ``groups``, is for backward.

Backward ladder: ``scan`` has a thread for each element of the table, which looks through all tokens: V x N comparisons.
``row_per_warp`` goes by groups: a warp adds, one by one, the rows of dout that have a token. On GPUs ``rows_of_groups``
(:mod:`numstack.kernels.embedding_rows`) has rows of the table and of dout under way together; both leave the positions
to a kernel of their own. On Hopper ``tiles_of_times`` (:mod:`numstack.kernels.embedding_tiles`) reads dout once for
both. Forward has a variant by vectors of 16 bytes (:mod:`numstack.kernels.embedding_vectors`).
"""

import math

import numpy as np
from numba import cuda, float32, from_dtype

from numstack.device import Array, Stream, current_device, kernel, narrow, widen
from numstack.kernels import embedding_rows as rows
from numstack.kernels import embedding_tiles as tiles
from numstack.kernels import embedding_vectors as by_vectors
from numstack.kernels.embedding_groups import group
from numstack.kernels.embedding_groups.format import (
    COUNT,
    HEAD_OF_TILE,
    N_FEW,
    N_FREQUENT,
    N_MANY,
    OF_FREQUENT,
    PLAN,
    ROWS,
    START,
    TOKEN,
    WORDS_OF_ROW,
    layout,
    parts,
)
from numstack.kernels.launch import (
    ceil_div,
    check_contiguous,
    check_dtype,
    check_floats,
    check_ndim,
    check_shape,
    check_workspace,
    flat,
)
from numstack.kernels.rows import VECTOR, Row, row_of
from numstack.kernels.variants import Variant, Variants
from numstack.kernels.warp import WARP

BLOCK = 128  # threads of the one-dimensional blocks
WARPS = 4  # positions of a forward block, a warp each
ADDERS = 8  # warps that add rows of the table, or share a frequent token
BYTES = 16  # of a vector


def reference(tokens_BT: np.ndarray, token_table_VC: np.ndarray, position_table_TC: np.ndarray | None) -> np.ndarray:
    """out_BTC in float64."""
    out: np.ndarray = np.asarray(token_table_VC, np.float64)[tokens_BT]
    return out if position_table_TC is None else out + np.asarray(position_table_TC, np.float64)


def reference_backward(tokens_BT: np.ndarray, dout_BTC: np.ndarray, V: int) -> tuple[np.ndarray, np.ndarray]:
    """``(dtoken_table_VC, dposition_table_TC)`` in float64."""
    dout = np.asarray(dout_BTC, np.float64)
    dtable = np.zeros((V, dout.shape[2]))
    np.add.at(dtable, tokens_BT, dout)
    return dtable, dout.sum(axis=0)


# --- forward kernels -------------------------------------------------------------------------------------------------


@kernel
def _forward_tokens(tokens_N, token_table_VC, out_NC):
    """Block (32, WARPS): a warp a position."""
    n = cuda.blockIdx.x * WARPS + cuda.threadIdx.y
    C = out_NC.shape[1]
    if n < tokens_N.size:
        token = tokens_N[n]
        known = token >= 0 and token < token_table_VC.shape[0]
        for c0 in range(0, C, WARP):
            c = c0 + cuda.threadIdx.x
            if c < C:
                value = widen(token_table_VC[token, c]) if known else float32(math.nan)
                out_NC[n, c] = narrow(value, out_NC.dtype)


@kernel
def _forward_tokens_positions(tokens_N, token_table_VC, position_table_TC, out_NC):
    """Block (32, WARPS): a warp a position."""
    n = cuda.blockIdx.x * WARPS + cuda.threadIdx.y
    C = out_NC.shape[1]
    if n < tokens_N.size:
        token = tokens_N[n]
        time = n % position_table_TC.shape[0]
        known = token >= 0 and token < token_table_VC.shape[0]
        for c0 in range(0, C, WARP):
            c = c0 + cuda.threadIdx.x
            if c < C:
                value = widen(token_table_VC[token, c]) if known else float32(math.nan)
                out_NC[n, c] = narrow(value + widen(position_table_TC[time, c]), out_NC.dtype)


# --- backward kernels ------------------------------------------------------------------------------------------------


@kernel
def _add_positions(dout_BP, dposition_table_P):
    """One thread for each element of the table, P = T C."""
    i = cuda.grid(1)
    if i < dposition_table_P.size:
        total = widen(dposition_table_P[i])
        for b in range(dout_BP.shape[0]):
            total += widen(dout_BP[b, i])
        dposition_table_P[i] = narrow(total, dposition_table_P.dtype)


@kernel
def _add_tokens_scan(tokens_N, dout_NC, dtoken_table_VC):
    """One thread for each element of the table."""
    v = cuda.blockIdx.x
    c = cuda.blockIdx.y * BLOCK + cuda.threadIdx.x
    if c < dtoken_table_VC.shape[1]:
        total = widen(dtoken_table_VC[v, c])
        for n in range(tokens_N.size):
            if tokens_N[n] == v:
                total += widen(dout_NC[n, c])
        dtoken_table_VC[v, c] = narrow(total, dtoken_table_VC.dtype)


@kernel
def _add_rows(order_N, plans_N, dout_NC, dtoken_table_VC):
    """Block (32, ADDERS) for each tile's plan: a warp for each row of the table."""
    plan = cuda.blockIdx.x * PLAN
    n_few = plans_N[plan + N_FEW]
    n_empty = ROWS - n_few - plans_N[plan + N_MANY]
    C = dout_NC.shape[1]
    for i in range(cuda.threadIdx.y, ROWS - n_empty, ADDERS):
        row = plan + HEAD_OF_TILE + (i if i < n_few else i + n_empty) * WORDS_OF_ROW
        token = plans_N[row + TOKEN]
        begin = plans_N[row + START]
        end = begin + plans_N[row + COUNT] // ROWS
        for c in range(cuda.threadIdx.x, C, WARP):
            total = widen(dtoken_table_VC[token, c])
            for k in range(begin, end):
                total += widen(dout_NC[order_N[k], c])
            dtoken_table_VC[token, c] = narrow(total, dtoken_table_VC.dtype)


@kernel
def _add_frequent(header, order_N, frequent_N, dout_NC, dtoken_table_VC):
    """Block (32, ADDERS) for each token with many positions: warp y takes positions y, y + ADDERS, ..."""
    sums = cuda.shared.array((ADDERS, WARP), float32)
    lane = cuda.threadIdx.x
    warp = cuda.threadIdx.y
    C = dout_NC.shape[1]
    if cuda.blockIdx.x >= header[N_FREQUENT]:
        return
    record = cuda.blockIdx.x * OF_FREQUENT
    token = frequent_N[record]
    begin = frequent_N[record + 1]
    end = begin + frequent_N[record + 2]
    for c0 in range(0, C, WARP):
        c = c0 + lane
        total = float32(0)
        for k in range(begin + warp, end, ADDERS):
            if c < C:
                total += widen(dout_NC[order_N[k], c])
        sums[warp, lane] = total
        cuda.syncthreads()
        if warp == 0 and c < C:
            for y in range(1, ADDERS):
                total += sums[y, lane]
            dtoken_table_VC[token, c] = narrow(widen(dtoken_table_VC[token, c]) + total, dtoken_table_VC.dtype)
        cuda.syncthreads()


# --- launchers -------------------------------------------------------------------------------------------------------


def groups_size(B: int, T: int, V: int) -> int:
    """Int32 elements of ``groups`` for B texts of T tokens of V."""
    return layout(B, T, V).size


def _takes_vectors(row: Row, V: int) -> bool:
    """Whole vectors of one dtype, and a table that has rows."""
    return _has_vectors(row) and row.itemsize > 0 and V > 0


def _has_vectors(row: Row) -> bool:
    return row.is_aligned and row.columns % VECTOR == 0 and row.columns > 0


def _takes_rows(row: Row, has_positions: bool) -> bool:
    return _has_vectors(row)


def _takes_tiles(row: Row, has_positions: bool) -> bool:
    """Whole vectors, and positions: without them, dout need not come by tiles."""
    return _has_vectors(row) and has_positions


def _forward_by_warps(
    tokens: Array, table: Array, positions: Array | None, out: Array, groups: Array | None, stream: Stream | None
) -> None:
    N = tokens.size
    tokens, out = tokens.reshape(N), out.reshape(N, table.shape[1])
    grid, block = ceil_div(N, WARPS), (WARP, WARPS)
    if positions is None:
        _forward_tokens[grid, block, stream](tokens, table, out)
    else:
        _forward_tokens_positions[grid, block, stream](tokens, table, positions, out, flops=out.size)


def _forward_by_vectors(
    tokens: Array, table: Array, positions: Array | None, out: Array, groups: Array | None, stream: Stream | None
) -> None:
    B, T = tokens.shape
    V, C = table.shape
    texts = next(n for n in (by_vectors.TEXTS, 2, 1) if n <= max(B, 1))
    slices = ceil_div(C * table.itemsize, BYTES * by_vectors.SLICE)
    grid, block = (ceil_div(B, texts), ceil_div(T, by_vectors.TIMES), slices), (by_vectors.SLICE, by_vectors.TIMES)
    is_beside_groups = groups is not None and current_device().properties.compute_capability >= (9, 0)
    kernel_ = by_vectors.forward(
        from_dtype(table.dtype), has_positions=positions is not None, texts=texts, is_beside_groups=is_beside_groups
    )
    arrays = (tokens, table, table if positions is None else positions, out)
    kernel_[grid, block, stream](*map(flat, arrays), B, T, V, C, flops=out.size)


def _backward_positions(dout: Array, dpositions: Array, stream: Stream | None) -> None:
    B, T, C = dout.shape
    _add_positions[ceil_div(T * C, BLOCK), BLOCK, stream](
        dout.reshape(B, T * C), dpositions.reshape(T * C), flops=dout.size
    )


def _backward_scan(
    tokens: Array, dout: Array, dtable: Array, dpositions: Array | None, groups: Array, stream: Stream | None
) -> None:
    if dpositions is not None:
        _backward_positions(dout, dpositions, stream)
    V, C = dtable.shape
    tokens, dout = tokens.reshape(tokens.size), dout.reshape(tokens.size, C)
    _add_tokens_scan[(V, ceil_div(C, BLOCK)), BLOCK, stream](tokens, dout, dtable)


def _backward_by_warps(
    tokens: Array, dout: Array, dtable: Array, dpositions: Array | None, groups: Array, stream: Stream | None
) -> None:
    if dpositions is not None:
        _backward_positions(dout, dpositions, stream)
    B, T = tokens.shape
    V = dtable.shape[0]
    header, order, frequent, plans = parts(groups, B, T, V)
    dout, block = dout.reshape(tokens.size, dtable.shape[1]), (WARP, ADDERS)
    _add_rows[plans.size // PLAN, block, stream](order, plans, dout, dtable, flops=dout.size)
    _add_frequent[frequent.size // OF_FREQUENT, block, stream](header, order, frequent, dout, dtable)


def _backward_by_rows(
    tokens: Array, dout: Array, dtable: Array, dpositions: Array | None, groups: Array, stream: Stream | None
) -> None:
    if dpositions is not None:
        _backward_positions_by_vectors(dout, dpositions, stream)
    rows.add(dout, dtable, groups, stream=stream)


def _backward_by_tiles(
    tokens: Array, dout: Array, dtable: Array, dpositions: Array, groups: Array, stream: Stream | None
) -> None:
    B, T, C = dout.shape
    size = tiles.size_of(dout.itemsize, C)
    kernel_ = tiles.add_tiles(
        from_dtype(dout.dtype), size, is_exact=C % size.channels == 0, keeps_rows=dtable.dtype == np.float32
    )
    shared_bytes = tiles.shared_bytes(size, dout.itemsize)
    kernel_[current_device().properties.multiprocessors, (WARP, size.warps), stream, shared_bytes](
        flat(dout), tiles.map_of(dout), dtable, flat(dpositions), *parts(groups, B, T, dtable.shape[0]),
        B, T, tiles.slices_of(size, C), ceil_div(B, ROWS), flops=dout.size,
    )  # fmt: skip


def _backward_positions_by_vectors(dout: Array, dpositions: Array, stream: Stream | None) -> None:
    B, P = dout.shape[0], dpositions.size
    by_vectors.add_positions[ceil_div(P, VECTOR * BLOCK), BLOCK, stream](
        dout.reshape(B, P), dpositions.reshape(P), flops=dout.size
    )


FORWARD = Variants(
    "embedding.forward",
    [
        Variant("warp_per_row", _forward_by_warps, note="A warp copies a row, an element a lane."),
        Variant("vectors", _forward_by_vectors, "16 bytes a lane, four rows, slice by slice.", _takes_vectors, "gpu"),
    ],
)

BACKWARD = Variants(
    "embedding.backward",
    [
        Variant("scan", _backward_scan, note="Each row of the table looks through all tokens."),
        Variant("row_per_warp", _backward_by_warps, note="Groups say where a token's rows are."),
        Variant("rows_of_groups", _backward_by_rows, "Rows under way together, 16 bytes a lane.", _takes_rows, "gpu"),
        Variant("tiles_of_times", _backward_by_tiles, "Positions as well: dout is read once.", _takes_tiles, "sm_90a"),
    ],
)


def forward(
    tokens_BT: Array,
    token_table_VC: Array,
    position_table_TC: Array | None,
    out_BTC: Array,
    groups: Array | None = None,
    *,
    variant: str | None = None,
    stream: Stream | None = None,
) -> None:
    """The tokens' rows of a table, plus the positions' rows of another.

    Parameters
    ----------
    tokens_BT : array, shape (B, T), int32
    token_table_VC : array, shape (V, C), floating, C-contiguous
    position_table_TC : array, shape (T, C), floating, C-contiguous, or None
        Of a longer table give the first T rows.
    out_BTC : array, shape (B, T, C), floating, C-contiguous
        NaN where a token is outside [0, V).
    groups : array, one axis, int32, optional
        At least ``groups_size(B, T, V)`` elements, for what :func:`backward` needs of these tokens.
    variant : str, optional
        A name of ``FORWARD``.

    Raises
    ------
    ShapeError, DTypeError
        If the arrays do not fit one another, or groups is too small.

    Notes
    -----
    Workspace: none. Deterministic: yes, but for what groups has room for beside its parts.
    """
    B, T, C = _check(tokens_BT, out_BTC, "out_BTC", token_table_VC, "token_table_VC")
    arrays = [token_table_VC, out_BTC.reshape(B * T, C)]
    if position_table_TC is not None:
        _check_positions(position_table_TC, "position_table_TC", T, C)
        arrays.append(position_table_TC)
    V = token_table_VC.shape[0]
    chosen = FORWARD.pick(variant, row_of(C, *arrays), V)
    if groups is not None:
        check_workspace("embedding", groups, groups_size(B, T, V), np.int32, "groups")
        if V > 0:
            group(tokens_BT, groups, V, stream=stream)
    chosen.launch(tokens_BT, token_table_VC, position_table_TC, out_BTC, groups, stream)


def backward(
    tokens_BT: Array,
    dout_BTC: Array,
    dtoken_table_VC: Array,
    dposition_table_TC: Array | None,
    groups: Array,
    *,
    variant: str | None = None,
    stream: Stream | None = None,
) -> None:
    """Add the gradients of :func:`forward` to those of the tables.

    Parameters
    ----------
    tokens_BT : array, shape (B, T), int32
    dout_BTC : array, shape (B, T, C), floating, C-contiguous
    dtoken_table_VC : array, shape (V, C), floating, C-contiguous
    dposition_table_TC : array, shape (T, C), floating, C-contiguous, or None
    groups : array, one axis, int32
        As :func:`forward`, or :func:`numstack.kernels.embedding_groups.group`, left it for these tokens.
    variant : str, optional
        A name of ``BACKWARD``.

    Raises
    ------
    ShapeError, DTypeError
        If the arrays do not fit one another, or groups is too small.

    Notes
    -----
    Deterministic: yes. The order of every sum depends on the tokens only.
    """
    B, T, C = _check(tokens_BT, dout_BTC, "dout_BTC", dtoken_table_VC, "dtoken_table_VC")
    V = dtoken_table_VC.shape[0]
    check_workspace("embedding", groups, groups_size(B, T, V), np.int32, "groups")
    arrays = [dout_BTC, dtoken_table_VC]
    if dposition_table_TC is not None:
        _check_positions(dposition_table_TC, "dposition_table_TC", T, C)
        arrays.append(dposition_table_TC)
    chosen = BACKWARD.pick(variant, row_of(C, *arrays), dposition_table_TC is not None)
    if dout_BTC.size > 0 and V > 0:
        chosen.launch(tokens_BT, dout_BTC, dtoken_table_VC, dposition_table_TC, groups, stream)


def _check(tokens: Array, rows: Array, rows_name: str, table: Array, table_name: str) -> tuple[int, int, int]:
    check_ndim("embedding", 2, tokens_BT=tokens, **{table_name: table})
    B, T = tokens.shape
    C = table.shape[1]
    check_shape("embedding", (B, T, C), **{rows_name: rows})
    check_dtype("embedding", np.int32, tokens_BT=tokens)
    check_floats("embedding", **{rows_name: rows, table_name: table})
    check_contiguous("embedding", tokens_BT=tokens, **{rows_name: rows, table_name: table})
    return B, T, C


def _check_positions(table: Array, name: str, T: int, C: int) -> None:
    check_shape("embedding", (T, C), **{name: table})
    check_floats("embedding", **{name: table})
    check_contiguous("embedding", **{name: table})
