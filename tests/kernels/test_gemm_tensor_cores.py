"""GEMM's variants for tensor cores: 16-bit operands of odd and real shapes, every layout and epilogue, against float64.

Outputs are NaN before, and there is NaN around every operand and output: what is read or written too far shows. A shape
that a variant does not support must still be computed by default, with another.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from numstack.device import current_device
from numstack.errors import ConfigError
from numstack.kernels import gelu
from numstack.kernels.gemm import LAYOUTS, VARIANTS, gemm, reference
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

FLOAT16, FLOAT32 = np.dtype(np.float16), np.dtype(np.float32)
ON_GPU = current_device().kind == "cuda"

# On a CPU each kind of kernel takes seconds to compile: the fewest that touch everything.
SMALL = {
    "one past a fragment": (17, 24, 24),
    "odd": (33, 41, 23),
}
LARGE = {
    "one k16 step": (16, 8, 16),
    "one tile": (128, 256, 64),
    "one past a tile": (129, 264, 72),
    "one short of a tile": (127, 248, 56),
    "a row": (1, 768, 768),
    "a column that no vector fits": (300, 1, 264),
    "odd everything": (257, 515, 131),
    "more k than tiles": (64, 64, 8192),
    "several tiles a block": (2048, 2560, 192),
    "the projection of GPT-2": (1024, 768, 768),
    "a vocabulary": (256, 50304, 64),
    "no depth": (64, 64, 0),
}
SHAPES = SMALL | (LARGE if ON_GPU else {})


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU launches run in Python, under simt's checks: small ones take less time than to compile them."""
    if not ON_GPU:
        monkeypatch.setattr(current_device(), "checks", True)


def tensor_core_variants() -> list[str | None]:
    """Those that run here, and None: what is chosen by default."""
    return [v.name for v in VARIANTS if v.made_for in ("sm_80", "sm_90a") and v.runs_here()] + (
        [None] if ON_GPU else []
    )


def surrounded(inside: np.ndarray) -> tuple[Any, Any]:
    """A device copy of a matrix with NaN before and behind it, and the whole of that memory."""
    whole = poisoned((inside.shape[0] + 16, *inside.shape[1:]), inside.dtype)
    whole[8:-8] = inside
    device = to_device(whole)
    return device[8:-8], device


def operands(m: int, n: int, k: int, layout: str, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(m + n + k)
    a = rng.standard_normal((k, m) if layout[0] == "T" else (m, k)).astype(dtype)
    b = rng.standard_normal((n, k) if layout[1] == "T" else (k, n)).astype(dtype)
    return a, b


def computed(a: np.ndarray, b: np.ndarray, c: np.ndarray, **options: Any) -> np.ndarray | None:
    """gemm's c, in the place of ``c``, after a look around it; None if the variant does not support the shape."""
    inside, whole = surrounded(c)
    try:
        gemm(surrounded(a)[0], surrounded(b)[0], inside, **options)
    except ConfigError as error:
        assert "does not support" in str(error), error
        return None
    after = to_host(whole, c.dtype)
    assert np.isnan(after[:8].astype(np.float32)).all() and np.isnan(after[-8:].astype(np.float32)).all()
    return after[8:-8]


def tolerance(dtype: np.dtype, k: int) -> dict[str, float]:
    """A rounding to the dtype of c, and those of a float32 sum of k products on tensor cores.

    They cut off what does not fit after each 16 products, always towards zero, so that errors add up instead of
    cancelling (Fasi et al. 2021, Numerical behavior of NVIDIA tensor cores): a bit of a sum of magnitude sqrt(k) each.
    """
    eps = float(ml_dtypes.finfo(dtype).eps)
    of_sum = max(2e-6, k / 16 * 2**-23) * max(1, k) ** 0.5
    return {
        "rtol": 2e-5 if dtype == FLOAT32 else eps,
        "atol": of_sum + (0 if dtype == FLOAT32 else eps / 8),
    }


@pytest.mark.parametrize("variant", tensor_core_variants())
@pytest.mark.parametrize(
    ("dtype", "out", "layout"),
    [
        pytest.param(dtype, out, layout, id=f"{dtype} to {out} {layout}")
        for dtype, out in [(BFLOAT16, FLOAT32), (FLOAT16, FLOAT16), (BFLOAT16, BFLOAT16)]
        for layout in LAYOUTS
        if ON_GPU or out == FLOAT32
    ],
)
def test_every_shape(dtype: np.dtype, out: np.dtype, layout: str, variant: str | None, quick: None) -> None:
    n_computed = 0
    for what, (m, n, k) in SHAPES.items():
        a, b = operands(m, n, k, layout, dtype)
        c = computed(a, b, poisoned((m, n), out), layout=layout, variant=variant)
        if c is not None:
            n_computed += 1
            assert_close(c, reference(a, b, layout=layout)[0], what=f"c of {what}", **tolerance(out, k))
    assert n_computed == len(SHAPES) if variant is None else n_computed


@pytest.mark.parametrize("variant", tensor_core_variants())
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("shape", [(300, 520, 264), (129, 264, 72)] if ON_GPU else [(17, 40, 24)], ids=str)
def test_epilogues(shape: tuple[int, int, int], dtype: np.dtype, variant: str | None, quick: None) -> None:
    m, n, k = shape
    a, b = operands(m, n, k, "NN", dtype)
    rng = np.random.default_rng(1)
    bias = rng.standard_normal(n).astype(dtype)
    other = rng.standard_normal((m, n)).astype(dtype)
    alpha = 0.0625
    common: dict[str, Any] = {"variant": variant, "alpha": alpha}
    bounds = tolerance(dtype, k)

    def check(what: str, expected: np.ndarray, **options: Any) -> None:
        c = computed(a, b, poisoned((m, n), dtype), **common, **options)
        if c is not None:
            assert_close(c, expected, what=what, **bounds)

    product = reference(a, b, alpha=alpha)[0]
    biased = reference(a, b, alpha=alpha, bias=bias)[0]
    activated = gelu.reference(biased, "tanh")[0]
    slope = gelu.reference(other.astype(np.float64), "tanh")[1]
    bias_N, (other_MN, _) = to_device(bias), surrounded(other)
    check("c with bias", biased, epilogue="bias", bias=bias_N)
    check("c with residual", product + other.astype(np.float64), epilogue="residual", residual=other_MN)
    check(
        "c with bias and residual",
        biased + other.astype(np.float64),
        epilogue="residual",
        residual=other_MN,
        bias=bias_N,
    )
    check("c with GeLU", activated, epilogue="bias_gelu", bias=bias_N)
    kept, kept_whole = surrounded(poisoned((m, n), dtype))
    check("c with GeLU that keeps", activated, epilogue="bias_gelu", bias=bias_N, preactivation=kept)
    found = to_host(kept_whole, dtype)
    if not np.isnan(found[8:-8].astype(np.float32)).all():
        assert np.isnan(found[:8].astype(np.float32)).all() and np.isnan(found[-8:].astype(np.float32)).all()
        assert_close(found[8:-8], biased, what="what went into the GeLU", **bounds)
    check("c with the GeLU's slope", product * slope, epilogue="gelu_backward", preactivation=other_MN)


@pytest.mark.parametrize("variant", tensor_core_variants())
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("out", [BFLOAT16, FLOAT32], ids=str)
def test_accumulate(out: np.dtype, layout: str, variant: str | None, quick: None) -> None:
    for m, n, k in [(33, 40, 24), (300, 520, 264), (768, 768, 4096)] if ON_GPU else [(17, 40, 24)]:
        a, b = operands(m, n, k, layout, BFLOAT16)
        before = np.random.default_rng(2).standard_normal((m, n)).astype(out)
        c = computed(a, b, before, layout=layout, variant=variant, accumulate=True)
        if c is not None:
            assert_close(c, reference(a, b, layout=layout, residual=before)[0], **tolerance(out, k))


@pytest.mark.parametrize("variant", tensor_core_variants())
def test_what_is_not_finite_stays_so(variant: str | None) -> None:
    """Infinities and NaN reach exactly the elements whose sums they are in."""
    m, n, k = 48, 40, 32
    a, b = operands(m, n, k, "NN", BFLOAT16)
    a[3, 5], a[20, 31] = np.inf, np.nan
    b[7, 11] = -np.inf
    c = computed(a, b, poisoned((m, n), FLOAT32), variant=variant)
    if c is not None:
        with np.errstate(invalid="ignore"):
            expected = reference(a, b)[0]
        np.testing.assert_array_equal(np.isfinite(c), np.isfinite(expected))
        np.testing.assert_array_equal(np.isnan(c), np.isnan(expected))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(33, 40, 72), (17, 9, 35)], ids=str)
def test_no_race_and_nothing_out_of_bounds(shape: tuple[int, int, int], layout: str, under_checks: None) -> None:
    m, n, k = shape
    a, b = operands(m, n, k, layout, FLOAT16)
    c = computed(a, b, poisoned((m, n), FLOAT32), layout=layout, variant="mma_sync")
    assert c is not None
    assert_close(c, reference(a, b, layout=layout)[0], **tolerance(FLOAT32, k))
