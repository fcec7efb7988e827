"""numstack.kernels.rmsnorm: every variant against float64, finite differences, bad arguments."""

from __future__ import annotations

import numpy as np
import pytest

from numstack.errors import ConfigError, DTypeError, ShapeError
from numstack.kernels import norm_rows, rmsnorm
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

EPS = 1e-5
SHAPES = {
    "one element": (1, 1),
    "one column past a warp, one row past a block": (rmsnorm.ROWS + 1, 33),
    "odd": (7, 84),
    "no row": (0, 8),
}
VECTOR_SHAPES = {
    "one vector": (1, 8),
    "one vector past a warp, one row past a block": (rmsnorm.ROWS + 1, 264),
    "no place past the row": (7, 768),
    "one vector past what a warp keeps, more rows than a batch": (11, 8 * 32 * norm_rows.MOST_VECTORS + 8),
    "no row": (0, 8),
}


def shapes(variant: str) -> dict[str, tuple[int, int]]:
    return VECTOR_SHAPES if variant in ("row_in_registers", "staged_rows") else SHAPES


def inputs(R: int, C: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """x, of rows of different scale, dy and weight."""
    rng = np.random.default_rng(R * 1000 + C)
    x, dy = (rng.standard_normal((R, C), dtype=np.float32) for _ in range(2))
    return x * np.linspace(0.5, 20, R, dtype=np.float32)[:, None], dy, rng.standard_normal(C, dtype=np.float32)


def forward(x, weight, dtype=np.float32, **options):
    y, rstd = to_device(poisoned(x.shape, dtype)), to_device(poisoned(x.shape[0]))
    rmsnorm.forward(to_device(x), to_device(weight), y, rstd, eps=EPS, **options)
    return to_host(y), to_host(rstd)


def backward(dy, x, weight, dtype=np.float32, dx=None, dweight=None, **options):
    _, rstd = rmsnorm.reference(x, weight, EPS)
    dx = to_device(poisoned(x.shape, dtype) if dx is None else dx)
    dweight = to_device(poisoned(weight.shape) if dweight is None else dweight)
    workspace = to_device(poisoned(rmsnorm.workspace_size(*x.shape)))
    arrays = [to_device(a) for a in (dy, x, weight, rstd.astype(np.float32))]
    rmsnorm.backward(*arrays, dx, dweight, workspace, **options)
    return to_host(dx), to_host(dweight)


@pytest.mark.parametrize("variant", rmsnorm.FORWARD.runnable())
def test_forward_at_every_shape(variant):
    for what, shape in shapes(variant).items():
        x, _, weight = inputs(*shape)
        for got, expected in zip(forward(x, weight, variant=variant), rmsnorm.reference(x, weight, EPS), strict=True):
            assert_close(got, expected, what=what)


@pytest.mark.parametrize("variant", rmsnorm.FORWARD.runnable())
def test_forward_that_keeps_nothing(variant):
    x, _, weight = inputs(5, 264)
    y = to_device(poisoned(x.shape))
    rmsnorm.forward(to_device(x), to_device(weight), y, eps=EPS, variant=variant)
    assert_close(to_host(y), rmsnorm.reference(x, weight, EPS)[0])


@pytest.mark.parametrize("variant", rmsnorm.BACKWARD.runnable())
def test_backward_at_every_shape(variant):
    for what, shape in shapes(variant).items():
        x, dy, weight = inputs(*shape)
        dx, dweight = backward(dy, x, weight, variant=variant)
        expected_dx, expected_dweight = rmsnorm.reference_backward(dy, x, weight, EPS)
        assert_close(dx, expected_dx, atol=1e-5, what=f"dx, {what}")
        assert_close(dweight, expected_dweight, atol=2e-5, what=f"dweight, {what}")


@pytest.mark.parametrize("variant", rmsnorm.BACKWARD.runnable())
def test_backward_accumulates_and_works_in_place(variant):
    x, dy, weight = inputs(9, 40)
    expected_dx, expected_dweight = rmsnorm.reference_backward(dy, x, weight, EPS)
    before = np.ones_like(x), np.full_like(weight, 2)
    dx, dweight = backward(
        dy, x, weight, dx=before[0], dweight=before[1], accumulate=True, accumulate_dx=True, variant=variant
    )
    assert_close(dx, expected_dx + 1, atol=1e-5)
    assert_close(dweight, expected_dweight + 2, atol=2e-5)
    _, rstd = rmsnorm.reference(x, weight, EPS)
    shared, sums = to_device(dy), to_device(poisoned(40))
    workspace = to_device(poisoned(rmsnorm.workspace_size(9, 40)))
    arrays = [to_device(a) for a in (x, weight, rstd.astype(np.float32))]
    rmsnorm.backward(shared, *arrays, shared, sums, workspace, variant=variant)
    assert_close(to_host(shared), expected_dx, atol=1e-5)
    assert_close(to_host(sums), expected_dweight, atol=2e-5)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
@pytest.mark.parametrize("in_registers", [False, True])
def test_sixteen_bits(dtype, in_registers):
    x, dy, weight = inputs(6, 80)
    x, dy = (x / 8).astype(dtype), dy.astype(dtype)
    stored = np.uint16 if dtype == BFLOAT16 else dtype
    names = (rmsnorm.FORWARD.names()[in_registers], rmsnorm.BACKWARD.names()[in_registers])
    y, _ = forward(x, weight, stored, variant=names[0])
    assert_close(y.view(dtype), rmsnorm.reference(x, weight, EPS)[0], dtype=str(dtype))
    dx, dweight = backward(dy, x, weight, stored, variant=names[1])
    expected_dx, expected_dweight = rmsnorm.reference_backward(dy, x, weight, EPS)
    assert_close(dx.view(dtype), expected_dx, dtype=str(dtype))
    assert_close(dweight, expected_dweight, atol=2e-5)


@pytest.mark.parametrize("adds", [False, True], ids=["sets", "adds"])
@pytest.mark.parametrize("variant", rmsnorm.BACKWARD.runnable())
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_backward_into_a_float32_stream(dtype, variant, adds):
    """dy and x have 16 bits, dx does not; as exact as float32, but for the rounding of the inputs that both share."""
    for what, shape in shapes(variant).items():
        x, dy, weight = inputs(*shape)
        x, dy = (x / 8).astype(dtype), dy.astype(dtype)
        stream = np.random.default_rng(0).standard_normal(shape, np.float32)
        dx, dweight = backward(dy, x, weight, dx=stream if adds else None, accumulate_dx=adds, variant=variant)
        expected = rmsnorm.reference_backward(dy, x, weight, EPS)
        assert_close(dx, expected[0] + stream if adds else expected[0], atol=2e-5, what=f"dx of {what}")
        assert_close(dweight, expected[1], atol=2e-5, what=f"dweight of {what}")


def test_reference_backward_by_finite_differences():
    x, dy, weight = (a.astype(np.float64) for a in inputs(3, 5))
    dx, dweight = rmsnorm.reference_backward(dy, x, weight, EPS)
    for array, gradient in ((x, dx), (weight, dweight)):
        for i in np.ndindex(array.shape):
            before, step = array[i], 1e-6
            array[i] = before + step
            above = (rmsnorm.reference(x, weight, EPS)[0] * dy).sum()
            array[i] = before - step
            below = (rmsnorm.reference(x, weight, EPS)[0] * dy).sum()
            array[i] = before
            assert abs((above - below) / (2 * step) - gradient[i]) < 1e-6


@pytest.mark.parametrize("in_registers", [False, True])
def test_under_checks(under_checks, in_registers):
    x, dy, weight = inputs(5, 40)
    y, _ = forward(x, weight, variant=rmsnorm.FORWARD.names()[in_registers])
    assert_close(y, rmsnorm.reference(x, weight, EPS)[0])
    dx, _ = backward(dy, x, weight, variant=rmsnorm.BACKWARD.names()[in_registers])
    assert_close(dx, rmsnorm.reference_backward(dy, x, weight, EPS)[0], atol=1e-5)


def test_bad_arguments():
    x, weight, rstd = (to_device(np.zeros(shape, np.float32)) for shape in ((3, 4), 4, 3))
    with pytest.raises(ShapeError, match=r"rmsnorm: weight_C has shape \(5,\); expected \(4,\)"):
        rmsnorm.forward(x, to_device(np.zeros(5, np.float32)), x, rstd, eps=EPS)
    with pytest.raises(DTypeError, match="rmsnorm: rstd_R has dtype float16; expected float32"):
        rmsnorm.forward(x, weight, x, to_device(np.zeros(3, np.float16)), eps=EPS)
    with pytest.raises(ShapeError, match="rmsnorm: workspace has shape"):
        rmsnorm.backward(x, x, weight, rstd, x, weight, to_device(np.zeros(1, np.float32)))
    with pytest.raises(ConfigError, match="'row_in_registers' does not support"):
        rmsnorm.forward(x, weight, x, rstd, eps=EPS, variant="row_in_registers")
