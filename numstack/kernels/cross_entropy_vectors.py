"""Cross-entropy by vectors, for GPUs: see :mod:`numstack.kernels.cross_entropy` for what it computes.

A block takes a row. Each thread has several vectors of 8 logits under way, and keeps a maximum and a sum of its own::

    vectors of a row     | 0 1 2 ... 511 | 512 ... 1023 | 1024 ... 1535 | 1536 ... 2047 | 2048 ...
    thread 0 takes         0               512            1024            1536            2048 ...

``row_in_shared`` keeps the row in shared memory, in the logits' own format, while the block agrees on maximum and sum:
a row of 50,304 bfloat16 is 100,608 bytes, so that two blocks fit a multiprocessor and one's exponentials hide behind
the other's loads. The gradient is made of what shared memory holds: each logit is read once from memory and its
gradient written once, the least there can be. Of a longer row the rest is read a second time, from the cache that it
has just come through.

``rows_in_turn`` has one block for a multiprocessor and room for two rows: while it computes one, the whole next one is
on its way.

On an H200, in TB/s of each row read and written once, where a copy has 4.26:

=============  =============  ===========================================
16384 x 50304  row_in_shared  3.68 (3.37 with nothing kept)
16384 x 50304  rows_in_turn   3.90 (3.68 with one vector a thread at a time)
4096 x 131072  row_in_shared  3.16
=============  =============  ===========================================

The loss alone has 4.45, the gradient from it 4.08.

Nothing is tested element by element: the target's gradient is written over by the thread that wrote there first, and
only the last vectors of a row, which may be padding, go another way. Exponentials are powers of 2 (``ptx.exp2``).
"""

import functools
import math
from typing import Any

from numba import cuda, float32

from numstack.device import Kernel, kernel, narrow, ptx, widen
from numstack.device.ptx.mma import cp_async_16, cp_async_commit_group, cp_async_wait_group
from numstack.kernels.warp import LOWEST, WARP, warp_max, warp_sum

VECTOR = 8
LONG_BLOCK = 512  # threads for a long row
SHORT_BLOCK = 128
PER_THREAD = 4  # vectors of a thread that are under way at once


@cuda.jit(device=True)
def _exp(x):
    return ptx.exp2(x * ptx.LOG2_E)


@cuda.jit(device=True)
def _target_logit(logits_RV, row, target, classes):
    """The logit of the target; NaN if there is none."""
    if target >= 0 and target < classes:
        return widen(logits_RV[row, target])
    return float32(math.nan)


@cuda.jit(device=True)
def target_of(targets_R, row, classes, ignore_index):
    """A row's target, how many of its logits count, which is none if it is ignored, and whether the target does."""
    target = targets_R[row]
    counted = 0 if target == ignore_index else classes
    return target, counted, target >= 0 and target < counted


@cuda.jit(device=True)
def finish_target(loss_R, dlogits_N, row, place, logit, largest, total, scale):
    """Loss, and the gradient of the target's logit at ``place``, over what its thread wrote there before."""
    loss_R[row] = largest + math.log(total) - logit
    gradient = (_exp(logit - largest) / total - float32(1)) * scale
    dlogits_N[place] = narrow(gradient, dlogits_N.dtype)


@cuda.jit(device=True)
def finish_without_target(loss_R, row, counted):
    """The loss of a row that is ignored, or whose target is no class."""
    loss_R[row] = float32(0) if counted == 0 else float32(math.nan)


@cuda.jit(device=True)
def _with_more(x, n, largest, total):
    """``(max x_i, sum exp(x_i - max))`` after x[:n] more, from those before."""
    new = largest
    for e in range(n):
        new = max(new, x[e])
    total *= _exp(largest - new)
    for e in range(n):
        total += _exp(x[e] - new)
    return new, total


@cuda.jit(device=True)
def _load_ragged(logits_RV, row, v, classes, x):
    """x[0:8] = the row's elements from v on; those past the classes count for nothing."""
    for e in range(VECTOR):
        x[e] = float32(-math.inf)
        if v + e < classes:
            x[e] = widen(logits_RV[row, v + e])


@cuda.jit(device=True)
def over_block(largest, total, warps, half):
    """Maximum and sum of the row from those of the threads, at the cost of one barrier.

    ``warps``: ``(2, 2, 32)`` float32 of shared memory, of which ``half`` 0 or 1 is used: the other half is for the next
    row, since some warps may be behind.
    """
    lane = cuda.threadIdx.x % WARP
    warp = cuda.threadIdx.x // WARP
    of_warp = warp_max(largest)
    total = warp_sum(total * _exp(largest - of_warp))
    if lane == 0:
        warps[half, 0, warp] = of_warp
        warps[half, 1, warp] = total
    cuda.syncthreads()
    of_warp = LOWEST
    total = float32(0)
    if lane < cuda.blockDim.x // WARP:
        of_warp = warps[half, 0, lane]
        total = warps[half, 1, lane]
    of_row = warp_max(of_warp)
    return of_row, warp_sum(total * _exp(of_warp - of_row))


@functools.cache
def forward(block: int, per_thread: int = PER_THREAD) -> Kernel:
    """Loss and log-sum-exp."""
    n_values, stride, span = VECTOR * per_thread, VECTOR * block, VECTOR * block * per_thread

    @kernel(name="cross_entropy.forward vectors", starts_early=True)
    def forward_vectors(logits_RV, targets_R, loss_R, lse_R, classes, ignore_index):
        warps = cuda.shared.array((2, 2, WARP), float32)
        x = cuda.local.array(n_values, float32)
        row = cuda.blockIdx.x
        target = targets_R[row]
        ignored = target == ignore_index
        start = row * logits_RV.shape[1]
        counted = 0 if ignored else classes
        largest = LOWEST
        total = float32(0)
        n_whole = counted // span * span
        for v0 in range(0, n_whole, span):
            v = v0 + cuda.threadIdx.x * VECTOR
            for k in range(per_thread):
                ptx.load8(logits_RV, start + v + k * stride, x, k * VECTOR)
            largest, total = _with_more(x, n_values, largest, total)
        for v0 in range(n_whole, counted, stride):
            v = v0 + cuda.threadIdx.x * VECTOR
            if v < counted:
                if v + VECTOR <= counted:
                    ptx.load8(logits_RV, start + v, x, 0)
                else:
                    _load_ragged(logits_RV, row, v, counted, x)
                largest, total = _with_more(x, VECTOR, largest, total)
        largest, total = over_block(largest, total, warps, 0)
        if cuda.threadIdx.x == 0:
            lse = largest + math.log(total)
            loss_R[row] = float32(0) if ignored else lse - _target_logit(logits_RV, row, target, classes)
            lse_R[row] = float32(0) if ignored else lse

    return forward_vectors


@functools.cache
def _gradient(block: int, per_thread: int) -> Any:
    """Device functions that turn logits into gradients: of a whole span of vectors, of one vector, of the target."""
    stride = VECTOR * block

    @cuda.jit(device=True)
    def of_values(x, n, shift, factor):
        for e in range(n):
            x[e] = _exp(x[e] - shift) * factor

    @cuda.jit(device=True)
    def store_vector(dlogits_RV, start, row, v, classes, x):
        """Of a vector that may reach into the padding, whose gradient is 0."""
        if v + VECTOR > classes:
            for e in range(VECTOR):
                if v + e >= classes:
                    x[e] = float32(0)
        ptx.store8(dlogits_RV, start + v, x, 0)

    @cuda.jit(device=True)
    def of_target(dlogits_RV, row, target, classes, target_logit, shift, inverse, scale):
        """The gradient of the target's logit, over what its thread wrote there before."""
        if target >= 0 and target < classes and cuda.threadIdx.x == target // VECTOR % block:
            gradient = (_exp(target_logit - shift) * inverse - float32(1)) * scale
            dlogits_RV[row, target] = narrow(gradient, dlogits_RV.dtype)

    @cuda.jit(device=True)
    def zero_row(dlogits_RV, start, x):
        for e in range(VECTOR):
            x[e] = float32(0)
        for v0 in range(0, dlogits_RV.shape[1], stride):
            v = v0 + cuda.threadIdx.x * VECTOR
            if v < dlogits_RV.shape[1]:
                ptx.store8(dlogits_RV, start + v, x, 0)

    return of_values, store_vector, of_target, zero_row


@functools.cache
def backward(block: int, per_thread: int = PER_THREAD) -> Kernel:
    """Gradient from the log-sum-exp."""
    n_values, stride, span = VECTOR * per_thread, VECTOR * block, VECTOR * block * per_thread
    of_values, store_vector, of_target, zero_row = _gradient(block, per_thread)

    @kernel(name="cross_entropy.backward vectors", starts_early=True)
    def backward_vectors(logits_RV, targets_R, lse_R, dlogits_RV, scale_1, classes, ignore_index):
        x = cuda.local.array(n_values, float32)
        row = cuda.blockIdx.x
        V = logits_RV.shape[1]
        start = row * V
        target = targets_R[row]
        ignored = target == ignore_index
        if ignored:
            zero_row(dlogits_RV, start, x)
            return
        lse = lse_R[row]
        scale = scale_1[0] if target >= 0 and target < classes else float32(math.nan)
        # Read before the gradient may overwrite it: by the thread that will.
        target_logit = _target_logit(logits_RV, row, target, classes)
        n_whole = classes // span * span
        for v0 in range(0, n_whole, span):
            v = v0 + cuda.threadIdx.x * VECTOR
            for k in range(per_thread):
                ptx.load8(logits_RV, start + v + k * stride, x, k * VECTOR)
            of_values(x, n_values, lse, scale)
            for k in range(per_thread):
                ptx.store8(dlogits_RV, start + v + k * stride, x, k * VECTOR)
        for v0 in range(n_whole, V, stride):
            v = v0 + cuda.threadIdx.x * VECTOR
            if v < V:
                ptx.load8(logits_RV, start + v, x, 0)
                of_values(x, VECTOR, lse, scale)
                store_vector(dlogits_RV, start, row, v, classes, x)
        of_target(dlogits_RV, row, target, classes, target_logit, lse, float32(1), scale)

    return backward_vectors


@functools.cache
def forward_backward(dtype: Any, block: int, per_thread: int = PER_THREAD) -> Kernel:
    """Loss and gradient of logits of a numba ``dtype``; the first n_kept elements of a row, whole spans, stay."""
    n_values, stride, span = VECTOR * per_thread, VECTOR * block, VECTOR * block * per_thread
    of_values, store_vector, of_target, zero_row = _gradient(block, per_thread)

    @kernel(name="cross_entropy.forward_backward row_in_shared")
    def row_in_shared(logits_RV, targets_R, loss_R, dlogits_RV, scale_1, classes, ignore_index, n_kept):
        warps = cuda.shared.array((2, 2, WARP), float32)
        kept = cuda.shared.array(0, dtype)
        x = cuda.local.array(n_values, float32)
        row = cuda.blockIdx.x
        V = logits_RV.shape[1]
        start = row * V
        target = targets_R[row]
        ignored = target == ignore_index
        if ignored:
            zero_row(dlogits_RV, start, x)
            if cuda.threadIdx.x == 0:
                loss_R[row] = float32(0)
            return
        scale = scale_1[0] if target >= 0 and target < classes else float32(math.nan)
        # Read before the barriers of the sum: after them the gradient may overwrite it.
        target_logit = _target_logit(logits_RV, row, target, classes)
        largest = LOWEST
        total = float32(0)
        n_whole = classes // span * span
        for v0 in range(0, n_whole, span):
            v = v0 + cuda.threadIdx.x * VECTOR
            for k in range(per_thread):
                ptx.load8(logits_RV, start + v + k * stride, x, k * VECTOR)
            if v0 < n_kept:
                for k in range(per_thread):
                    ptx.store8(kept, v + k * stride, x, k * VECTOR)
            largest, total = _with_more(x, n_values, largest, total)
        for v0 in range(n_whole, classes, stride):
            v = v0 + cuda.threadIdx.x * VECTOR
            if v < classes:
                if v + VECTOR <= classes:
                    ptx.load8(logits_RV, start + v, x, 0)
                else:
                    _load_ragged(logits_RV, row, v, classes, x)
                if v < n_kept:
                    ptx.store8(kept, v, x, 0)
                largest, total = _with_more(x, VECTOR, largest, total)
        largest, total = over_block(largest, total, warps, 0)
        if cuda.threadIdx.x == 0:
            loss_R[row] = largest + math.log(total) - target_logit
        inverse = float32(1) / total
        factor = inverse * scale
        for v0 in range(0, n_whole, span):
            v = v0 + cuda.threadIdx.x * VECTOR
            if v0 < n_kept:
                for k in range(per_thread):
                    ptx.load8(kept, v + k * stride, x, k * VECTOR)
            else:
                for k in range(per_thread):
                    ptx.load8(logits_RV, start + v + k * stride, x, k * VECTOR)
            of_values(x, n_values, largest, factor)
            for k in range(per_thread):
                ptx.store8(dlogits_RV, start + v + k * stride, x, k * VECTOR)
        for v0 in range(n_whole, V, stride):
            v = v0 + cuda.threadIdx.x * VECTOR
            if v < V:
                if v < n_kept and v < classes:
                    ptx.load8(kept, v, x, 0)
                else:
                    ptx.load8(logits_RV, start + v, x, 0)
                of_values(x, VECTOR, largest, factor)
                store_vector(dlogits_RV, start, row, v, classes, x)
        of_target(dlogits_RV, row, target, classes, target_logit, largest, inverse, scale)

    return row_in_shared


@functools.cache
def forward_backward_in_turn(dtype: Any, block: int, per_thread: int) -> Kernel:
    """Loss and gradient of rows of V logits of a numba ``dtype``, two of which fit in shared memory."""
    n_values, stride, span = VECTOR * per_thread, VECTOR * block, VECTOR * block * per_thread
    n_copies, copied = VECTOR * dtype.bitwidth // 128, 128 // dtype.bitwidth  # of a vector; elements of one
    of_values, store_vector, _, _ = _gradient(block, per_thread)
    wait_for_all_but_one = cp_async_wait_group(1)

    @cuda.jit(device=True)
    def start_copy(rows, at, logits_N, start, V):
        """Start copying the thread's vectors of a row to element ``at`` of shared memory."""
        for v in range(cuda.threadIdx.x * VECTOR, V, stride):
            for i in range(n_copies):
                cp_async_16(rows, at + v + i * copied, logits_N, start + v + i * copied, 16)

    @kernel(name="cross_entropy.forward_backward rows_in_turn")
    def rows_in_turn(logits_N, targets_R, loss_R, dlogits_N, scale_1, V, classes, ignore_index):
        warps = cuda.shared.array((2, 2, WARP), float32)
        rows = cuda.shared.array(0, dtype)
        x = cuda.local.array(n_values, float32)
        R = targets_R.size
        row = cuda.blockIdx.x
        at = 0
        half = 0
        start_copy(rows, at, logits_N, row * V, V)
        cp_async_commit_group()
        while row < R:
            # A thread waits for, reads and overwrites its own vectors only, so that no barrier stands between rows.
            following = row + cuda.gridDim.x
            if following < R:
                start_copy(rows, V - at, logits_N, following * V, V)
            cp_async_commit_group()
            wait_for_all_but_one()
            start = row * V
            target, counted, is_class = target_of(targets_R, row, classes, ignore_index)
            scale = scale_1[0] if is_class else float32(math.nan)
            largest = LOWEST
            total = float32(0)
            n_whole = counted // span * span
            for v0 in range(0, n_whole, span):
                v = at + v0 + cuda.threadIdx.x * VECTOR
                for k in range(per_thread):
                    ptx.load8(rows, v + k * stride, x, k * VECTOR)
                largest, total = _with_more(x, n_values, largest, total)
            for v0 in range(n_whole, counted, stride):
                v = v0 + cuda.threadIdx.x * VECTOR
                if v < counted:
                    ptx.load8(rows, at + v, x, 0)
                    for e in range(VECTOR):
                        if v + e >= counted:
                            x[e] = float32(-math.inf)
                    largest, total = _with_more(x, VECTOR, largest, total)
            largest, total = over_block(largest, total, warps, half)
            inverse = float32(1) / total
            factor = inverse * scale
            for v0 in range(0, n_whole, span):
                v = v0 + cuda.threadIdx.x * VECTOR
                for k in range(per_thread):
                    ptx.load8(rows, at + v + k * stride, x, k * VECTOR)
                of_values(x, n_values, largest, factor)
                for k in range(per_thread):
                    ptx.store8(dlogits_N, start + v + k * stride, x, k * VECTOR)
            for v0 in range(n_whole, V, stride):
                v = v0 + cuda.threadIdx.x * VECTOR
                if v < V:
                    ptx.load8(rows, at + v, x, 0)
                    of_values(x, VECTOR, largest, factor)
                    store_vector(dlogits_N, start, row, v, counted, x)
            if is_class and cuda.threadIdx.x == target // VECTOR % block:
                logit = widen(rows[at + target])
                finish_target(loss_R, dlogits_N, row, start + target, logit, largest, total, scale)
            elif not is_class and cuda.threadIdx.x == 0:
                finish_without_target(loss_R, row, counted)
            row = following
            at = V - at
            half = 1 - half

    return rows_in_turn
