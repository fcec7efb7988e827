"""Functions of whole warps: registers of every lane, whole blocks, loops and barriers around, and what is refused."""

import numpy as np
import pytest
from numba import cuda, float32

from numstack.errors import KernelError
from numstack.simt import collective, interpret
from tests.simt.support import WAYS
from tests.support import poisoned

RANDOM = np.random.default_rng(5)


@collective(reads=(1,), writes=(0,))
def turned(to_LN, from_LN):
    """Lane l gets what lane 31 - l has, its registers in reverse order."""
    for lane in range(32):
        for i in range(to_LN.shape[1]):
            to_LN[lane, i] = from_LN[31 - lane, to_LN.shape[1] - 1 - i]


@cuda.jit(device=True)
def turn_pair(registers, first):
    """In a device function, on a part of the caller's array."""
    turned(registers, first, 2, registers, first + 2, 2)


def turn_parts(x_TN, out_TN):
    registers = cuda.local.array((3, 4), float32)
    t = cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    for i in range(3):
        for j in range(4):
            registers[i, j] = x_TN[t, 4 * i + j]
    for i in range(3):
        turn_pair(registers, 4 * i)
    for i in range(3):
        for j in range(4):
            out_TN[t, 4 * i + j] = registers[i, j]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block", [(32, 1), (64, 1), (16, 4), (96, 2)])
def test_registers_change_lanes_within_each_warp(block, way):
    n = block[0] * block[1]
    x = RANDOM.standard_normal((n, 12)).astype(np.float32)
    out = poisoned((n, 12))
    WAYS[way](turn_parts, 1, block, x, out, shared_bytes=0)
    expected = x.reshape(-1, 32, 3, 4).copy()
    expected[..., :2] = expected[:, ::-1, :, 3:1:-1]
    np.testing.assert_array_equal(out, expected.reshape(n, 12))


def turn_around_barriers(x_T, out_T, n):
    kept = cuda.local.array(1, float32)
    now = cuda.local.array(1, float32)
    shared = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    kept[0] = x_T[t]
    for _ in range(n):
        turned(now, 0, 1, kept, 0, 1)
        shared[t] = now[0]
        cuda.syncthreads()
        kept[0] = shared[(t + 32) % 64] + float32(1)
        cuda.syncthreads()
    if cuda.threadIdx.x // 32 == 1:  # one warp alone
        turned(now, 0, 1, kept, 0, 1)
        kept[0] = now[0]
    out_T[t] = kept[0]


@pytest.mark.parametrize("way", WAYS)
def test_registers_live_across_barriers_and_loops(way):
    x = RANDOM.standard_normal(64).astype(np.float32)
    out = poisoned(64)
    WAYS[way](turn_around_barriers, 1, 64, x, out, np.int32(3), shared_bytes=0)
    expected = x.reshape(2, 32)
    for _ in range(3):
        expected = expected[::-1, ::-1] + np.float32(1)
    expected[1] = expected[1, ::-1].copy()
    np.testing.assert_array_equal(out.reshape(2, 32), expected)


def test_a_warp_must_be_whole_and_agree_on_the_registers():
    def one(x):
        r = cuda.local.array(4, float32)
        for i in range(4):
            r[i] = x[0]
        turned(r, 0, 1, r, 1, 1)
        x[cuda.threadIdx.x] = r[0]

    def own_number(x):
        r = cuda.local.array(32, float32)
        for i in range(32):
            r[i] = x[0]
        turned(r, cuda.threadIdx.x, 1, r, 0, 1)
        x[cuda.threadIdx.x] = r[0]

    def shared_array(x):
        s = cuda.shared.array(4, float32)
        turned(s, 0, 1, s, 1, 1)
        x[cuda.threadIdx.x] = s[0]

    x = np.zeros(64, np.float32)
    for kernel, block, message in (
        (one, 48, "takes whole warps, but a block has 48 threads"),
        (own_number, 32, "registers whose numbers differ between the lanes"),
        (shared_array, 32, "takes local arrays; s is none"),
    ):
        with pytest.raises(KernelError, match=message):
            WAYS["compiled"](kernel, 1, block, x, shared_bytes=0)
    with pytest.raises(KernelError, match="takes all 32 lanes of a warp, but only 16 come to it"):
        interpret(one, (1, 1, 1), (48, 1, 1), (x,))


SPECIALISED = 3


def of_constant_conditions(x_T, out_T):
    t = cuda.threadIdx.x
    if SPECIALISED == 4:
        out_T[t] = x_T[t, t]  # would not compile
    elif not SPECIALISED > 5:
        for k in range(2):
            if k == SPECIALISED - 2:
                out_T[t] = x_T[t]


@pytest.mark.parametrize("way", WAYS)
def test_conditions_that_constants_decide(way):
    x = RANDOM.standard_normal(32).astype(np.float32)
    out = poisoned(32)
    WAYS[way](of_constant_conditions, 1, 32, x, out, shared_bytes=0)
    np.testing.assert_array_equal(out, x)
