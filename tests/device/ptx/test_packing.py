"""numstack.device.ptx.packing: two 16-bit floats in a register, on the device under test."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda

from numstack.device import kernel
from numstack.device.ptx import halves, packing
from tests.support import BFLOAT16, poisoned, to_device, to_host

FLOAT16 = np.dtype(np.float16)


@kernel
def _bf16(x_N2, pair_N, y_N2):
    i = cuda.grid(1)
    if i < pair_N.shape[0]:
        pair_N[i] = packing.pack_bf16(x_N2[i, 0], x_N2[i, 1])
        y_N2[i, 0], y_N2[i, 1] = packing.low_bf16(pair_N[i]), packing.high_bf16(pair_N[i])


@kernel
def _f16(x_N2, pair_N, y_N2):
    i = cuda.grid(1)
    if i < pair_N.shape[0]:
        pair_N[i] = packing.pack_f16(x_N2[i, 0], x_N2[i, 1])
        y_N2[i, 0], y_N2[i, 1] = packing.low_f16(pair_N[i]), packing.high_f16(pair_N[i])


@pytest.mark.parametrize(("kernel_", "dtype"), [(_bf16, BFLOAT16), (_f16, FLOAT16)], ids=["bf16", "fp16"])
def test_pairs(kernel_, dtype: np.dtype) -> None:
    rng = np.random.default_rng(0)
    # Ties (to even), subnormal numbers, the largest, both zeros, infinities; NaN has many patterns of bits.
    corners = [0.0, -0.0, 1.00390625, 1.01171875, 1.00048828125, 65504, 65519, 65520, 1e-7, 6e-8, np.inf, -np.inf]
    x = np.concatenate([rng.standard_normal(84), corners]).astype(np.float32).reshape(-1, 2)
    pair, y = to_device(poisoned(x.shape[0], np.uint32)), to_device(poisoned(x.shape))
    kernel_[2, 32](to_device(x), pair, y)
    with np.errstate(over="ignore"):
        expected = x.astype(dtype)
    np.testing.assert_array_equal(to_host(pair).view(np.uint16).reshape(x.shape), expected.view(np.uint16))
    np.testing.assert_array_equal(to_host(y), expected.astype(np.float32))


def test_nan_stays_nan() -> None:
    x = np.full((1, 2), np.nan, np.float32)
    for kernel_ in (_bf16, _f16):
        pair, y = to_device(poisoned(1, np.uint32)), to_device(np.zeros((1, 2), np.float32))
        kernel_[1, 32](to_device(x), pair, y)
        assert np.isnan(to_host(y)).all()


@kernel
def _halves(x_N2, y_N2):
    i = cuda.grid(1)
    if i < x_N2.shape[0]:
        y_N2[i, 0] = halves.low_halves(x_N2[i, 0], x_N2[i, 1])
        y_N2[i, 1] = halves.high_halves(x_N2[i, 0], x_N2[i, 1])


def test_halves_of_words_that_are_no_numbers() -> None:
    """Bits come through as they are, also of what would be a NaN."""
    words = np.random.default_rng(0).integers(0, 2**32, (96, 2), dtype=np.uint32)
    words[0] = 0x7F812345, 0xFFC00001
    y = to_device(poisoned(words.shape))
    _halves[3, 32](to_device(words.view(np.float32)), y)
    low, high = words & 0xFFFF, words >> 16
    expected = np.stack([low[:, 0] | low[:, 1] << 16, high[:, 0] | high[:, 1] << 16], axis=1)
    np.testing.assert_array_equal(to_host(y).view(np.uint32), expected)
