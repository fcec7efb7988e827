"""numstack.kernels.layernorm: every variant against float64, against PyTorch's gradients and ONNX's cases."""

import numpy as np
import pytest

from numstack.errors import ConfigError, DTypeError, ShapeError
from numstack.kernels import layernorm, norm_rows, norm_rows_backward
from tests.golden import OnnxCase, onnx_cases
from tests.golden.torch_kernels import LAYERNORM_EPS, torch_case
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

EPS = 1e-5
SHAPES = {
    "one element": (1, 1),
    "one row": (1, 33),
    "one column past a warp, one row past a block": (layernorm.BLOCK + 1, 33),
    "one column past a block": (5, layernorm.BLOCK + 1),
    "more groups of rows than one for a block": (70, 16),
    "a small model's": (96, 128),
    "no row": (0, 8),
}


VECTOR_SHAPES = {
    "one vector": (1, 8),
    "one vector past a warp, one row past a block": (layernorm.ROWS + 1, 264),
    "no place past the row": (7, 768),
    "one vector past what a warp keeps, more rows than a batch": (11, 8 * 32 * norm_rows.MOST_VECTORS + 8),
    "no row": (0, 8),
}


def shapes(variant: str) -> dict[str, tuple[int, int]]:
    return VECTOR_SHAPES if variant in ("row_in_registers", "staged_rows") else SHAPES


def inputs(R: int, C: int) -> tuple[np.ndarray, ...]:
    """x (away from mean 0), weight, bias, dy."""
    rng = np.random.default_rng(R * 1000 + C)
    x, dy = (rng.standard_normal((R, C), dtype=np.float32) for _ in range(2))
    weight, bias = (rng.standard_normal(C, dtype=np.float32) for _ in range(2))
    return 2 * x + 3, weight, bias, dy


def forward(x, weight, bias, *, eps=EPS, y_dtype=np.float32, **options) -> tuple[np.ndarray, ...]:
    R, C = x.shape
    y, mean, rstd = (to_device(poisoned(shape, dtype)) for shape, dtype in [((R, C), y_dtype)] + [(R, np.float32)] * 2)
    layernorm.forward(to_device(x), to_device(weight), to_device(bias), y, mean, rstd, eps=eps, **options)
    return to_host(y), to_host(mean), to_host(rstd)


def backward(dy, x, weight, *, eps=EPS, **options) -> tuple[np.ndarray, ...]:
    R, C = x.shape
    _, mean, rstd = layernorm.reference(x, weight, weight, eps)
    out = [to_device(poisoned(shape)) for shape in ((R, C), C, C)]
    workspace = to_device(poisoned(layernorm.workspace_size(R, C)))
    kept = (to_device(a.astype(np.float32)) for a in (mean, rstd))
    layernorm.backward(to_device(dy), to_device(x), to_device(weight), *kept, *out, workspace, **options)
    return tuple(to_host(a) for a in out)


@pytest.mark.parametrize("variant", layernorm.FORWARD.runnable())
def test_forward_at_every_shape(variant):
    for what, shape in shapes(variant).items():
        x, weight, bias, _ = inputs(*shape)
        for name, got, expected in zip(
            ("y", "mean", "rstd"),
            forward(x, weight, bias, variant=variant),
            layernorm.reference(x, weight, bias, EPS),
            strict=True,
        ):
            assert_close(got, expected, what=f"{name} of {what}")


@pytest.mark.parametrize("variant", layernorm.FORWARD.runnable())
def test_forward_without_statistics(variant):
    for what, shape in shapes(variant).items():
        x, weight, bias, _ = inputs(*shape)
        y = to_device(poisoned(shape))
        layernorm.forward(to_device(x), to_device(weight), to_device(bias), y, eps=EPS, variant=variant)
        assert_close(to_host(y), layernorm.reference(x, weight, bias, EPS)[0], what=f"y of {what}")


@pytest.mark.parametrize("variant", layernorm.BACKWARD.runnable())
def test_backward_at_every_shape(variant):
    for what, shape in shapes(variant).items():
        x, weight, _, dy = inputs(*shape)
        got = backward(dy, x, weight, variant=variant)
        expected = layernorm.reference_backward(dy, x, weight, EPS)
        assert_close(got[0], expected[0], atol=1e-5, what=f"dx of {what}")
        assert_close(got[1], expected[1], atol=2e-5, what=f"dweight of {what}")
        assert_close(got[2], expected[2], atol=2e-5, what=f"dbias of {what}")


def test_more_rows_than_the_largest_grid_takes_at_once():
    """Every block of the backward pass walks over several groups of rows, the last of them not full."""
    R, C = layernorm.GROUPS * layernorm.ROWS * 5 + 1, 3
    x, weight, _, dy = inputs(R, C)
    got = backward(dy, x, weight)
    for name, a, b in zip(
        ("dx", "dweight", "dbias"), got, layernorm.reference_backward(dy, x, weight, EPS), strict=True
    ):
        assert_close(a, b, rtol=1e-4, atol=1e-3, what=name)


def test_more_rows_than_a_warp_keeps_statistics_of():
    """Each lane has those of one row; after 32 turns the block fetches the next."""
    plan = norm_rows_backward.plan_backward(1 << 20, 8, norm_rows_backward.Fetched(4, 0))
    x, weight, _, dy = inputs(32 * plan.blocks * plan.layout.rows + 5, 8)
    got = backward(dy, x, weight, variant="staged_rows")
    expected = layernorm.reference_backward(dy, x, weight, EPS)
    for name, a, b in zip(("dx", "dweight", "dbias"), got, expected, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-3, what=name)


def test_reference_backward_by_finite_differences():
    x, weight, bias, dy = (a.astype(np.float64) for a in inputs(3, 5))

    def loss() -> float:
        return float((layernorm.reference(x, weight, bias, EPS)[0] * dy).sum())

    for array, gradient in zip((x, weight, bias), layernorm.reference_backward(dy, x, weight, EPS), strict=True):
        for i in np.ndindex(array.shape):
            kept, h = array[i], 1e-6
            array[i] = kept + h
            up = loss()
            array[i] = kept - h
            down = loss()
            array[i] = kept
            assert abs((up - down) / (2 * h) - gradient[i]) < 1e-7


@pytest.mark.parametrize("variant", layernorm.BACKWARD.runnable())
def test_backward_adds_where_asked_and_dx_may_be_dy(variant):
    x, weight, _, dy = inputs(37, 40)
    _, mean, rstd = (a.astype(np.float32) for a in layernorm.reference(x, weight, weight, EPS))
    dx, dweight, dbias = layernorm.reference_backward(dy, x, weight, EPS)
    residual = np.ones_like(x)
    workspace = to_device(poisoned(layernorm.workspace_size(*x.shape)))
    kept = [to_device(a) for a in (x, weight, mean, rstd)]

    out = [to_device(a) for a in (residual, np.full_like(weight, 2), np.full_like(weight, 3))]
    layernorm.backward(to_device(dy), *kept, *out, workspace, accumulate=True, accumulate_dx=True, variant=variant)
    for name, a, b in zip(("dx", "dweight", "dbias"), out, (dx + 1, dweight + 2, dbias + 3), strict=True):
        assert_close(to_host(a), b, atol=2e-5, what=name)

    in_place = to_device(dy)
    out = [to_device(poisoned(40)) for _ in range(2)]
    layernorm.backward(in_place, *kept, in_place, *out, workspace, variant=variant)
    assert_close(to_host(in_place), dx, atol=1e-5)
    assert_close(to_host(out[0]), dweight, atol=2e-5)


@pytest.mark.parametrize("variants", [("warp_per_row", "row_groups"), ("row_in_registers", "staged_rows")])
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_sixteen_bits(dtype, variants):
    """Arithmetic is float32: the only error is that of rounding the inputs, which both sides share, and the result."""
    x, weight, bias, dy = (a.astype(dtype) for a in inputs(6, 200))
    stored = np.uint16 if dtype == BFLOAT16 else dtype
    y, _, _ = forward(x, weight, bias, y_dtype=stored, variant=variants[0])
    expected = layernorm.reference(x, weight, bias, EPS)[0]
    assert_close(y.view(dtype), expected, dtype=str(dtype))

    _, mean, rstd = layernorm.reference(x, weight, bias, EPS)
    out = [to_device(poisoned(shape, stored)) for shape in (x.shape, 200, 200)]
    workspace = to_device(poisoned(layernorm.workspace_size(*x.shape)))
    arrays = [to_device(a) for a in (dy, x, weight, mean.astype(np.float32), rstd.astype(np.float32))]
    layernorm.backward(*arrays, *out, workspace, variant=variants[1])
    for a, b in zip(out, layernorm.reference_backward(dy, x, weight, EPS), strict=True):
        assert_close(to_host(a, dtype), b, dtype=str(dtype))


@pytest.mark.parametrize("variant", layernorm.FORWARD.runnable())
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_forward_of_a_float32_stream_keeps_it_in_sixteen_bits(dtype, variant):
    """y is of x as it is; what is kept for backward is x rounded to nearest."""
    stored = np.uint16 if dtype == BFLOAT16 else dtype
    for what, shape in shapes(variant).items():
        x, weight, bias, _ = inputs(*shape)
        kept = to_device(poisoned(shape, stored))
        y, mean, rstd = forward(x, weight, bias, y_dtype=stored, kept_RC=kept, variant=variant)
        expected = layernorm.reference(x, weight, bias, EPS)
        assert_close(y.view(dtype), expected[0], dtype=str(dtype), what=f"y of {what}")
        assert_close(mean, expected[1], what=f"mean of {what}")
        assert_close(rstd, expected[2], what=f"rstd of {what}")
        np.testing.assert_array_equal(to_host(kept, dtype), x.astype(dtype), err_msg=f"kept of {what}")


@pytest.mark.parametrize("variant", layernorm.FORWARD.runnable())
def test_what_is_kept_is_x_where_y_takes_its_place(variant):
    x, weight, bias, _ = inputs(5, 40)
    array, kept = to_device(x), to_device(poisoned(x.shape))
    layernorm.forward(array, to_device(weight), to_device(bias), array, eps=EPS, kept_RC=kept, variant=variant)
    assert_close(to_host(array), layernorm.reference(x, weight, bias, EPS)[0])
    np.testing.assert_array_equal(to_host(kept), x)


@pytest.mark.parametrize("adds", [False, True], ids=["sets", "adds"])
@pytest.mark.parametrize("variant", layernorm.BACKWARD.runnable())
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_backward_into_a_float32_stream(dtype, variant, adds):
    """dy and x have 16 bits, dx does not; as exact as float32, but for the rounding of the inputs that both share."""
    for what, (R, C) in shapes(variant).items():
        x, weight, _, dy = inputs(R, C)
        x, dy = x.astype(dtype), dy.astype(dtype)
        _, mean, rstd = layernorm.reference(x, weight, weight, EPS)
        stream = np.random.default_rng(R).standard_normal((R, C), np.float32)
        dx = to_device(stream if adds else poisoned((R, C)))
        dweight, dbias = (to_device(poisoned(C)) for _ in range(2))
        workspace = to_device(poisoned(layernorm.workspace_size(R, C)))
        arrays = [to_device(a) for a in (dy, x, weight, mean.astype(np.float32), rstd.astype(np.float32))]
        layernorm.backward(*arrays, dx, dweight, dbias, workspace, accumulate_dx=adds, variant=variant)
        expected = layernorm.reference_backward(dy, x, weight, EPS)
        assert_close(to_host(dx), expected[0] + stream if adds else expected[0], atol=1e-5, what=f"dx of {what}")
        assert_close(to_host(dweight), expected[1], atol=2e-5, what=f"dweight of {what}")
        assert_close(to_host(dbias), expected[2], atol=2e-5, what=f"dbias of {what}")


def test_torch():
    case = torch_case("layernorm")
    y, _, _ = forward(case["x"], case["weight"], case["bias"], eps=LAYERNORM_EPS)
    assert_close(y, case["y"])
    got = backward(case["dy"], case["x"], case["weight"], eps=LAYERNORM_EPS)
    for name, gradient in zip(("dx", "dweight", "dbias"), got, strict=True):
        assert_close(gradient, case[name], atol=1e-5, what=name)


@pytest.mark.parametrize("case", onnx_cases("LayerNormalization"), ids=lambda case: case.name)
def test_onnx(case: OnnxCase):
    """Axes from ``axis`` on are one row."""
    x, weight, bias = case.inputs
    y, mean, inverse_deviation = case.outputs
    columns = int(np.prod(x.shape[case.attributes.get("axis", -1) :]))
    got = forward(
        x.reshape(-1, columns), weight.reshape(-1), bias.reshape(-1), eps=case.attributes.get("epsilon", 1e-5)
    )
    assert_close(got[0].reshape(y.shape), y, atol=1e-5)
    assert_close(got[1].reshape(mean.shape), mean, atol=1e-6)
    assert_close(got[2].reshape(mean.shape), inverse_deviation, rtol=1e-4)


def test_equal_bits_on_every_run():
    x, weight, _, dy = inputs(300, 40)
    for a, b in zip(backward(dy, x, weight), backward(dy, x, weight), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("variant", layernorm.FORWARD.runnable())
def test_variance_of_a_row_far_from_zero(variant):
    """E[x^2] - E[x]^2 would lose every digit here."""
    x = np.float32(4096) + np.arange(64, dtype=np.float32).reshape(1, 64) / 64
    one, zero = np.ones(64, np.float32), np.zeros(64, np.float32)
    assert_close(
        forward(x, one, zero, variant=variant)[0], layernorm.reference(x, one, zero, EPS)[0], rtol=1e-3, atol=1e-4
    )


@pytest.mark.parametrize("variant", layernorm.FORWARD.runnable())
def test_forward_under_checks(under_checks, variant):
    x, weight, bias, _ = inputs(5, 40)
    assert_close(forward(x, weight, bias, variant=variant)[0], layernorm.reference(x, weight, bias, EPS)[0])


@pytest.mark.parametrize("variant", layernorm.BACKWARD.runnable())
def test_backward_under_checks(under_checks, variant):
    x, weight, _, dy = inputs(5, 40)
    assert_close(
        backward(dy, x, weight, variant=variant)[0], layernorm.reference_backward(dy, x, weight, EPS)[0], atol=1e-5
    )


def test_bad_arguments():
    x, weight, bias, _ = inputs(4, 8)
    with pytest.raises(ShapeError, match=r"layernorm: x_RC has 1 axes \(shape \(32,\)\); expected 2"):
        layernorm.forward(x.reshape(-1), weight, bias, x, x[:, 0], x[:, 0], eps=EPS)
    with pytest.raises(ShapeError, match=r"layernorm: bias_C has shape \(7,\); expected \(8,\)"):
        forward(x, weight, bias[:7])
    with pytest.raises(DTypeError, match="layernorm: weight_C has dtype float64; expected float32"):
        forward(x, weight.astype(np.float64), bias)
    with pytest.raises(DTypeError, match="layernorm: x_RC is not C-contiguous"):
        mean = np.empty(4, np.float32)
        layernorm.forward(to_device(x)[:, ::2], weight[:4], bias[:4], x[:, :4].copy(), mean, mean, eps=EPS)
    with pytest.raises(ShapeError, match="layernorm: rstd_R is given, mean_R is None; give both, or neither"):
        layernorm.forward(x, weight, bias, x, rstd_R=np.empty(4, np.float32), eps=EPS)
    with pytest.raises(ShapeError, match=r"layernorm: kept_RC has shape \(4, 7\); expected \(4, 8\)"):
        forward(x, weight, bias, kept_RC=np.empty((4, 7), np.float16))
    with pytest.raises(ConfigError, match=r"'staged_rows' does not support .*float16 of shape \(4, 8\)"):
        dy, x_RC, mean, *sums = (to_device(a) for a in (x, x, x[:, 0].copy(), weight, bias))
        dx, workspace = to_device(poisoned((4, 8), np.float16)), to_device(poisoned(layernorm.workspace_size(4, 8)))
        layernorm.backward(dy, x_RC, sums[0], mean, mean, dx, *sums, workspace, variant="staged_rows")
    with pytest.raises(ShapeError, match=r"layernorm: mean_R has shape \(3,\); expected \(4,\)"):
        layernorm.forward(x, weight, bias, x, *np.empty((2, 3), np.float32), eps=EPS)
    with pytest.raises(ShapeError, match=f"workspace has shape .* at least {layernorm.workspace_size(4, 8)} elements"):
        mean = np.empty(4, np.float32)
        layernorm.backward(x, x, weight, mean, mean, x, weight, bias, np.empty(9, np.float32))
    with pytest.raises(ConfigError, match=r"'staged_rows' does not support .*columns=9"):
        backward(*(np.zeros(shape, np.float32) for shape in ((2, 9), (2, 9), 9)), variant="staged_rows")
    with pytest.raises(ConfigError, match=r"layernorm\.forward: there is no variant 'fast'; choose one of"):
        forward(x, weight, bias, variant="fast")
