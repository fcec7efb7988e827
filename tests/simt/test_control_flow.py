"""Early return, break, continue and conditions, with and without barriers; and what is refused, with its line."""

import numpy as np
import pytest
from numba import cuda, float32, int32, int64, types

from numstack.errors import KernelError
from numstack.simt import compile_kernel
from tests.simt.support import launch
from tests.support import poisoned

I32 = types.Array(types.int32, 1, "C")


def returns_before_a_barrier(x, out):
    shared = cuda.shared.array(64, int32)
    i = cuda.threadIdx.x
    if i >= x.size:
        return
    shared[i] = x[i]
    cuda.syncthreads()
    out[i] = shared[x.size - 1 - i]


def test_threads_that_have_returned_are_not_waited_for():
    x = np.arange(40, dtype=np.int32)
    out = poisoned(64, np.int32)
    before = out[40:].copy()
    launch(returns_before_a_barrier, 1, 64, x, out)
    np.testing.assert_array_equal(out[:40], x[::-1])
    np.testing.assert_array_equal(out[40:], before)


def first_divisor(x, out):
    i = cuda.grid(1)
    if i < x.size:
        out[i] = 0
        for d in range(2, 1000):
            if d * d > x[i]:
                out[i] = x[i]
                return
            if x[i] % d != 0:
                continue
            out[i] = d
            break


def test_return_break_and_continue_in_a_loop_of_single_threads():
    x = np.arange(2, 200, dtype=np.int32)
    out = poisoned(x.size, np.int32)
    launch(first_divisor, 4, 64, x, out)
    expected = [next((d for d in range(2, v) if v % d == 0), v) for v in x.tolist()]
    np.testing.assert_array_equal(out, expected)


def halves(x, out):
    shared = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    shared[i] = x[i]
    half = cuda.blockDim.x // 2
    while half > 0:
        cuda.syncthreads()
        if i < half:
            shared[i] += shared[i + half]
        half //= 2
    cuda.syncthreads()
    while True:
        if shared[0] < 1000:
            break
        cuda.syncthreads()
        if i == 0:
            shared[0] -= 1000
        cuda.syncthreads()
    out[i] = shared[0]


def test_loops_around_barriers_with_conditions_from_memory():
    x = np.full(64, 100, np.float32)
    out = poisoned(64, np.float32)
    launch(halves, 1, 64, x, out)
    np.testing.assert_array_equal(out, np.full(64, 400, np.float32))


@cuda.jit(device=True)
def sign(value):
    if value < 0:
        return -1
    if value > 0:
        return 1
    return 0


def signs(x, out):
    i = cuda.grid(1)
    if (i < x.size and sign(x[i]) != 0) or i == 0:
        out[i] = sign(x[i]) * 10 if i % 2 == 0 else sign(-x[i])


def test_early_returns_of_device_functions_in_conditions():
    x = np.array([0, 3, -4, 0, 5], np.int32)
    out = np.full(5, 77, np.int32)
    launch(signs, 1, 8, x, out)
    np.testing.assert_array_equal(out, [0, -1, -10, 77, 10])


def reused(x, out):
    i = cuda.threadIdx.x
    total = int32(0)
    for k in range(4):
        total += k
    for k in range(x.size):
        total += x[k]
    for k in range(i, 8, 3):
        total += 100 * k
    cuda.syncthreads()
    out[i] = total


def test_a_loop_variable_used_again():
    x = np.arange(70, dtype=np.int32)
    out = poisoned(32, np.int32)
    launch(reused, 1, 32, x, out)
    np.testing.assert_array_equal(out, [6 + x.sum() + 100 * sum(range(i, 8, 3)) for i in range(32)])


def swaps(n, out):
    i = cuda.grid(1)
    a, b = i, i + 1
    for _ in range(n):
        a, b = b, a + b
    n = n + 1
    out[i] = a * 1000 + n


def test_swapped_variables_and_a_changed_parameter():
    out = poisoned(96, np.int64)
    launch(swaps, 3, 32, np.int32(3), out)
    np.testing.assert_array_equal(out, [(i + 2 * (i + 1)) * 1000 + 4 for i in range(96)])


# ---- refused


def barrier_under_a_condition(x):
    if cuda.threadIdx.x < 10:
        cuda.syncthreads()
    x[0] = 1


def barrier_in_a_strided_loop(x):
    for _ in range(cuda.threadIdx.x, x.size, cuda.blockDim.x):
        cuda.syncthreads()


def barrier_after_a_break(x):
    for i in range(10):
        if x[cuda.threadIdx.x] > i:
            break
        cuda.syncthreads()


@cuda.jit(device=True)
def recursive(n):
    return 1 if n == 0 else recursive(n - 1)


def calls_itself(x):
    x[0] = recursive(3)


def unknown_function(x):
    cuda.grid_group().sync()


def local_array_as_a_whole(x):
    a = cuda.local.array(4, int32)
    x[0] = np.sum(a)


def shape_not_constant(x):
    a = cuda.shared.array(x.size, int32)
    x[0] = a[0]


@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (barrier_under_a_condition, r"line \d+, which differs between threads; every thread"),
        (barrier_in_a_strided_loop, "could not be proven the same for all threads"),
        (barrier_after_a_break, "could not be proven the same for all threads"),
        (calls_itself, "recursive calls itself; write the recursion as a loop"),
        (unknown_function, "grid_group"),
        (local_array_as_a_whole, "used as a whole"),
        (shape_not_constant, "is not constant"),
    ],
)
def test_refused_with_the_line(kernel, message):
    with pytest.raises(KernelError, match=message) as caught:
        compile_kernel(kernel, (I32,), (64, 1, 1))
    assert "test_control_flow.py:" in str(caught.value)


def changes_its_loop_variable(x, out):
    i = cuda.threadIdx.x
    total = int32(0)
    for k in range(x.size):
        if x[k] > i:
            k += 1000
        total += k
    out[i] = total


def test_a_loop_variable_that_the_body_changes():
    x = np.arange(40, dtype=np.int32)
    out = poisoned(32, np.int32)
    launch(changes_its_loop_variable, 1, 32, x, out)
    np.testing.assert_array_equal(out, [sum(k + 1000 * (k > i) for k in range(40)) for i in range(32)])


def may_not_assign(x, out):
    i = cuda.threadIdx.x
    last = -1
    for _ in range(x.size // 4):
        for k in range(x[i] % 3):
            last = k + i
        out[i] = last


def test_a_variable_that_a_loop_may_leave_as_it_was():
    x = np.arange(32, dtype=np.int32)
    out = poisoned(32, np.int32)
    launch(may_not_assign, 1, 32, x, out)
    np.testing.assert_array_equal(out, [i + i % 3 - 1 if i % 3 else -1 for i in range(32)])


def divides_under_a_condition(x, out, n):
    i = cuda.threadIdx.x
    chosen = int64(0)
    if x[i] < 500:
        chosen = x[19 % n]
    out[i] = chosen


def divides_in_place_under_a_condition(x, out, n):
    i = cuda.threadIdx.x
    chosen = int64(0)
    if x[i] < 500:
        index = 19 + 0 * n
        index %= n
        chosen = x[index]
    out[i] = chosen


def quotient_under_a_condition(x, out, n):
    i = cuda.threadIdx.x
    chosen = int64(0)
    if x[i] < 500:
        chosen = x[(19 % n * n) // n] if n else x[19 // n]
    out[i] = chosen


@pytest.mark.parametrize("n", [50, 5, 0])
@pytest.mark.parametrize(
    "kernel", [divides_under_a_condition, divides_in_place_under_a_condition, quotient_under_a_condition]
)
def test_a_quotient_that_only_some_threads_need(kernel, n):
    """LLVM would take the first thread's quotient for all, though that thread does not divide."""
    x = np.random.default_rng(3).integers(0, 1000, 50).astype(np.int32)
    assert x[0] >= 500
    out = poisoned(16, np.int64)
    launch(kernel, 1, 16, x, out, np.int32(n))
    np.testing.assert_array_equal(out, np.where(x[:16] < 500, x[19 % n if n else 0], 0))


@cuda.jit(device=True)
def is_in_row(v, columns):
    return v * 32 + cuda.threadIdx.x < columns


PIECES = 2


def pieces_of_a_row(x_RC, out_RC, sums_R):
    row = cuda.blockIdx.x * 2 + cuda.threadIdx.y
    start = row * 100 + cuda.threadIdx.x
    if row < x_RC.shape[0]:
        for v in range(PIECES):
            if is_in_row(v, x_RC.shape[1]):  # computed again where it is needed, but not before there is a v
                out_RC[row, v * 32 + cuda.threadIdx.x] = 2 * x_RC[row, v * 32 + cuda.threadIdx.x]
    while row < x_RC.shape[0]:
        other = cuda.shfl_xor_sync(0xFFFFFFFF, start, 1)
        if cuda.threadIdx.x == 0:
            sums_R[row] = start + other
        row += 6


def test_what_depends_on_a_loop_among_statements_of_a_thread_is_computed_inside_it():
    x = np.arange(5 * 50, dtype=np.int32).reshape(5, 50)
    out, sums = poisoned(x.shape, np.int32), poisoned(5, np.int32)
    launch(pieces_of_a_row, 3, (32, 2), x, out, sums)
    np.testing.assert_array_equal(out, 2 * x)
    np.testing.assert_array_equal(sums, 200 * np.arange(5) + 1)
