"""numstack.device.ptx.tma: boxes of arrays of two to four axes, to shared memory, back, and added.

A box that hangs over an edge reads zeros there and writes nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import cuda, float32, int32, uint8, uint32, uint64

from numstack.device import Kernel, current_device, kernel
from numstack.device.ptx import integers, mbarrier, tma
from tests.device.ptx.support import Bench
from tests.support import poisoned

SHARED_BYTES = 1024 + 8192
_stored = tma.make_wait(0, reads_only=False)
_read = tma.make_wait(0, reads_only=True)


@cuda.jit(device=True)
def _begin(barrier, nbytes):
    """Make the barrier and announce what is asked for next, by one thread.

    All others come to a syncthreads behind what it asks for: racecheck takes no wait of theirs for an order, as they do
    not arrive at the barrier.
    """
    mbarrier.init(barrier, uint32(1))
    mbarrier.fence_init()
    mbarrier.arrive_and_expect(barrier, uint32(nbytes))


def _make_load(ndim: int) -> Kernel:
    @kernel(name=f"load_{ndim}d")
    def load(array, y_N, x0, x1, x2, x3):
        shared = cuda.shared.array(0, uint8)
        barriers = cuda.shared.array(1, uint64)
        barrier = integers.shared_address(barriers)
        first = integers.shared_address(shared)
        tile = integers.round_up_1024(first)
        if cuda.threadIdx.x == 0:
            _begin(barrier, y_N.shape[0])
            tma.acquire_map(array)
            tma.prefetch_map(array)
            if ndim == 2:
                tma.load_2d(array, tile, barrier, x0, x1)
            if ndim == 3:
                tma.load_3d(array, tile, barrier, x0, x1, x2)
            if ndim == 4:
                tma.load_4d(array, tile, barrier, x0, x1, x2, x3)
        cuda.syncthreads()
        mbarrier.wait(barrier, uint32(0))
        offset = int32(tile - first)
        for i in range(cuda.threadIdx.x, y_N.shape[0], cuda.blockDim.x):
            y_N[i] = shared[offset + i]

    return load


def _make_store(ndim: int, adds: bool) -> Kernel:
    @kernel(name=f"{'add' if adds else 'store'}_{ndim}d")
    def store(array, y_N, x0, x1, x2, x3):
        shared = cuda.shared.array(0, uint8)
        first = integers.shared_address(shared)
        tile = integers.round_up_1024(first)
        offset = int32(tile - first)
        for i in range(cuda.threadIdx.x, y_N.shape[0], cuda.blockDim.x):
            shared[offset + i] = y_N[i]
        tma.fence_async()
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            tma.acquire_map(array)
            if ndim == 2 and adds:
                tma.add_2d(array, tile, x0, x1)
            if ndim == 3 and adds:
                tma.add_3d(array, tile, x0, x1, x2)
            if ndim == 4 and adds:
                tma.add_4d(array, tile, x0, x1, x2, x3)
            if ndim == 2 and not adds:
                tma.store_2d(array, tile, x0, x1)
            if ndim == 3 and not adds:
                tma.store_3d(array, tile, x0, x1, x2)
            if ndim == 4 and not adds:
                tma.store_4d(array, tile, x0, x1, x2, x3)
            tma.commit()
            _read()
            _stored()

    return store


LOAD = {n: _make_load(n) for n in (2, 3, 4)}
STORE = {(n, adds): _make_store(n, adds) for n in (2, 3, 4) for adds in (False, True)}

# Shape of the array, box, and where the box is put: inside, over the last edges, and for loads before the first; always
# at a multiple of 16 bytes.
CASES = [
    ((40, 64), (8, 16), [(0, 0), (16, 8), (56, 36), (-8, -3)]),
    ((6, 10, 32), (2, 4, 32), [(0, 0, 0), (0, 8, 5), (16, 1, 2), (16, -1, 2)]),
    ((3, 4, 10, 16), (1, 2, 4, 8), [(0, 0, 0, 0), (8, 4, 3, 2), (8, 8, 1, 1), (8, 8, -1, 1)]),
]


def _integers(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> np.ndarray:
    """Small whole numbers, which bfloat16 holds exactly; bfloat16 as its bits."""
    values = np.random.default_rng(seed).integers(-60, 60, shape).astype(np.float32)
    return _bits(values) if dtype == np.uint16 else values.astype(dtype)


def _bits(values: np.ndarray) -> np.ndarray:
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def _values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32) if bits.dtype == np.uint16 else bits.astype(np.float32)


def _inside(shape: tuple[int, ...], box: tuple[int, ...], place: tuple[int, ...]) -> tuple[Any, Any]:
    """Slices of an array, and of the box, where they meet; ``place`` has the innermost axis first."""
    of_array, of_box = [], []
    for size, side, x in zip(shape, box, reversed(place), strict=True):
        low, high = max(x, 0), min(x + side, size)
        of_array.append(slice(low, high))
        of_box.append(slice(low - x, high - x))
    return tuple(of_array), tuple(of_box)


@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("case", CASES, ids=["2d", "3d", "4d"])
def test_loads(hopper: Bench, case: Any, dtype: type) -> None:
    shape, box, places = case
    host = _integers(shape, dtype)
    array = hopper.array(host)
    described = current_device().tensor_map(array, box, swizzle_bytes=0)
    outputs = []
    for place in places:
        y = hopper.array(poisoned(int(np.prod(box)) * host.itemsize, np.uint8))
        LOAD[len(shape)][1, 64, None, SHARED_BYTES](described, y, *(*place, 0, 0)[:4])
        outputs.append(y)
    for place, y in zip(places, outputs, strict=True):
        expected = np.zeros(box, dtype)
        of_array, of_box = _inside(shape, box, place)
        expected[of_box] = host[of_array]
        np.testing.assert_array_equal(hopper.result(y).view(dtype).reshape(box), expected, err_msg=str(place))


@pytest.mark.parametrize("swizzle_bytes", [32, 64, 128])
def test_a_swizzled_tile(hopper: Bench, swizzle_bytes: int) -> None:
    """16 bytes of a row lie where the address, its low bits exclusive-or'd with the row's, says."""
    box = (32, swizzle_bytes // 2)
    host = _integers((32, 64), np.uint16)
    array = hopper.array(host)
    described = current_device().tensor_map(array, box, swizzle_bytes=swizzle_bytes)
    y = hopper.array(poisoned(32 * swizzle_bytes, np.uint8))
    LOAD[2][1, 64, None, SHARED_BYTES](described, y, 0, 0, 0, 0)
    found = hopper.result(y).view(np.uint16)
    address = np.arange(32 * swizzle_bytes)
    mask = swizzle_bytes // 16 - 1
    swizzled = address ^ (((address >> 7) & mask) << 4)
    np.testing.assert_array_equal(found[swizzled[::2] // 2].reshape(box), host[:, : box[1]])


@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("adds", [False, True], ids=["stores", "adds"])
@pytest.mark.parametrize("case", CASES, ids=["2d", "3d", "4d"])
def test_stores_and_additions(hopper: Bench, case: Any, adds: bool, dtype: type) -> None:
    shape, box, places = case
    before, tile = _integers(shape, dtype, 1), _integers(box, dtype, 2)
    outputs = []
    places = [place for place in places if min(place) >= 0]
    for place in places:
        array = hopper.array(before)
        described = current_device().tensor_map(array, box, swizzle_bytes=0)
        bytes_of_tile = hopper.array(tile.reshape(-1).view(np.uint8))
        STORE[len(shape), adds][1, 64, None, SHARED_BYTES](described, bytes_of_tile, *(*place, 0, 0)[:4])
        outputs.append(array)
    for place, array in zip(places, outputs, strict=True):
        expected = _values(before)
        of_array, of_box = _inside(shape, box, place)
        expected[of_array] = _values(tile)[of_box] + (expected[of_array] if adds else 0)
        np.testing.assert_array_equal(_values(hopper.result(array)), expected, err_msg=str(place))


@kernel
def _written_then_loaded(array, x_NN, y_N):
    """Global memory written by stores and read by the copy engine, in one kernel."""
    shared = cuda.shared.array(0, uint8)
    barriers = cuda.shared.array(1, uint64)
    barrier = integers.shared_address(barriers)
    first = integers.shared_address(shared)
    tile = integers.round_up_1024(first)
    x_NN[cuda.threadIdx.x // 16, cuda.threadIdx.x % 16] = float32(3 * cuda.threadIdx.x)
    tma.fence_async_all()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        _begin(barrier, y_N.shape[0])
        tma.acquire_map(array)
        tma.load_2d(array, tile, barrier, 0, 0)
    cuda.syncthreads()
    mbarrier.wait(barrier, uint32(0))
    offset = int32(tile - first)
    for i in range(cuda.threadIdx.x, y_N.shape[0], cuda.blockDim.x):
        y_N[i] = shared[offset + i]


def test_stores_are_seen_by_the_copy_engine_behind_a_fence(hopper: Bench) -> None:
    x = hopper.array(poisoned((16, 16)))
    y = hopper.array(poisoned(1024, np.uint8))
    described = current_device().tensor_map(x, (16, 16), swizzle_bytes=0)
    _written_then_loaded[1, 256, None, SHARED_BYTES](described, x, y)
    np.testing.assert_array_equal(hopper.result(y).view(np.float32), 3 * np.arange(256))
