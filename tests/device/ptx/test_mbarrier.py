"""numstack.device.ptx.mbarrier: phases end when all have arrived, not before, and parities alternate."""

from __future__ import annotations

import numpy as np
from numba import cuda, int32, uint16, uint32, uint64

from numstack.device import kernel
from numstack.device.ptx import integers, mbarrier, mma
from tests.device.ptx.support import Bench
from tests.support import poisoned

ROUNDS = 7


@kernel
def _handed_over(y_RN):
    """Warp 0 writes, warp 1 reads, in turns: a barrier says that there is something, another that it was read."""
    barriers = cuda.shared.array(2, uint64)
    words = cuda.shared.array(32, int32)
    full = integers.shared_address(barriers)
    empty = uint32(full + uint32(8))
    lane = cuda.threadIdx.x % 32
    if cuda.threadIdx.x == 0:
        mbarrier.init(full, uint32(32))
        mbarrier.init(empty, uint32(32))
        mbarrier.fence_init()
    cuda.syncthreads()
    if cuda.threadIdx.x < 32:
        for i in range(ROUNDS):
            mbarrier.wait(empty, uint32(i & 1 ^ 1))  # the first time at once
            words[lane] = 100 * i + lane
            mbarrier.arrive(full)
    else:
        for i in range(ROUNDS):
            while mbarrier.try_wait(full, uint32(i & 1)) == 0:
                pass
            y_RN[i, lane] = words[31 - lane]
            mbarrier.arrive(empty)


def test_two_warps_hand_data_over_in_turns(hopper: Bench) -> None:
    y = hopper.array(poisoned((ROUNDS, 32), np.int32))
    _handed_over[1, 64](y)
    expected = 100 * np.arange(ROUNDS)[:, None] + np.arange(31, -1, -1)
    np.testing.assert_array_equal(hopper.result(y), expected)


@kernel
def _asked(y_N):
    barriers = cuda.shared.array(1, uint64)
    barrier = integers.shared_address(barriers)
    mbarrier.init(barrier, uint32(2))
    mbarrier.fence_init()
    y_N[0] = mbarrier.try_wait(barrier, uint32(1))  # the phase before the first counts as over
    y_N[1] = mbarrier.try_wait(barrier, uint32(0))
    mbarrier.arrive(barrier)
    y_N[2] = mbarrier.try_wait(barrier, uint32(0))  # one arrival of two
    mbarrier.arrive(barrier)
    y_N[3] = mbarrier.try_wait(barrier, uint32(0))
    mbarrier.wait(barrier, uint32(0))
    y_N[4] = mbarrier.try_wait(barrier, uint32(1))  # the second phase is under way


def test_a_phase_is_over_after_the_last_arrival(hopper: Bench) -> None:
    y = hopper.array(poisoned(5, np.uint32))
    _asked[1, 1](y)
    np.testing.assert_array_equal(hopper.result(y), [1, 0, 0, 1, 0])


@kernel
def _bytes_expected(y_N):
    barriers = cuda.shared.array(1, uint64)
    barrier = integers.shared_address(barriers)
    mbarrier.init(barrier, uint32(1))
    mbarrier.fence_init()
    mbarrier.expect(barrier, uint32(0))
    y_N[0] = mbarrier.try_wait(barrier, uint32(0))
    mbarrier.arrive_and_expect(barrier, uint32(0))
    mbarrier.wait(barrier, uint32(0))
    y_N[1] = mbarrier.try_wait(barrier, uint32(0))
    mbarrier.arrive_and_expect(barrier, uint32(64))  # bytes that never come
    y_N[2] = mbarrier.try_wait(barrier, uint32(1))


def test_a_phase_waits_for_bytes_too(hopper: Bench) -> None:
    y = hopper.array(poisoned(3, np.uint32))
    _bytes_expected[1, 1](y)
    np.testing.assert_array_equal(hopper.result(y), [0, 1, 0])


@kernel
def _copied(x_N, y_N):
    """Each lane starts a copy of 16 bytes, and once all are there reads those of the lane opposite."""
    rows = cuda.shared.array(256, uint16)
    barriers = cuda.shared.array(1, uint64)
    barrier = integers.shared_address(barriers)
    t = cuda.threadIdx.x
    if t == 0:
        mbarrier.init(barrier, uint32(32))
        mbarrier.fence_init()
    cuda.syncthreads()
    mma.cp_async_16(rows, 8 * t, x_N, 8 * t, 16)
    mbarrier.arrive_when_copied(barrier)
    mbarrier.wait(barrier, uint32(0))
    for i in range(8):
        y_N[8 * t + i] = rows[8 * (31 - t) + i]


def test_a_phase_waits_for_copies(hopper: Bench) -> None:
    x = np.arange(256, dtype=np.uint16)
    y = hopper.array(poisoned(256, np.uint16))
    _copied[1, 32](hopper.array(x), y)
    np.testing.assert_array_equal(hopper.result(y).reshape(32, 8), x.reshape(32, 8)[::-1])
