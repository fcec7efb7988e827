"""Cross-entropy of rows that stay on the chip, for GPUs: see :mod:`numstack.kernels.cross_entropy`.

A block takes row after row. Of each it has the first ``n_spans`` spans in shared memory, in the logits' own format, and
the next ``held`` vectors of each thread in registers, as words that nothing has widened yet: a row of 131,072 bfloat16
is 224 KB of shared memory and 32 KB of registers, all of a multiprocessor. Each logit is read once from memory and its
gradient written once. Of a still longer row the rest is read a second time, from the cache.

As soon as a vector's gradient is made, the next row's vector is on its way to the same place, so that memory has
something to do while the block computes. A thread waits for, reads and overwrites its own vectors only::

    loss of row r        waits for vector after vector of row r, which have been under way since row r - 1
    one barrier          maximum and sum, from those of the warps
    gradient of row r    read, compute, store, ask for the same vector of the next row

On an H200, in TB/s of each row read and written once, where a copy has 4.24: 4096 x 131072 3.81, 16384 x 50304 4.01.
Its stores come before its loads: with one load after each store it was 3.76. Rows shared by the blocks of a cluster,
more of the next row under way, spans in an order that differs from block to block, and neighbouring rows for a block
were slower.

``rows_in_clusters`` leaves whole turns to these blocks. The few rows that are left, which would keep few blocks busy
for the time of a row, are done beside them by clusters that share each: 4096 x 131072 3.87.

Exponentials are powers of 2, of ``logit * log2(e) - shift``: one multiply-add.
"""

import functools
import math
from typing import Any

from numba import cuda, float32, uint32

from numstack.device import Kernel, kernel, narrow, ptx, widen
from numstack.device.ptx import cluster
from numstack.device.ptx.integers import shared_address
from numstack.device.ptx.math import maximum
from numstack.device.ptx.mma import cp_async_16, cp_async_commit_group, cp_async_wait_group
from numstack.device.ptx.words import WORDS, words_of
from numstack.kernels.cross_entropy_vectors import (
    finish_target,
    finish_without_target,
    over_block,
    target_of,
)
from numstack.kernels.launch import ceil_div
from numstack.kernels.warp import LOWEST, WARP, warp_max, warp_sum

PER_THREAD = 2  # vectors of 16 bytes of a thread in a span, which are under way at once
HELD = 2  # vectors of a thread in registers
CLUSTER = 8  # blocks that share a row
CLUSTER_THREADS = 1024  # of each of them
MOST_CLUSTERS = 8  # that surely run at once
MOST_IN_CLUSTER = 4  # vectors of a row of each of those
MOST_PENDING = 7  # groups of copies that a wait tells apart


def span_bytes(threads: int) -> int:
    """Bytes of a row that a block of so many threads has under way at once."""
    return 16 * PER_THREAD * threads


def n_spans(nbytes: int, threads: int, most: int) -> int:
    """How many whole spans of ``nbytes`` of classes stay in ``most`` bytes of shared memory."""
    return min(nbytes, most) // span_bytes(threads)


@functools.cache
def _wait_for_all_but() -> Any:
    """A device function that waits until at most n of a thread's groups of copies are under way, or fewer."""
    wait_0, wait_1, wait_2, wait_3, wait_4, wait_5, wait_6, wait_7 = map(cp_async_wait_group, range(MOST_PENDING + 1))

    @cuda.jit(device=True)
    def wait(n):
        if n >= MOST_PENDING:
            wait_7()
        elif n == 6:
            wait_6()
        elif n == 5:
            wait_5()
        elif n == 4:
            wait_4()
        elif n == 3:
            wait_3()
        elif n == 2:
            wait_2()
        elif n == 1:
            wait_1()
        else:
            wait_0()

    return wait


@functools.cache
def _of_words(dtype: Any) -> tuple[Any, Any]:
    """Device functions of words of logits: with more of them in maximum and sum, and from logits to gradients."""
    of = words_of(dtype)
    low, high, pack, elements = of.low, of.high, of.pack, of.elements

    @cuda.jit(device=True)
    def with_more(words, first, n, x, n_left, largest, total):
        """``(max l, sum exp(l - max))`` with n words of logits more, of which the first n_left logits are classes."""
        for w in range(n):
            x[elements * w] = low(words[first + w])
            if elements == 2:
                x[2 * w + 1] = high(words[first + w])
        if n_left < elements * n:
            for e in range(elements * n):
                if e >= n_left:
                    x[e] = float32(-math.inf)
        new = largest
        for e in range(elements * n):
            new = maximum(new, x[e])
        shift = new * ptx.LOG2_E
        total *= ptx.exp2(largest * ptx.LOG2_E - shift)
        for e in range(elements * n):
            total += ptx.exp2(x[e] * ptx.LOG2_E - shift)
        return new, total

    @cuda.jit(device=True)
    def to_gradient(words, first, n, shift, factor, n_left):
        """Logits become gradients, 0 from the n_left-th on."""
        for w in range(n):
            a = ptx.exp2(low(words[first + w]) * ptx.LOG2_E - shift) * factor
            b = ptx.exp2(high(words[first + w]) * ptx.LOG2_E - shift) * factor
            words[first + w] = pack(a, b)
        if n_left < elements * n:
            for w in range(n):
                if elements * w >= n_left:
                    words[first + w] = uint32(0)
                elif elements * w + elements > n_left:
                    words[first + w] &= uint32(0xFFFF)

    return with_more, to_gradient


@functools.cache
def forward_backward(dtype: Any, threads: int, n_spans: int, *, beside_another: bool = False) -> Kernel:
    """Loss and gradient of rows of logits of a numba ``dtype``; n_spans whole spans of classes stay in shared memory.

    One axis for all logits; block ``threads``; dynamic shared memory for the spans. ``beside_another``: it runs beside
    the kernel before, with which it shares no row.
    """
    per_thread, held = PER_THREAD, HELD
    of = words_of(dtype)
    vector = WORDS * of.elements
    stride, span = vector * threads, vector * threads * per_thread
    kept, warps = n_spans * span, threads // WARP
    n_values, n_words, n_held, n_pairs = vector * per_thread, WORDS * per_thread, WORDS * max(held, 1), 4 * WARP
    load, load_shared, store = of.load, of.load_shared, of.store
    with_more, to_gradient = _of_words(dtype)
    wait = _wait_for_all_but()

    @kernel(name="cross_entropy.forward_backward rows_on_chip", waits_itself=beside_another)
    def rows_on_chip(logits_N, targets_R, loss_R, dlogits_N, scale_1, V, classes, ignore_index):
        pairs = cuda.shared.array(n_pairs, float32)  # maximum and sum of each warp, of this row and of the one before
        kept_N = cuda.shared.array(0, dtype)
        x = cuda.local.array(n_values, float32)
        words = cuda.local.array(n_words, uint32)
        held_words = cuda.local.array(n_held, uint32)
        own = cuda.threadIdx.x * vector
        lane = cuda.threadIdx.x % WARP
        warp = cuda.threadIdx.x // WARP
        R = targets_R.size
        row = cuda.blockIdx.x
        start = row * V
        half = 0
        for k in range(held):
            v = kept + own + k * stride
            if v < V:
                load(logits_N, start + v, held_words, WORDS * k)
        for s in range(n_spans):
            for k in range(per_thread):
                v = s * span + own + k * stride
                cp_async_16(kept_N, v, logits_N, start + v, 16)
            cp_async_commit_group()
        while row < R:
            following = row + cuda.gridDim.x
            target = targets_R[row]
            ignored = target == ignore_index
            counted = 0 if ignored else classes
            is_class = target >= 0 and target < counted
            scale = scale_1[0] if is_class else float32(math.nan)
            largest = LOWEST
            total = float32(0)
            for k in range(held):
                v = kept + own + k * stride
                if v < classes:
                    largest, total = with_more(held_words, WORDS * k, WORDS, x, classes - v, largest, total)
            for s in range(n_spans):
                wait(n_spans - 1 - s)
                for k in range(per_thread):
                    load_shared(kept_N, s * span + own + k * stride, words, WORDS * k)
                largest, total = with_more(words, 0, n_words, x, n_values, largest, total)
            for v in range(kept + held * stride + own, classes, stride):
                load(logits_N, start + v, words, 0)
                largest, total = with_more(words, 0, WORDS, x, classes - v, largest, total)
            of_warp = warp_max(largest)
            total = warp_sum(total * ptx.exp2((largest - of_warp) * ptx.LOG2_E))
            place = 2 * (half * WARP + warp)
            if lane == 0:
                pairs[place] = of_warp
                pairs[place + 1] = total
            logit = float32(0)
            owns_target = is_class and cuda.threadIdx.x == target // vector % threads
            if owns_target:
                logit = widen(kept_N[target]) if target < kept else widen(logits_N[start + target])
            cuda.syncthreads()
            of_warp = LOWEST
            total = float32(0)
            if lane < warps:
                of_warp = pairs[2 * (half * WARP + lane)]
                total = pairs[2 * (half * WARP + lane) + 1]
            of_row = warp_max(of_warp)
            total = warp_sum(total * ptx.exp2((of_warp - of_row) * ptx.LOG2_E))
            inverse = float32(1) / total
            factor = inverse * scale
            shift = of_row * ptx.LOG2_E
            then = following * V
            for k in range(held):
                v = kept + own + k * stride
                if v < V:
                    to_gradient(held_words, WORDS * k, WORDS, shift, factor, counted - v)
                    store(dlogits_N, start + v, held_words, WORDS * k)
                    if following < R:
                        load(logits_N, then + v, held_words, WORDS * k)
            for s in range(n_spans):
                for k in range(per_thread):
                    load_shared(kept_N, s * span + own + k * stride, words, WORDS * k)
                to_gradient(words, 0, n_words, shift, factor, 0 if ignored else n_values)
                for k in range(per_thread):
                    store(dlogits_N, start + s * span + own + k * stride, words, WORDS * k)
                if following < R:
                    for k in range(per_thread):
                        v = s * span + own + k * stride
                        cp_async_16(kept_N, v, logits_N, then + v, 16)
                cp_async_commit_group()
            for v in range(kept + held * stride + own, V, stride):
                load(logits_N, start + v, words, 0)
                to_gradient(words, 0, WORDS, shift, factor, counted - v)
                store(dlogits_N, start + v, words, 0)
            if owns_target:
                loss_R[row] = of_row + math.log(total) - logit
                gradient = (ptx.exp2(logit * ptx.LOG2_E - shift) * inverse - float32(1)) * scale
                dlogits_N[start + target] = narrow(gradient, dlogits_N.dtype)
            elif not is_class and cuda.threadIdx.x == 0:
                loss_R[row] = float32(0) if ignored else float32(math.nan)
            row = following
            start = then
            half = 1 - half
        if beside_another:
            ptx.wait_for_kernel_before()  # what comes after this kernel is after both

    return rows_on_chip


def vectors_in_cluster(V: int, itemsize: int) -> int:
    """Vectors of each thread of a cluster that shares a row."""
    return ceil_div(V * itemsize, 4 * WORDS * CLUSTER * CLUSTER_THREADS)


@functools.cache
def forward_backward_in_clusters(dtype: Any, per_thread: int) -> Kernel:
    """Loss and gradient of a row a cluster, ``per_thread`` vectors of it in registers of each thread."""
    of = words_of(dtype)
    vector = WORDS * of.elements
    threads = CLUSTER_THREADS
    across = vector * threads * CLUSTER
    n_words, n_pairs = WORDS * per_thread, 2 * CLUSTER
    load, store = of.load, of.store
    with_more, to_gradient = _of_words(dtype)

    @kernel(name="cross_entropy.forward_backward rows_in_clusters", cluster=CLUSTER)
    def rows_in_clusters(logits_N, targets_R, loss_R, dlogits_N, scale_1, V, classes, ignore_index):
        of_warps = cuda.shared.array((2, 2, WARP), float32)
        of_blocks = cuda.shared.array(n_pairs, float32)  # maximum and sum of each block of the cluster
        x = cuda.local.array(vector, float32)
        words = cuda.local.array(n_words, uint32)
        row = cuda.blockIdx.x // CLUSTER
        block = cuda.blockIdx.x % CLUSTER
        own = (block * threads + cuda.threadIdx.x) * vector
        lane = cuda.threadIdx.x % WARP
        start = row * V
        for k in range(per_thread):
            v = own + k * across
            if v < V:
                load(logits_N, start + v, words, WORDS * k)
        target, counted, is_class = target_of(targets_R, row, classes, ignore_index)
        scale = scale_1[0] if is_class else float32(math.nan)
        owns_target = is_class and target % across // vector == block * threads + cuda.threadIdx.x
        logit = widen(logits_N[start + target]) if owns_target else float32(0)
        cluster.barrier()  # all blocks are there
        largest = LOWEST
        total = float32(0)
        for k in range(per_thread):
            v = own + k * across
            if v < classes:
                largest, total = with_more(words, WORDS * k, WORDS, x, classes - v, largest, total)
        largest, total = over_block(largest, total, of_warps, 0)
        if cuda.threadIdx.x < CLUSTER:
            place = cluster.address_of(uint32(shared_address(of_blocks) + uint32(8 * block)), uint32(cuda.threadIdx.x))
            cluster.store_float32(place, largest)
            cluster.store_float32(uint32(place + uint32(4)), total)
        cluster.barrier()
        of_block = LOWEST
        total = float32(0)
        if lane < CLUSTER:
            of_block = of_blocks[2 * lane]
            total = of_blocks[2 * lane + 1]
        largest = warp_max(of_block)
        total = warp_sum(total * ptx.exp2((of_block - largest) * ptx.LOG2_E))
        shift = largest * ptx.LOG2_E
        for k in range(per_thread):
            v = own + k * across
            if v < V:
                to_gradient(words, WORDS * k, WORDS, shift, scale / total, counted - v)
                store(dlogits_N, start + v, words, WORDS * k)
        if owns_target:
            finish_target(loss_R, dlogits_N, row, start + target, logit, largest, total, scale)
        elif not is_class and block == 0 and cuda.threadIdx.x == 0:
            finish_without_target(loss_R, row, counted)

    return rows_in_clusters
