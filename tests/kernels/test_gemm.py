"""numstack.kernels.gemm: every variant, layout and epilogue against float64, and against ONNX's cases."""

import ml_dtypes
import numpy as np
import pytest

from numstack.errors import ConfigError, DTypeError, ShapeError
from numstack.kernels.gemm import LAYOUTS, VARIANTS, gemm, reference, workspace_size
from numstack.kernels.gemm.portable import TILE_K, TILE_M, TILE_N
from tests.golden import OnnxCase, onnx_cases
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

# Those for tensor cores take 16-bit operands alone: test_gemm_tensor_cores.py.
FOR_ANY_DTYPE = [variant.name for variant in VARIANTS if variant.made_for == "any"]
SHAPES = {
    "one element": (1, 1, 1),
    "one past a small tile": (17, 17, 17),
    "exactly one tile": (TILE_M, TILE_N, TILE_K),
    "one past a tile": (TILE_M + 1, TILE_N + 1, TILE_K + 1),
    "a row": (1, 50, 70),
    "a column": (130, 1, 40),
    "vocabulary head": (96, 84, 128),
    "no depth": (5, 6, 0),
    "no rows": (0, 6, 5),
    "no columns": (5, 0, 6),
}


def operands(m: int, n: int, k: int, layout: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    a = rng.standard_normal((k, m) if layout[0] == "T" else (m, k), dtype=np.float32)
    b = rng.standard_normal((n, k) if layout[1] == "T" else (k, n), dtype=np.float32)
    return a, b


def surrounded(inside: np.ndarray):
    """A device copy of a matrix with NaN before and behind it in memory, and the whole of that memory."""
    whole = poisoned((inside.shape[0] + 4, *inside.shape[1:]), inside.dtype)
    whole[2:-2] = inside
    device = to_device(whole)
    return device[2:-2], device


def run(a: np.ndarray, b: np.ndarray, m: int, n: int, **options) -> np.ndarray:
    """gemm's c, after checking that nothing was written around it, nor read around a and b (all NaN there)."""
    c, c_whole = surrounded(poisoned((m, n)))
    gemm(surrounded(a)[0], surrounded(b)[0], c, **options)
    whole = to_host(c_whole)
    assert np.isnan(whole[:2]).all() and np.isnan(whole[-2:]).all()
    return whole[2:-2]


def tolerance(k: int) -> dict[str, float]:
    """Rounding of a sum of k products of standard normal numbers, in any order: sqrt(k) of them at magnitude 1."""
    return {"rtol": 1e-5, "atol": 4e-7 * max(1, k) ** 0.5 * 3}


@pytest.mark.parametrize("variant", FOR_ANY_DTYPE)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_variant_and_layout_at_every_shape(variant, layout):
    for what, (m, n, k) in SHAPES.items():
        a, b = operands(m, n, k, layout)
        c = run(a, b, m, n, layout=layout, variant=variant)
        assert_close(c, reference(a, b, layout=layout)[0], what=f"c of {what}", **tolerance(k))


@pytest.mark.parametrize("variant", FOR_ANY_DTYPE)
def test_epilogue_bias_gelu_in_every_variant(variant):
    m, n, k = TILE_M + 1, TILE_N + 1, 40
    a, b = operands(m, n, k, "NN")
    bias = np.linspace(-2, 2, n, dtype=np.float32)
    preactivation = to_device(poisoned((m, n)))
    c = run(
        a, b, m, n, epilogue="bias_gelu", bias=to_device(bias), preactivation=preactivation, alpha=0.25, variant=variant
    )
    expected, expected_preactivation = reference(a, b, epilogue="bias_gelu", bias=bias, alpha=0.25)
    assert_close(c, expected, **tolerance(k))
    assert_close(to_host(preactivation), expected_preactivation, **tolerance(k))


@pytest.mark.parametrize("variant", FOR_ANY_DTYPE)
def test_epilogue_gelu_backward_in_every_variant(variant):
    m, n, k = TILE_M + 1, TILE_N + 1, 40
    a, b = operands(m, n, k, "NT")
    preactivation = np.random.default_rng(1).standard_normal((m, n), dtype=np.float32) * 3
    options = {"layout": "NT", "alpha": 0.5, "epilogue": "gelu_backward"}
    c = run(a, b, m, n, preactivation=to_device(preactivation), variant=variant, **options)
    expected = reference(a, b, preactivation=preactivation, **options)[0]
    assert_close(c, expected, **tolerance(k))


def test_other_epilogues():
    m, n, k = TILE_M + 1, TILE_N + 1, 40
    a, b = operands(m, n, k, "NN")
    bias = np.linspace(-2, 2, n, dtype=np.float32)
    residual = np.random.default_rng(1).standard_normal((m, n), dtype=np.float32)
    for options in (
        {"epilogue": "bias", "bias": bias},
        {"epilogue": "bias_gelu", "bias": bias},
        {"epilogue": "residual", "residual": residual},
        {"epilogue": "residual", "residual": residual, "bias": bias},
    ):
        on_device = {name: to_device(x) if isinstance(x, np.ndarray) else x for name, x in options.items()}
        c = run(a, b, m, n, alpha=-0.5, **on_device)
        expected = reference(a, b, alpha=-0.5, **options)[0]
        assert_close(c, expected, what=f"c of {sorted(options)}", **tolerance(k))


@pytest.mark.parametrize("k", [40, 0])
def test_accumulate_adds_into_c_also_without_depth(k):
    m, n = 20, 30
    a, b = operands(m, n, k, "TN")
    c = np.random.default_rng(2).standard_normal((m, n), dtype=np.float32)
    c_device = to_device(c)
    gemm(to_device(a), to_device(b), c_device, layout="TN", alpha=2, accumulate=True)
    assert_close(to_host(c_device), reference(a, b, layout="TN", alpha=2, residual=c)[0], **tolerance(k))


def test_residual_may_be_c():
    a, b = operands(20, 30, 40, "NN")
    c = np.ones((20, 30), np.float32)
    c_device = to_device(c)
    gemm(to_device(a), to_device(b), c_device, epilogue="residual", residual=c_device)
    assert_close(to_host(c_device), reference(a, b, residual=c)[0], **tolerance(40))


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_sixteen_bit_operands_are_summed_in_float32(dtype):
    m, n, k = 40, 50, 300
    a, b = (x.astype(dtype) for x in operands(m, n, k, "NN"))
    exact = reference(a, b)[0]
    # A float32 result has no rounding to 16 bits in it, so sums in 16 bits would show.
    c = to_device(poisoned((m, n)))
    gemm(to_device(a), to_device(b), c)
    assert_close(to_host(c), exact, **tolerance(k))
    c = to_device(poisoned((m, n), np.uint16 if dtype == BFLOAT16 else dtype))
    gemm(to_device(a), to_device(b), c)
    eps = ml_dtypes.finfo(dtype).eps
    assert_close(to_host(c, dtype), exact, rtol=float(eps), atol=1e-5)


def test_equal_bits_on_every_run():
    a, b = operands(100, 100, 100, "NN")
    first, second = (run(a, b, 100, 100) for _ in range(2))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("case", onnx_cases("Gemm"), ids=lambda case: case.name)
def test_onnx(case: OnnxCase):
    """y = alpha A' B' + beta C, where C broadcasts: the residual epilogue on beta C."""
    a, b, *rest = case.inputs
    (expected,) = case.outputs
    transpose_a, transpose_b = case.attributes.get("transA", 0), case.attributes.get("transB", 0)
    if transpose_a and transpose_b:  # not a layout: no linear layer needs it
        a, transpose_a = np.ascontiguousarray(a.T), 0
    layout = ("T" if transpose_a else "N") + ("T" if transpose_b else "N")
    options = {}
    if rest:
        residual = np.float32(case.attributes.get("beta", 1)) * np.broadcast_to(rest[0], expected.shape)
        options = {"epilogue": "residual", "residual": to_device(np.ascontiguousarray(residual, np.float32))}
    c = to_device(poisoned(expected.shape))
    gemm(to_device(a), to_device(b), c, layout=layout, alpha=case.attributes.get("alpha", 1), **options)
    assert_close(to_host(c), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("variant", FOR_ANY_DTYPE)
def test_no_race_and_nothing_out_of_bounds(variant, under_checks):
    m, n, k = 5, 3, TILE_K + 1
    for layout in LAYOUTS:
        a, b = operands(m, n, k, layout)
        c = run(a, b, m, n, layout=layout, variant=variant)
        assert_close(c, reference(a, b, layout=layout)[0], **tolerance(k))


def test_bad_arguments_say_what_to_do():
    a, b, c = (np.zeros(shape, np.float32) for shape in [(4, 384), (512, 384), (4, 512)])
    bias, wide = np.zeros(512, np.float32), np.zeros((4, 1024), np.float32)
    for error, message, args, options in [
        (ShapeError, r'a_MK has K=384 but b_KN has K=512; pass b transposed \(layout="NT"\)', (a, b, c), {}),
        (ShapeError, r"a_KM has K=4 but b_KN has K=512; fix the shape", (a, b, c), {"layout": "TN"}),
        (ShapeError, r"c_MN has shape \(512, 4\) but layout NT .* gives \(4, 512\)", (a, b, c.T), {"layout": "NT"}),
        (ShapeError, r"b_KN has 1 axes \(shape \(512,\)\); expected 2", (a, bias, c), {}),
        (ShapeError, r"bias has shape \(511,\); expected \(512,\)", (a, b, c), {"bias": bias[1:], "epilogue": "bias"}),
        (DTypeError, r"a_MK has dtype float64; expected float32", (a.astype(np.float64), b, c), {}),
        (DTypeError, r"c_MN is not C-contiguous", (a, b, wide[:, ::2]), {}),
        (ConfigError, r"layout='TT'; choose one of 'NN', 'NT', 'TN'", (a, b, c), {"layout": "TT"}),
        (ConfigError, r"epilogue='gelu'; choose one of None", (a, b, c), {"epilogue": "gelu"}),
        (ConfigError, r"epilogue='bias' needs bias, which is missing", (a, b, c), {"epilogue": "bias"}),
        (ConfigError, r"bias is given but epilogue=None does not use it", (a, b, c), {"bias": bias}),
        (ConfigError, r"accumulate takes no epilogue", (a, b, c), {"accumulate": True, "epilogue": "bias"}),
        (ConfigError, r"no variant 'fast'; choose one of thread_per_element", (a, b, c), {"variant": "fast"}),
    ]:
        options = {"layout": "NT"} | options if error is not ShapeError or "bias" in options else options
        with pytest.raises(error, match=message):
            gemm(*args, **options)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_batches(layout):
    m, n, k, count = 20, 24, 40, 3
    pairs = [operands(m, n, k, layout, seed) for seed in range(count)]
    a, b = (np.stack(matrices) for matrices in zip(*pairs, strict=True))
    residual = np.random.default_rng(3).standard_normal((count, m, n), dtype=np.float32)
    c = to_device(poisoned((count, m, n)))
    options = {"layout": layout, "epilogue": "residual"}
    gemm(to_device(a), to_device(b), c, residual=to_device(residual), **options)
    for i in range(count):
        expected = reference(a[i], b[i], residual=residual[i], **options)[0]
        assert_close(to_host(c)[i], expected, what=f"product {i}", **tolerance(k))
    with pytest.raises(ShapeError, match=r"c_MN has shape \(2, 20, 24\) but layout .* gives \(3, 20, 24\)"):
        gemm(to_device(a), to_device(b), c[:2], layout=layout)


@pytest.mark.parametrize("dtype", [np.float32, np.uint16], ids=["float32", "bfloat16"])
def test_sums_of_columns(dtype):
    m, n, k = 130, 136, 40
    a, b = operands(m, n, k, "NT")
    preactivation = np.random.default_rng(1).standard_normal((m, n), dtype=np.float32)
    if dtype == np.uint16:
        a, b, preactivation = (x.astype(BFLOAT16) for x in (a, b, preactivation))
    c, sums = to_device(poisoned((m, n), dtype)), to_device(np.ones(n, np.float32))
    workspace = to_device(poisoned(workspace_size(m, n, k, layout="NT", column_sums=True)))
    options = {"epilogue": "gelu_backward", "preactivation": to_device(preactivation), "layout": "NT"}
    gemm(to_device(a), to_device(b), c, column_sums=sums, accumulate_sums=True, workspace=workspace, **options)
    stored = to_host(c, BFLOAT16 if dtype == np.uint16 else None).astype(np.float64)
    assert_close(to_host(sums), stored.sum(axis=0) + 1, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="column_sums without a workspace"):
        gemm(to_device(a), to_device(b), c, column_sums=sums, **options)


@pytest.mark.parametrize(("value", "flag"), [(1.0, 4), (np.inf, 5), (np.nan, 5)])
def test_what_is_not_finite_sets_a_flag(value, flag):
    a, b = operands(40, 48, 24, "NN")
    a[37, 5] = value
    for a_stored, b_stored in ((a, b), (a.astype(BFLOAT16), b.astype(BFLOAT16))):
        c, flag_1 = to_device(poisoned((40, 48), a_stored.dtype)), to_device(np.array([4], np.int32))
        gemm(to_device(a_stored), to_device(b_stored), c, nonfinite=flag_1)
        assert to_host(flag_1)[0] == flag, "the other bits stay as they are"
