"""Compiled kernels: dimensions, memory, types, indices, views, and values that live across barriers."""

import math

import numpy as np
import pytest
from numba import cuda, float32, int32, typeof

from numstack.errors import KernelError
from numstack.simt import Accesses, accesses, compile_kernel
from tests.simt.support import launch
from tests.support import poisoned

RANDOM = np.random.default_rng(3)
TILE = 16
TM, TN, BK = 4, 2, 16


def uniform(*shape: int) -> np.ndarray:
    return RANDOM.standard_normal(shape).astype(np.float32)


def tiled_product(a, b, c):
    a_tile = cuda.shared.array((TILE, TILE), float32)
    b_tile = cuda.shared.array((TILE, TILE), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    j, i = cuda.grid(2)
    total = float32(0)
    for k0 in range(0, a.shape[1], TILE):
        a_tile[y, x] = a[i, k0 + x] if i < a.shape[0] and k0 + x < a.shape[1] else float32(0)
        b_tile[y, x] = b[k0 + y, j] if k0 + y < b.shape[0] and j < b.shape[1] else float32(0)
        cuda.syncthreads()
        for k in range(TILE):
            total += a_tile[y, k] * b_tile[k, x]
        cuda.syncthreads()
    if i < c.shape[0] and j < c.shape[1]:
        c[i, j] = total


def test_shared_tiles_of_odd_shapes_in_ranges_of_blocks():
    a, b = uniform(35, 50), uniform(50, 61)
    c = poisoned((35, 61), np.float32)
    run = compile_kernel(tiled_product, tuple(typeof(x) for x in (a, b, c)), (TILE, TILE, 1))
    run((4, 3, 1), 0, 7, 0, a, b, c)
    assert np.isnan(c[32:]).all()  # blocks 7 to 11 have not run
    run((4, 3, 1), 7, 12, 0, a, b, c)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)
    assert not run.has_global_atomics
    assert not run.uses_dynamic_shared


def register_tiles(a, b, c):
    a_tile = cuda.shared.array((BK, 16 * TM), float32)
    b_tile = cuda.shared.array((BK, 16 * TN), float32)
    total = cuda.local.array((TM, TN), float32)
    x, y = cuda.threadIdx.x, cuda.threadIdx.y
    thread = y * 16 + x
    i0, j0 = cuda.blockIdx.y * 16 * TM, cuda.blockIdx.x * 16 * TN
    for m in range(TM):
        for n in range(TN):
            total[m, n] = 0
    for k0 in range(0, a.shape[1], BK):
        for e in range(thread, BK * 16 * TM, 256):
            a_tile[e % BK, e // BK] = a[i0 + e // BK, k0 + e % BK]
        for e in range(thread, BK * 16 * TN, 256):
            b_tile[e // (16 * TN), e % (16 * TN)] = b[k0 + e // (16 * TN), j0 + e % (16 * TN)]
        cuda.syncthreads()
        for k in range(BK):
            for m in range(TM):
                for n in range(TN):
                    total[m, n] += a_tile[k, y * TM + m] * b_tile[k, n * 16 + x]
        cuda.syncthreads()
    for m in range(TM):
        for n in range(TN):
            c[i0 + y * TM + m, j0 + n * 16 + x] = total[m, n]


def test_local_arrays_that_live_across_barriers():
    a, b = uniform(128, 48), uniform(48, 64)
    c = poisoned((128, 64), np.float32)
    launch(register_tiles, (2, 2), (16, 16), a, b, c)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b, rtol=1e-5, atol=1e-5)


def three_dimensions(out):
    x, y, z = cuda.grid(3)
    width, height, depth = cuda.gridsize(3)
    if x < out.shape[2] and y < out.shape[1] and z < out.shape[0]:
        out[z, y, x] = ((z * height + y) * width + x) * 10 + cuda.threadIdx.z + depth * 100000


def test_three_dimensions():
    out = poisoned((5, 6, 7), np.int64)
    launch(three_dimensions, (2, 3, 2), (4, 2, 3), out)
    z, y, x = np.indices(out.shape)
    np.testing.assert_array_equal(out, ((z * 6 + y) * 8 + x) * 10 + z % 3 + 600000)


def strided(x, out):
    j, i = cuda.grid(2)
    if i < x.shape[0] and j < x.shape[1]:
        row = x[i]
        out[i, j] = row[j] + x[-1, j] + x[i, j - 1]


def test_strided_arrays_views_and_negative_indices():
    base = uniform(20, 30)
    x, out = base[::2, 1:28:3], poisoned((9, 10), np.float32).T
    launch(strided, (1, 2), (16, 8), x, out)
    np.testing.assert_allclose(out, x + x[-1] + np.roll(x, 1, axis=1), rtol=1e-6)


def shifted(x, out, shift):
    i = cuda.grid(1)
    if i < out.size:
        out[i] = x[i + shift]


def test_a_negative_argument_wraps_too():
    x, out = uniform(50), poisoned(40, np.float32)
    launch(shifted, 2, 32, x, out, np.int32(5))
    np.testing.assert_array_equal(out, x[5:45])
    launch(shifted, 2, 32, x, out, np.int32(-3))
    np.testing.assert_array_equal(out, x[np.arange(40) - 3])


def wraps_columns(x, out, start, stop):
    row = cuda.threadIdx.x
    shared = cuda.shared.array((3, 8), int32)
    local = cuda.local.array((3, 8), int32)
    for c in range(8):
        shared[row, c] = x[row, c]
        local[row, c] = x[row, c]
    cuda.syncthreads()
    first = start - 4
    for c in range(first, stop):
        out[row, 0] += x[row, c]
        out[row, 1] += shared[row, c]
        out[row, 2] += local[row, c]
        out[row, 3] += local[row][c] - shared[row][c] + x[row][c]
        out[row, c] += cuda.atomic.add(x, (row, c), 0) * 1000


def test_an_index_that_may_be_negative_wraps_along_its_own_axis():
    whole = np.arange(48, dtype=np.int32).reshape(3, 16)
    for x in (whole[:, :8].copy(), whole[:, :8], whole[:, ::2]):
        out = np.zeros((3, 9), np.int32)
        launch(wraps_columns, 1, 3, x, out, np.int32(1), np.int32(5))
        expected = np.zeros((3, 9), np.int32)
        for c in range(-3, 5):
            expected[:, :4] += x[:, [c]]
            expected[:, c] += x[:, c] * 1000
        np.testing.assert_array_equal(out, expected)


def dynamic(x, out):
    whole = cuda.shared.array(0, float32)
    same = cuda.shared.array(0, int32)
    i = cuda.threadIdx.x
    whole[i] = x[i]
    cuda.syncthreads()
    out[i] = whole[cuda.blockDim.x - 1 - i]
    if i == 0:
        out[0] = float32(whole.size) + (same[1] == 0)


def test_dynamic_shared_memory():
    x, out = np.arange(32, dtype=np.float32), poisoned(32, np.float32)
    launch(dynamic, 1, 32, x, out, shared_bytes=32 * 4)
    np.testing.assert_array_equal(out[1:], x[::-1][1:])
    assert out[0] == 32


def halves(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = float32(x[i]) * float32(1.0009765625)


def test_float16_is_read_as_float32_and_rounded_to_nearest_even():
    bits = np.arange(0, 2**16, 5, dtype=np.uint16)
    x = bits.view(np.float16)[np.isfinite(bits.view(np.float16))]
    y = poisoned(x.size, np.float16)
    launch(halves, -(-x.size // 128), 128, x, y)
    with np.errstate(over="ignore"):
        expected = (x.astype(np.float32) * np.float32(1.0009765625)).astype(np.float16)
    np.testing.assert_array_equal(y.view(np.uint16), expected.view(np.uint16))


def narrowed(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i]


def test_float64_to_float16_rounds_once():
    near_ties = (1 + 2.0**-11) + np.array([0, 2.0**-40, -(2.0**-40), 2.0**-30])
    x = np.concatenate([near_ties, -near_ties, RANDOM.standard_normal(100), [np.inf, np.nan, 65519.99999, 1e-8]])
    y = poisoned(x.size, np.float16)
    launch(narrowed, 1, 128, x, y)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(y, x.astype(np.float16))


def functions(x, out):
    i = cuda.grid(1)
    out[0, i] = math.exp(x[i])
    out[1, i] = math.floor(x[i])
    out[2, i] = max(x[i], float32(0), math.sqrt(abs(x[i])))
    out[3, i] = x[i] ** 2


def test_exp_is_within_one_unit_and_max_prefers_numbers():
    x = np.linspace(-86, 88.5, 100_000).astype(np.float32)
    x[:3] = np.nan, np.inf, -np.inf
    out = poisoned((4, x.size), np.float32)
    launch(functions, x.size // 32, 32, x, out)
    exact = np.exp(x.astype(np.float64))
    assert np.isnan(out[0, 0])
    assert (out[0, 1], out[0, 2]) == (np.inf, 0)
    assert (np.abs(out[0, 3:] - exact[3:]) <= np.spacing(exact[3:].astype(np.float32))).all()
    np.testing.assert_array_equal(out[1, 3:], np.floor(x[3:]))
    assert out[2, 0] == 0
    np.testing.assert_array_equal(out[2, 3:], np.maximum(np.maximum(x[3:], 0), np.sqrt(np.abs(x[3:]))))


@pytest.mark.parametrize("block", [(1, 1, 1), (7, 5, 1), (33, 1, 1), (48, 2, 1), (100, 1, 3), (1024, 1, 1)])
def test_blocks_of_any_shape(block):
    n = math.prod(block)
    out = poisoned(3 * n, np.int32)
    launch(reversed_in_block, 3, block, out)
    np.testing.assert_array_equal(out.reshape(3, n), np.tile(np.arange(n)[::-1], (3, 1)))


def reversed_in_block(out):
    shared = cuda.shared.array(1024, int32)
    n = cuda.blockDim.x * cuda.blockDim.y * cuda.blockDim.z
    thread = (cuda.threadIdx.z * cuda.blockDim.y + cuda.threadIdx.y) * cuda.blockDim.x + cuda.threadIdx.x
    shared[thread] = thread
    cuda.syncthreads()
    out[cuda.blockIdx.x * n + thread] = shared[n - 1 - thread]


def test_accesses_are_found_in_the_source():
    assert accesses(tiled_product) == Accesses((0, 1), (2,))
    assert accesses(shifted) == Accesses((0,), (1,))


def misspelt(x):
    x[0] = x.no_such_attribute


def test_what_numba_refuses_is_shown_with_the_kernels_line():
    with pytest.raises(KernelError, match=r"test_compile.py:\d+: numba cannot compile this: (.|\n)*no_such_attribute"):
        compile_kernel(misspelt, (typeof(uniform(1)),), (1, 1, 1))


def test_the_generated_source_names_the_kernels_lines():
    a = uniform(4, 4)
    source = compile_kernel(tiled_product, (typeof(a),) * 3, (TILE, TILE, 1)).source
    assert "total += a_tile[y, k] * b_tile[k, x]" in source
    assert "# test_compile.py:" in source


def doubled_rows(x, out):
    j, i = cuda.grid(2)
    if i < x.shape[0] and j < x.shape[1]:
        out[i, j] = 2 * x[i, j]


def test_rows_that_lie_side_by_side_and_rows_that_do_not():
    base = uniform(40, 50)
    for x in (base[3:30, 5:45], base[::2, ::3], base.T[1:20], base[:, :1]):
        out = np.full((x.shape[0], x.shape[1] + 1), np.nan, np.float32)[:, :-1]
        launch(doubled_rows, (4, 4), (16, 16), x, out)
        np.testing.assert_array_equal(out, 2 * x)
