"""bfloat16 bits against ml_dtypes, element by element, on the host and in kernels."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda

from numstack.device import kernel, narrow, widen
from tests.support import BFLOAT16, poisoned, to_device, to_host


@kernel
def _convert(x_N, y_N):
    i = cuda.grid(1)
    if i < x_N.size:
        y_N[i] = narrow(widen(x_N[i]), y_N.dtype)


def convert(x: np.ndarray, dtype: np.dtype) -> np.ndarray:
    out = to_device(poisoned(x.shape, dtype))
    _convert[-(-x.size // 128), 128](to_device(x), out)
    return to_host(out, dtype)


def test_every_bfloat16_widens_exactly() -> None:
    bits = np.arange(2**16, dtype=np.uint16).view(BFLOAT16)
    np.testing.assert_array_equal(convert(bits, np.dtype(np.float32)), bits.astype(np.float32))


def awkward() -> np.ndarray:
    """Ties between two bfloat16 numbers, their neighbours, subnormals, overflow, infinities and NaN."""
    ties = (np.arange(2**16, dtype=np.uint32) << 16) + 0x8000
    bits = np.concatenate([ties, ties - 1, ties + 1])
    return bits.view(np.float32)


def test_narrowing_rounds_to_nearest_even_as_ml_dtypes_does() -> None:
    x = awkward()
    with np.errstate(all="ignore"):
        expected = x.astype(BFLOAT16)
    got = convert(x, BFLOAT16)
    nan = np.isnan(x)
    assert np.isnan(got[nan].astype(np.float32)).all()
    np.testing.assert_array_equal(got[~nan].view(np.uint16), expected[~nan].view(np.uint16))


def test_float16_round_trip_and_overflow() -> None:
    x = np.concatenate([np.random.default_rng(0).standard_normal(5000) * 100, [1e6, -1e6, 6e-8, 65519, 65520]])
    x = x.astype(np.float32)
    with np.errstate(over="ignore"):
        expected = x.astype(np.float16)
    np.testing.assert_array_equal(convert(x, np.dtype(np.float16)), expected)


@pytest.mark.parametrize("value", [0.1, -3.0, 1e-40, 3.4e38, np.inf, -np.inf])
def test_the_host_functions_agree_with_the_kernels(value: float) -> None:
    x = np.full(1, value, np.float32)
    assert narrow(x[0], np.uint16) == convert(x, BFLOAT16).view(np.uint16)[0]
    assert widen(narrow(x[0], np.uint16)) == x.astype(BFLOAT16).astype(np.float32)[0]
