"""Embedding: rows of a table picked by tokens, plus a row for each position.

Forward, for batch b, time t, channel c::

    out_btc = token_table[tokens_bt, c] + position_table[t, c]

Backward, added to what the gradients hold::

    dtoken_table[v, c]    += sum over (b, t) with tokens_bt = v of dout_btc
    dposition_table[t, c] += sum_b dout_btc

A token outside [0, V) gives a row of NaN in out and no gradient, and no access outside the table: the host checks
tokens before they get here, and the NaN watch sees what slips through.

Backward ladder: ``scan`` has a block for each row of the table, which looks through all tokens: V x N comparisons.
``counting_sort`` first groups the N = B T positions by token, then sums each group:

1. count tokens (integer atomics: the counts do not depend on their order);
2. turn counts into the start of each group in a list of N slots (a scan by one block);
3. drop each position into a slot of its group, in whatever order the atomics come;
4. sort each group: a position's rank is the number of smaller positions in its group;
5. a block for each row of the table adds its group's rows of dout: warp y takes ranks y, y + 8, ..., and the eight
   sums are added in order.

So the order of every floating-point sum is fixed by the tokens alone, and the result is the same bits in every run.
Step 4 costs the sum of squared group sizes, 6% of N^2 comparisons for English characters, far less for BPE tokens.

On GPUs forward has a variant by vectors of 16 bytes (:mod:`numstack.kernels.embedding_vectors`), and backward
``owned_rows`` (:mod:`numstack.kernels.embedding_owned`): each block looks for the tokens of its own rows. On Hopper
``rows_of_clusters`` (:mod:`numstack.kernels.embedding_clusters`): blocks of a cluster share tokens and rows.
"""

import math

import numpy as np
from numba import cuda, float32, from_dtype, int32

from numstack.device import Array, Stream, current_device, kernel, narrow, widen
from numstack.kernels import embedding_clusters as clusters
from numstack.kernels import embedding_owned as owned
from numstack.kernels import embedding_vectors as by_vectors
from numstack.kernels.embedding_parts import MOST_COLUMNS, MOST_ROWS, fours_of, owners, reciprocal
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
ROWS = 4  # positions of a forward block, a warp each
SCANNERS = 256  # threads of the block that scans the counts
ADDERS = 8  # warps that share the rows of a group
BYTES = 16  # of a vector
CLUSTER = 8  # blocks that share tokens and rows


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
    """Block (32, ROWS): a warp a position."""
    n = cuda.blockIdx.x * ROWS + cuda.threadIdx.y
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
    """Block (32, ROWS): a warp a position."""
    n = cuda.blockIdx.x * ROWS + cuda.threadIdx.y
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
def _clear(ends_V):
    v = cuda.grid(1)
    if v < ends_V.size:
        ends_V[v] = int32(0)


@kernel
def _count(tokens_N, ends_V):
    n = cuda.grid(1)
    if n < tokens_N.size:
        token = tokens_N[n]
        if token >= 0 and token < ends_V.size:
            cuda.atomic.add(ends_V, token, int32(1))


@kernel
def _scan_counts(ends_V):
    """One block: each count becomes the sum of those before it. Each thread takes a stretch of the counts."""
    sums = cuda.shared.array(SCANNERS, int32)
    thread = cuda.threadIdx.x
    stretch = (ends_V.size + SCANNERS - 1) // SCANNERS
    begin = thread * stretch
    end = min(begin + stretch, ends_V.size)
    total = int32(0)
    for v in range(begin, end):
        total += ends_V[v]
    sums[thread] = total
    cuda.syncthreads()
    offset = 1
    while offset < SCANNERS:  # Hillis-Steele: after step k a thread has the sum of 2^k stretches
        other = int32(0)
        if thread >= offset:
            other = sums[thread - offset]
        cuda.syncthreads()
        sums[thread] += other
        cuda.syncthreads()
        offset *= 2
    before = sums[thread] - total
    for v in range(begin, end):
        count = ends_V[v]
        ends_V[v] = before
        before += count


@kernel
def _fill_slots(tokens_N, ends_V, slots_N):
    """Each group's start moves on by one for each position dropped, and so becomes its end, the start of the next."""
    n = cuda.grid(1)
    if n < tokens_N.size:
        token = tokens_N[n]
        if token >= 0 and token < ends_V.size:
            slots_N[cuda.atomic.add(ends_V, token, int32(1))] = n


@kernel
def _sort_groups(tokens_N, ends_V, slots_N, sorted_N):
    n = cuda.grid(1)
    if n < tokens_N.size:
        token = tokens_N[n]
        if token >= 0 and token < ends_V.size:
            begin = ends_V[token - 1] if token > 0 else int32(0)
            rank = int32(0)
            for slot in range(begin, ends_V[token]):
                if slots_N[slot] < n:
                    rank += int32(1)
            sorted_N[begin + rank] = n


@kernel
def _add_groups(ends_V, sorted_N, dout_NC, dtoken_table_VC):
    """Block (32, ADDERS) for each row of the table."""
    sums = cuda.shared.array((ADDERS, WARP), float32)
    lane = cuda.threadIdx.x
    warp = cuda.threadIdx.y
    v = cuda.blockIdx.x
    C = dout_NC.shape[1]
    begin = ends_V[v - 1] if v > 0 else int32(0)
    end = ends_V[v]
    if begin == end:
        return  # most rows of a large vocabulary
    for c0 in range(0, C, WARP):
        c = c0 + lane
        total = float32(0)
        for s0 in range(begin, end, ADDERS):
            s = s0 + warp
            if s < end:
                n = sorted_N[s]
                if c < C:
                    total += widen(dout_NC[n, c])
        sums[warp, lane] = total
        cuda.syncthreads()
        if warp == 0 and c < C:
            for y in range(1, ADDERS):
                total += sums[y, lane]
            dtoken_table_VC[v, c] = narrow(widen(dtoken_table_VC[v, c]) + total, dtoken_table_VC.dtype)
        cuda.syncthreads()


# --- launchers -------------------------------------------------------------------------------------------------------


def workspace_size(B: int, T: int, V: int) -> int:
    """Int32 elements of workspace that :func:`backward` needs."""
    return V + 2 * B * T + 1


def _takes_vectors(row: Row, V: int) -> bool:
    """Whole vectors of one dtype, and a table that has rows."""
    return _has_vectors(row) and row.itemsize > 0 and V > 0


def _has_vectors(row: Row) -> bool:
    return row.is_aligned and row.columns % VECTOR == 0 and row.columns > 0


def _takes_owners(row: Row, V: int) -> bool:
    """Whole vectors, and a table that has rows, but not so many that they cannot be shared out by a multiplication."""
    multiprocessors = current_device().properties.multiprocessors
    return _has_vectors(row) and 0 < V * (owners(V, multiprocessors) + multiprocessors) < 1 << 32


def _forward_by_warps(tokens: Array, table: Array, positions: Array | None, out: Array, stream: Stream | None) -> None:
    N = tokens.size
    tokens, out = tokens.reshape(N), out.reshape(N, table.shape[1])
    grid, block = ceil_div(N, ROWS), (WARP, ROWS)
    if positions is None:
        _forward_tokens[grid, block, stream](tokens, table, out)
    else:
        _forward_tokens_positions[grid, block, stream](tokens, table, positions, out, flops=out.size)


def _forward_by_vectors(
    tokens: Array, table: Array, positions: Array | None, out: Array, stream: Stream | None
) -> None:
    B, T = tokens.shape
    V, C = table.shape
    texts = next(n for n in (by_vectors.TEXTS, 4, 2, 1) if n <= max(B, 1))
    n_vectors = C * table.itemsize // BYTES
    grid = (ceil_div(T * n_vectors, by_vectors.THREADS), ceil_div(B, texts))
    kernel_ = by_vectors.forward(from_dtype(table.dtype), has_positions=positions is not None, texts=texts)
    arrays = (tokens, table, table if positions is None else positions, out)
    kernel_[grid, by_vectors.THREADS, stream](*map(flat, arrays), B, T, V, n_vectors, flops=out.size)


def _backward_positions(dout: Array, dpositions: Array, stream: Stream | None) -> None:
    B, T, C = dout.shape
    _add_positions[ceil_div(T * C, BLOCK), BLOCK, stream](
        dout.reshape(B, T * C), dpositions.reshape(T * C), flops=dout.size
    )


def _backward_scan(
    tokens: Array, dout: Array, dtable: Array, dpositions: Array | None, workspace: Array, stream: Stream | None
) -> None:
    if dpositions is not None:
        _backward_positions(dout, dpositions, stream)
    V, C = dtable.shape
    tokens, dout = tokens.reshape(tokens.size), dout.reshape(tokens.size, C)
    _add_tokens_scan[(V, ceil_div(C, BLOCK)), BLOCK, stream](tokens, dout, dtable)


def _backward_sort(
    tokens: Array, dout: Array, dtable: Array, dpositions: Array | None, workspace: Array, stream: Stream | None
) -> None:
    if dpositions is not None:
        _backward_positions(dout, dpositions, stream)
    N, V = tokens.size, dtable.shape[0]
    tokens, dout = tokens.reshape(N), dout.reshape(N, dtable.shape[1])
    ends, slots, order = workspace[:V], workspace[V : V + N], workspace[V + N : V + 2 * N]
    over_tokens = ceil_div(N, BLOCK)
    _clear[ceil_div(V, BLOCK), BLOCK, stream](ends)
    _count[over_tokens, BLOCK, stream](tokens, ends)
    _scan_counts[1, SCANNERS, stream](ends)
    _fill_slots[over_tokens, BLOCK, stream](tokens, ends, slots)
    _sort_groups[over_tokens, BLOCK, stream](tokens, ends, slots, order)
    _add_groups[V, (WARP, ADDERS), stream](ends, order, dout, dtable, flops=dout.size)


def _backward_owned(
    tokens: Array, dout: Array, dtable: Array, dpositions: Array | None, workspace: Array, stream: Stream | None
) -> None:
    if tokens.size == 0:
        return
    B, V, C = tokens.shape[0], *dtable.shape
    n_blocks = owners(V, current_device().properties.multiprocessors)
    n_rows = ceil_div(V, n_blocks)
    fours, is_exact = fours_of(C)
    n_vectors = 0 if dpositions is None else ceil_div(dpositions.size * dout.itemsize, BYTES * n_blocks)
    columns = ceil_div(n_vectors, WARP * owned.FEW.warps)
    is_fused = 0 < columns <= MOST_COLUMNS
    size = owned.MANY if is_exact and not is_fused else owned.FEW
    kernel_ = owned.add_owned_rows(
        from_dtype(dout.dtype), size, fours, is_exact=is_exact, columns=columns if is_fused else 0
    )
    positions = dpositions if is_fused and dpositions is not None else dout
    kernel_[n_blocks, (WARP, size.warps), stream, owned.shared_bytes(n_rows, size.warps)](
        flat(tokens), flat(dout), dtable, flat(positions), B, n_rows, reciprocal(n_blocks), n_vectors,
        flops=dout.size,
    )  # fmt: skip
    if dpositions is not None and not is_fused:
        _backward_positions_by_vectors(dout, dpositions, stream)


def _backward_clusters(
    tokens: Array, dout: Array, dtable: Array, dpositions: Array | None, workspace: Array, stream: Stream | None
) -> None:
    if tokens.size == 0:
        return
    B, T = tokens.shape
    V, C = dtable.shape
    fours, is_exact = fours_of(C)
    kernel_ = clusters.add_rows(from_dtype(dout.dtype), fours, is_exact=is_exact, blocks=CLUSTER)
    arrays = (flat(tokens), flat(dout), dtable, _flat_or(dpositions, dtable), B, T)
    block = (WARP, clusters.WARPS)
    n_clusters = kernel_.clusters_at_once(block, clusters.shared_bytes(MOST_ROWS), *arrays, 0, 0, 0)
    n_blocks = owners(V, n_clusters * CLUSTER)
    n_rows = ceil_div(V, n_blocks)
    kernel_[n_blocks, block, stream, clusters.shared_bytes(n_rows)](
        *arrays, n_rows, reciprocal(n_blocks), _chunks(dpositions, dout, n_blocks), flops=dout.size
    )


def _flat_or(dpositions: Array | None, instead: Array) -> Array:
    """What a kernel takes that does not look at it if there is none."""
    return flat(instead if dpositions is None else dpositions)


def _chunks(dpositions: Array | None, dout: Array, n_blocks: int) -> int:
    """Of the positions' gradient that are a block's."""
    return 0 if dpositions is None else ceil_div(dpositions.size * dout.itemsize, WARP * BYTES * n_blocks)


def _backward_positions_by_vectors(dout: Array, dpositions: Array, stream: Stream | None) -> None:
    B, P = dout.shape[0], dpositions.size
    by_vectors.add_positions[ceil_div(P, VECTOR * BLOCK), BLOCK, stream](
        dout.reshape(B, P), dpositions.reshape(P), flops=dout.size
    )


FORWARD = Variants(
    "embedding.forward",
    [
        Variant("warp_per_row", _forward_by_warps, note="A warp copies a row, an element a lane."),
        Variant("vectors", _forward_by_vectors, "16 bytes a lane, eight rows at once.", _takes_vectors, "gpu"),
    ],
)

BACKWARD = Variants(
    "embedding.backward",
    [
        Variant("scan", _backward_scan, note="Each row of the table looks through all tokens."),
        Variant("counting_sort", _backward_sort, note="Positions are grouped by token first: each is looked at once."),
        Variant("owned_rows", _backward_owned, "Each block looks for its own rows' tokens.", _takes_owners, "gpu"),
        Variant("rows_of_clusters", _backward_clusters, "Blocks share tokens and rows.", _takes_owners, "sm_90a"),
    ],
)


def forward(
    tokens_BT: Array,
    token_table_VC: Array,
    position_table_TC: Array | None,
    out_BTC: Array,
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
    variant : str, optional
        A name of ``FORWARD``.

    Raises
    ------
    ShapeError, DTypeError
        If the arrays do not fit one another.

    Notes
    -----
    Workspace: none. Deterministic: yes.
    """
    B, T, C = _check(tokens_BT, out_BTC, "out_BTC", token_table_VC, "token_table_VC")
    arrays = [token_table_VC, out_BTC.reshape(B * T, C)]
    if position_table_TC is not None:
        _check_positions(position_table_TC, "position_table_TC", T, C)
        arrays.append(position_table_TC)
    chosen = FORWARD.pick(variant, row_of(C, *arrays), token_table_VC.shape[0])
    chosen.launch(tokens_BT, token_table_VC, position_table_TC, out_BTC, stream)


def backward(
    tokens_BT: Array,
    dout_BTC: Array,
    dtoken_table_VC: Array,
    dposition_table_TC: Array | None,
    workspace: Array,
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
    workspace : array, one axis, int32
        At least ``workspace_size(B, T, V)`` elements.
    variant : str, optional
        A name of ``BACKWARD``.

    Raises
    ------
    ShapeError, DTypeError
        If the arrays do not fit one another, or the workspace is too small.

    Notes
    -----
    Deterministic: yes. The order of every sum depends on the tokens only.
    """
    B, T, C = _check(tokens_BT, dout_BTC, "dout_BTC", dtoken_table_VC, "dtoken_table_VC")
    check_workspace("embedding", workspace, workspace_size(B, T, dtoken_table_VC.shape[0]), np.int32)
    arrays = [dout_BTC, dtoken_table_VC]
    if dposition_table_TC is not None:
        _check_positions(dposition_table_TC, "dposition_table_TC", T, C)
        arrays.append(dposition_table_TC)
    chosen = BACKWARD.pick(variant, row_of(C, *arrays), dtoken_table_VC.shape[0])
    chosen.launch(tokens_BT, dout_BTC, dtoken_table_VC, dposition_table_TC, workspace, stream)


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
