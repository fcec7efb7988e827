"""numstack.device.ptx.words: 16 bytes in registers as they lie in memory, on the device under test."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32, from_dtype, uint32

from numstack.device import kernel
from numstack.device.ptx.words import WORDS, Words, make_load_four, words_of
from tests.support import BFLOAT16, poisoned, to_device, to_host


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)], ids=str)
def test_words(dtype: np.dtype) -> None:
    """Copied by way of shared memory, with the sign of each element turned while it is wide."""
    stored = np.dtype(np.uint16) if dtype == BFLOAT16 else dtype
    of: Words = words_of(from_dtype(stored))
    vector = WORDS * of.elements
    n, n_words = 32 * vector, 2 * WORDS
    load, load_shared, store, low, high, pack, add, shared_dtype = *of[1:], from_dtype(stored)

    @kernel(name="words")
    def copy(x_N, copied_N, y_N, sum_N):
        kept = cuda.shared.array(n, shared_dtype)
        words = cuda.local.array(n_words, uint32)
        i = cuda.threadIdx.x * vector
        for e in range(vector):
            kept[i + e] = x_N[i + e]
        load(x_N, i, words, 0)
        load_shared(kept, i, words, WORDS)
        store(copied_N, i, words, 0)
        for w in range(WORDS, n_words):
            words[w] = pack(float32(0) - low(words[w]), float32(0) - high(words[w]))
        store(y_N, i, words, WORDS)
        for w in range(WORDS):
            words[w] = add(words[w], pack(float32(0.25), float32(0.25)))
        store(sum_N, i, words, 0)

    x = np.random.default_rng(0).standard_normal(n, dtype=np.float32).astype(dtype)
    copied, y, sums = (to_device(poisoned(n, stored)) for _ in range(3))
    copy[1, 32](to_device(x), copied, y, sums)
    np.testing.assert_array_equal(to_host(copied).view(dtype), x)
    np.testing.assert_array_equal(to_host(y).view(dtype), -x)
    quarter = (x.astype(np.float64) + 0.25).astype(np.float32).astype(dtype)
    np.testing.assert_array_equal(to_host(sums).view(dtype), quarter)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)], ids=str)
def test_four_elements(dtype: np.dtype) -> None:
    """To the third word on, from each multiple of four; words beside are left alone."""
    stored = np.dtype(np.uint16) if dtype == BFLOAT16 else dtype
    of: Words = words_of(from_dtype(stored))
    load_four, low, high, elements = make_load_four(from_dtype(stored)), of.low, of.high, of.elements
    n_words = 4 // elements
    n_room = 2 + n_words + 1

    @kernel(name="four elements")
    def widen_four(x_N, y_N, beside_N):
        words = cuda.local.array(n_room, uint32)
        i = cuda.threadIdx.x * 4
        for w in range(n_room):
            words[w] = uint32(77)
        load_four(x_N, i, words, 2)
        for w in range(n_words):
            y_N[i + elements * w] = low(words[2 + w])
            y_N[i + elements * w + elements - 1] = high(words[2 + w])
        beside_N[cuda.threadIdx.x] = float32(words[0] + words[1] + words[n_room - 1])

    x = np.random.default_rng(0).standard_normal(4 * 32, dtype=np.float32).astype(dtype)
    y, beside = (to_device(poisoned(n, np.float32)) for n in (x.size, 32))
    widen_four[1, 32](to_device(x), y, beside)
    np.testing.assert_array_equal(to_host(y), x.astype(np.float32))
    np.testing.assert_array_equal(to_host(beside), np.full(32, 231, np.float32))
