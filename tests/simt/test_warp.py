"""Shuffles and votes: whole and partial warps, warps of several rows, masks, loops, and distances known or not."""

import numpy as np
import pytest
from numba import cuda, float32, int32

from tests.simt.support import launch
from tests.support import poisoned

FULL = 0xFFFFFFFF
RANDOM = np.random.default_rng(4)


def shuffles(x, out, delta):
    t = cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    value = x[t]
    out[0, t] = cuda.shfl_up_sync(FULL, value, delta)
    out[1, t] = cuda.shfl_down_sync(FULL, value, delta)
    out[2, t] = cuda.shfl_xor_sync(FULL, value, delta)
    out[3, t] = cuda.shfl_sync(FULL, value, delta)
    out[4, t] = cuda.shfl_sync(FULL, value, (t * 7) % 32)
    out[5, t] = cuda.shfl_down_sync(FULL, value, t % 3)


@pytest.mark.parametrize("block", [(64, 1), (16, 4), (8, 8), (24, 4)])
def test_shuffles_follow_cudas_rule_for_lanes_out_of_range(block):
    n = block[0] * block[1]
    x = RANDOM.standard_normal(n).astype(np.float32)
    lane, warp = np.arange(n) % 32, np.arange(n) // 32 * 32
    for delta in (0, 1, 5, 16, 31):
        out = poisoned((6, n), np.float32)
        launch(shuffles, 1, block, x, out, np.int32(delta))
        t = np.arange(n)
        np.testing.assert_array_equal(out[0], x[np.where(lane >= delta, t - delta, t)])
        np.testing.assert_array_equal(out[1], x[np.where(lane + delta < 32, t + delta, t)])
        np.testing.assert_array_equal(out[2], x[warp + (lane ^ delta)])
        np.testing.assert_array_equal(out[3], x[warp + delta])
        np.testing.assert_array_equal(out[4], x[warp + t * 7 % 32])
        np.testing.assert_array_equal(out[5], x[np.where(lane + t % 3 < 32, t + t % 3, t)])


@cuda.jit(device=True)
def warp_sum(value):
    for offset in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(FULL, value, offset)
    return value


@cuda.jit(device=True)
def block_sum(value, sums):
    value = warp_sum(value)
    if cuda.laneid == 0:
        sums[cuda.threadIdx.x // 32] = value
    cuda.syncthreads()
    if cuda.threadIdx.x < 32:  # the first warp alone
        value = sums[cuda.threadIdx.x] if cuda.threadIdx.x < cuda.blockDim.x // 32 else float32(0)
        value = warp_sum(value)
        if cuda.threadIdx.x == 0:
            sums[0] = value
    cuda.syncthreads()
    return sums[0]


def row_sums(x, out):
    sums = cuda.shared.array(32, float32)
    total = float32(0)
    for c in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
        total += x[cuda.blockIdx.x, c]
    total = block_sum(total, sums)
    if cuda.threadIdx.x == 0:
        out[cuda.blockIdx.x] = total


@pytest.mark.parametrize("columns", [1, 100, 257])
def test_rows_reduced_by_shuffles_with_the_first_warp_finishing(columns):
    x = RANDOM.standard_normal((5, columns)).astype(np.float32)
    out = poisoned(5, np.float32)
    launch(row_sums, 5, 96, x, out)
    np.testing.assert_allclose(out, x.astype(np.float64).sum(1), rtol=1e-5, atol=1e-5)


def warp_a_row(x, out):
    warp = cuda.grid(1) // 32
    if warp >= x.shape[0]:
        return
    lane = cuda.laneid
    total = float32(0)
    for c0 in range(0, x.shape[1], 32):
        c = c0 + lane
        if c < x.shape[1]:
            total += x[warp, c]
    offset = 16
    while offset > 0:
        total += cuda.shfl_down_sync(FULL, total, offset)
        offset //= 2
    if lane == 0:
        out[warp] = total


def test_a_warp_for_each_row_with_warps_that_leave():
    x = RANDOM.standard_normal((6, 75)).astype(np.float32)
    out = poisoned(6, np.float32)
    launch(warp_a_row, 2, 128, x, out)
    np.testing.assert_allclose(out, x.astype(np.float64).sum(1), rtol=1e-5, atol=1e-5)


def votes(x, out):
    t = cuda.threadIdx.x
    out[0, t] = cuda.any_sync(FULL, x[t] > 5)
    out[1, t] = cuda.all_sync(FULL, x[t] >= 0)
    out[2, t] = cuda.popc(cuda.ballot_sync(FULL, x[t] % 2))
    if t % 4 == 1:
        out[3, t] = cuda.ballot_sync(0x22222222, x[t] > 2)
    out[4, t] = cuda.syncthreads_count(x[t] > 3)
    out[5, t] = cuda.syncthreads_and(x[t] >= 0) + 10 * cuda.syncthreads_or(x[t] == 6)


@pytest.mark.parametrize("n", [32, 64, 80])
def test_votes_count_only_lanes_that_take_part(n):
    x = RANDOM.integers(0, 7, n).astype(np.int32)
    x[:32] = np.minimum(x[:32], 5)
    out = np.full((6, n), -1, np.int32)
    launch(votes, 1, n, x, out)
    for start in range(0, n, 32):
        warp = x[start : start + 32]
        bits = int(sum(1 << lane for lane, v in enumerate(warp) if lane % 4 == 1 and v > 2))
        assert (out[0, start : start + 32] == (warp > 5).any()).all()
        assert (out[1, start : start + 32] == 1).all()
        assert (out[2, start : start + 32] == (warp % 2).sum()).all()
        assert (out[3, start + 1 : start + 32 : 4] == np.int64(bits).astype(np.int32)).all()
    assert (out[3, ::4] == -1).all()
    assert (out[4] == (x > 3).sum()).all()
    assert (out[5] == 1 + 10 * (x == 6).any()).all()


def shared_between_lanes(x):
    shared = cuda.shared.array(32, int32)
    t = cuda.threadIdx.x
    shared[t] = x[t]
    cuda.syncwarp()
    if t < 16:
        shared[t] += shared[t + 16]
    cuda.syncwarp()
    x[t] = shared[t % 16]


def test_syncwarp_orders_shared_memory():
    x = np.arange(32, dtype=np.int32)
    expected = np.tile(x[:16] + x[16:], 2)
    launch(shared_between_lanes, 1, 32, x)
    np.testing.assert_array_equal(x, expected)


def vote_kept_across_a_barrier(x, out):
    t = cuda.threadIdx.x
    count = cuda.popc(cuda.ballot_sync(FULL, x[t] > 0))
    place = count * 1000 + t
    cuda.syncthreads()
    out[t] = place


def test_each_warp_keeps_its_own_vote_across_a_barrier():
    x = RANDOM.integers(-3, 4, 96).astype(np.int32)
    out = poisoned(96, np.int64)
    launch(vote_kept_across_a_barrier, 1, 96, x, out)
    np.testing.assert_array_equal(out, np.repeat((x.reshape(3, 32) > 0).sum(1), 32) * 1000 + np.arange(96))
