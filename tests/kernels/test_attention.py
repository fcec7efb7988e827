"""numstack.kernels.attention: both variants against float64, against PyTorch's gradients and ONNX's cases."""

import numpy as np
import pytest

from numstack.errors import DTypeError, ShapeError
from numstack.kernels import attention
from numstack.kernels.attention import online_tiles
from tests.golden import OnnxCase, onnx_cases
from tests.golden.torch_kernels import torch_case
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

TOLERANCE = {"rtol": 1e-5, "atol": 5e-6}
GRADIENT_TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}

# Variants for tensor cores take 16 bits only: test_attention_tiles.py runs them.
IN_FLOAT32 = [variant.name for variant in attention.FORWARD if variant.made_for == "any"]

# B, H, queries, keys, D. All widths up to 16 share a kernel, so that few have to be compiled.
SHAPES = {
    "one query, one key": (1, 2, 1, 1, 1),
    "two batches, one past a tile": (2, 2, 33, 33, 5),
    "three tiles and a bit": (1, 2, 100, 100, 16),
    "more keys than queries": (1, 2, 7, 70, 16),
    "more queries than keys": (1, 2, 70, 7, 16),
    "no query": (1, 2, 0, 5, 16),
}


def inputs(B: int, H: int, T: int, keys: int, D: int) -> tuple[np.ndarray, ...]:
    """q, k, v, dout."""
    rng = np.random.default_rng(B + 10 * H + 100 * T + 1000 * keys + 10000 * D)
    return tuple(rng.standard_normal((B, H, length, D), dtype=np.float32) for length in (T, keys, keys, T))


class Strided:
    """A device copy of [B, H, T, D] as training has it: a view of [B, T, H, more than D], with NaN around it."""

    def __init__(self, host: np.ndarray, beside: int = 3) -> None:
        B, H, T, D = host.shape
        self.D = D
        whole = poisoned((B, T, H, D + beside), np.uint16 if host.dtype == BFLOAT16 else host.dtype)
        whole[..., :D] = host.transpose(0, 2, 1, 3).view(whole.dtype)
        self.whole = to_device(whole)
        self.view = self.whole[..., :D].transpose(0, 2, 1, 3)

    def to_host(self, dtype: np.dtype | None = None) -> np.ndarray:
        """The view's contents; nothing around it may have changed."""
        whole = to_host(self.whole, dtype)
        assert np.isnan(whole[..., self.D :].astype(np.float32)).all()
        return whole[..., : self.D].transpose(0, 2, 1, 3)


def forward(q, k, v, **options) -> tuple[np.ndarray, np.ndarray]:
    """out, in the dtype of q, and lse."""
    out, lse = Strided(np.full_like(q, np.nan)), to_device(poisoned(q.shape[:3]))
    attention.forward(*(Strided(a).view for a in (q, k, v)), out.view, lse, **options)
    return out.to_host(q.dtype), to_host(lse)


def backward(q, k, v, dout, *, variant=None, **options) -> list[np.ndarray]:
    """dq, dk, dv, from float64's out and lse."""
    out, lse = attention.reference(q, k, v, **options)
    gradients = [Strided(np.full_like(a, np.nan)) for a in (q, k, v)]
    arrays = (Strided(a).view for a in (q, k, v, out.astype(q.dtype), dout))
    workspace = to_device(poisoned((attention.workspace_size(q),)))
    views = (gradient.view for gradient in gradients)
    attention.backward(*arrays, to_device(lse.astype(np.float32)), *views, workspace, variant=variant, **options)
    return [gradient.to_host(q.dtype) for gradient in gradients]


@pytest.mark.parametrize("variant", IN_FLOAT32)
@pytest.mark.parametrize("causal", [False, True])
def test_forward_at_every_shape(variant, causal):
    for what, shape in SHAPES.items():
        q, k, v, _ = inputs(*shape)
        out, lse = forward(q, k, v, causal=causal, variant=variant)
        expected_out, expected_lse = attention.reference(q, k, v, causal=causal)
        assert_close(out, expected_out, **TOLERANCE, what=f"out of {what}")
        assert_close(lse, expected_lse, **TOLERANCE, what=f"lse of {what}")


@pytest.mark.parametrize("variant", IN_FLOAT32)
@pytest.mark.parametrize("causal", [False, True])
def test_backward_at_every_shape(variant, causal):
    for what, shape in SHAPES.items():
        q, k, v, dout = inputs(*shape)
        expected = attention.reference_backward(q, k, v, dout, causal=causal)
        for name, a, b in zip("qkv", backward(q, k, v, dout, causal=causal, variant=variant), expected, strict=True):
            assert_close(a, b, **GRADIENT_TOLERANCE, what=f"d{name} of {what}")


def test_the_widest_heads():
    """Their tiles are smaller, so that they fit shared memory, and shared by more warps."""
    q, k, v, dout = inputs(1, 2, 40, 40, attention.MAX_WIDTH - 1)
    assert_close(forward(q, k, v)[0], attention.reference(q, k, v)[0], **TOLERANCE)
    for a, b in zip(backward(q, k, v, dout), attention.reference_backward(q, k, v, dout), strict=True):
        assert_close(a, b, **GRADIENT_TOLERANCE)


@pytest.mark.parametrize("D", range(1, attention.MAX_WIDTH + 1))
def test_tiles_cover_every_width_and_fit_shared_memory(D):
    padded, tile, warps = online_tiles._sizes(D)
    assert padded >= D and padded % warps == 0 and tile % warps == 0
    elements = 2 * padded * online_tiles.ROWS + 2 * tile * padded + 2 * tile * online_tiles.ROWS
    assert 4 * elements + 4 * warps * online_tiles.ROWS <= 48 * 1024


def test_parts_of_a_packed_projection():
    """q, k, v and their gradients are parts of (B, T, 3, H, D) arrays, out and its gradient of (B, T, H, D)."""
    B, T, H, D = 2, 37, 3, 16
    rng = np.random.default_rng(0)
    qkv, dout = rng.standard_normal((B, T, 3, H, D), np.float32), rng.standard_normal((B, T, H, D), np.float32)
    out, dqkv = to_device(poisoned((B, T, H, D))), to_device(poisoned((B, T, 3, H, D)))
    lse = to_device(poisoned((B, H, T)))

    def parts(packed):
        return [packed[:, :, i].transpose(0, 2, 1, 3) for i in range(3)]

    q, k, v = parts(to_device(qkv))
    out_view, dout_view = (a.transpose(0, 2, 1, 3) for a in (out, to_device(dout)))
    attention.forward(q, k, v, out_view, lse)
    workspace = to_device(poisoned((attention.workspace_size(q),)))
    attention.backward(q, k, v, out_view, dout_view, lse, *parts(dqkv), workspace)
    assert_close(to_host(out).transpose(0, 2, 1, 3), attention.reference(*parts(qkv))[0], **TOLERANCE)
    gradients = attention.reference_backward(*parts(qkv), dout.transpose(0, 2, 1, 3))
    for name, a, b in zip("qkv", parts(to_host(dqkv)), gradients, strict=True):
        assert_close(a, b, **GRADIENT_TOLERANCE, what=f"d{name}")


@pytest.mark.parametrize("causal", [False, True])
def test_reference_backward_by_finite_differences(causal):
    q, k, v, dout = (a.astype(np.float64) for a in inputs(1, 2, 3, 3, 2))

    def loss() -> float:
        return float((attention.reference(q, k, v, causal=causal)[0] * dout).sum())

    for array, gradient in zip((q, k, v), attention.reference_backward(q, k, v, dout, causal=causal), strict=True):
        for i in np.ndindex(array.shape):
            kept, h = array[i], 1e-6
            array[i] = kept + h
            up = loss()
            array[i] = kept - h
            down = loss()
            array[i] = kept
            assert abs((up - down) / (2 * h) - gradient[i]) < 1e-7


@pytest.mark.parametrize("variant", IN_FLOAT32)
def test_scores_that_would_overflow_and_a_maximum_that_grows_late(variant):
    q, k, v, _ = inputs(1, 2, 40, 40, 16)
    k = k * np.linspace(1, 300, 40, dtype=np.float32)[:, None]
    out, lse = forward(q, k, v, causal=False, scale=1.0, variant=variant)
    expected_out, expected_lse = attention.reference(q, k, v, causal=False, scale=1.0)
    assert np.abs(expected_lse).max() > 500
    assert_close(out, expected_out, rtol=1e-3, atol=1e-3)
    assert_close(lse, expected_lse, rtol=1e-5)


@pytest.mark.parametrize("dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_sixteen_bits_forward(dtype):
    q, k, v, _ = (a.astype(dtype) for a in inputs(1, 2, 50, 50, 16))
    assert_close(forward(q, k, v)[0], attention.reference(q, k, v)[0], dtype=str(dtype))


def test_bfloat16_backward():
    """out was rounded before delta was made of it: that error is as large as those of the results."""
    q, k, v, dout = (a.astype(BFLOAT16) for a in inputs(1, 2, 50, 50, 16))
    for a, b in zip(backward(q, k, v, dout), attention.reference_backward(q, k, v, dout), strict=True):
        assert_close(a, b, rtol=2**-6, atol=2**-5)


@pytest.mark.parametrize("causal", [False, True])
def test_torch(causal):
    case = torch_case("attention_causal" if causal else "attention_full")
    q, k, v, dout = (case[name] for name in ("q", "k", "v", "dout"))
    assert_close(forward(q, k, v, causal=causal)[0], case["out"], **TOLERANCE)
    for name, gradient in zip(("dq", "dk", "dv"), backward(q, k, v, dout, causal=causal), strict=True):
        assert_close(gradient, case[name], **GRADIENT_TOLERANCE, what=name)


@pytest.mark.parametrize("case", onnx_cases("Attention"), ids=lambda case: case.name)
def test_onnx(case: OnnxCase):
    """(B, T, H D) or (B, H, T, D); bfloat16 is stored as two raw bytes."""
    dtype = BFLOAT16 if case.inputs[0].dtype.kind == "V" else case.inputs[0].dtype
    arrays = [a.view(dtype) if dtype == BFLOAT16 else a for a in (*case.inputs, *case.outputs)]
    if arrays[0].ndim == 3:
        heads = case.attributes["q_num_heads"]
        arrays = [a.reshape(*a.shape[:2], heads, -1).swapaxes(1, 2) for a in arrays]
    q, k, v, expected = arrays
    got, _ = forward(q, k, v, causal=bool(case.attributes.get("is_causal", 0)), scale=case.attributes.get("scale"))
    if dtype == np.float32:
        assert_close(got, expected, rtol=1e-5, atol=1e-6)
    else:  # ONNX rounds the scores to 16 bits as well, numstack does not
        eps = 2.0**-7 if dtype == BFLOAT16 else 2.0**-10
        assert_close(got, expected, rtol=2 * eps, atol=2 * eps)


def test_equal_bits_on_every_run():
    q, k, v, dout = inputs(2, 2, 70, 70, 16)
    for a, b in zip(backward(q, k, v, dout), backward(q, k, v, dout), strict=True):
        np.testing.assert_array_equal(a, b)


# One past a tile; and keys that no query sees, so that a block of them has nothing to loop over.
@pytest.mark.parametrize(("queries", "keys"), [(33, 33), (2, 40)])
@pytest.mark.parametrize("variant", IN_FLOAT32)
def test_under_checks(under_checks, variant, queries, keys):
    q, k, v, dout = inputs(1, 1, queries, keys, 2)
    assert_close(forward(q, k, v, variant=variant)[0], attention.reference(q, k, v)[0], **TOLERANCE)
    for a, b in zip(backward(q, k, v, dout, variant=variant), attention.reference_backward(q, k, v, dout), strict=True):
        assert_close(a, b, **GRADIENT_TOLERANCE)


def test_bad_arguments():
    q, k, v, _ = inputs(1, 2, 3, 4, 5)
    with pytest.raises(ShapeError, match=r"attention: v_BHTD has shape \(1, 2, 3, 5\); expected \(1, 2, 4, 5\)"):
        forward(q, k, v[:, :, :3])
    with pytest.raises(ShapeError, match=r"attention: k_BHTD has shape \(1, 1, 4, 5\); expected \(1, 2, 4, 5\)"):
        forward(q, k[:, :1], v)
    with pytest.raises(ShapeError, match="attention: q_BHTD has width D=129; expected 1 to 128: use more heads"):
        forward(*inputs(1, 2, 2, 2, 129)[:3])
    with pytest.raises(ShapeError, match=r"attention: k_BHTD has shape \(1, 2, 0, 5\): no key"):
        forward(q, k[:, :, :0], v[:, :, :0])
    with pytest.raises(DTypeError, match="attention: lse_BHT has dtype float16; expected float32"):
        attention.forward(q, k, v, np.empty_like(q), np.empty(q.shape[:3], np.float16))
    with pytest.raises(ShapeError, match="attention: q_BHTD has 3 axes"):
        attention.forward(q[0], k, v, q, q[..., 0])
