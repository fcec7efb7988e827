"""numstack.device.ptx.vectors: what is loaded and stored, in every dtype; alignment; bounds under checks."""

import ml_dtypes
import numpy as np
import pytest
from numba import cuda, float32

from numstack.device import current_device, kernel, ptx
from numstack.errors import KernelError
from tests.support import BFLOAT16, poisoned, to_device, to_host

WIDTHS = {
    "2": (2, ptx.load2, ptx.store2),
    "4": (4, ptx.load4, ptx.store4),
    "4 once": (4, ptx.load4_once, ptx.store4_once),
    "8": (8, ptx.load8, ptx.store8),
    "8 once": (8, ptx.load8_once, ptx.store8_once),
}
DTYPES = [np.dtype(np.float32), BFLOAT16, np.dtype(np.float16)]


def doubling(n, load, store):
    @kernel
    def double(x_N, y_N):
        values = cuda.local.array(n, float32)
        i = cuda.grid(1) * n
        load(x_N, i, values, 0)
        for k in range(n):
            values[k] *= float32(2)
        store(y_N, i, values, 0)

    return double


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", WIDTHS)
def test_elements_go_in_and_out(width, dtype):
    n, load, store = WIDTHS[width]
    x = np.random.default_rng(0).normal(size=64 * n).astype(dtype)
    y = to_device(poisoned(x.shape, dtype))
    double = doubling(n, load, store)
    double[2, 32](to_device(x), y)
    np.testing.assert_array_equal(to_host(y, dtype).astype(np.float32), 2 * x.astype(np.float32))
    assert double.accesses.reads == (0,)
    assert double.accesses.writes == (1,)


def test_the_index_counts_in_c_order():
    @kernel
    def copy(x_RC, y_RC):
        values = cuda.local.array(8, float32)
        ptx.load8(x_RC, cuda.grid(1) * 8, values, 0)
        ptx.store8(y_RC, cuda.grid(1) * 8, values, 0)

    x = np.arange(128, dtype=np.float32).reshape(4, 32)
    y = to_device(poisoned(x.shape))
    copy[1, 16](to_device(x), y)
    np.testing.assert_array_equal(to_host(y), x)


def test_shared_arrays():
    @kernel
    def reverse(x_N, y_N):
        shared = cuda.shared.array(128, float32)
        values = cuda.local.array(4, float32)
        t = cuda.threadIdx.x
        ptx.load4(x_N, 4 * t, values, 0)
        ptx.store4(shared, 4 * t, values, 0)
        cuda.syncthreads()
        ptx.load4(shared, 4 * (31 - t), values, 0)
        ptx.store4(y_N, 4 * t, values, 0)

    x = np.arange(128, dtype=np.float32)
    y = to_device(poisoned(x.shape))
    reverse[1, 32](to_device(x), y)
    np.testing.assert_array_equal(to_host(y), x.reshape(32, 4)[::-1].ravel())


def test_narrowing_rounds_to_nearest_even():
    x = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1e-40, np.inf, np.nan, 3.4e38, 0.1, -0.0] * 32, np.float32)
    y = to_device(poisoned(x.shape, BFLOAT16))
    doubling(8, ptx.load8, ptx.store8)[1, 32](to_device(x), y)
    with np.errstate(over="ignore"):
        expected = (2 * x).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(to_host(y, BFLOAT16).astype(np.float32), expected.astype(np.float32))


@pytest.mark.skipif(current_device().kind != "cpu", reason="checks run on the CPU device: NUMSTACK_DEVICE=cpu")
def test_checks_see_bounds_and_alignment():
    double = doubling(8, ptx.load8, ptx.store8)
    x = np.zeros(256, np.float32)
    double.check[1, 32](x, np.zeros(256, np.float32))
    with pytest.raises(KernelError, match=r"y_N\[248\] is outside its shape \(248,\)"):
        double.check[1, 32](x, np.zeros(248, np.float32))

    @kernel
    def one_further(x_N, y_N):
        values = cuda.local.array(8, float32)
        ptx.load8(x_N, cuda.grid(1) * 8 + 1, values, 0)
        ptx.store8(y_N, cuda.grid(1) * 8, values, 0)

    with pytest.raises(KernelError, match="element 1 of x_N is not at a multiple of 16 bytes"):
        one_further.check[1, 31](x, np.zeros(256, np.float32))


def test_where_an_array_may_begin():
    assert [ptx.vectors.is_aligned(address) for address in (0, 16, 4096, 8, 17)] == [True, True, True, False, False]
