"""numstack.device.ptx.sync: register budgets, named barriers, one lane of a warp."""

from __future__ import annotations

import numpy as np
from numba import cuda, float32, int32, uint32

from numstack.device import kernel
from numstack.device.ptx import sync
from tests.device.ptx.support import Bench
from tests.support import poisoned

_give_back, _take = sync.make_set_registers("dec", 24), sync.make_set_registers("inc", 240)
_both_groups, _one_group = sync.make_barrier(1, 256), sync.make_barrier(2, 128)
_say_ready = sync.make_barrier_arrive(1, 256)


HELD = 128


@kernel
def _registers_moved(y_N, rounds):
    """One warpgroup gives registers to two others, which keep many numbers at once."""
    group = sync.uniform(uint32(cuda.threadIdx.x // 128))
    if group == 0:
        _give_back()
        y_N[cuda.threadIdx.x] = float32(-1)
    else:
        _take()
        held = cuda.local.array(HELD, float32)
        for i in range(HELD):
            held[i] = float32(cuda.threadIdx.x + i)
        total = float32(1)
        for _ in range(rounds):
            for i in range(HELD):
                held[i] = held[i] * float32(0.5) + total
            total = held[0] + held[HELD - 1]
        for i in range(HELD):
            total += held[i]
        y_N[cuda.threadIdx.x] = total


def test_registers_go_from_one_role_to_another(hopper: Bench) -> None:
    y = hopper.array(poisoned(384))
    _registers_moved[4, 384](y, 3)
    found = hopper.result(y)
    held = np.arange(128, 384, dtype=np.float32)[:, None] + np.arange(HELD, dtype=np.float32)
    total = np.ones(256, np.float32)
    for _ in range(3):
        held = held * np.float32(0.5) + total[:, None]
        total = held[:, 0] + held[:, -1]
    np.testing.assert_array_equal(found[:128], -1)
    np.testing.assert_allclose(found[128:], total + held.sum(axis=1), rtol=1e-5)


@kernel
def _behind_a_barrier(y_N):
    """Warpgroup 0 writes and goes on; 1 waits for it, then both halves of it exchange what they read."""
    words = cuda.shared.array(256, int32)
    t = cuda.threadIdx.x
    if t < 128:
        words[t] = 3 * t
        _say_ready()
        y_N[t] = 1
    else:
        _both_groups()
        words[t] = words[255 - t] + 1
        _one_group()
        y_N[t] = words[383 - t]


def test_named_barriers(hopper: Bench) -> None:
    y = hopper.array(poisoned(256, np.int32))
    _behind_a_barrier[3, 256](y)
    t = np.arange(128, 256)
    np.testing.assert_array_equal(hopper.result(y), np.concatenate([np.ones(128), 3 * (255 - (383 - t)) + 1]))


@kernel
def _lanes(chosen_N, first_N):
    t = cuda.threadIdx.x
    chosen_N[t] = sync.elect()
    first_N[t] = sync.uniform(uint32(10 * t + 5))
    sync.cluster_barrier()  # of one block, as none was asked for


def test_one_lane_is_chosen_and_the_first_is_heard(hopper: Bench) -> None:
    chosen, first = (hopper.array(poisoned(96, np.uint32)) for _ in range(2))
    _lanes[1, 96](chosen, first)
    found = hopper.result(chosen).reshape(3, 32)
    np.testing.assert_array_equal(found.sum(axis=1), 1)
    np.testing.assert_array_equal(hopper.result(first), np.repeat([5, 325, 645], 32))
