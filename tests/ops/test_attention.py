import numpy as np
import pytest

from numstack import ops
from numstack.errors import ShapeError
from numstack.tensor import tensor
from tests.ops.gradients import check_operation


def attention(qkv, n_heads, causal, scale):
    n_batch, n_time, n_channels = qkv.shape[0], qkv.shape[1], qkv.shape[2] // 3
    q, k, v = (
        part.reshape(n_batch, n_time, n_heads, n_channels // n_heads).transpose(0, 2, 1, 3)
        for part in np.split(qkv, 3, axis=2)
    )
    scores = q @ k.swapaxes(2, 3) * scale
    if causal:
        scores = np.where(np.tri(n_time, dtype=bool), scores, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    out = p / p.sum(-1, keepdims=True) @ v
    return out.transpose(0, 2, 1, 3).reshape(n_batch, n_time, n_channels)


@pytest.mark.parametrize("causal", [True, False])
def test_attention(rng, causal):
    qkv = rng.standard_normal((2, 5, 3 * 16)).astype(np.float32)
    check_operation(
        lambda x: ops.attention(x, n_heads=2, causal=causal), lambda x: attention(x, 2, causal, 8**-0.5), qkv
    )


def test_scale(rng):
    qkv = rng.standard_normal((2, 5, 3 * 16)).astype(np.float32)
    check_operation(lambda x: ops.attention(x, n_heads=2, scale=0.5), lambda x: attention(x, 2, True, 0.5), qkv)


@pytest.mark.parametrize(("shape", "n_heads"), [((2, 5, 32), 2), ((5, 48), 2), ((2, 5, 48), 0)])
def test_shape_error(shape, n_heads):
    with pytest.raises(ShapeError, match=rf"qkv has shape .* with n_heads={n_heads}; expected \(B, T, 3 \* C\)"):
        ops.attention(tensor(np.zeros(shape)), n_heads=n_heads)
