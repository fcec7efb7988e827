"""numstack.kernels.softmax: every variant against float64, against PyTorch's gradients and ONNX's cases."""

import numpy as np
import pytest

from numstack.errors import ConfigError, DTypeError, ShapeError
from numstack.kernels import softmax
from tests.golden import OnnxCase, onnx_cases
from tests.golden.torch_kernels import torch_case
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

SHAPES = {
    "one element": (1, 1),
    "one column past a warp, one row past a block": (softmax.BLOCK + 1, 33),
    "a vocabulary of characters": (6, 84),
    "long rows": (3, 1000),
    "no row": (0, 8),
}
VECTOR_SHAPES = {
    "one vector": (1, 8),
    "one vector past a warp, one row past a block": (softmax.ROWS + 1, 264),
    "one vector past what a warp keeps": (2, 8 * 32 * softmax.VECTORS + 8),
    "no row": (0, 8),
}


def shapes(variant: str) -> dict[str, tuple[int, int]]:
    return VECTOR_SHAPES if variant == "row_in_registers" else SHAPES


def inputs(R: int, C: int) -> tuple[np.ndarray, np.ndarray]:
    """x, whose rows have their maximum early, late and in between, and dy."""
    rng = np.random.default_rng(R * 1000 + C)
    x, dy = (rng.standard_normal((R, C), dtype=np.float32) for _ in range(2))
    if R > 2:
        x[0] += np.linspace(0, 30, C, dtype=np.float32)
        x[1] -= np.linspace(0, 30, C, dtype=np.float32)
    return x, dy


def forward(x: np.ndarray, dtype=np.float32, **options) -> np.ndarray:
    y = to_device(poisoned(x.shape, dtype))
    softmax.forward(to_device(x), y, **options)
    return to_host(y)


def backward(dy: np.ndarray, y: np.ndarray, dtype=np.float32, **options) -> np.ndarray:
    dx = to_device(poisoned(y.shape, dtype))
    softmax.backward(to_device(dy), to_device(y), dx, **options)
    return to_host(dx)


@pytest.mark.parametrize("variant", softmax.FORWARD.runnable())
def test_forward_at_every_shape(variant):
    for what, shape in shapes(variant).items():
        x, _ = inputs(*shape)
        assert_close(forward(x, variant=variant), softmax.reference(x), what=what)


@pytest.mark.parametrize("variant", softmax.BACKWARD.runnable())
def test_backward_at_every_shape(variant):
    for what, shape in shapes(variant).items():
        x, dy = inputs(*shape)
        y = softmax.reference(x).astype(np.float32)
        assert_close(backward(dy, y, variant=variant), softmax.reference_backward(dy, y), what=what)


def test_reference_backward_by_finite_differences():
    x, dy = (a.astype(np.float64) for a in inputs(3, 5))
    gradient = softmax.reference_backward(dy, softmax.reference(x))
    for i in np.ndindex(x.shape):
        step = np.zeros_like(x)
        step[i] = 1e-6
        slope = ((softmax.reference(x + step) - softmax.reference(x - step)) * dy).sum() / 2e-6
        assert abs(slope - gradient[i]) < 1e-8


@pytest.mark.parametrize("variant", softmax.FORWARD.runnable())
def test_rows_of_extreme_values(variant):
    """Large numbers do not overflow; -inf is probability 0; NaN and a row of -inf are NaN; no row harms another."""
    x = np.zeros((4, 40), np.float32)
    x[0] = np.linspace(3e38, -3e38, 40)
    x[1, 1:] = -np.inf
    x[2, 7] = np.nan
    x[3] = -np.inf
    y = forward(x, variant=variant)
    one = np.zeros(40)
    one[0] = 1
    assert_close(y[:2], np.stack([one, one]))
    assert np.isnan(y[2:]).all()


def test_in_place():
    x, dy = inputs(5, 40)
    y = to_device(x)
    softmax.forward(y, y)
    assert_close(to_host(y), softmax.reference(x))
    dx = to_device(dy)
    softmax.backward(dx, y, dx)
    assert_close(to_host(dx), softmax.reference_backward(dy, softmax.reference(x)))


def test_rows_that_vectors_cannot_reach():
    x, _ = inputs(3, 84)
    with pytest.raises(ConfigError, match="'row_in_registers' does not support"):
        forward(x, variant="row_in_registers")
    moved = to_device(np.zeros(81, np.float32))[1:].reshape(2, 40)
    with pytest.raises(ConfigError, match="is_aligned=False"):
        softmax.forward(moved, moved, variant="row_in_registers")


@pytest.mark.parametrize("columns", [84, 88])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_sixteen_bits(dtype, columns):
    x, dy = (a.astype(dtype) for a in inputs(6, columns))
    stored = np.uint16 if dtype == BFLOAT16 else dtype
    variant = None if columns % 8 else "row_in_registers"
    expected = softmax.reference(x)
    assert_close(forward(x, stored, variant=variant).view(dtype), expected, dtype=str(dtype))
    y = expected.astype(dtype)
    dx = backward(dy, y, stored, variant=variant).view(dtype)
    assert_close(dx, softmax.reference_backward(dy, y), dtype=str(dtype))


def test_torch():
    case = torch_case("softmax")
    y = forward(case["x"])
    assert_close(y, case["y"])
    assert_close(backward(case["dy"], y), case["dx"])


@pytest.mark.parametrize("case", onnx_cases("Softmax"), ids=lambda case: case.name)
def test_onnx(case: OnnxCase):
    """The axis is moved to the end, where our rows lie."""
    axis = case.attributes.get("axis", -1)
    x, y = (np.moveaxis(a, axis, -1) for a in (*case.inputs, *case.outputs))
    got = forward(np.ascontiguousarray(x).reshape(-1, x.shape[-1]))
    assert_close(got.reshape(y.shape), y)


@pytest.mark.parametrize("variant", softmax.FORWARD.runnable())
def test_forward_under_checks(under_checks, variant):
    x, _ = inputs(5, 40)
    assert_close(forward(x, variant=variant), softmax.reference(x))


@pytest.mark.parametrize("variant", softmax.BACKWARD.runnable())
def test_backward_under_checks(under_checks, variant):
    x, dy = inputs(5, 40)
    y = softmax.reference(x).astype(np.float32)
    assert_close(backward(dy, y, variant=variant), softmax.reference_backward(dy, y))


def test_bad_arguments():
    x = np.zeros((3, 4), np.float32)
    with pytest.raises(ShapeError, match=r"softmax: y_RC has shape \(4, 3\); expected \(3, 4\)"):
        softmax.forward(x, np.zeros((4, 3), np.float32))
    with pytest.raises(DTypeError, match="softmax: x_RC has dtype int32"):
        softmax.forward(x.astype(np.int32), x)
    with pytest.raises(DTypeError, match="softmax: dx_RC is not C-contiguous"):
        softmax.backward(x, x, np.zeros((4, 3), np.float32).T)
