"""numstack.kernels.dropout and the random numbers under it."""

import numpy as np
import pytest
from numba import cuda, uint32

from numstack.device import kernel
from numstack.errors import ConfigError, DTypeError, ShapeError
from numstack.kernels import dropout, philox
from numstack.kernels.philox import philox4x32
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

# Random123's kat_vectors for philox4x32-10: counter, key, words.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
EVERY_VARIANT = pytest.mark.parametrize("variant", dropout.VARIANTS.runnable())
SPAN = dropout.BLOCK * dropout.VECTOR * dropout.PER_THREAD  # of a block of vectors
OPTIONS = {"p": 0.25, "seed": 0x0123456789ABCDEF, "offset": 2**32 - 2}  # the counter carries into its second word


@kernel
def _words(inputs_N6, words_N4):
    i = cuda.grid(1)
    if i < inputs_N6.shape[0]:
        r0, r1, r2, r3 = philox4x32(
            uint32(inputs_N6[i, 0]),
            uint32(inputs_N6[i, 1]),
            uint32(inputs_N6[i, 2]),
            uint32(inputs_N6[i, 3]),
            uint32(inputs_N6[i, 4]),
            uint32(inputs_N6[i, 5]),
        )
        words_N4[i, 0] = r0
        words_N4[i, 1] = r1
        words_N4[i, 2] = r2
        words_N4[i, 3] = r3


def device_words(inputs_N6: np.ndarray) -> np.ndarray:
    words = to_device(poisoned((len(inputs_N6), 4), np.uint32))
    _words[1, 32](to_device(inputs_N6), words)
    return to_host(words)


def test_philox_known_answers():
    expected = np.array([words for _, _, words in KNOWN_ANSWERS], np.uint32)
    for counter, key, words in KNOWN_ANSWERS:
        assert philox.reference(counter, key) == words
    inputs = np.array([(*counter, *key) for counter, key, _ in KNOWN_ANSWERS], np.uint32)
    np.testing.assert_array_equal(device_words(inputs), expected)


def test_philox_on_random_counters():
    inputs = np.random.default_rng(0).integers(0, 2**32, (30, 6), dtype=np.uint32)
    expected = [philox.reference(tuple(map(int, row[:4])), tuple(map(int, row[4:]))) for row in inputs]
    np.testing.assert_array_equal(device_words(inputs), np.array(expected, np.uint32))
    wide = inputs[:, 0].astype(np.uint64) | (inputs[:, 1].astype(np.uint64) << np.uint64(32))
    expected = [philox.reference((int(w) & philox.LOW, int(w) >> 32, 0, 0), (5, 6)) for w in wide]
    np.testing.assert_array_equal(philox.reference_words(wide, 6 << 32 | 5), np.array(expected, np.uint32))


def forward(x: np.ndarray, dtype=np.float32, **options) -> np.ndarray:
    y = to_device(poisoned(x.shape, dtype))
    dropout.forward(to_device(x), y, **options)
    return to_host(y)


@EVERY_VARIANT
@pytest.mark.parametrize("shape", [(1,), (2, 3), (4 * dropout.BLOCK + 1,), (0, 5), (7, 11, 13), (SPAN + 13,)])
def test_equals_the_reference(shape, variant):
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    y = forward(x, **OPTIONS, variant=variant)
    assert_close(y, dropout.reference(x, **OPTIONS), rtol=1e-6)
    np.testing.assert_array_equal(y == 0, ~dropout.reference_mask(x.size, **OPTIONS).reshape(shape))


@EVERY_VARIANT
def test_backward_has_the_same_mask_in_place(variant):
    dy = to_device(np.ones(1000, np.float32))
    dropout.backward(dy, dy, **OPTIONS, variant=variant)
    np.testing.assert_array_equal(to_host(dy), forward(np.ones(1000, np.float32), **OPTIONS))


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_keeps_the_right_share_and_the_mean(p):
    """Bounds of five standard deviations."""
    n = 40_000
    y = forward(np.ones(n, np.float32), p=p, seed=1, offset=0)
    assert abs((y != 0).mean() - (1 - p)) <= 5 * np.sqrt(p * (1 - p) / n)
    assert_close(np.unique(y[y != 0]), np.array([1 / (1 - p)]))


def test_masks_of_other_offsets_and_seeds_are_independent():
    n = 40_000
    masks = [
        dropout.reference_mask(n, p=0.5, seed=seed, offset=offset)
        for seed, offset in ((1, 0), (2, 0), (1, dropout.counters_used(n)))
    ]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert abs((masks[i] == masks[j]).mean() - 0.5) < 5 * 0.5 / np.sqrt(n)
    overlapping = dropout.reference_mask(n, p=0.5, seed=1, offset=10)
    np.testing.assert_array_equal(overlapping[: n - 40], masks[0][40:])


@EVERY_VARIANT
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_sixteen_bits(dtype, variant):
    x = np.random.default_rng(0).standard_normal(SPAN + 100).astype(dtype)
    y = forward(x, np.uint16 if dtype == BFLOAT16 else dtype, **OPTIONS, variant=variant).view(dtype)
    assert_close(y, dropout.reference(x, **OPTIONS), dtype=str(dtype))


@EVERY_VARIANT
def test_under_checks(under_checks, variant):
    x = np.ones(150, np.float32)
    np.testing.assert_array_equal(forward(x, **OPTIONS, variant=variant) == 0, ~dropout.reference_mask(150, **OPTIONS))


def test_bad_arguments():
    x = np.ones(8, np.float32)
    with pytest.raises(ConfigError, match=r"dropout: p=1; choose a probability from 0 up to but not including 1"):
        dropout.forward(x, x, p=1, seed=0, offset=0)
    with pytest.raises(ConfigError, match=r"dropout: offset=-1; choose an integer from 0 to 2\*\*64 - 1"):
        dropout.forward(x, x, p=0.5, seed=0, offset=-1)
    with pytest.raises(ShapeError, match=r"dropout: y has shape \(4,\); expected \(8,\)"):
        dropout.forward(x, x[:4].copy(), p=0.5, seed=0, offset=0)
    with pytest.raises(DTypeError, match="dropout: x has dtype float64"):
        dropout.forward(x.astype(np.float64), x, p=0.5, seed=0, offset=0)
