"""numstack.device.ptx.cluster: blocks share what one of them loads, their barriers, and each other's memory."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32, int32, uint8, uint16, uint32, uint64

from numstack.device import Kernel, current_device, kernel
from numstack.device.ptx import cluster, integers, mbarrier, tma
from tests.device.ptx.support import Bench
from tests.support import poisoned

BOX_BYTES = 8 * 16 * 4
SHARED_BYTES = 1024 + 2 * BOX_BYTES


def _make_shared_load(ndim: int) -> Kernel:
    @kernel(name=f"multicast_{ndim}d", cluster=2)
    def load(array, y_RN, arrived_N):
        """Each block loads one box for both; each gets two boxes, and both say so to both."""
        dynamic = cuda.shared.array(0, uint8)
        barriers = cuda.shared.array(2, uint64)
        full = integers.shared_address(barriers)
        both_read = uint32(full + uint32(8))
        first = integers.shared_address(dynamic)
        tile = integers.round_up_1024(first)
        block = int32(cuda.blockIdx.x & 1)
        if cuda.threadIdx.x == 0:
            tma.acquire_map(array)
            mbarrier.init(full, uint32(1))
            mbarrier.init(both_read, uint32(2))
            mbarrier.fence_init()
        cluster.barrier()
        if cuda.threadIdx.x == 0:
            mbarrier.arrive_and_expect(full, uint32(2 * BOX_BYTES))
            place = uint32(tile + uint32(block * BOX_BYTES))
            if ndim == 2:
                cluster.load_2d(array, place, full, uint16(3), int32(16 * block), int32(cuda.blockIdx.x >> 1) * 8)
            else:
                cluster.load_3d(array, place, full, uint16(3), int32(16 * block), 0, int32(cuda.blockIdx.x >> 1))
        mbarrier.wait(full, uint32(0))
        offset = int32(tile - first)
        for i in range(cuda.threadIdx.x, 2 * BOX_BYTES, cuda.blockDim.x):
            y_RN[cuda.blockIdx.x, i] = dynamic[offset + i]
        cuda.syncthreads()
        if cuda.threadIdx.x < 2:
            cluster.arrive(both_read, uint32(cuda.threadIdx.x))
        mbarrier.wait(both_read, uint32(0))
        arrived_N[cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x] = 1
        cluster.barrier()

    return load


@pytest.mark.parametrize("ndim", [2, 3])
def test_a_box_goes_to_both_blocks(hopper: Bench, ndim: int) -> None:
    pairs = 3
    host = np.arange(pairs * 8 * 32, dtype=np.float32).reshape((pairs * 8, 32) if ndim == 2 else (pairs, 8, 32))
    array = hopper.array(host)
    box = (8, 16) if ndim == 2 else (1, 8, 16)
    described = current_device().tensor_map(array, box, swizzle_bytes=0)
    y = hopper.array(poisoned((2 * pairs, 2 * BOX_BYTES), np.uint8))
    arrived = hopper.array(poisoned(2 * pairs * 64, np.int32))
    _make_shared_load(ndim)[2 * pairs, 64, None, SHARED_BYTES](described, y, arrived)
    found = hopper.result(y).view(np.float32).reshape(pairs, 2, 2, 8, 16)
    boxes = host.reshape(pairs, 8, 2, 16).transpose(0, 2, 1, 3)
    for block in range(2):
        np.testing.assert_array_equal(found[:, block], boxes)
    np.testing.assert_array_equal(hopper.result(arrived), 1)


BLOCKS = 4
THREADS = 64


@kernel(name="neighbours", cluster=BLOCKS)
def _neighbours(y_N, counted_N, x_N, z_N):
    """Each thread puts words down in the next block's memory, and reads what the block before it has."""
    counts = cuda.shared.array(2, int32)
    words = cuda.shared.array(THREADS, int32)
    values = cuda.shared.array(THREADS, float32)
    t = cuda.threadIdx.x
    i = cuda.blockIdx.x * THREADS + t
    rank = cuda.blockIdx.x % BLOCKS
    words[t] = int32(-7)
    if t < 2:
        counts[t] = int32(0)
    cluster.barrier()
    after = uint32((rank + 1) % BLOCKS)
    is_even = uint32(1 - t % 2)
    place = cluster.count_if(is_even, cluster.address_of(integers.shared_address(counts), after))
    counted_N[i] = place
    own = uint32(integers.shared_address(words) + uint32(4 * t))
    cluster.store_int32_if(is_even, cluster.address_of(own, after), int32(i))
    own = uint32(integers.shared_address(values) + uint32(4 * t))
    cluster.store_float32(cluster.address_of(own, after), float32(i))
    cluster.barrier()
    y_N[i] = words[t]
    x_N[i] = values[t]
    before = uint32((rank + BLOCKS - 1) % BLOCKS)
    own = uint32(integers.shared_address(words) + uint32(4 * t))
    z_N[i] = cluster.load_int32(cluster.address_of(own, before))
    cluster.barrier()


def test_words_in_other_blocks(hopper: Bench) -> None:
    n = 2 * BLOCKS * THREADS
    y, counted, z = (hopper.array(poisoned(n, np.int32)) for _ in range(3))
    x = hopper.array(poisoned(n))
    _neighbours[2 * BLOCKS, THREADS](y, counted, x, z)
    number = np.arange(n).reshape(2, BLOCKS, THREADS)
    is_even = number % 2 == 0
    from_before = np.roll(number, 1, axis=1)
    words = np.where(is_even, from_before, -7)
    np.testing.assert_array_equal(hopper.result(y).reshape(number.shape), words)
    np.testing.assert_array_equal(hopper.result(x).reshape(number.shape), from_before)
    np.testing.assert_array_equal(hopper.result(z).reshape(number.shape), np.roll(words, 1, axis=1))
    places = np.sort(hopper.result(counted).reshape(number.shape), axis=2)
    np.testing.assert_array_equal(places[..., : THREADS // 2], -1)
    np.testing.assert_array_equal(
        places[..., THREADS // 2 :], np.broadcast_to(np.arange(THREADS // 2), (2, BLOCKS, 32))
    )


@kernel(name="where blocks run", cluster=2)
def _where(y_N):
    memory = cuda.shared.array(0, uint8)
    if cuda.threadIdx.x == 0:
        y_N[cuda.blockIdx.x] = int32(cluster.multiprocessor())
        memory[0] = uint8(0)
    cluster.barrier()


def test_blocks_that_fill_a_multiprocessor_have_one_each(hopper: Bench) -> None:
    properties = current_device().properties
    y = hopper.array(poisoned(2, np.int32))
    _where[2, THREADS, None, properties.shared_bytes_per_block](y)
    found = set(hopper.result(y).tolist())
    assert len(found) == 2 and found <= set(range(properties.multiprocessors))
