"""numstack.device.ptx.bulk, shared and turns: plain bytes by the copy engine, words by address, blocks in order."""

from __future__ import annotations

import numpy as np
from numba import cuda, float32, int32, uint32, uint64

from numstack.device import kernel
from numstack.device.ptx import bulk, integers, mbarrier, shared, sync, tma, turns
from tests.device.ptx.support import Bench
from tests.support import poisoned

_stored = tma.make_wait(0, reads_only=False)


@kernel
def _copied(x_N, copy_N, sum_N, first):
    """256 floats from element ``first`` on: into shared memory, doubled there, stored and added from there."""
    tile = cuda.shared.array(256, float32)
    barriers = cuda.shared.array(1, uint64)
    barrier, place = integers.shared_address(barriers), integers.shared_address(tile)
    if cuda.threadIdx.x == 0:
        mbarrier.init(barrier, uint32(1))
        mbarrier.fence_init()
        mbarrier.arrive_and_expect(barrier, uint32(1024))
        bulk.load(x_N, first, place, uint32(1024), barrier)
    cuda.syncthreads()
    mbarrier.wait(barrier, uint32(0))
    tile[cuda.threadIdx.x] *= float32(2)
    tma.fence_async()
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        bulk.store(copy_N, first, place, uint32(1024))
        bulk.add_float32(sum_N, first, place, uint32(1024))
        tma.commit()
        _stored()


def test_loads_stores_and_additions(hopper: Bench) -> None:
    x = np.arange(1024, dtype=np.float32)
    copy, total = hopper.array(poisoned(1024)), hopper.array(np.full(1024, 5, np.float32))
    _copied[1, 256](hopper.array(x), copy, total, 516)
    found = hopper.result(copy)
    np.testing.assert_array_equal(found[516:772], 2 * x[516:772])
    assert np.isnan(found[:516]).all() and np.isnan(found[772:]).all()
    x[:516] = x[772:] = 0
    np.testing.assert_array_equal(hopper.result(total), 5 + 2 * x)


@kernel
def _words(y_N, z_N):
    tile = cuda.shared.array(512, float32)
    values = cuda.local.array(4, float32)
    t = cuda.threadIdx.x
    place = integers.shared_address(tile)
    for i in range(4):
        values[i] = float32(100 * i + t)
    shared.store4(uint32(place + uint32(16 * t)), values, 0)
    cuda.syncthreads()
    y_N[4 * t], y_N[4 * t + 1] = shared.load2(uint32(place + uint32(16 * t)))
    y_N[4 * t + 2], y_N[4 * t + 3] = shared.load2(uint32(place + uint32(16 * t + 8)))
    cuda.syncthreads()
    shared.store2(uint32(place + uint32(8 * (63 - t))), float32(t), float32(-t))
    cuda.syncthreads()
    z_N[2 * t], z_N[2 * t + 1] = tile[2 * t], tile[2 * t + 1]


def test_words_of_shared_memory_by_address(hopper: Bench) -> None:
    y, z = hopper.array(poisoned(256)), hopper.array(poisoned(128))
    _words[1, 64](y, z)
    t = np.arange(64)
    np.testing.assert_array_equal(hopper.result(y).reshape(64, 4), 100 * np.arange(4) + t[:, None])
    np.testing.assert_array_equal(hopper.result(z).reshape(64, 2), (63 - t)[:, None] * np.array([1, -1]))


@kernel
def _matrices(y_RN, back_N4):
    """Lane l holds, of matrix i, words 1000 i + 10 g + t: rows of two elements each, as the docstring says."""
    tile = cuda.shared.array((32, 4), uint32)  # row r of matrix i: 8 elements of 16 bits
    registers = cuda.local.array(4, uint32)
    lane = int32(cuda.threadIdx.x)
    row = uint32(integers.shared_address(tile) + uint32(16 * lane))
    for i in range(4):
        registers[i] = uint32(1000 * i + 10 * (lane // 4) + lane % 4)
    shared.store_matrices(row, registers, 0)
    cuda.syncwarp()
    for word in range(4):
        y_RN[lane, word] = tile[lane, word]
    for i in range(4):
        registers[i] = uint32(0)
    shared.load_matrices(row, registers, 0)
    for i in range(4):
        back_N4[lane, i] = registers[i]


def test_matrices_between_registers_and_shared_memory(hopper: Bench) -> None:
    rows, back = hopper.array(poisoned((32, 4), np.uint32)), hopper.array(poisoned((32, 4), np.uint32))
    _matrices[1, 32](rows, back)
    matrix, row, word = np.indices((4, 8, 4))
    np.testing.assert_array_equal(hopper.result(rows).reshape(4, 8, 4), 1000 * matrix + 10 * row + word)
    lane = np.arange(32)[:, None]
    np.testing.assert_array_equal(hopper.result(back), 1000 * np.arange(4) + 10 * (lane // 4) + lane % 4)


@kernel
def _in_turn(counters_N, y_N, order_N, n_blocks):
    """Blocks, the last first, each append their number and add to what the one before left."""
    block = int32(cuda.blockIdx.x)
    turn = integers.subtract(integers.subtract(n_blocks, int32(1)), block)
    if sync.uniform(uint32(cuda.threadIdx.x)) == 0:
        turns.wait_until_equal(counters_N, 0, turn)
        if cuda.threadIdx.x == 0:
            order_N[turn] = block
            y_N[0] = y_N[0] * float32(0.5) + float32(block)
            turns.set_after(counters_N, 0, int32(turn + 1))


def test_blocks_take_turns(hopper: Bench) -> None:
    n = 64
    counters, y = hopper.array(np.zeros(1, np.int32)), hopper.array(np.zeros(1, np.float32))
    order = hopper.array(poisoned(n, np.int32))
    _in_turn[n, 32](counters, y, order, n)
    expected = np.float32(0)
    for block in range(n - 1, -1, -1):
        expected = expected * np.float32(0.5) + np.float32(block)
    np.testing.assert_array_equal(hopper.result(order), np.arange(n - 1, -1, -1))
    assert hopper.result(y)[0] == expected
    assert hopper.result(counters)[0] == n
