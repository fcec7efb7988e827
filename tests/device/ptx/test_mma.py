"""numstack.device.ptx.mma: fragments lie as its tables say, products are those of NumPy, copies fill with zeros."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from numba import cuda, float32, uint16, uint32

from numstack.device import Kernel, current_device, kernel
from numstack.device.ptx import mma
from numstack.errors import KernelError
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

PITCH = 24  # elements from a row of a block to the next: not a power of two, and a multiple of 16 bytes
BLOCKS_PADDED = 32 * PITCH  # numba.cuda takes no expression for the size of an array
LOADS = {
    "x1": (mma.ldmatrix_x1, 1, False),
    "x2": (mma.ldmatrix_x2, 2, False),
    "x4": (mma.ldmatrix_x4, 4, False),
    "x1 trans": (mma.ldmatrix_x1_trans, 1, True),
    "x2 trans": (mma.ldmatrix_x2_trans, 2, True),
    "x4 trans": (mma.ldmatrix_x4_trans, 4, True),
}
STORES = {
    "x1": (mma.stmatrix_x1, 1, False),
    "x2": (mma.stmatrix_x2, 2, False),
    "x4": (mma.stmatrix_x4, 4, False),
    "x1 trans": (mma.stmatrix_x1_trans, 1, True),
    "x2 trans": (mma.stmatrix_x2_trans, 2, True),
    "x4 trans": (mma.stmatrix_x4_trans, 4, True),
}
PRODUCTS = {"bfloat16": (mma.mma_m16n8k16_bf16, BFLOAT16), "float16": (mma.mma_m16n8k16_f16, np.dtype(np.float16))}
COPIES = {4: mma.cp_async_4, 8: mma.cp_async_8, 16: mma.cp_async_16}
LANE = np.arange(32)
G, T = LANE // 4, LANE % 4


@pytest.fixture(params=["as launched", "under checks"])
def way(request, monkeypatch) -> None:
    """Launches as they are, and on a CPU also under simt's checks."""
    if request.param == "under checks":
        if current_device().kind != "cpu":
            pytest.skip("checks run on the CPU device: NUMSTACK_DEVICE=cpu runs this test")
        monkeypatch.setattr(current_device(), "checks", True)


def pairs(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Registers of two 16-bit elements each."""
    return low.view(np.uint16).astype(np.uint32) | (high.view(np.uint16).astype(np.uint32) << 16)


@functools.cache
def loading(what: str) -> Kernel:
    load, count, _ = LOADS[what]
    first = 2  # of more registers than are loaded
    size = count + first

    @kernel(name=f"ldmatrix {what}")
    def load_blocks(x_RC, order_R, registers_TN):
        rows = cuda.shared.array(BLOCKS_PADDED, uint16)
        registers = cuda.local.array(size, uint32)
        t = cuda.threadIdx.x
        for c in range(8):
            rows[t * PITCH + c] = x_RC[t, c]
        cuda.syncthreads()
        load(registers, first, rows, order_R[t] * PITCH)
        for i in range(count):
            registers_TN[t, i] = registers[first + i]

    return load_blocks


@pytest.mark.parametrize("what", LOADS)
def test_ldmatrix_gives_each_lane_its_part_of_each_block(what, way):
    _, count, transposed = LOADS[what]
    rng = np.random.default_rng(0)
    x = rng.integers(0, 1 << 16, (32, 8), dtype=np.uint16)
    order = rng.permutation(32).astype(np.int32)
    registers = to_device(poisoned((32, count), np.uint32))
    loading(what)[1, 32](to_device(x), to_device(order), registers)
    blocks = x[order].reshape(4, 8, 8)[:count]
    expected = [
        pairs(block[2 * T, G], block[2 * T + 1, G]) if transposed else pairs(block[G, 2 * T], block[G, 2 * T + 1])
        for block in blocks
    ]
    np.testing.assert_array_equal(to_host(registers), np.stack(expected, 1))


@functools.cache
def storing(what: str) -> Kernel:
    store, count, _ = STORES[what]
    first = 1
    size = count + first

    @kernel(name=f"stmatrix {what}")
    def store_blocks(registers_TN, order_R, x_RC):
        rows = cuda.shared.array(BLOCKS_PADDED, uint16)
        registers = cuda.local.array(size, uint32)
        t = cuda.threadIdx.x
        for c in range(8):
            rows[t * PITCH + c] = uint16(7)
        for i in range(count):
            registers[first + i] = registers_TN[t, i]
        cuda.syncthreads()
        store(rows, order_R[t] * PITCH, registers, first)
        cuda.syncthreads()
        for c in range(8):
            x_RC[t, c] = rows[t * PITCH + c]

    return store_blocks


@pytest.mark.parametrize("what", STORES)
def test_stmatrix_stores_what_ldmatrix_would_load(what, way):
    device = current_device()
    if device.kind == "cuda" and device.properties.compute_capability < (9, 0):
        pytest.skip("stmatrix needs a GPU of compute capability 9.0 or more")
    _, count, transposed = STORES[what]
    rng = np.random.default_rng(1)
    registers = rng.integers(0, 1 << 32, (32, count), dtype=np.uint32)
    order = rng.permutation(32).astype(np.int32)
    x = to_device(poisoned((32, 8), np.uint16))
    storing(what)[1, 32](to_device(registers), to_device(order), x)
    blocks = np.empty((count, 8, 8), np.uint16)
    for i in range(count):
        first, second = ((2 * T, G), (2 * T + 1, G)) if transposed else ((G, 2 * T), (G, 2 * T + 1))
        blocks[i][first], blocks[i][second] = registers[:, i] & 0xFFFF, registers[:, i] >> 16
    expected = np.full((32, 8), 7, np.uint16)
    expected[order[: 8 * count]] = blocks.reshape(-1, 8)
    np.testing.assert_array_equal(to_host(x), expected)


@functools.cache
def multiplying(dtype: str) -> Kernel:
    multiply = PRODUCTS[dtype][0]

    @kernel(name=f"mma {dtype}")
    def product(a_TN, b_TN, c_TN):
        a = cuda.local.array(8, uint32)
        b = cuda.local.array(4, uint32)
        c = cuda.local.array(8, float32)
        t = cuda.threadIdx.x
        for i in range(4):
            a[4 + i] = a_TN[t, i]
            c[4 + i] = c_TN[t, i]
        for i in range(2):
            b[2 + i] = b_TN[t, i]
        multiply(c, 4, a, 4, b, 2)
        for i in range(4):
            c_TN[t, i] = c[4 + i]

    return product


@pytest.mark.parametrize("dtype", PRODUCTS)
def test_mma_multiplies_fragments(dtype, way):
    rng = np.random.default_rng(2)
    stored = PRODUCTS[dtype][1]
    a, b = rng.standard_normal((16, 16)).astype(stored), rng.standard_normal((16, 8)).astype(stored)
    c = rng.standard_normal((16, 8)).astype(np.float32)
    a_registers = [pairs(a[row, k], a[row, k + 1]) for k in (2 * T, 2 * T + 8) for row in (G, G + 8)]
    b_registers = [pairs(b[k, G], b[k + 1, G]) for k in (2 * T, 2 * T + 8)]
    rows, columns = np.stack([G, G, G + 8, G + 8], 1), np.stack([2 * T, 2 * T + 1] * 2, 1)
    got = to_device(np.ascontiguousarray(c[rows, columns]))
    multiplying(dtype)[1, 32](to_device(np.stack(a_registers, 1)), to_device(np.stack(b_registers, 1)), got)
    expected = c + a.astype(np.float64) @ b.astype(np.float64)
    assert_close(to_host(got), expected[rows, columns], rtol=1e-5, atol=1e-5)


@functools.cache
def copying(size: int) -> Kernel:
    copy, n = COPIES[size], size // 2
    wait = mma.cp_async_wait_group(0)
    n_elements = 32 * n

    @kernel(name=f"cp.async {size}")
    def copied(x_N, nbytes_T, y_N):
        tile = cuda.shared.array(n_elements, uint16)
        t = cuda.threadIdx.x
        copy(tile, (31 - t) * n, x_N, t * n, nbytes_T[t])
        mma.cp_async_commit_group()
        wait()
        cuda.syncthreads()
        for i in range(n):
            y_N[t * n + i] = tile[t * n + i]

    return copied


@pytest.mark.parametrize("size", COPIES)
def test_cp_async_copies_and_fills_with_zeros(size, way):
    n = size // 2
    x = np.random.default_rng(3).integers(1, 1 << 16, (32, n), dtype=np.uint16)
    nbytes = np.arange(32, dtype=np.int32) % (n + 1) * 2
    y = to_device(poisoned(32 * n, np.uint16))
    copying(size)[1, 32](to_device(x.reshape(-1)), to_device(nbytes), y)
    expected = np.where(2 * np.arange(n) < nbytes[:, None], x, 0)[::-1]
    np.testing.assert_array_equal(to_host(y).reshape(32, n), expected)
    assert copying(size).accesses.reads == (0, 1)


@kernel
def _words_turned(x_N, y_N):
    """Each lane moves 8 elements to the place of the lane opposite, and exchanges the halves of each word."""
    words = cuda.local.array(5, uint32)
    t = cuda.threadIdx.x
    mma.load_words(words, 1, x_N, 8 * t)
    for i in range(1, 5):
        words[i] = (words[i] >> uint32(16)) | (words[i] << uint32(16))
    mma.store_words(y_N, 8 * (31 - t), words, 1)


@kernel
def _pairs_turned(x_N, y_N):
    t = cuda.threadIdx.x
    first, second = mma.load_pair(x_N, 2 * t)
    mma.store_pair(y_N, 2 * (31 - t), second, first)


def test_words_and_pairs_go_to_memory_and_back(way):
    x, y = np.arange(256, dtype=np.uint16), to_device(poisoned(256, np.uint16))
    _words_turned[1, 32](to_device(x), y)
    np.testing.assert_array_equal(to_host(y).reshape(32, 4, 2), x.reshape(32, 4, 2)[::-1, :, ::-1])
    x, y = np.arange(64, dtype=np.float32), to_device(poisoned(64, np.float32))
    _pairs_turned[1, 32](to_device(x), y)
    np.testing.assert_array_equal(to_host(y), x[::-1])


def test_checks_see_what_ldmatrix_reads():
    @kernel
    def races(y):
        rows = cuda.shared.array(256, uint16)
        registers = cuda.local.array(1, uint32)
        t = cuda.threadIdx.x
        for c in range(8):
            rows[(31 - t) * 8 + c] = uint16(t)
        mma.ldmatrix_x1(registers, 0, rows, t * 8)
        y[t] = registers[0]

    @kernel
    def reads_before_writing(y):
        rows = cuda.shared.array(256, uint16)
        registers = cuda.local.array(4, uint32)
        mma.ldmatrix_x4(registers, 0, rows, cuda.threadIdx.x * 8)
        y[cuda.threadIdx.x] = registers[0]

    @kernel
    def out_of_bounds(y):
        rows = cuda.shared.array(256, uint16)
        registers = cuda.local.array(4, uint32)
        t = cuda.threadIdx.x
        for c in range(8):
            rows[t * 8 + c] = uint16(t)
        cuda.syncthreads()
        mma.ldmatrix_x4(registers, 0, rows, t * 8 + 8)
        y[t] = registers[0]

    y = to_device(np.zeros(32, np.uint32))
    for case, message in ((races, "race"), (reads_before_writing, "nothing has written"), (out_of_bounds, "outside")):
        with pytest.raises(KernelError, match=message):
            case.check[1, 32](y)


def test_checks_see_registers_that_nothing_wrote_and_lanes_that_stay_away():
    @kernel
    def unset(y):
        a = cuda.local.array(4, uint32)
        b = cuda.local.array(2, uint32)
        c = cuda.local.array(4, float32)
        for i in range(4):
            c[i] = float32(0)
            a[i] = uint32(0)
        b[0] = uint32(0)
        mma.mma_m16n8k16_bf16(c, 0, a, 0, b, 0)
        y[cuda.threadIdx.x] = c[0]

    @kernel
    def half_a_warp(y):
        a = cuda.local.array(4, uint32)
        b = cuda.local.array(2, uint32)
        c = cuda.local.array(4, float32)
        for i in range(4):
            c[i] = float32(0)
            a[i] = uint32(0)
        b[0] = uint32(0)
        b[1] = uint32(0)
        if cuda.threadIdx.x < 16:
            mma.mma_m16n8k16_bf16(c, 0, a, 0, b, 0)
        y[cuda.threadIdx.x] = c[0]

    y = to_device(np.zeros(32, np.float32))
    with pytest.raises(KernelError, match=r"b\[1\], which nothing has written"):
        unset.check[1, 32](y)
    with pytest.raises(KernelError, match="takes all 32 lanes of a warp, but only 16"):
        half_a_warp.check[1, 32](y)
    if current_device().kind == "cpu":
        with pytest.raises(KernelError, match="under a condition that differs between the lanes of a warp"):
            half_a_warp[1, 32](y)
