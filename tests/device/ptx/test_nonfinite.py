"""numstack.device.ptx.nonfinite: an infinity or NaN among many values leaves its mark; words of shared memory."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32, uint32

from numstack.device import Kernel, kernel
from numstack.device.ptx import integers, nonfinite, packing, shared
from tests.device.ptx.support import Bench
from tests.support import BFLOAT16, poisoned


def _make(dtype: str) -> Kernel:
    largest = {
        "bf16": nonfinite.largest_bf16,
        "f16": nonfinite.largest_f16,
        "f32": nonfinite.largest_f32,
    }[dtype]
    is_nonfinite = {
        "bf16": nonfinite.is_nonfinite_bf16,
        "f16": nonfinite.is_nonfinite_f16,
        "f32": nonfinite.is_nonfinite_f32,
    }[dtype]

    @kernel(name=f"largest_{dtype}")
    def run(words_NW, kept_N, found_N):
        i = cuda.grid(1)
        if i < kept_N.shape[0]:
            kept = uint32(0)
            for word in range(words_NW.shape[1]):
                kept = largest(kept, words_NW[i, word])
            kept_N[i] = kept
            found_N[i] = 1 if is_nonfinite(kept) else 0

    return run


@pytest.mark.parametrize(
    ("name", "dtype"), [("bf16", BFLOAT16), ("f16", np.dtype(np.float16)), ("f32", np.dtype(np.float32))]
)
def test_one_value_that_is_not_finite_is_found(hopper: Bench, name: str, dtype: np.dtype) -> None:
    x = np.random.default_rng(0).standard_normal((32, 12)).astype(dtype)
    x[3, 5], x[4, 0], x[5, 11] = np.inf, -np.inf, np.nan
    x[6, 2], x[7, 7] = -x[6, 2], np.finfo(np.float16).max  # finite: the largest that all of them have
    words = np.ascontiguousarray(x).view(np.uint32)
    kept, found = hopper.array(poisoned(32, np.uint32)), hopper.array(poisoned(32, np.int32))
    _make(name)[1, 32](hopper.array(words), kept, found)
    np.testing.assert_array_equal(hopper.result(found), [int(i in (3, 4, 5)) for i in range(32)])
    halves = np.abs(hopper.result(kept).view(dtype).astype(np.float32).reshape(32, -1))
    columns = np.abs(x.astype(np.float32)).reshape(32, -1, halves.shape[1]).max(axis=1)
    np.testing.assert_array_equal(halves[np.isfinite(columns)], columns[np.isfinite(columns)])


@kernel
def _words(x_N, y_N):
    tile = cuda.shared.array(32, float32)
    t = cuda.threadIdx.x
    place = integers.shared_address(tile)
    shared.store(uint32(place + uint32(4 * t)), x_N[t])
    cuda.syncthreads()
    y_N[t] = packing.value_of(shared.load(uint32(place + uint32(4 * (31 - t))))) + float32(
        packing.bits_of(x_N[t]) >> 31
    )


def test_words_of_shared_memory(hopper: Bench) -> None:
    x = np.linspace(-2, 2, 32, dtype=np.float32)
    y = hopper.array(poisoned(32))
    _words[1, 32](hopper.array(x), y)
    np.testing.assert_array_equal(hopper.result(y), x[::-1] + (x < 0))
