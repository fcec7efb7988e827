"""Atomics on global and shared memory: what they store, and the old value that they return."""

import numpy as np
import pytest
from numba import cuda, int32, typeof

from numstack.simt import accesses, compile_kernel
from tests.simt.support import launch
from tests.support import poisoned


def histogram(x, counts, order):
    shared = cuda.shared.array(16, int32)
    t = cuda.threadIdx.x
    if t < 16:
        shared[t] = 0
    cuda.syncthreads()
    i = cuda.grid(1)
    if i < x.size:
        order[i] = cuda.atomic.add(shared, x[i], 1)
    cuda.syncthreads()
    if t < 16:
        cuda.atomic.add(counts, t, shared[t])


def test_a_histogram_in_shared_memory():
    x = np.random.default_rng(0).integers(0, 16, 300).astype(np.int32)
    counts, order = np.zeros(16, np.int32), poisoned(300, np.int32)
    launch(histogram, 3, 128, x, counts, order)
    np.testing.assert_array_equal(counts, np.bincount(x, minlength=16))
    for start in range(0, 300, 128):  # in each block, the old values of a bin are 0, 1, 2 ...
        for value in range(16):
            here = slice(start, start + 128)
            found = np.sort(order[here][x[here] == value])
            np.testing.assert_array_equal(found, np.arange(found.size))


def all_of_them(x, y, old):
    i = cuda.grid(1)
    if i < 1:
        old[0] = cuda.atomic.sub(x, 0, 3)
        old[1] = cuda.atomic.max(x, 1, 50)
        old[2] = cuda.atomic.min(x, 2, 50)
        old[3] = cuda.atomic.and_(x, 3, 6)
        old[4] = cuda.atomic.or_(x, 4, 6)
        old[5] = cuda.atomic.xor(x, 5, 6)
        old[6] = cuda.atomic.exch(x, 6, 99)
        old[7] = cuda.atomic.cas(x, 7, 17, 99)
        old[8] = cuda.atomic.cas(x, 8, 5, 99)
        old[9] = cuda.atomic.add(y, (1, 2), 7)
        old[10] = cuda.atomic.add(y, (-1, -1), 7)


def test_every_operation_returns_the_old_value():
    x, y, old = np.arange(10, 20, dtype=np.int32), np.arange(6, dtype=np.int32).reshape(2, 3), poisoned(11, np.int32)
    launch(all_of_them, 1, 32, x, y, old)
    np.testing.assert_array_equal(old, [10, 11, 12, 13, 14, 15, 16, 17, 18, 5, 12])
    np.testing.assert_array_equal(x, [7, 50, 12, 13 & 6, 14 | 6, 15 ^ 6, 99, 99, 18, 19])
    np.testing.assert_array_equal(y, [[0, 1, 2], [3, 4, 19]])


def uniform_arguments(x, largest):
    cuda.atomic.add(x, 0, 1)
    cuda.atomic.max(largest, 0, float(cuda.threadIdx.x))


@pytest.mark.parametrize("block", [1, 48, 64])
def test_each_thread_adds_even_if_all_add_the_same(block):
    x, largest = np.zeros(1, np.float32), np.full(1, -1, np.float32)
    launch(uniform_arguments, 3, block, x, largest)
    assert (x[0], largest[0]) == (3 * block, block - 1)


def test_kernels_say_whether_they_have_atomics_on_global_memory():
    x = np.zeros(1, np.float32)
    compiled = compile_kernel(uniform_arguments, (typeof(x), typeof(x)), (64, 1, 1))
    assert compiled.has_global_atomics
    assert accesses(uniform_arguments).reads == accesses(uniform_arguments).writes == (0, 1)
