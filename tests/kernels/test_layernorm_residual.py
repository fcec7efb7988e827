"""numstack.kernels.layernorm_residual: every variant against the sum and float64's normalisation of it."""

from __future__ import annotations

import numpy as np
import pytest

from numstack.errors import ConfigError, ShapeError
from numstack.kernels import layernorm, layernorm_residual, norm_rows
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

EPS = 1e-5
SHAPES = [(1, 1), (layernorm_residual.ROWS + 1, 33), (6, 84), (0, 8)]
VECTOR_SHAPES = [(1, 8), (7, 768), (layernorm_residual.ROWS + 1, 264), (2, 8 * 32 * norm_rows.MOST_VECTORS + 8), (0, 8)]


def inputs(R: int, C: int, dtype: np.dtype | type) -> tuple[np.ndarray, ...]:
    """x and residual (away from mean 0), weight, bias."""
    rng = np.random.default_rng(R * 1000 + C)
    x, residual = (rng.standard_normal((R, C), dtype=np.float32) + 1 for _ in range(2))
    weight, bias = (rng.standard_normal(C, dtype=np.float32) for _ in range(2))
    return x.astype(dtype), residual.astype(dtype), weight, bias


def forward(x, residual, weight, bias, **options) -> tuple[np.ndarray, ...]:
    out = [to_device(poisoned(shape, dtype)) for shape, dtype in ((x.shape, x.dtype),) * 2]
    kept = [to_device(poisoned(x.shape[0])) for _ in range(2)]
    arrays = [to_device(a) for a in (x, residual, weight, bias)]
    layernorm_residual.forward(*arrays, *out, *kept, eps=EPS, **options)
    return (*(to_host(a, x.dtype) for a in out), *(to_host(a) for a in kept))


def assert_right(got, x, residual, weight, bias, what: str, dtype: str = "float32") -> None:
    whole = (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
    np.testing.assert_array_equal(got[0].astype(np.float32), whole.astype(np.float32))
    y, mean, rstd = layernorm.reference(whole, weight, bias, EPS)
    assert_close(got[1], y, dtype=dtype, what=f"y of {what}", atol=1e-5 if dtype == "float32" else None)
    assert_close(got[2], mean, what=f"mean of {what}")
    assert_close(got[3], rstd, what=f"rstd of {what}")


@pytest.mark.parametrize("variant", layernorm_residual.FORWARD.runnable())
def test_every_shape(variant):
    for shape in VECTOR_SHAPES if "registers" in variant else SHAPES:
        given = inputs(*shape, np.float32)
        assert_right(forward(*given, variant=variant), *given, str(shape))


@pytest.mark.parametrize("variant", layernorm_residual.FORWARD.runnable())
@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_sixteen_bits(dtype, variant):
    """The sum is normalised as it is stored, rounded."""
    given = inputs(6, 80, dtype)
    assert_right(forward(*given, variant=variant), *given, "6 x 80", str(dtype))


@pytest.mark.parametrize("variant", layernorm_residual.FORWARD.runnable())
def test_the_sum_may_be_the_residual(variant):
    x, residual, weight, bias = inputs(5, 40, np.float32)
    both = to_device(residual)
    y, mean, rstd = to_device(poisoned(x.shape)), to_device(poisoned(5)), to_device(poisoned(5))
    arrays = [to_device(a) for a in (x, weight, bias)]
    layernorm_residual.forward(arrays[0], both, *arrays[1:], both, y, mean, rstd, eps=EPS, variant=variant)
    got = [to_host(a) for a in (both, y, mean, rstd)]
    assert_right(got, x, residual, weight, bias, "in place")


@pytest.mark.parametrize("variant", layernorm_residual.FORWARD.runnable())
def test_without_statistics(variant):
    x, residual, weight, bias = inputs(5, 40, np.float32)
    total, y = (to_device(poisoned(x.shape)) for _ in range(2))
    arrays = [to_device(a) for a in (x, residual, weight, bias)]
    layernorm_residual.forward(*arrays, total, y, eps=EPS, variant=variant)
    _, mean, rstd = layernorm.reference(x + residual, weight, bias, EPS)
    assert_right((to_host(total), to_host(y), mean, rstd), x, residual, weight, bias, "what is not kept")


@pytest.mark.parametrize("variant", layernorm_residual.FORWARD.runnable())
def test_under_checks(under_checks, variant):
    given = inputs(5, 40, np.float32)
    assert_right(forward(*given, variant=variant), *given, "5 x 40")


def test_bad_arguments():
    x, residual, weight, bias = inputs(3, 4, np.float32)
    with pytest.raises(ShapeError, match=r"layernorm_residual: residual_RC has shape \(2, 4\); expected \(3, 4\)"):
        forward(x, residual[:2], weight, bias)
    with pytest.raises(ShapeError, match="layernorm_residual: mean_R is given, rstd_R is None; give both, or neither"):
        layernorm_residual.forward(x, residual, weight, bias, x, x, weight[:3], eps=EPS)
    with pytest.raises(ConfigError, match="'row_in_registers' does not support"):
        forward(x, residual, weight, bias, variant="row_in_registers")
