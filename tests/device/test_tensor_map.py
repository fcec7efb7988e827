"""Tensor maps: which arrays they can describe, and what a launch knows of them."""

import numpy as np
import pytest
from numba import cuda

from numstack.device import Work, current_device, kernel, offline
from numstack.device.ptx import tma
from numstack.device.tensor_map import TensorMap, pitches_fit
from numstack.errors import DeviceError, DTypeError, ShapeError
from tests.support import poisoned, to_device, to_host

IS_HOPPER = current_device().kind == "cuda" and current_device().properties.compute_capability >= (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU: NUMSTACK_DEVICE=cuda runs it there")


@kernel
def _copy(source, target, n):
    if cuda.grid(1) == 0:
        tma.load_2d(source, 0, 0, 0, n)
        tma.store_2d(target, 0, 0, n)


def test_an_argument_is_the_address_of_the_map_and_the_launch_knows_the_array():
    with offline.device("sm_90a") as device:
        source, target = device.array((100, 64), np.uint16), device.array((100, 64), np.uint16)
        seen: list[Work] = []

        class Watch:
            def before(self, work):
                seen.append(work)

            def after(self, work):
                pass

        with device.observe(Watch()):
            _copy[1, 32](device.tensor_map(source, (64, 64)), device.tensor_map(target, (64, 64)), 5)
    (work,) = seen
    assert [a is source for a in work.reads] == [True]
    assert [a is target for a in work.writes] == [True]
    assert work.nbytes == 2 * source.nbytes


@pytest.mark.parametrize(
    ("shape", "box", "dtype", "options", "error", "message"),
    [
        ((8,) * 6, (8,) * 6, np.uint16, {}, ShapeError, "1 to 5 axes"),
        ((8, 64), (64,), np.uint16, {}, ShapeError, r"shape \(8, 64\) with a box \(64,\)"),
        ((0, 64), (8, 64), np.uint16, {}, ShapeError, "none of them empty"),
        ((512, 64), (512, 64), np.uint16, {}, ShapeError, "1 to 256 elements"),
        ((8, 128), (8, 128), np.uint16, {}, ShapeError, "rows of a box of 256 bytes; .* at most 128"),
        ((8, 64), (8, 4), np.uint16, {"swizzle_bytes": 0}, ShapeError, "rows of a box of 8 bytes"),
        ((8, 63), (8, 64), np.uint16, {}, DTypeError, r"strides \(126, 2\); .* multiples of 16 bytes"),
    ],
)
def test_what_the_copy_engine_cannot_move(shape, box, dtype, options, error, message):
    with offline.device("sm_90a") as device, pytest.raises(error, match=message):
        device.tensor_map(device.array(shape, dtype), box, **options)


def test_views_are_described_where_their_pitches_fit():
    with offline.device("sm_90a") as device:
        qkv = device.array((2, 10, 3, 4, 64), np.uint16)
        assert pitches_fit(qkv[:, :, 1].transpose(0, 2, 1, 3))
        assert not pitches_fit(qkv[..., ::2])
        assert not pitches_fit(device.array((8, 63), np.uint16))
        assert pitches_fit(device.array((1, 63), np.uint16)), "the pitch of one row does not matter"
        with pytest.raises(DTypeError, match="address"):
            device.tensor_map(device.array((4, 64), np.uint16)[:, 1:], (4, 64))


@pytest.mark.skipif(current_device().kind == "cuda", reason="GPUs have them: NUMSTACK_DEVICE=cpu runs it")
def test_a_cpu_has_none():
    with pytest.raises(DeviceError, match=r"has no tensor maps; they are for GPUs of compute capability 9\.0"):
        current_device().tensor_map(np.zeros((8, 64), np.uint16), (8, 64))


@needs_hopper
def test_an_array_is_described_once():
    device = current_device()
    x = to_device(poisoned((8, 64), np.float32))
    first, again = device.tensor_map(x, (8, 32)), device.tensor_map(x[:], (8, 32))
    assert isinstance(first, TensorMap)
    assert first.address == again.address and first.address % 64 == 0
    others = [device.tensor_map(x, (4, 32)), device.tensor_map(x[1:], (8, 32)), device.tensor_map(x, (8, 16))]
    assert len({first.address, *(m.address for m in others)}) == 4
    assert to_host(x).shape == (8, 64)
