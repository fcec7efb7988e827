"""numstack.device.ptx.wgmma: every width, dtype and way that operands lie, against float64."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from numba import cuda, float32, int32, uint8, uint32, uint64

from numstack.device import Kernel, current_device, kernel
from numstack.device.ptx import integers, mbarrier, tma, wgmma
from tests.device.ptx.support import Bench
from tests.support import BFLOAT16, poisoned

M, K = 64, 64
TILE_BYTES = M * K * 2
SHARED_BYTES = 1024 + TILE_BYTES + 256 * K * 2
FLOAT16 = np.dtype(np.float16)


def _matrix(registers: np.ndarray) -> np.ndarray:
    """What the accumulators hold, [register, thread], as the matrix that the module's docstring says they are."""
    c = np.empty((M, registers.shape[0] * 2), np.float32)
    register, thread = np.indices(registers.shape)
    warp, lane = thread // 32, thread % 32
    c[16 * warp + lane // 4 + 8 * (register // 2 % 2), 8 * (register // 4) + 2 * (lane % 4) + register % 2] = registers
    return c


def _box_columns(n: int) -> int:
    """Of the boxes in which a b of n columns, in rows of k, is loaded."""
    return 32 if n % 64 else 64


@functools.cache
def _make_kernel(n: int, dtype: str, a_is_KM: bool, b_is_KN: bool) -> Kernel:
    multiply = wgmma.make_multiply(n, dtype, a_is_KM, b_is_KN)
    columns = _box_columns(n)
    mn_major, b_mn_major, wait = wgmma.make_mn_major(K), wgmma.make_mn_major(K, columns), wgmma.make_wait(0, n // 2)
    k_major = wgmma.k_major
    step_a, step_b = (128 if a_is_KM else 2), (2 * columns if b_is_KN else 2)
    n_accumulators, n_boxes, nbytes = n // 2, (n // columns if b_is_KN else 1), TILE_BYTES + n * K * 2

    @kernel(name=f"wgmma n={n} {dtype} {'KM' if a_is_KM else 'MK'} {'KN' if b_is_KN else 'NK'}")
    def product(a, b, registers, rounds):
        shared = cuda.shared.array(0, uint8)
        barriers = cuda.shared.array(1, uint64)
        barrier = integers.shared_address(barriers)
        a_tile = integers.round_up_1024(integers.shared_address(shared))
        b_tile = uint32(a_tile + uint32(TILE_BYTES))
        if cuda.threadIdx.x == 0:
            mbarrier.init(barrier, uint32(1))
            mbarrier.fence_init()
            mbarrier.arrive_and_expect(barrier, uint32(nbytes))
            tma.acquire_map(a)
            tma.acquire_map(b)
            tma.load_2d(a, a_tile, barrier, 0, 0)
            for j in range(n_boxes):  # one after another
                tma.load_2d(b, uint32(b_tile + uint32(j * K * columns * 2)), barrier, columns * j, 0)
        cuda.syncthreads()
        mbarrier.wait(barrier, uint32(0))
        acc = cuda.local.array(n_accumulators, float32)
        for i in range(n_accumulators):
            acc[i] = float32(100)
        a_place = mn_major(a_tile) if a_is_KM else k_major(a_tile)
        b_place = b_mn_major(b_tile) if b_is_KN else k_major(b_tile)
        for round in range(rounds):
            wgmma.fence()
            for k in range(K // 16):
                keep = int32(round != 0 or k != 0)  # what acc holds before is not added
                multiply(acc, a_place + uint64(step_a * k), b_place + uint64(step_b * k), keep)
            wgmma.commit()
            wait(acc)
        for i in range(n_accumulators):
            registers[i, cuda.threadIdx.x] = acc[i]

    return product


def _operands(n: int, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    return rng.standard_normal((M, K)).astype(dtype), rng.standard_normal((K, n)).astype(dtype)


def _stored(values: np.ndarray) -> np.ndarray:
    contiguous = np.ascontiguousarray(values)
    return contiguous.view(np.uint16) if values.dtype == BFLOAT16 else contiguous


@pytest.mark.parametrize("layout", ["NT", "TN", "NN", "TT"])
@pytest.mark.parametrize(
    ("n", "dtype"),
    [(64, BFLOAT16), (64, FLOAT16), (96, BFLOAT16), (128, BFLOAT16), (160, FLOAT16), (192, FLOAT16), (256, BFLOAT16)],
    ids=str,
)
def test_operands_in_shared_memory(hopper: Bench, n: int, dtype: np.dtype, layout: str) -> None:
    a, b = _operands(n, dtype)
    a_is_KM, b_is_KN = layout[0] == "T", layout[1] == "N"
    device = current_device()
    a_array, b_array = hopper.array(_stored(a.T if a_is_KM else a)), hopper.array(_stored(b if b_is_KN else b.T))
    a_map = device.tensor_map(a_array, (64, 64))
    b_box, b_swizzle = ((K, _box_columns(n)), 2 * _box_columns(n)) if b_is_KN else ((n, K), 128)
    b_map = device.tensor_map(b_array, b_box, swizzle_bytes=b_swizzle)
    product = _make_kernel(n, "f16" if dtype == FLOAT16 else "bf16", a_is_KM, b_is_KN)
    outputs = [hopper.array(poisoned((n // 2, 128))) for _ in range(2)]
    for rounds, c in enumerate(outputs, start=1):
        product[1, 128, None, SHARED_BYTES](a_map, b_map, c, rounds)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    for rounds, c in enumerate(outputs, start=1):
        np.testing.assert_allclose(_matrix(hopper.result(c)), rounds * exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("n", [8, 16, 24, 80, 96, 160, 224])
def test_other_widths(hopper: Bench, n: int) -> None:
    a, b = _operands(n, BFLOAT16)
    device = current_device()
    a_array, b_array = hopper.array(_stored(a)), hopper.array(_stored(b.T))
    c = hopper.array(poisoned((n // 2, 128)))
    a_map, b_map = device.tensor_map(a_array, (64, K)), device.tensor_map(b_array, (n, K))
    _make_kernel(n, "bf16", False, False)[1, 128, None, SHARED_BYTES](a_map, b_map, c, 1)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(_matrix(hopper.result(c)), exact, rtol=1e-5, atol=1e-4)


@functools.cache
def _make_first_kernel(n: int) -> Kernel:
    begin, multiply = wgmma.make_first_multiply(n, "bf16"), wgmma.make_multiply(n, "bf16")
    wait, k_major, n_accumulators = wgmma.make_wait(0, n // 2), wgmma.k_major, n // 2

    @kernel(name=f"wgmma that begins n={n}")
    def product(a, b, registers, rounds):
        shared = cuda.shared.array(0, uint8)
        barriers = cuda.shared.array(1, uint64)
        barrier = integers.shared_address(barriers)
        a_tile = integers.round_up_1024(integers.shared_address(shared))
        b_tile = uint32(a_tile + uint32(TILE_BYTES))
        if cuda.threadIdx.x == 0:
            mbarrier.init(barrier, uint32(1))
            mbarrier.fence_init()
            mbarrier.arrive_and_expect(barrier, uint32(TILE_BYTES + n * K * 2))
            tma.acquire_map(a)
            tma.acquire_map(b)
            tma.load_2d(a, a_tile, barrier, 0, 0)
            tma.load_2d(b, b_tile, barrier, 0, 0)
        cuda.syncthreads()
        mbarrier.wait(barrier, uint32(0))
        acc = cuda.local.array(n_accumulators, float32)
        for _ in range(rounds):
            wgmma.fence()
            begin(acc, k_major(a_tile), k_major(b_tile))
            multiply(acc, k_major(a_tile) + uint64(2), k_major(b_tile) + uint64(2), int32(1))
            multiply(acc, k_major(a_tile) + uint64(4), k_major(b_tile) + uint64(4), int32(1))
            multiply(acc, k_major(a_tile) + uint64(6), k_major(b_tile) + uint64(6), int32(1))
            wgmma.commit()
            wait(acc)
        for i in range(n_accumulators):
            registers[i, cuda.threadIdx.x] = acc[i]

    return product


def test_a_sum_begins_without_what_was_there(hopper: Bench) -> None:
    n = 64
    a, b = _operands(n, BFLOAT16)
    device = current_device()
    a_array, b_array = hopper.array(_stored(a)), hopper.array(_stored(b.T))
    c = hopper.array(poisoned((n // 2, 128)))
    a_map, b_map = device.tensor_map(a_array, (64, K)), device.tensor_map(b_array, (n, K))
    _make_first_kernel(n)[1, 128, None, SHARED_BYTES](a_map, b_map, c, 3)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(_matrix(hopper.result(c)), exact, rtol=1e-5, atol=1e-4)


@functools.cache
def _make_registers_kernel(n: int, dtype: str, b_is_KN: bool) -> Kernel:
    multiply = wgmma.make_multiply_registers(n, dtype, b_is_KN)
    wait, drain = wgmma.make_wait(0, n // 2), wgmma.make_wait(1)
    mn_major, k_major = wgmma.make_mn_major(K), wgmma.k_major
    step, n_accumulators, n_registers = (128 if b_is_KN else 2), n // 2, K // 4

    @kernel(name=f"wgmma from registers n={n} {dtype} {'KN' if b_is_KN else 'NK'}")
    def product(a_MK, b, registers):
        shared = cuda.shared.array(0, uint8)
        barriers = cuda.shared.array(1, uint64)
        barrier = integers.shared_address(barriers)
        b_tile = integers.round_up_1024(integers.shared_address(shared))
        if cuda.threadIdx.x == 0:
            mbarrier.init(barrier, uint32(1))
            mbarrier.fence_init()
            mbarrier.arrive_and_expect(barrier, uint32(n * K * 2))
            tma.acquire_map(b)
            tma.load_2d(b, b_tile, barrier, 0, 0)
        cuda.syncthreads()
        mbarrier.wait(barrier, uint32(0))
        a = cuda.local.array(n_registers, uint32)
        row = 16 * (cuda.threadIdx.x // 32) + cuda.threadIdx.x % 32 // 4
        for k in range(K // 16):
            for r in range(4):
                column = 16 * k + 2 * (cuda.threadIdx.x % 4) + 8 * (r // 2)
                low, high = a_MK[row + 8 * (r % 2), column], a_MK[row + 8 * (r % 2), column + 1]
                a[4 * k + r] = uint32(low) | (uint32(high) << uint32(16))
        acc = cuda.local.array(n_accumulators, float32)
        for i in range(n_accumulators):
            acc[i] = float32(0)
        place = mn_major(b_tile) if b_is_KN else k_major(b_tile)
        wgmma.fence()
        for k in range(K // 16):
            multiply(acc, a, 4 * k, place + uint64(step * k), int32(1))
            wgmma.commit()
        drain()  # all groups but the last
        wait(acc)
        for i in range(n_accumulators):
            registers[i, cuda.threadIdx.x] = acc[i]

    return product


@pytest.mark.parametrize("b_is_KN", [False, True], ids=["NK", "KN"])
@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16], ids=str)
def test_a_from_registers(hopper: Bench, dtype: np.dtype, b_is_KN: bool) -> None:
    n = 64
    a, b = _operands(n, dtype)
    bits = hopper.array(np.ascontiguousarray(a).view(np.uint16))
    b_array, c = hopper.array(_stored(b if b_is_KN else b.T)), hopper.array(poisoned((n // 2, 128)))
    b_map = current_device().tensor_map(b_array, (64, 64))
    product = _make_registers_kernel(n, "f16" if dtype == FLOAT16 else "bf16", b_is_KN)
    product[1, 128, None, SHARED_BYTES](bits, b_map, c)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_allclose(_matrix(hopper.result(c)), exact, rtol=1e-5, atol=1e-4)
