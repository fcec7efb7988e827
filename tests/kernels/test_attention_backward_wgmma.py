"""numstack.kernels.attention's backward pass for Hopper, against float64, in arrays laid out as models have them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from numstack.device import current_device, offline
from numstack.errors import ConfigError, DTypeError
from numstack.kernels import attention
from numstack.kernels.attention import wgmma_backward
from numstack.kernels.attention.hopper import Operands
from numstack.kernels.attention.wgmma_gradients import KEYS, tiles_of
from tests.support import BFLOAT16, poisoned, to_device, to_host

HERE = "wgmma" in attention.BACKWARD.runnable()
on_hopper = pytest.mark.skipif(
    not HERE,
    reason="needs a Hopper GPU: NUMSTACK_DEVICE=cuda python -m pytest tests/kernels",
)

# Frobenius norm of the error over that of the gradient: P and dS are rounded before they are multiplied, and so are the
# results; that gives about 0.7 units in the last place.
TOLERANCE = {BFLOAT16: 5e-3, np.dtype(np.float16): 6e-4}

# B, H, queries, keys, D
SHAPES = {
    "one query, one key": (1, 2, 1, 1, 64),
    "one tile": (2, 2, 128, 128, 64),
    "one past a tile": (1, 2, 129, 129, 64),
    "one past a tile of wide heads": (1, 2, 129, 129, 128),
    "several tiles of several heads": (2, 3, 1000, 1000, 64),
    "several tiles of wide heads": (1, 3, 700, 700, 128),
    "a width that is padded": (1, 2, 200, 200, 40),
    "a width that is padded to two parts": (1, 2, 200, 200, 72),
    "more keys than queries": (1, 2, 130, 700, 64),
    "more queries than keys": (1, 2, 700, 130, 128),
}


class Case(NamedTuple):
    """Host arrays [B, H, T, D]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    dout: np.ndarray


def case(B: int, H: int, T: int, keys: int, D: int, dtype: Any) -> Case:
    rng = np.random.default_rng(B + 10 * H + 100 * T + 1000 * keys + 10000 * D)
    arrays = (rng.standard_normal((B, H, length, D), dtype=np.float32) for length in (T, keys, keys, T))
    return Case(*(a.astype(dtype) for a in arrays))


class Part:
    """[B, H, T, D] as a part of a packed projection: a view of [B, T, 3, H, D], with NaN in the other two."""

    def __init__(self, host: np.ndarray, part: int) -> None:
        B, H, T, D = host.shape
        self._part = part
        packed = poisoned((B, T, 3, H, D), np.uint16 if host.dtype == BFLOAT16 else host.dtype)
        packed[:, :, part] = host.transpose(0, 2, 1, 3).view(packed.dtype)
        self._packed = to_device(packed)
        self.view = self._packed[:, :, part].transpose(0, 2, 1, 3)

    def to_host(self, dtype: Any) -> np.ndarray:
        """The part; the other two must be as they were."""
        packed = to_host(self._packed, dtype)
        others = [i for i in range(3) if i != self._part]
        assert np.isnan(packed[:, :, others].astype(np.float32)).all()
        return packed[:, :, self._part].transpose(0, 2, 1, 3)


def backward(given: Case, causal: bool, times: int = 1) -> list[list[np.ndarray]]:
    """dq, dk, dv as often as asked for."""
    out, lse = attention.reference(given.q, given.k, given.v, causal=causal)
    dtype = given.q.dtype
    inputs = (Part(a, i % 3).view for i, a in enumerate((*given[:3], out.astype(dtype), given.dout)))
    arrays = (*inputs, to_device(lse.astype(np.float32)))
    results = []
    for _ in range(times):
        gradients = [Part(np.full_like(a, np.nan), i) for i, a in enumerate(given[:3])]
        workspace = to_device(poisoned((attention.workspace_size(arrays[0]),)))
        attention.backward(*arrays, *(g.view for g in gradients), workspace, causal=causal, variant="wgmma")
        results.append([g.to_host(dtype) for g in gradients])
    return results


def relative_error(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got.astype(np.float64) - expected) / np.linalg.norm(expected))


@on_hopper
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_against_float64(shape, causal, dtype):
    given = case(*shape, dtype)
    expected = attention.reference_backward(*given, causal=causal)
    (got,) = backward(given, causal)
    for name, a, b in zip("qkv", got, expected, strict=True):
        if np.linalg.norm(b) < 1e-6:  # one key: nothing depends on the scores
            assert np.abs(a.astype(np.float64)).max() < 2e-2, f"d{name}"
        else:
            assert relative_error(a, b) < TOLERANCE[np.dtype(dtype)], f"d{name}"


@on_hopper
@pytest.mark.parametrize("D", [64, 128])
def test_equal_bits_on_every_run(D):
    first, *others = backward(case(2, 5, 900, 900, D, BFLOAT16), True, times=20)
    for other in others:
        for a, b in zip(first, other, strict=True):
            np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


@on_hopper
def test_keys_that_no_query_sees_have_no_gradient():
    given = case(1, 1, 10, 3 * KEYS, 64, BFLOAT16)
    ((_, dk, dv),) = backward(given, True)
    assert not dk[:, :, 10:].astype(np.float32).any() and not dv[:, :, 10:].astype(np.float32).any()


@on_hopper
def test_what_it_does_not_support_is_refused_by_name_and_done_by_another():
    shape = (1, 1, 8, 12)  # rows of 24 bytes: the copy engine wants multiples of 16
    arrays = [to_device(np.ones(shape, np.float16)) for _ in range(8)]
    lse = to_device(np.zeros(shape[:3], np.float32))
    workspace = to_device(poisoned((attention.workspace_size(arrays[0]),)))
    with pytest.raises(ConfigError, match="'wgmma' does not support"):
        attention.backward(*arrays[:5], lse, *arrays[5:], workspace, variant="wgmma")
    attention.backward(*arrays[:5], lse, *arrays[5:], workspace)


@pytest.mark.parametrize(
    ("shape", "dtype", "supported"),
    [
        ((2, 3, 10, 64), np.uint16, True),
        ((2, 3, 10, 64), np.float16, True),
        ((2, 3, 10, 64), np.float32, False),
        ((2, 3, 10, 40), np.float16, True),
        ((2, 3, 10, 36), np.float16, False),
        ((2, 3, 0, 64), np.float16, False),
    ],
)
def test_what_it_supports(shape, dtype, supported):
    with offline.device("sm_90a") as device:
        arrays = tuple(device.array((*shape[:3], 128), dtype)[..., : shape[3]] for _ in range(3))
        assert wgmma_backward.supports(Operands(arrays, 1.0)) is supported


def test_workspace_holds_whole_tiles():
    for width, D in ((64, 64), (40, 64), (128, 128), (72, 128)):
        queries = tiles_of(D).queries
        of_tile = queries * D + 2 * queries + 1
        assert wgmma_backward.workspace_size(2, 3, queries, width) == 6 * of_tile + 1
        assert wgmma_backward.workspace_size(2, 3, queries + 1, width) == 12 * of_tile + 1


@pytest.mark.parametrize("D", [64, 128])
def test_shared_memory_suffices(D):
    with offline.device("sm_90a"):
        assert tiles_of(D).nbytes <= current_device().properties.shared_bytes_per_block


def test_a_workspace_that_the_copy_engine_cannot_address():
    with offline.device("sm_90a") as device:
        arrays = [device.array((1, 1, 128, 64), np.float16) for _ in range(8)]
        lse = device.array((1, 1, 128), np.float32)
        workspace = device.array((attention.workspace_size(arrays[0]) + 1,), np.float32)[1:]
        with pytest.raises(DTypeError, match="attention: the workspace begins at 0x10000000004; the copy engine"):
            attention.backward(*arrays[:5], lse, *arrays[5:], workspace)
