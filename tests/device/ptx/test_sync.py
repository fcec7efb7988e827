"""numstack.device.ptx.sync: register budgets, named barriers, one lane of a warp."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32, int32, uint32

from numstack.device import Kernel, kernel, ptx
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


@kernel(name="slow writer", waits_itself=True)
def _slow_writer(y_N, rounds):
    """Writes late; the next kernel is there before."""
    ptx.wait_for_kernel_before()
    ptx.let_next_kernel_start()
    x = float32(cuda.grid(1))
    for _ in range(rounds):
        x = x * float32(0.5) + float32(1)
    y_N[cuda.grid(1)] = x


@kernel(name="reader", starts_early=True)
def _reader(y_N, z_N):
    """Reads what blocks of the other kernel wrote, each of them another's."""
    i = cuda.grid(1)
    z_N[i] = y_N[y_N.size - 1 - i]


@kernel(name="late waiter", waits_itself=True)
def _late_waiter(y_N, z_N):
    """Reads what blocks of the other kernel wrote, each of them another's."""
    i = cuda.grid(1)
    ptx.wait_for_kernel_before()
    z_N[i] = y_N[y_N.size - 1 - i]


@pytest.mark.parametrize("reader", [_reader, _late_waiter], ids=lambda kernel: kernel.name)
def test_a_kernel_that_starts_early_waits_for_the_one_before(hopper: Bench, reader: Kernel) -> None:
    n = 64 * 128
    y, z = hopper.array(poisoned(n)), hopper.array(poisoned(n))
    for _ in range(3):
        _slow_writer[64, 128](y, 20_000)
        reader[64, 128](y, z)
    np.testing.assert_array_equal(hopper.result(z), np.full(n, 2, np.float32))


def test_a_kernel_that_starts_early_waits_for_all_before_that_one_too(hopper: Bench) -> None:
    """The kernel in between reads nothing of the first one's, and is over as soon as it may be."""
    n = 64 * 128
    other = hopper.array(poisoned(128))
    for reader in (_reader, _late_waiter) * 3:
        y, z = hopper.array(poisoned(n)), hopper.array(poisoned(n))
        _slow_writer[64, 128](y, 20_000)
        _reader[1, 128](other, other)
        reader[64, 128](y, z)
        np.testing.assert_array_equal(hopper.result(z), np.full(n, 2, np.float32))


_two_warps = sync.make_numbered_barrier(64)


@kernel
def _pairs_of_warps(y_N):
    """Each group of 64 threads has a barrier of its own, and passes it as often as it likes."""
    words = cuda.shared.array((4, 2, 64), int32)
    t = cuda.threadIdx.x
    group = cuda.threadIdx.y
    x = int32(64 * group + t)
    for turn in range(group + 1):
        words[group, turn & 1, t] = x
        _two_warps(uint32(1 + group))
        x = words[group, turn & 1, 63 - t]
    y_N[64 * group + t] = x


def test_groups_of_warps_wait_for_themselves(hopper: Bench) -> None:
    y = hopper.array(poisoned(256, np.int32))
    _pairs_of_warps[1, (64, 4)](y)
    found = hopper.result(y).reshape(4, 64)
    forward = np.arange(256).reshape(4, 64)
    np.testing.assert_array_equal(found, [row[:: 1 if group % 2 else -1] for group, row in enumerate(forward)])
