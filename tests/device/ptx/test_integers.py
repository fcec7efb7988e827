"""numstack.device.ptx.integers: 32-bit arithmetic that wraps around, on the device under test."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, uint8, uint32

from numstack.device import kernel
from numstack.device.ptx import integers
from tests.device.ptx.support import Bench
from tests.support import poisoned, to_device, to_host


@kernel
def _sums(a_N, b_N, y_RN):
    i = cuda.grid(1)
    if i < a_N.shape[0]:
        y_RN[0, i] = integers.add(a_N[i], b_N[i])
        y_RN[1, i] = integers.subtract(a_N[i], b_N[i])
        y_RN[2, i] = integers.multiply(a_N[i], b_N[i])


@kernel
def _anew(x_N, y_N):
    i = cuda.grid(1)
    y_N[i] = integers.anew(x_N[i]) + 1


def test_a_number_made_anew_is_the_number() -> None:
    x = np.arange(-16, 16, dtype=np.int32)
    y = to_device(poisoned(32, np.int32))
    _anew[1, 32](to_device(x), y)
    np.testing.assert_array_equal(to_host(y), x + 1)


@kernel
def _quotients(a_N, b_N, y_RN):
    i = cuda.grid(1)
    if i < a_N.shape[0]:
        y_RN[0, i] = integers.divide(a_N[i], b_N[i])
        y_RN[1, i] = integers.remainder(a_N[i], b_N[i])


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_sums_and_products_wrap_around(dtype: type) -> None:
    limits = np.iinfo(dtype)
    rng = np.random.default_rng(0)
    random = rng.integers(limits.min, limits.max, (2, 96), dtype=dtype, endpoint=True)
    corners = np.array([limits.min, limits.min, limits.max, limits.max, 0, 1, 65536, 3], dtype)
    a, b = np.concatenate([random[0], corners]), np.concatenate([random[1], corners[::-1]])
    y = to_device(poisoned((3, a.size), dtype))
    _sums[4, 32](to_device(a), to_device(b), y)
    np.testing.assert_array_equal(to_host(y), [a + b, a - b, a * b])


@pytest.mark.parametrize("dtype", [np.int32, np.uint32])
def test_quotients_and_what_is_left(dtype: type) -> None:
    most = np.iinfo(dtype).max
    rng = np.random.default_rng(1)
    a = np.concatenate([rng.integers(0, most, 60, dtype=dtype), np.array([0, most, most, 7], dtype)])
    b = np.concatenate([rng.integers(1, 1000, 60, dtype=dtype), np.array([3, 1, most, 8], dtype)])
    y = to_device(poisoned((2, a.size), dtype))
    _quotients[2, 32](to_device(a), to_device(b), y)
    np.testing.assert_array_equal(to_host(y), [a // b, a % b])


@kernel
def _counted(y_N, n):
    total = 0
    for i in range(integers.opaque(n)):
        total += i
    y_N[cuda.grid(1)] = total


def test_an_opaque_number_is_the_number(hopper: Bench) -> None:
    y = hopper.array(poisoned(32, np.int32))
    _counted[1, 32](y, 10)
    np.testing.assert_array_equal(hopper.result(y), 45)


@kernel
def _addresses(y_N):
    plain = cuda.shared.array(4, uint32)
    dynamic = cuda.shared.array(0, uint8)
    plain[cuda.threadIdx.x] = uint32(7)
    y_N[0] = integers.shared_address(dynamic)
    y_N[1] = integers.round_up_1024(integers.shared_address(dynamic))
    y_N[2] = integers.round_up_1024(uint32(1024))
    y_N[3] = integers.round_up_1024(uint32(1025)) + plain[0]
    y_N[4] = integers.shared_address(plain)


def test_addresses_in_shared_memory(hopper: Bench) -> None:
    y = hopper.array(poisoned(5, np.uint32))
    _addresses[1, 1, None, 4096](y)
    dynamic, rounded, kept, raised, plain = hopper.result(y)
    assert 0 <= rounded - dynamic < 1024 and rounded % 1024 == 0
    assert (kept, raised) == (1024, 2048 + 7)
    assert dynamic < 228 * 1024 and plain < 228 * 1024 and dynamic != plain


@kernel
def _bits(x_N, y_N, same_N):
    i = cuda.grid(1)
    if i < x_N.shape[0]:
        y_N[i] = integers.highest_bit(x_N[i])
        same_N[i] = integers.opaque(y_N[i])


def test_highest_bit() -> None:
    x = np.array([0, 1, 2, 3, 5, 2**31, 2**32 - 1], np.uint32)
    y, same = (to_device(poisoned(x.size, np.int32)) for _ in range(2))
    _bits[1, 32](to_device(x), y, same)
    np.testing.assert_array_equal(to_host(y), [-1, 0, 1, 1, 2, 31, 31])
    np.testing.assert_array_equal(to_host(same), to_host(y))
