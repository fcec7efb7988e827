"""numstack.kernels.elementwise: exact, since each element is rounded once."""

import itertools

import numpy as np
import pytest

from numstack.errors import ConfigError, DTypeError, ShapeError
from numstack.kernels import elementwise
from numstack.kernels.elementwise import BLOCK, BLOCK_Y, TILE, TILE_ROWS, TILE_WORDS
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

DTYPES = (np.dtype(np.float32), BFLOAT16, np.dtype(np.float16))
EVERY_VARIANT = pytest.mark.parametrize("variant", elementwise.VARIANTS.runnable())
VECTOR = 8
SHAPES = [(1,), (BLOCK,), (BLOCK + 1,), (3, 5, 7), (0,), (4, 0), (BLOCK * VECTOR + VECTOR + 1,)]


def random(shape: tuple[int, ...], dtype=np.float32) -> np.ndarray:
    return np.random.default_rng(0).normal(scale=3, size=shape).astype(dtype)


def empty_like(x: np.ndarray, dtype=None):
    return to_device(poisoned(x.shape, x.dtype if dtype is None else dtype))


@EVERY_VARIANT
def test_add_and_scale_at_every_shape(variant):
    for shape in SHAPES:
        a, b = random(shape), random(shape) + np.float32(1)
        out = empty_like(a)
        elementwise.add(to_device(a), to_device(b), out, variant=variant)
        np.testing.assert_array_equal(to_host(out), a + b)
        out = empty_like(a)
        elementwise.scale(to_device(a), out, -0.3, variant=variant)
        np.testing.assert_array_equal(to_host(out), np.float32(-0.3) * a)


@EVERY_VARIANT
def test_in_place_and_mixed_dtypes(variant):
    a, b = random((300,)), random((300,), BFLOAT16)
    a_device = to_device(a)
    elementwise.add(a_device, to_device(b), a_device, variant=variant)
    np.testing.assert_array_equal(to_host(a_device), a + b.astype(np.float32))


@EVERY_VARIANT
@pytest.mark.parametrize(("source", "target"), list(itertools.product(DTYPES, DTYPES)), ids=str)
def test_cast_rounds_as_numpy_does(source, target, variant):
    special = [0.0, -0.0, 1e-8, -1e-8, 65504, 65520, 1e30, -np.inf, np.inf, np.nan, 1.00390625, 1.01171875]
    with np.errstate(over="ignore"):
        x = np.concatenate([random((500,)), np.array(special, np.float32)]).astype(source)
        expected = x.astype(np.float32).astype(target)
    out = empty_like(x, target)
    elementwise.cast(to_device(x), out, variant=variant)
    np.testing.assert_array_equal(to_host(out, target).astype(np.float64), expected.astype(np.float64))


@EVERY_VARIANT
def test_fill(variant):
    for dtype, value in [(np.float32, 0.1), (BFLOAT16, -2.5), (np.float16, 3.25), (np.int32, -7)]:
        for shape in SHAPES:
            x = to_device(poisoned(shape, dtype))
            elementwise.fill(x, value, variant=variant)
            np.testing.assert_array_equal(to_host(x, dtype), np.full(shape, value, dtype))


STRIDED = {
    "reversed": lambda x: x[::-1],
    "every other column": lambda x: x[:, ::2],
    "transposed": lambda x: x.T,
    "three axes swapped": lambda x: x.reshape(5, -1, 6).transpose(1, 0, 2),
    "heads out of packed qkv": lambda x: x.reshape(5, 11, 2, 3)[:, 1:, 0].transpose(0, 2, 1),
    "four axes": lambda x: x.reshape(5, 11, 2, 3).transpose(0, 2, 1, 3),
    "empty": lambda x: x[:0, ::2],
}


@pytest.mark.parametrize("view", list(STRIDED.values()), ids=list(STRIDED))
@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.int32], ids=str)
def test_copy_of_strided_views(view, dtype):
    x = np.arange(5 * 66).reshape(5, 66).astype(dtype)
    whole = to_device(x)
    # From a view,
    out = empty_like(view(x))
    elementwise.copy(view(whole), out)
    np.testing.assert_array_equal(to_host(out, dtype), view(x))
    # and into one, which leaves the rest alone.
    expected = poisoned(x.shape, dtype)
    target = to_device(expected)
    view(expected)[...] = view(x)
    elementwise.copy(out, view(target))
    np.testing.assert_array_equal(to_host(target, dtype).astype(np.float64), expected.astype(np.float64))


def test_copy_of_whole_arrays():
    for shape in [*SHAPES, (2, 3, 2, 3, 2)]:
        x = random(shape)
        out = empty_like(x)
        elementwise.copy(to_device(x), out)
        np.testing.assert_array_equal(to_host(out), x)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32], ids=str)
@pytest.mark.parametrize("start", [0, 1, 2, 8])
@pytest.mark.parametrize("size", [1, 2, 7, 8, 1030])
def test_copy_moves_bits_as_they_are(dtype, start, size):
    """What would be NaN with a payload, too; and nothing beside the array."""
    whole = np.random.default_rng(size).integers(0, 1 << 16, start + size + 3).astype(dtype)
    if dtype == np.int32:
        whole |= np.int32(0x7F800000)
    target = np.full_like(whole, 77)
    x, out = to_device(whole), to_device(target)
    elementwise.copy(x[start : start + size], out[start : start + size])
    target[start : start + size] = whole[start : start + size]
    np.testing.assert_array_equal(to_host(out), target)


TRANSPOSED = {
    np.dtype(np.float32): [(1, 1), (TILE, TILE), (TILE + 1, TILE - 1), (3, 200), (BLOCK_Y + 1, 33), (0, 4), (4, 0)],
    BFLOAT16: [(40, 50), (TILE_ROWS + 8, 8), (8, 2 * TILE_WORDS + 24), (2 * TILE_ROWS, 4 * TILE_WORDS)],
    np.dtype(np.int32): [(TILE_ROWS, TILE_WORDS), (TILE_ROWS + 4, 12), (4, TILE_WORDS + 4), (4, 0)],
}


@pytest.mark.parametrize("variant", elementwise.TRANSPOSE_VARIANTS.runnable())
def test_transpose(variant):
    for dtype, shapes in TRANSPOSED.items():
        vector = 16 // dtype.itemsize
        for R, C in shapes:
            if variant != "vector_tile" or R % vector == C % vector == 0:
                x = np.arange(R * C, dtype=np.int32).reshape(R, C).astype(dtype)
                out = empty_like(x.T)
                elementwise.transpose(to_device(x), out, variant=variant)
                np.testing.assert_array_equal(to_host(out, dtype), x.T)


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_transpose_keeps_every_bit(dtype):
    """Also of what would be NaNs, whose bits arithmetic changes."""
    x = np.random.default_rng(0).integers(0, np.iinfo(dtype).max, (64, 16), dtype, endpoint=True)
    x[0] = 0x7F81 if dtype == np.uint16 else 0x7F800001
    out = empty_like(x.T)
    elementwise.transpose(to_device(x), out, variant="vector_tile")
    np.testing.assert_array_equal(to_host(out), x.T)


def test_no_race_and_nothing_out_of_bounds(under_checks):
    for variant in elementwise.VARIANTS.runnable():
        for n in (1, VECTOR + 1):
            a, out = random((n,)), empty_like(random((n,)))
            elementwise.add(to_device(a), to_device(a), out, variant=variant)
            np.testing.assert_array_equal(to_host(out), a + a)
    for variant in elementwise.TRANSPOSE_VARIANTS.runnable():
        for x in (random((TILE_ROWS + 4, 4)), random((8, 8), BFLOAT16)):
            out = empty_like(x.T)
            elementwise.transpose(to_device(x), out, variant=variant)
            np.testing.assert_array_equal(to_host(out, x.dtype), x.T)
    x = random((TILE + 1, 5))
    out = empty_like(x.T)
    elementwise.copy(to_device(x).T, out)
    assert_close(to_host(out), x.T, rtol=0, atol=0)


def test_vectors_want_alignment():
    """By name they refuse what is not aligned; by default it goes to the plain variant."""
    whole, out = to_device(random((17,))), to_device(poisoned((16,)))
    message = (
        r"elementwise: variant 'vectors' does not support float32 of shape \(16,\) at .*; choose one of thread_per"
    )
    with pytest.raises(ConfigError, match=message):
        elementwise.scale(whole[1:], out, 2, variant="vectors")
    elementwise.scale(whole[1:], out, 2)
    np.testing.assert_array_equal(to_host(out), 2 * to_host(whole)[1:])


def test_bad_arguments_say_what_to_do():
    x = np.zeros((3, 4), np.float32)
    with pytest.raises(ShapeError, match=r"elementwise.add: b has shape \(4, 3\); expected \(3, 4\)"):
        elementwise.add(x, np.zeros((4, 3), np.float32), x)
    with pytest.raises(DTypeError, match=r"elementwise.scale: x has dtype int32; expected float32"):
        elementwise.scale(np.zeros(3, np.int32), np.zeros(3, np.int32), 2)
    with pytest.raises(DTypeError, match=r"elementwise.cast: x is not C-contiguous"):
        elementwise.cast(x.T, np.zeros((4, 3), np.float32))
    with pytest.raises(DTypeError, match=r"elementwise.fill: x has dtype int32 but value=0.5; pass an int"):
        elementwise.fill(np.zeros(3, np.int32), 0.5)
    with pytest.raises(DTypeError, match=r"elementwise.copy: out has dtype float16; expected float32"):
        elementwise.copy(x, x.astype(np.float16))
    with pytest.raises(DTypeError, match=r"elementwise.copy: x has dtype float64; expected elements of 2 or 4 bytes"):
        elementwise.copy(np.zeros(3), np.zeros(3))
    with pytest.raises(ShapeError, match=r"elementwise.copy: x has 5 axes .* strided copy takes at most 4"):
        elementwise.copy(np.zeros((2, 2, 2, 2, 2), np.float32).T, np.zeros((2, 2, 2, 2, 2), np.float32))
    with pytest.raises(ShapeError, match=r"elementwise.transpose: out_CR has shape \(3, 4\); expected \(4, 3\)"):
        elementwise.transpose(x, x)
