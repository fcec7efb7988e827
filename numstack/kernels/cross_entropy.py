"""Cross-entropy of each row of logits_RV against the index of its target.

Forward, for every row r with target t_r::

    lse_r  = log sum_v exp(l_rv)                    (about the row's maximum, so that nothing overflows)
    loss_r = lse_r - l_r,t

Backward, with a scale s for all rows (1 / number of targets for a mean, times the loss scale)::

    dl_rv = s (exp(l_rv - lse_r) - [v = t_r])

The gradient may overwrite the logits: with 50,000 classes they are by far the largest arrays of a training step. Rows
may be longer than there are classes, so that they start at addresses that hardware likes: padding counts for nothing,
and its gradient is 0.

A row whose target is ``ignore_index`` is not read: its loss, log-sum-exp and gradient are 0. Any other target outside
[0, V) gives loss NaN and a gradient row of NaN, and no access outside the arrays: the host checks targets before they
get here, and the NaN watch sees what slips through.

Ladder: ``thread_per_row`` is the formula; ``block_per_row`` gives 32 or 512 threads to a row and finds maximum and sum
in one pass (Milakov, Gimelshein 2018). ``forward_backward`` reads a row once from memory and once from cache for both.
On GPUs ``vectors`` moves 16 bytes a thread, and the variants after it also keep the row on the chip between loss and
gradient (:mod:`numstack.kernels.cross_entropy_vectors`, :mod:`numstack.kernels.cross_entropy_rows`).
"""

import math

import numpy as np
from numba import cuda, float32, from_dtype

from numstack.device import Array, Stream, current_device, kernel, narrow, widen
from numstack.errors import ShapeError
from numstack.kernels import cross_entropy_rows as on_chip
from numstack.kernels import cross_entropy_vectors as by_vectors
from numstack.kernels.launch import (
    ceil_div,
    check_contiguous,
    check_dtype,
    check_floats,
    check_ndim,
    check_shape,
    flat,
)
from numstack.kernels.rows import VECTOR, Row, row_of
from numstack.kernels.variants import Variant, Variants
from numstack.kernels.warp import LOWEST, WARP, block_max, block_sum, online_sum

BLOCK = 128  # threads of the one-dimensional blocks of thread_per_row
LONG_BLOCK = 512  # threads of a block that takes a long row; a short one gets a warp
LONG_ROW = 2048  # least number of classes of a long row
LEAST_ROW_OF_VECTORS = 256  # shorter ones leave most of a block without a vector
VERY_LONG_ROW = 16384  # least number of classes of a row that keeps by_vectors.LONG_BLOCK threads busy
LONGEST_ROW = 49152  # least number of logits of which one row keeps a multiprocessor busy
SHARED_ROW = 98304  # least number of logits of a row that takes a block longer than clusters take for several
SHARED_BESIDES = 1024 + 512  # bytes of shared memory of a block that are not the row's: the system's, and its sums


def reference(logits_RV: np.ndarray, targets_R: np.ndarray, *, ignore_index: int = -1) -> tuple[np.ndarray, np.ndarray]:
    """``(loss_R, lse_R)`` in float64."""
    logits, targets = np.asarray(logits_RV, np.float64), np.asarray(targets_R)
    kept = targets != ignore_index
    largest = logits.max(axis=1, initial=-np.inf)
    lse = largest + np.log(np.exp(logits - largest[:, None]).sum(axis=1))
    loss = lse - logits[np.arange(len(targets)), np.where(kept, targets, 0)]
    return np.where(kept, loss, 0), np.where(kept, lse, 0)


def reference_backward(
    logits_RV: np.ndarray, targets_R: np.ndarray, scale: float, *, ignore_index: int = -1
) -> np.ndarray:
    """dlogits_RV in float64."""
    logits, targets = np.asarray(logits_RV, np.float64), np.asarray(targets_R)
    kept = targets != ignore_index
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    gradient = e / e.sum(axis=1, keepdims=True)
    gradient[np.arange(len(targets)), np.where(kept, targets, 0)] -= 1
    return np.where(kept[:, None], scale * gradient, 0)


# --- device functions ------------------------------------------------------------------------------------------------


@cuda.jit(device=True)
def _thread_max_and_sum(logits_RV, row, classes):
    """Largest of the first ``classes`` logits of a row, and the sum of exp(logit - largest), by one thread."""
    largest = LOWEST
    for v in range(classes):
        largest = max(largest, widen(logits_RV[row, v]))
    total = float32(0)
    for v in range(classes):
        total += math.exp(widen(logits_RV[row, v]) - largest)
    return largest, total


@cuda.jit(device=True)
def _block_max_and_sum(logits_RV, row, classes, warps):
    """The same by a block; ``warps``: as for block_sum."""
    own_largest = LOWEST
    own_total = float32(0)
    for v0 in range(0, logits_RV.shape[1], cuda.blockDim.x):
        v = v0 + cuda.threadIdx.x
        if v < classes:
            logit = widen(logits_RV[row, v])
            own_total = online_sum(own_total, own_largest, logit)
            own_largest = max(own_largest, logit)
    largest = block_max(own_largest, warps)
    total = block_sum(own_total * math.exp(own_largest - largest), warps)
    return largest, total


@cuda.jit(device=True)
def _target_logit(logits_RV, row, target, classes):
    """The logit of the target; NaN if there is none."""
    if target >= 0 and target < classes:
        return widen(logits_RV[row, target])
    return float32(math.nan)


@cuda.jit(device=True)
def _gradient(probability, is_target, scale):
    return (probability - float32(1)) * scale if is_target else probability * scale


# --- kernels ---------------------------------------------------------------------------------------------------------


@kernel
def _forward_thread_per_row(logits_RV, targets_R, loss_R, lse_R, classes, ignore_index):
    row = cuda.grid(1)
    if row < logits_RV.shape[0]:
        target = targets_R[row]
        loss = float32(0)
        lse = float32(0)
        if target != ignore_index:
            largest, total = _thread_max_and_sum(logits_RV, row, classes)
            lse = largest + math.log(total)
            loss = lse - _target_logit(logits_RV, row, target, classes)
        loss_R[row] = loss
        lse_R[row] = lse


@kernel
def _forward_block_per_row(logits_RV, targets_R, loss_R, lse_R, classes, ignore_index):
    warps = cuda.shared.array(WARP, float32)
    row = cuda.blockIdx.x
    target = targets_R[row]
    ignored = target == ignore_index
    largest, total = _block_max_and_sum(logits_RV, row, 0 if ignored else classes, warps)
    if cuda.threadIdx.x == 0:
        lse = largest + math.log(total)
        loss_R[row] = float32(0) if ignored else lse - _target_logit(logits_RV, row, target, classes)
        lse_R[row] = float32(0) if ignored else lse


@kernel
def _backward(logits_RV, targets_R, lse_R, dlogits_RV, scale_1, classes, ignore_index):
    row = cuda.blockIdx.x
    V = logits_RV.shape[1]
    target = targets_R[row]
    lse = lse_R[row]
    ignored = target == ignore_index
    scale = scale_1[0] if target >= 0 and target < classes else float32(math.nan)
    for v0 in range(0, V, cuda.blockDim.x):
        v = v0 + cuda.threadIdx.x
        if v < V:
            gradient = _gradient(math.exp(widen(logits_RV[row, v]) - lse), v == target, scale)
            nothing = ignored or v >= classes
            dlogits_RV[row, v] = narrow(float32(0) if nothing else gradient, dlogits_RV.dtype)


@kernel
def _forward_backward_thread_per_row(logits_RV, targets_R, loss_R, dlogits_RV, scale_1, classes, ignore_index):
    row = cuda.grid(1)
    V = logits_RV.shape[1]
    if row < logits_RV.shape[0]:
        target = targets_R[row]
        if target == ignore_index:
            loss_R[row] = float32(0)
            for v in range(V):
                dlogits_RV[row, v] = narrow(float32(0), dlogits_RV.dtype)
        else:
            scale = scale_1[0] if target >= 0 and target < classes else float32(math.nan)
            largest, total = _thread_max_and_sum(logits_RV, row, classes)
            loss_R[row] = largest + math.log(total) - _target_logit(logits_RV, row, target, classes)
            for v in range(V):
                gradient = float32(0)
                if v < classes:
                    probability = math.exp(widen(logits_RV[row, v]) - largest) / total
                    gradient = _gradient(probability, v == target, scale)
                dlogits_RV[row, v] = narrow(gradient, dlogits_RV.dtype)


@kernel
def _forward_backward_block_per_row(logits_RV, targets_R, loss_R, dlogits_RV, scale_1, classes, ignore_index):
    warps = cuda.shared.array(WARP, float32)
    row = cuda.blockIdx.x
    V = logits_RV.shape[1]
    target = targets_R[row]
    ignored = target == ignore_index
    scale = scale_1[0] if target >= 0 and target < classes else float32(math.nan)
    # Read before the barriers of the sum: after them the gradient may overwrite it.
    target_logit = _target_logit(logits_RV, row, target, classes)
    largest, total = _block_max_and_sum(logits_RV, row, 0 if ignored else classes, warps)
    if cuda.threadIdx.x == 0:
        loss_R[row] = float32(0) if ignored else largest + math.log(total) - target_logit
    inverse = float32(1) / total
    for v0 in range(0, V, cuda.blockDim.x):
        v = v0 + cuda.threadIdx.x
        if v < V:
            gradient = _gradient(math.exp(widen(logits_RV[row, v]) - largest) * inverse, v == target, scale)
            nothing = ignored or v >= classes
            dlogits_RV[row, v] = narrow(float32(0) if nothing else gradient, dlogits_RV.dtype)


# --- launchers -------------------------------------------------------------------------------------------------------


# A launcher takes the arrays as its kernel does: logits and targets, then what there is of the others.
Arrays = tuple[Array, ...]


def _row_threads(V: int) -> int:
    return LONG_BLOCK if V >= LONG_ROW else WARP


def _forward_by_threads(arrays: Arrays, classes: int, ignore_index: int, stream: Stream | None) -> None:
    grid = ceil_div(arrays[0].shape[0], BLOCK)
    _forward_thread_per_row[grid, BLOCK, stream](*arrays, classes, ignore_index)


def _forward_by_blocks(arrays: Arrays, classes: int, ignore_index: int, stream: Stream | None) -> None:
    R, V = arrays[0].shape
    _forward_block_per_row[R, _row_threads(V), stream](*arrays, classes, ignore_index, flops=4 * R * V)


def _forward_backward_by_threads(arrays: Arrays, classes: int, ignore_index: int, stream: Stream | None) -> None:
    grid = ceil_div(arrays[0].shape[0], BLOCK)
    _forward_backward_thread_per_row[grid, BLOCK, stream](*arrays, classes, ignore_index)


def _forward_backward_by_blocks(arrays: Arrays, classes: int, ignore_index: int, stream: Stream | None) -> None:
    R, V = arrays[0].shape
    _forward_backward_block_per_row[R, _row_threads(V), stream](*arrays, classes, ignore_index, flops=7 * R * V)


def _backward_by_blocks(arrays: Arrays, classes: int, ignore_index: int, stream: Stream | None) -> None:
    R, V = arrays[0].shape
    _backward[R, _row_threads(V), stream](*arrays, classes, ignore_index, flops=3 * R * V)


def _takes_vectors(row: Row, itemsize: int, by_name: bool = False) -> bool:
    return row.is_aligned and row.columns % VECTOR == 0 and row.columns >= LEAST_ROW_OF_VECTORS


def _is_default(row: Row, itemsize: int, least: int) -> bool:
    """On a GPU 16 bits and at least so many columns is what has been seen right, and faster."""
    return itemsize == 2 and row.columns >= least


def _takes_two_rows(row: Row, itemsize: int, by_name: bool) -> bool:
    most = current_device().properties.shared_bytes_per_block - SHARED_BESIDES
    fits = _takes_vectors(row, itemsize) and 2 * row.columns * itemsize <= most
    return fits and (by_name or _is_default(row, itemsize, VERY_LONG_ROW))


def _takes_longest_rows(row: Row, itemsize: int, by_name: bool) -> bool:
    return _takes_vectors(row, itemsize) and (by_name or _is_default(row, itemsize, LONGEST_ROW))


def _takes_rows_to_share(row: Row, itemsize: int, by_name: bool) -> bool:
    return _takes_vectors(row, itemsize) and (by_name or _is_default(row, itemsize, SHARED_ROW))


def _vector_threads(V: int) -> int:
    return by_vectors.LONG_BLOCK if V >= VERY_LONG_ROW else by_vectors.SHORT_BLOCK


def _forward_by_vectors(arrays: Arrays, classes: int, ignore_index: int, stream: Stream | None) -> None:
    R, V = arrays[0].shape
    threads = _vector_threads(V)
    by_vectors.forward(threads)[R, threads, stream](*arrays, classes, ignore_index, flops=4 * R * V)


def _backward_by_vectors(arrays: Arrays, classes: int, ignore_index: int, stream: Stream | None) -> None:
    R, V = arrays[0].shape
    threads = _vector_threads(V)
    by_vectors.backward(threads)[R, threads, stream](*arrays, classes, ignore_index, flops=3 * R * V)


def _forward_backward_in_shared(arrays: Arrays, classes: int, ignore_index: int, stream: Stream | None) -> None:
    logits = arrays[0]
    R, V = logits.shape
    threads = _vector_threads(V)
    n_kept = _kept_elements(V, logits.itemsize, VECTOR * by_vectors.PER_THREAD * threads)
    row_in_shared = by_vectors.forward_backward(from_dtype(logits.dtype), threads)
    row_in_shared[R, threads, stream, n_kept * logits.itemsize](*arrays, classes, ignore_index, n_kept, flops=7 * R * V)


def _forward_backward_in_turn(arrays: Arrays, classes: int, ignore_index: int, stream: Stream | None) -> None:
    logits = arrays[0]
    R, V = logits.shape
    threads, per_thread = _threads_in_turn(V)
    rows_in_turn = by_vectors.forward_backward_in_turn(from_dtype(logits.dtype), threads, per_thread)
    nbytes = 2 * V * logits.itemsize
    rows_in_turn[min(R, _resident_blocks(threads, nbytes)), threads, stream, nbytes](
        *map(flat, arrays), V, classes, ignore_index, flops=7 * R * V
    )


def _forward_backward_on_chip(arrays: Arrays, classes: int, ignore_index: int, stream: Stream | None) -> None:
    logits = arrays[0]
    R, V = logits.shape
    threads, n_spans = _spans_on_chip(classes * logits.itemsize, V)
    nbytes = n_spans * on_chip.span_bytes(threads)
    rows_on_chip = on_chip.forward_backward(from_dtype(logits.dtype), threads, n_spans)
    n_turns = max(ceil_div(R, _resident_blocks(threads, nbytes)), 1)  # so many rows, or one less, for each block
    rows_on_chip[ceil_div(R, n_turns), threads, stream, nbytes](
        *map(flat, arrays), V, classes, ignore_index, flops=7 * R * V
    )


def _forward_backward_in_clusters(arrays: Arrays, classes: int, ignore_index: int, stream: Stream | None) -> None:
    logits = arrays[0]
    R, V = logits.shape
    threads, n_spans = _spans_on_chip(classes * logits.itemsize, V)
    nbytes = n_spans * on_chip.span_bytes(threads)
    n_blocks = _resident_blocks(threads, nbytes)
    n_left = R % n_blocks
    per_thread = on_chip.vectors_in_cluster(V, logits.itemsize)
    if not 0 < n_left <= on_chip.MOST_CLUSTERS or per_thread > on_chip.MOST_IN_CLUSTER:
        _forward_backward_on_chip(arrays, classes, ignore_index, stream)
        return
    logits, targets, loss, dlogits, scale = arrays
    first, others = (
        (flat(logits[rows]), targets[rows], loss[rows], flat(dlogits[rows]), scale, V, classes, ignore_index)
        for rows in (slice(n_left), slice(n_left, R))
    )
    in_clusters = on_chip.forward_backward_in_clusters(from_dtype(logits.dtype), per_thread)
    in_clusters[n_left * on_chip.CLUSTER, on_chip.CLUSTER_THREADS, stream](*first, flops=7 * n_left * V)
    rows_on_chip = on_chip.forward_backward(from_dtype(logits.dtype), threads, n_spans, beside_another=True)
    rows_on_chip[min(R - n_left, n_blocks), threads, stream, nbytes](*others, flops=7 * (R - n_left) * V)


def _spans_on_chip(nbytes: int, V: int) -> tuple[int, int]:
    """Threads of a block that takes rows of V logits, and how many spans of ``nbytes`` of them stay."""
    threads = by_vectors.SHORT_BLOCK if V < VERY_LONG_ROW else 1024
    most = current_device().properties.shared_bytes_per_block - SHARED_BESIDES
    return threads, on_chip.n_spans(nbytes, threads, most)


def _resident_blocks(threads: int, nbytes: int) -> int:
    """Blocks of so many threads, of 64 registers, and so much shared memory that all multiprocessors hold."""
    properties = current_device().properties
    of_each = min(1024 // threads, properties.shared_bytes_per_block // (nbytes + SHARED_BESIDES))
    return max(of_each, 1) * properties.multiprocessors


def _threads_in_turn(V: int) -> tuple[int, int]:
    """Threads of a block, and vectors of a thread."""
    return (1024, 2) if V >= VERY_LONG_ROW else (by_vectors.SHORT_BLOCK, 1)


def _kept_elements(V: int, itemsize: int, span: int) -> int:
    """How much of a row stays in shared memory: all, or else as many spans as let two blocks share a processor."""
    # What two blocks share is a little more than the most that one may have; each has some of its own as well.
    most = current_device().properties.shared_bytes_per_block // 2 - SHARED_BESIDES
    return V if V * itemsize <= most else most // (span * itemsize) * span


FORWARD = Variants(
    "cross_entropy.forward",
    [
        Variant("thread_per_row", _forward_by_threads, note="The formula: one thread walks over a row twice."),
        Variant("block_per_row", _forward_by_blocks, note="Coalesced reads; maximum and sum in one pass over the row."),
        Variant("vectors", _forward_by_vectors, "16 bytes a thread, four times at once.", _takes_vectors, "gpu"),
    ],
)

BACKWARD = Variants(
    "cross_entropy.backward",
    [
        Variant("block_per_row", _backward_by_blocks, note="The formula, coalesced."),
        Variant("vectors", _backward_by_vectors, "16 bytes a thread, four times at once.", _takes_vectors, "gpu"),
    ],
)

FORWARD_BACKWARD = Variants(
    "cross_entropy.forward_backward",
    [
        Variant("thread_per_row", _forward_backward_by_threads, note="The formula, then the gradient, by one thread."),
        Variant("block_per_row", _forward_backward_by_blocks, note="Coalesced; one pass for the sum, one in cache."),
        Variant(
            "row_in_shared", _forward_backward_in_shared, "One read and one write of memory.", _takes_vectors, "gpu"
        ),
        Variant("rows_in_turn", _forward_backward_in_turn, "The next row comes meanwhile.", _takes_two_rows, "gpu"),
        Variant("rows_on_chip", _forward_backward_on_chip, "The next takes its place.", _takes_longest_rows, "gpu"),
        Variant(
            "rows_in_clusters",
            _forward_backward_in_clusters,
            "Clusters share what few rows are left.",
            _takes_rows_to_share,
            "sm_90a",
        ),
    ],
)


def _check(
    logits: Array,
    targets: Array,
    scale: Array | None,
    floats: dict[str, Array],
    rows: dict[str, Array],
    n_classes: int | None,
) -> int:
    """The number of classes. ``floats`` have the logits' shape, ``rows`` one float32 a row."""
    check_ndim("cross_entropy", 2, logits_RV=logits)
    R, V = logits.shape
    if n_classes is not None and not 1 <= n_classes <= V:
        raise ShapeError(f"cross_entropy: n_classes={n_classes} but logits_RV has shape {logits.shape}: 1 to {V} fit")
    check_shape("cross_entropy", (R,), targets_R=targets, **rows)
    check_shape("cross_entropy", logits.shape, **floats)
    check_floats("cross_entropy", logits_RV=logits, **floats)
    check_dtype("cross_entropy", np.int32, targets_R=targets)
    check_dtype("cross_entropy", np.float32, **rows)
    check_contiguous("cross_entropy", logits_RV=logits, targets_R=targets, **floats, **rows)
    if scale is not None:
        check_shape("cross_entropy", (1,), scale_1=scale)
        check_dtype("cross_entropy", np.float32, scale_1=scale)
    return V if n_classes is None else n_classes


def forward(
    logits_RV: Array,
    targets_R: Array,
    loss_R: Array,
    lse_R: Array,
    *,
    n_classes: int | None = None,
    ignore_index: int = -1,
    variant: str | None = None,
    stream: Stream | None = None,
) -> None:
    """Loss of each row, and the log-sum-exp that :func:`backward` needs.

    Parameters
    ----------
    logits_RV : array, shape (R, V), floating, C-contiguous
    targets_R : array, shape (R,), int32
        Class of each row, or ``ignore_index``.
    loss_R, lse_R : array, shape (R,), float32
        In nats. Both 0 for an ignored row; loss NaN for a target that is no class.
    n_classes : int, optional
        How many columns of the logits are classes, if not all V: those after them are padding.
    variant : str, optional
        A name of ``FORWARD``.

    Raises
    ------
    ShapeError, DTypeError
        If an array does not fit the logits.

    Notes
    -----
    Workspace: none. Deterministic: yes.
    """
    classes = _check(logits_RV, targets_R, None, {}, {"loss_R": loss_R, "lse_R": lse_R}, n_classes)
    FORWARD.pick(variant, row_of(logits_RV.shape[1], logits_RV), logits_RV.itemsize).launch(
        (logits_RV, targets_R, loss_R, lse_R), classes, ignore_index, stream
    )


def backward(
    logits_RV: Array,
    targets_R: Array,
    lse_R: Array,
    dlogits_RV: Array,
    scale_1: Array,
    *,
    n_classes: int | None = None,
    ignore_index: int = -1,
    variant: str | None = None,
    stream: Stream | None = None,
) -> None:
    """Gradient of ``scale * sum(loss_R)`` with respect to the logits.

    Parameters
    ----------
    logits_RV, dlogits_RV : array, shape (R, V), floating, C-contiguous
        dlogits may be logits.
    targets_R : array, shape (R,), int32
    lse_R : array, shape (R,), float32
        From :func:`forward`.
    scale_1 : array, shape (1,), float32
        On the device, so that the number of targets or a loss scale needs no wait.
    n_classes : int, optional
        As given to :func:`forward`; the gradient of padding is 0.
    variant : str, optional
        A name of ``BACKWARD``.

    Raises
    ------
    ShapeError, DTypeError
        If an array does not fit the logits.

    Notes
    -----
    Workspace: none. Deterministic: yes.
    """
    classes = _check(logits_RV, targets_R, scale_1, {"dlogits_RV": dlogits_RV}, {"lse_R": lse_R}, n_classes)
    launch = BACKWARD.pick(variant, row_of(logits_RV.shape[1], logits_RV, dlogits_RV), logits_RV.itemsize).launch
    launch((logits_RV, targets_R, lse_R, dlogits_RV, scale_1), classes, ignore_index, stream)


def forward_backward(
    logits_RV: Array,
    targets_R: Array,
    loss_R: Array,
    dlogits_RV: Array,
    scale_1: Array,
    *,
    n_classes: int | None = None,
    ignore_index: int = -1,
    variant: str | None = None,
    stream: Stream | None = None,
) -> None:
    """Loss of each row and the gradient of ``scale * sum(loss_R)``, in one kernel.

    Parameters
    ----------
    logits_RV, dlogits_RV : array, shape (R, V), floating, C-contiguous
        dlogits may be logits.
    targets_R : array, shape (R,), int32
    loss_R : array, shape (R,), float32
    scale_1 : array, shape (1,), float32
    n_classes : int, optional
        How many columns of the logits are classes; the gradient of the others is 0.
    variant : str, optional
        A name of ``FORWARD_BACKWARD``.

    Raises
    ------
    ShapeError, DTypeError
        If an array does not fit the logits.

    Notes
    -----
    Workspace: none. Deterministic: yes.
    """
    classes = _check(logits_RV, targets_R, scale_1, {"dlogits_RV": dlogits_RV}, {"loss_R": loss_R}, n_classes)
    launch = FORWARD_BACKWARD.pick(
        variant, row_of(logits_RV.shape[1], logits_RV, dlogits_RV), logits_RV.itemsize, variant is not None
    ).launch
    launch((logits_RV, targets_R, loss_R, dlogits_RV, scale_1), classes, ignore_index, stream)
