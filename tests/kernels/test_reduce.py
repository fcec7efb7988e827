"""numstack.kernels.reduce: against float64, at sizes around every boundary between blocks and stretches."""

import numpy as np
import pytest

from numstack.errors import ConfigError, DTypeError, ShapeError
from numstack.kernels import reduce
from numstack.kernels.reduce import BLOCK, COLUMNS, MAX_BLOCKS, MAX_STRETCHES, MIN_ROWS, MIN_STRETCH, ROWS
from numstack.kernels.reduce_vectors import BLOCKS, TILE
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

SIZES = {
    "nothing": 0,
    "one": 1,
    "one past a block": BLOCK + 1,
    "exactly a stretch": MIN_STRETCH,
    "one past a stretch": MIN_STRETCH + 1,
    "more partial results than threads": MIN_STRETCH * (BLOCK + 1) + 7,
}

VECTOR_SIZES = {"nothing": 0, "one": 1, "a tile": TILE, "more tiles than blocks, and a rest": TILE * BLOCKS + 9}

MATRICES = {
    "one element": (1, 1),
    "no rows": (0, 5),
    "no columns": (5, 0),
    "one past the threads": (ROWS + 1, COLUMNS + 1),
    "one past a stretch": (MIN_ROWS + 1, 40),
    "a layer of a small model": (768, 512),
    "more rows than stretches of the least size": (MIN_ROWS * MAX_STRETCHES + 1, 3),
}
VECTOR_MATRICES = {
    "one vector": (1, 8),
    "no rows": (0, 16),
    "no columns": (5, 0),
    "a vector past a block's columns": (70, 264),
    "more rows than one stretch": (2000, 24),
    "a layer of a small model": (768, 512),
}


def run(operation, x: np.ndarray, dtype=np.float32, **options):
    out = to_device(poisoned(1, dtype))
    workspace = to_device(poisoned(reduce.workspace_size(x.size)))
    operation(to_device(x), out, workspace, **options)
    return to_host(out)[0]


def run_rows(x: np.ndarray, out: np.ndarray, **options) -> np.ndarray:
    out_device = to_device(out)
    workspace = to_device(poisoned(reduce.sum_rows_workspace_size(*x.shape)))
    reduce.sum_rows(to_device(x), out_device, workspace, **options)
    return to_host(out_device)


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


@pytest.mark.parametrize("variant", reduce.VARIANTS.runnable())
def test_whole_array_at_every_size(variant):
    for what, n in (VECTOR_SIZES if variant == "vectors" else SIZES).items():
        x = random(n)
        magnitude = np.sum(np.abs(x, dtype=np.float64)) + 1e-30
        total, norm = run(reduce.sum, x, variant=variant), run(reduce.norm, x, variant=variant)
        assert_close(total, np.sum(x, dtype=np.float64), atol=3e-7 * magnitude, what=f"sum of {what}")
        assert_close(norm, reduce.reference_norm(x), rtol=1e-6, atol=0, what=f"norm of {what}")
        assert run(reduce.count_nonfinite, x, np.int32, variant=variant) == 0
        if n:
            assert run(reduce.max, x, variant=variant) == x.max(), what


def test_partition_covers_any_size_with_few_blocks():
    for n in (0, 1, MIN_STRETCH, MIN_STRETCH * MAX_BLOCKS, MIN_STRETCH * MAX_BLOCKS + 1, 10**9 + 7, 10**11):
        n_blocks, stretch = reduce._blocks_and_stretch(n)
        assert n_blocks <= MAX_BLOCKS and stretch % BLOCK == 0
        assert (n_blocks - 1) * stretch < n <= n_blocks * stretch or n == n_blocks == 0


def test_sum_of_many_equal_terms_keeps_its_digits():
    # A running float32 sum of these would be off by 4e-4 of the total.
    n = 1_000_000
    assert_close(run(reduce.sum, np.full(n, 0.1, np.float32)), n * np.float64(np.float32(0.1)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("variant", reduce.VARIANTS.runnable())
def test_nonfinite_values_are_counted_and_propagate(variant):
    n = TILE + 5000
    x = random(n)
    x[[0, 17, n - 1]] = np.nan, np.inf, -np.inf
    assert run(reduce.count_nonfinite, x, np.int32, variant=variant) == 3
    assert np.isnan(run(reduce.sum, x, variant=variant))
    for where in (0, 1, BLOCK, TILE, n - 1):
        x = random(n)
        x[where] = np.nan
        assert np.isnan(run(reduce.max, x, variant=variant)), where
    assert run(reduce.max, np.full(3, -np.inf, np.float32), variant=variant) == -np.inf
    assert run(reduce.norm, np.full(3, 3e38, np.float32), variant=variant) == np.inf


@pytest.mark.parametrize(("variant", "of_rows"), [("thread_per_element", "two_phase"), ("vectors", "vectors")])
def test_any_shape_and_sixteen_bits(variant, of_rows):
    for dtype in (BFLOAT16, np.dtype(np.float16)):
        x = random(30, 40, 8).astype(dtype)
        total = run(reduce.sum, x, variant=variant)
        assert_close(total, np.sum(x, dtype=np.float64), rtol=1e-5, atol=1e-3, what=f"sum of {dtype}")
        assert run(reduce.max, x, variant=variant) == x.max()
        rows = x.reshape(-1, 8)
        got = run_rows(rows, poisoned(8), variant=of_rows)
        assert_close(got, np.sum(rows, axis=0, dtype=np.float64), atol=1e-4)


@pytest.mark.parametrize("variant", reduce.SUM_ROWS_VARIANTS.runnable())
def test_sum_rows_at_every_size(variant):
    for what, shape in (VECTOR_MATRICES if variant == "vectors" else MATRICES).items():
        x = random(*shape)
        expected = np.sum(x, axis=0, dtype=np.float64)
        tolerance = {"rtol": 1e-5, "atol": 1e-6 * shape[0]}
        got = run_rows(x, poisoned(shape[1]), variant=variant)
        assert_close(got, expected, what=f"sum of {what}", **tolerance)
        got = run_rows(x, np.full(shape[1], 2, np.float32), accumulate=True, variant=variant)
        assert_close(got, expected + 2, what=f"sum of {what}, accumulated", **tolerance)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16), np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("variant", reduce.SUM_ROWS_VARIANTS.runnable())
def test_sum_rows_copies_what_it_sums(variant, dtype):
    """The sums are of x as it is, the copy is x rounded to nearest."""
    for what, shape in (VECTOR_MATRICES if variant == "vectors" else MATRICES).items():
        x = random(*shape)
        copy = to_device(poisoned(shape, np.uint16 if dtype == BFLOAT16 else dtype))
        got = run_rows(x, poisoned(shape[1]), variant=variant, copy_RC=copy)
        assert_close(got, np.sum(x, axis=0, dtype=np.float64), rtol=1e-5, atol=1e-6 * shape[0], what=f"sum of {what}")
        np.testing.assert_array_equal(to_host(copy, dtype), x.astype(dtype), err_msg=f"copy of {what}")


def test_clip_scale():
    for norm, expected in [(0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (4.0, 0.25), (np.inf, np.nan), (np.nan, np.nan)]:
        scale = to_device(poisoned(1))
        reduce.clip_scale(to_device(np.array([norm], np.float32)), scale, max_norm=1.0)
        assert_close(to_host(scale), [expected], rtol=1e-7, atol=0, what=f"scale of norm {norm}")


def test_equal_bits_on_every_run():
    x = random(100_000)
    assert run(reduce.sum, x) == run(reduce.sum, x)


@pytest.mark.parametrize("variant", reduce.VARIANTS.runnable())
def test_no_race_and_nothing_out_of_bounds(under_checks, variant):
    x = random(BLOCK + 3 + (TILE if variant == "vectors" else 0))
    assert_close(run(reduce.sum, x, variant=variant), np.sum(x, dtype=np.float64), atol=1e-4)
    assert run(reduce.max, x[: BLOCK + 3], variant=variant) == x[: BLOCK + 3].max()


@pytest.mark.parametrize("variant", ["two_phase", "vectors"])
def test_no_race_among_columns(under_checks, variant):
    x = random(37, 16)
    assert_close(run_rows(x, poisoned(16), variant=variant), x.sum(axis=0), atol=1e-5)


def test_bad_arguments_say_what_to_do():
    x, out, workspace = (to_device(np.zeros(shape, np.float32)) for shape in ((3, 5000), 1, 4))
    with pytest.raises(ShapeError, match=r"reduce.sum: workspace has shape \(3,\); expected one axis of at least 4"):
        reduce.sum(x, out, workspace[1:])
    with pytest.raises(ShapeError, match=r"reduce.norm: out_1 has shape \(4,\); expected \(1,\)"):
        reduce.norm(x, workspace, workspace)
    with pytest.raises(DTypeError, match=r"reduce.count_nonfinite: out_1 has dtype float32; expected int32"):
        reduce.count_nonfinite(x, out, workspace)
    with pytest.raises(DTypeError, match=r"reduce.max: x is not C-contiguous"):
        reduce.max(x.T, out, workspace)
    with pytest.raises(ShapeError, match=r"reduce.max: x has shape \(0,\), no elements"):
        reduce.max(out[:0], out, workspace)
    with pytest.raises(ShapeError, match=r"reduce.sum_rows: copy_RC has shape .*; expected "):
        reduce.sum_rows(x, x[0], workspace, copy_RC=x[:0])
    with pytest.raises(ShapeError, match=r"reduce.sum_rows: out_C has shape \(3,\); expected \(5000,\)"):
        reduce.sum_rows(x, workspace[:3], workspace)
    with pytest.raises(ConfigError, match=r"'vectors' does not support 1666, True"):
        reduce.sum_rows(x.reshape(-1)[:4998].reshape(3, 1666), x[0, :1666], x.reshape(-1)[:6000], variant="vectors")
    with pytest.raises(DTypeError, match=r"reduce.clip_scale: norm_1 has dtype float64; expected float32"):
        reduce.clip_scale(to_device(np.zeros(1)), out, max_norm=1.0)
