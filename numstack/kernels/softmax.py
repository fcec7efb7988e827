"""Softmax of each row of x_RC.

Forward, for every row r, with m_r = max_c x_rc::

    y_rc = exp(x_rc - m_r) / sum_c exp(x_rc - m_r)

Backward::

    dx_rc = y_rc (dy_rc - sum_c dy_rc y_rc)

Forward ladder: ``thread_per_row`` is the formula; ``three_pass`` gives a warp to each row, which reads it for the
maximum, for the sum and for the result; ``online`` finds maximum and sum in one pass, correcting the sum each time the
maximum grows (Milakov, Gimelshein 2018, "Online normalizer calculation for softmax"); ``row_in_registers``, for GPUs,
reads a row once, 16 bytes a lane, and keeps it. Backward ladder: ``thread_per_row``, ``warp_per_row``,
``row_in_registers``.

Both kernels tie with PyTorch's compiled ones, which have the same warp a row, loads and registers (65536 x 1024
bfloat16 on an H200: forward 4.14 to 4.27 TB/s, 0.990 to 1.020 of its rate in six runs, backward 4.34 to 4.38, 0.994 to
1.005; the same kernel twice in a run differs by up to 0.5%). They move the same bytes, and arithmetic is no limit:
PyTorch's forward kernel executes twice as many instructions. An empty kernel takes 3.6 us between the same events. No
layout was faster by more than that noise. Forward, beside today's rate: blocks of two rows 1.002 to 1.004, of four
0.990 to 0.994, of 16 0.992 to 0.998, rows of two warps 1.003 to 1.006, of four 0.81, two rows a warp 0.98, fewer warps
at a time 0.989 to 1.008, fewer instructions 0.988 to 0.999. Backward: rows of two warps 1.001, of four, 48 KiB of a
multiprocessor under way, 1.003 to 1.006, blocks of two to eight rows 0.998 to 1.003, of 768 threads, as in additions,
0.94, rows kept as 16-bit words 1.000, less arithmetic before the first load 1.000, lines of 256 bytes asked for 0.982.
Loads that pass by the first cache, or that tell the second one to forget, 0.93 to 0.95 either way.

Backward again, singly and in a row: results stored by bulk copies 0.995 to 1.000, 32 bytes a lane 0.996 to 1.001, later
rows asked for ahead 0.68 to 0.94. Addresses for arguments in place of arrays, one line of the constant cache for four,
take 0.2 us less singly, 1.002 to 1.003, in a row 1.001. The first rows asked for before the kernel ahead is over: 1.000
to 1.010 in a row, 0.989 to 0.998 singly.

Loads that tell the second cache to give their lines up last (``L2::evict_last``) gain 1.6% forward and 0.6% backward in
a row by as many bytes, but such lines outlive the kernel and are in the way of what comes next (``adamw`` has figures).
To release each of them (``applypriority``) leaves 0.5% forward, and costs 4% backward. So they are not used.

A row that holds NaN, or nothing but -inf, becomes NaN. Sums are float32 whatever the arrays hold.
"""

import functools
import math

import numpy as np
from numba import cuda, float32

from numstack.device import Array, Kernel, Stream, kernel, narrow, ptx, widen
from numstack.kernels.launch import ceil_div, check_contiguous, check_floats, check_ndim, check_shape
from numstack.kernels.rows import VECTOR, Layout, fits, layout, row_functions, row_of
from numstack.kernels.variants import Variant, Variants
from numstack.kernels.warp import LOWEST, WARP, online_sum, warp_max, warp_sum

BLOCK = 128  # threads of the one-dimensional blocks
ROWS = 4  # rows of a block where a warp takes a row
MINUS_INFINITY = float32(-math.inf)
VECTORS = 4  # vectors of a row that a thread keeps, at most


def reference(x_RC: np.ndarray) -> np.ndarray:
    """y_RC in float64."""
    x = np.asarray(x_RC, np.float64)
    e: np.ndarray = np.exp(x - x.max(axis=1, keepdims=True))
    e /= e.sum(axis=1, keepdims=True)
    return e


def reference_backward(dy_RC: np.ndarray, y_RC: np.ndarray) -> np.ndarray:
    """dx_RC in float64."""
    dy, y = np.asarray(dy_RC, np.float64), np.asarray(y_RC, np.float64)
    dx: np.ndarray = y * (dy - (dy * y).sum(axis=1, keepdims=True))
    return dx


# --- kernels ---------------------------------------------------------------------------------------------------------


@kernel
def _forward_thread_per_row(x_RC, y_RC):
    row = cuda.grid(1)
    C = x_RC.shape[1]
    if row < x_RC.shape[0]:
        largest = LOWEST
        for c in range(C):
            largest = max(largest, widen(x_RC[row, c]))
        total = float32(0)
        for c in range(C):
            total += math.exp(widen(x_RC[row, c]) - largest)
        for c in range(C):
            y_RC[row, c] = narrow(math.exp(widen(x_RC[row, c]) - largest) / total, y_RC.dtype)


@kernel
def _forward_three_pass(x_RC, y_RC):
    lane = cuda.threadIdx.x
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.y
    C = x_RC.shape[1]
    columns = C if row < x_RC.shape[0] else 0  # a warp past the last row has nothing to read, but joins the shuffles
    largest = LOWEST
    for c0 in range(0, C, WARP):
        c = c0 + lane
        if c < columns:
            largest = max(largest, widen(x_RC[row, c]))
    largest = warp_max(largest)
    total = float32(0)
    for c0 in range(0, C, WARP):
        c = c0 + lane
        if c < columns:
            total += math.exp(widen(x_RC[row, c]) - largest)
    scale = float32(1) / warp_sum(total)
    for c0 in range(0, C, WARP):
        c = c0 + lane
        if c < columns:
            y_RC[row, c] = narrow(math.exp(widen(x_RC[row, c]) - largest) * scale, y_RC.dtype)


@kernel
def _forward_online(x_RC, y_RC):
    lane = cuda.threadIdx.x
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.y
    C = x_RC.shape[1]
    columns = C if row < x_RC.shape[0] else 0
    own_largest = LOWEST
    total = float32(0)
    for c0 in range(0, C, WARP):
        c = c0 + lane
        if c < columns:
            x = widen(x_RC[row, c])
            total = online_sum(total, own_largest, x)
            own_largest = max(own_largest, x)
    largest = warp_max(own_largest)
    scale = float32(1) / warp_sum(total * math.exp(own_largest - largest))
    for c0 in range(0, C, WARP):
        c = c0 + lane
        if c < columns:
            y_RC[row, c] = narrow(math.exp(widen(x_RC[row, c]) - largest) * scale, y_RC.dtype)


@kernel
def _backward_thread_per_row(dy_RC, y_RC, dx_RC):
    row = cuda.grid(1)
    C = y_RC.shape[1]
    if row < y_RC.shape[0]:
        dot = float32(0)
        for c in range(C):
            dot += widen(dy_RC[row, c]) * widen(y_RC[row, c])
        for c in range(C):
            dx_RC[row, c] = narrow(widen(y_RC[row, c]) * (widen(dy_RC[row, c]) - dot), dx_RC.dtype)


@kernel
def _backward_warp_per_row(dy_RC, y_RC, dx_RC):
    lane = cuda.threadIdx.x
    row = cuda.blockIdx.x * ROWS + cuda.threadIdx.y
    C = y_RC.shape[1]
    columns = C if row < y_RC.shape[0] else 0
    dot = float32(0)
    for c0 in range(0, C, WARP):
        c = c0 + lane
        if c < columns:
            dot += widen(dy_RC[row, c]) * widen(y_RC[row, c])
    dot = warp_sum(dot)
    for c0 in range(0, C, WARP):
        c = c0 + lane
        if c < columns:
            dx_RC[row, c] = narrow(widen(y_RC[row, c]) * (widen(dy_RC[row, c]) - dot), dx_RC.dtype)


@functools.cache
def _forward_in_registers(layout: Layout, is_full: bool) -> Kernel:
    threads, vectors, rows = layout
    elements = VECTOR * vectors
    load, store, totals, largest_of = row_functions(threads, vectors, is_full)

    @kernel(name="softmax.forward row_in_registers", starts_early=True)
    def forward_in_registers(x_RC, y_RC):
        x = cuda.local.array(elements, float32)
        total = cuda.local.array(1, float32)
        shared = cuda.shared.array((WARP, 1), float32)
        shared_largest = cuda.shared.array(WARP, float32)
        row = cuda.blockIdx.x * rows + cuda.threadIdx.y
        R, C = x_RC.shape
        # In place of a row past the last, that one again: there is no branch to wait at, and nothing is stored.
        load(x_RC, min(row, R - 1) * C, C, x, 0, MINUS_INFINITY)  # exp(-inf) is 0, also in a row of nothing else
        largest = LOWEST
        for v in range(vectors):
            of_vector = LOWEST
            for i in range(VECTOR * v, VECTOR * v + VECTOR):
                of_vector = max(of_vector, x[i])
            largest = max(largest, of_vector)
        largest = largest_of(largest, shared_largest)
        total[0] = float32(0)
        for v in range(vectors):
            of_vector = float32(0)
            for i in range(VECTOR * v, VECTOR * v + VECTOR):
                x[i] = ptx.exp2((x[i] - largest) * ptx.LOG2_E)
                of_vector += x[i]
            total[0] += of_vector
        totals(total, 1, shared)
        scale = float32(1) / total[0]
        for i in range(elements):
            x[i] *= scale
        if row < R:
            store(y_RC, row * C, C, x, 0)

    return forward_in_registers


@functools.cache
def _backward_in_registers(layout: Layout, is_full: bool) -> Kernel:
    threads, vectors, rows = layout
    elements = VECTOR * vectors
    load, store, totals, _ = row_functions(threads, vectors, is_full)

    @kernel(name="softmax.backward row_in_registers", starts_early=True)
    def backward_in_registers(dy_RC, y_RC, dx_RC):
        dy = cuda.local.array(elements, float32)
        y = cuda.local.array(elements, float32)
        dot = cuda.local.array(1, float32)
        shared = cuda.shared.array((WARP, 1), float32)
        row = cuda.blockIdx.x * rows + cuda.threadIdx.y
        R, C = y_RC.shape
        start = min(row, R - 1) * C  # as in the forward pass
        load(dy_RC, start, C, dy, 0, float32(0))
        load(y_RC, start, C, y, 0, float32(0))
        dot[0] = float32(0)
        for v in range(vectors):
            of_vector = float32(0)
            for i in range(VECTOR * v, VECTOR * v + VECTOR):
                of_vector += dy[i] * y[i]
            dot[0] += of_vector
        totals(dot, 1, shared)
        for i in range(elements):
            y[i] *= dy[i] - dot[0]
        if row < R:
            store(dx_RC, start, C, y, 0)

    return backward_in_registers


# --- launchers -------------------------------------------------------------------------------------------------------


def _forward_by_threads(x: Array, y: Array, stream: Stream | None) -> None:
    _forward_thread_per_row[ceil_div(x.shape[0], BLOCK), BLOCK, stream](x, y)


def _forward_by_passes(x: Array, y: Array, stream: Stream | None) -> None:
    _forward_three_pass[ceil_div(x.shape[0], ROWS), (WARP, ROWS), stream](x, y, flops=5 * x.size)


def _forward_by_online_sums(x: Array, y: Array, stream: Stream | None) -> None:
    _forward_online[ceil_div(x.shape[0], ROWS), (WARP, ROWS), stream](x, y, flops=5 * x.size)


def _backward_by_threads(dy: Array, y: Array, dx: Array, stream: Stream | None) -> None:
    _backward_thread_per_row[ceil_div(y.shape[0], BLOCK), BLOCK, stream](dy, y, dx)


def _backward_by_warps(dy: Array, y: Array, dx: Array, stream: Stream | None) -> None:
    _backward_warp_per_row[ceil_div(y.shape[0], ROWS), (WARP, ROWS), stream](dy, y, dx, flops=4 * y.size)


def _forward_by_registers(x: Array, y: Array, stream: Stream | None) -> None:
    R, C = x.shape
    chosen = layout(C, VECTORS)
    kernel_ = _forward_in_registers(chosen, chosen.is_full(C))
    kernel_[ceil_div(R, chosen.rows), chosen.block, stream](x, y, flops=5 * x.size)


def _backward_by_registers(dy: Array, y: Array, dx: Array, stream: Stream | None) -> None:
    R, C = y.shape
    chosen = layout(C, VECTORS)
    kernel_ = _backward_in_registers(chosen, chosen.is_full(C))
    kernel_[ceil_div(R, chosen.rows), chosen.block, stream](dy, y, dx, flops=4 * y.size)


FORWARD = Variants(
    "softmax.forward",
    [
        Variant("thread_per_row", _forward_by_threads, note="The formula: one thread walks over a row three times."),
        Variant("three_pass", _forward_by_passes, note="A warp a row: coalesced reads, shuffles for maximum and sum."),
        Variant(
            "online", _forward_by_online_sums, note="Maximum and sum in one pass: two reads of the row, not three."
        ),
        Variant(
            "row_in_registers",
            _forward_by_registers,
            note="One read of the row, 16 bytes a lane and all on their way at once.",
            supports=lambda row: fits(row, VECTORS),
            made_for="gpu",
        ),
    ],
)

BACKWARD = Variants(
    "softmax.backward",
    [
        Variant("thread_per_row", _backward_by_threads, note="The formula: one thread walks over a row twice."),
        Variant("warp_per_row", _backward_by_warps, note="A warp a row: coalesced reads, shuffles for the sum."),
        Variant(
            "row_in_registers",
            _backward_by_registers,
            note="One read of each row, 16 bytes a lane and all on their way at once.",
            supports=lambda row: fits(row, VECTORS),
            made_for="gpu",
        ),
    ],
)


def forward(x_RC: Array, y_RC: Array, *, variant: str | None = None, stream: Stream | None = None) -> None:
    """Softmax of each row.

    Parameters
    ----------
    x_RC, y_RC : array, shape (R, C), floating, C-contiguous
        y may be x.
    variant : str, optional
        A name of ``FORWARD``.

    Raises
    ------
    ShapeError, DTypeError
        If y does not fit x.

    Notes
    -----
    Workspace: none. Deterministic: yes.
    """
    check_ndim("softmax", 2, x_RC=x_RC)
    check_shape("softmax", x_RC.shape, y_RC=y_RC)
    check_floats("softmax", x_RC=x_RC, y_RC=y_RC)
    check_contiguous("softmax", x_RC=x_RC, y_RC=y_RC)
    FORWARD.pick(variant, row_of(x_RC.shape[1], x_RC, y_RC)).launch(x_RC, y_RC, stream)


def backward(
    dy_RC: Array, y_RC: Array, dx_RC: Array, *, variant: str | None = None, stream: Stream | None = None
) -> None:
    """Gradient of :func:`forward` from its result y.

    Parameters
    ----------
    dy_RC, y_RC, dx_RC : array, shape (R, C), floating, C-contiguous
        dx may be dy or y.
    variant : str, optional
        A name of ``BACKWARD``.

    Raises
    ------
    ShapeError, DTypeError
        If an array does not fit y.

    Notes
    -----
    Workspace: none. Deterministic: yes.
    """
    check_ndim("softmax", 2, y_RC=y_RC)
    check_shape("softmax", y_RC.shape, dy_RC=dy_RC, dx_RC=dx_RC)
    check_floats("softmax", dy_RC=dy_RC, y_RC=y_RC, dx_RC=dx_RC)
    check_contiguous("softmax", dy_RC=dy_RC, y_RC=y_RC, dx_RC=dx_RC)
    row = row_of(y_RC.shape[1], dy_RC, y_RC, dx_RC)
    BACKWARD.pick(variant, row).launch(dy_RC, y_RC, dx_RC, stream)
