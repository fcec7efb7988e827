"""numstack.kernels.gelu: every form against float64, its stated largest error, ONNX's cases, finite differences."""

import numpy as np
import pytest

from numstack.errors import ConfigError, DTypeError, ShapeError
from numstack.kernels import gelu
from tests.golden import OnnxCase, onnx_cases
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

FORMS = [form for form in gelu.FORMS if form != "tanh"]  # tanh is one of the others
SHAPES = [(1,), (gelu.BLOCK + 1,), (3, 5, 7), (12, 512), (gelu.TILE,), (2 * gelu.TILE + 9,), (0,), (4, 0)]


def forward(x: np.ndarray, form: str, variant: str | None = None) -> np.ndarray:
    y = to_device(poisoned(x.shape))
    gelu.forward(to_device(x), y, form=form, variant=variant)
    return to_host(y)


def backward(dy: np.ndarray, x: np.ndarray, form: str, variant: str | None = None) -> np.ndarray:
    dx = to_device(poisoned(x.shape))
    gelu.backward(to_device(dy), to_device(x), dx, form=form, variant=variant)
    return to_host(dx)


@pytest.mark.parametrize("variant", gelu.VARIANTS.names())
@pytest.mark.parametrize("form", FORMS)
def test_forward_and_backward_at_every_shape(form, variant):
    rng = np.random.default_rng(0)
    for shape in SHAPES:
        x, dy = (rng.normal(scale=2, size=shape).astype(np.float32) for _ in range(2))
        y, slope = gelu.reference(x, form)
        assert_close(forward(x, form, variant), y, what=f"y of {shape}")
        assert_close(backward(dy, x, form, variant), dy * slope, rtol=1e-5, atol=2e-5, what=f"dx of {shape}")


@pytest.mark.parametrize("variant", gelu.VARIANTS.names())
@pytest.mark.parametrize("form", FORMS)
def test_one_pass_equals_two(form, variant):
    x, dy = np.random.default_rng(1).normal(scale=2, size=(2, gelu.TILE + 77)).astype(np.float32)
    y, dx = to_device(poisoned(x.shape)), to_device(poisoned(x.shape))
    gelu.forward_backward(to_device(x), to_device(dy), y, dx, form=form, variant=variant)
    assert_close(to_host(y), forward(x, form, variant), rtol=1e-6, atol=1e-7)
    assert_close(to_host(dx), backward(dy, x, form, variant), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", FORMS)
def test_largest_error_is_as_stated(form):
    x = np.linspace(-12, 12, 400_001, dtype=np.float32)
    y, slope = gelu.reference(x, form)
    for what, got, expected, stated in (
        ("y", forward(x, form), y, gelu.LARGEST_ERROR[form][0]),
        ("slope", backward(np.ones_like(x), x, form), slope, gelu.LARGEST_ERROR[form][1]),
    ):
        # In parts of |x|, where that is more than 1: rounding y to float32 alone is an error of 6e-8 |x|.
        error = np.max(np.abs(got - expected) / np.maximum(1, np.abs(x)))
        assert error <= stated, f"{what}: error {error:.3g}, stated {stated:.3g}"
        assert error >= stated / 4, f"{what}: error {error:.3g} is far less than the {stated:.3g} stated"


@pytest.mark.parametrize("form", FORMS)
def test_far_from_zero_it_is_x_or_0(form):
    x = np.array([-1e30, -1e4, -50, -0.0, 0.0, 50, 1e4, 1e30], np.float32)
    assert_close(forward(x, form), np.maximum(x, 0), rtol=1e-6, atol=1e-7)
    assert_close(backward(np.ones_like(x), x, form), [0, 0, 0, 0.5, 0.5, 1, 1, 1], rtol=1e-6, atol=1e-6)
    assert np.isnan(forward(np.full(3, np.nan, np.float32), form)).all()


@pytest.mark.parametrize("form", ["erf", "tanh"])
def test_reference_slope_is_the_finite_difference(form):
    x = np.linspace(-6, 6, 1001)
    step = 1e-5
    difference = (gelu.reference(x + step, form)[0] - gelu.reference(x - step, form)[0]) / (2 * step)
    assert_close(gelu.reference(x, form)[1], difference, rtol=1e-8, atol=1e-9)


def test_tanh_is_the_form_with_the_least_error():
    assert gelu.DEFAULT_FORM == "tanh_exp"
    assert gelu.LARGEST_ERROR["tanh"] == gelu.LARGEST_ERROR["tanh_exp"]


def test_in_place():
    x, dy = np.random.default_rng(2).normal(size=(2, 300)).astype(np.float32)
    y, slope = gelu.reference(x)
    x_device, dy_device = to_device(x), to_device(dy)
    gelu.forward_backward(x_device, dy_device, x_device, dy_device)
    assert_close(to_host(x_device), y)
    assert_close(to_host(dy_device), dy * slope)


@pytest.mark.parametrize("variant", gelu.VARIANTS.names())
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_sixteen_bits(dtype, variant):
    x, dy = np.random.default_rng(3).normal(scale=2, size=(2, gelu.TILE + 300)).astype(dtype)
    y, dx = to_device(poisoned(x.shape, dtype)), to_device(poisoned(x.shape, dtype))
    gelu.forward_backward(to_device(x), to_device(dy), y, dx, variant=variant)
    expected, slope = gelu.reference(x)
    # Only the stored result is rounded.
    assert_close(to_host(y, dtype), expected, dtype=dtype.name, atol=1e-6)
    assert_close(to_host(dx, dtype), dy.astype(np.float64) * slope, dtype=dtype.name, atol=1e-6)


@pytest.mark.parametrize("case", onnx_cases("Gelu"), ids=lambda case: case.name)
def test_onnx(case: OnnxCase):
    forms = gelu.FORMS[1:] if case.attributes.get("approximate") == "tanh" else ("erf",)
    for form in forms:
        assert_close(forward(case.inputs[0], form), case.outputs[0], rtol=1e-6, atol=3e-7, what=form)


def test_arrays_that_vectors_cannot_reach_take_another_variant():
    x = np.random.default_rng(4).normal(size=(101,)).astype(np.float32)
    y = to_device(poisoned(101))
    gelu.forward(to_device(x)[1:], y[1:])
    assert_close(to_host(y)[1:], gelu.reference(x[1:])[0])
    with pytest.raises(ConfigError, match="'vectors_in_registers' does not support"):
        gelu.forward(to_device(x)[1:], y[1:], variant="vectors_in_registers")


def test_vectors_stay_in_bounds(under_checks):
    x = np.linspace(-3, 3, gelu.TILE + 3, dtype=np.float32)
    y, slope = gelu.reference(x)
    assert_close(forward(x, "tanh", "vectors_in_registers"), y)
    assert_close(backward(np.ones_like(x), x, "tanh", "vectors_in_registers"), slope)


@pytest.mark.parametrize("form", FORMS)
def test_nothing_out_of_bounds(form, under_checks):
    x = np.linspace(-3, 3, gelu.BLOCK + 3, dtype=np.float32)
    y, slope = gelu.reference(x, form)
    assert_close(forward(x, form), y)
    assert_close(backward(np.ones_like(x), x, form), slope)


def test_bad_arguments_say_what_to_do():
    x, y = np.zeros((3, 4), np.float32), np.zeros((3, 5), np.float32)
    with pytest.raises(ShapeError, match=r"gelu.forward: y has shape \(3, 5\); expected \(3, 4\)"):
        gelu.forward(x, y)
    with pytest.raises(DTypeError, match=r"gelu.backward: dx has dtype int32; expected float32, float16, or bfloat16"):
        gelu.backward(x, x, np.zeros((3, 4), np.int32))
    with pytest.raises(DTypeError, match=r"gelu.forward: x is not C-contiguous: shape \(4, 3\)"):
        gelu.forward(x.T, np.zeros((4, 3), np.float32))
    with pytest.raises(ConfigError, match=r"gelu.forward: form='relu'; choose one of 'erf', 'tanh_library'"):
        gelu.forward(x, x, form="relu")
