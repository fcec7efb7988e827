"""Attention backward on Hopper: five products of wgmma for each tile, TMA for all traffic, and sums in a fixed order.

Three kernels:

1. ``prepare``: delta, and the log-sum-exp in units of log 2, padded to whole tiles;
2. ``gradients`` (``wgmma_gradients.py``): a block of keys walks over the queries that see it; dk and dv stay in
   registers, dq is added to float32 sums in global memory by the copy engine, one block of keys after the other in a
   fixed order (``wgmma_backward_layout.py``), which costs nothing: without turns, on an H200, it took as long;
3. ``finish``: dq of the sums, scaled and rounded.

Five products are the least there are; a kernel for dq of its own would need seven, and every exponential twice.

Widths are padded to 64 or 128 and lengths to whole tiles by the copy engine, which reads zeros outside an array and
writes nothing there.

Sources: Dao 2023, "FlashAttention-2", algorithm 2; Shah et al. 2024, "FlashAttention-3".
"""

import functools
import math
from typing import NamedTuple

import numpy as np
from numba import cuda, float32, int32, int64, uint8, uint32

from numstack.device import Array, Kernel, Stream, current_device, kernel
from numstack.device.ptx import integers, sync, tma
from numstack.device.ptx.math import LOG2_E
from numstack.device.ptx.vectors import WIDEST, load4_once, load8, load8_once
from numstack.errors import DTypeError
from numstack.kernels.attention.hopper import ROWS, SWIZZLED, Operands, pack_of, padded_width, wgmma_dtype
from numstack.kernels.attention.wgmma_backward_layout import (
    DQ_HALF,
    DQ_REGISTERS,
    KEYS,
    ROW_BYTES,
    THREADS,
    tiles_of,
)
from numstack.kernels.attention.wgmma_gradients import make_gradients, make_put_packed
from numstack.kernels.launch import ceil_div

SMALL_BLOCK = 256  # threads of the other two kernels
VECTOR = 8  # elements that a thread loads at once: 16 bytes


class Workspace(NamedTuple):
    """Parts of the workspace, in float32 elements; the last two hold int32.

    Attributes
    ----------
    dq : int
        Sums of dq, of whole tiles.
    rows : int
        Log-sum-exp and delta of whole tiles.
    turns : int
        Of each tile the number of blocks of keys that have added their dq.
    tickets : int
        Items of work that are given out.
    """

    dq: int
    rows: int
    turns: int
    tickets: int

    @staticmethod
    def of(B: int, H: int, T: int, width: int) -> "Workspace":
        tiles = tiles_of(padded_width(width))
        n_tiles = B * H * ceil_div(T, tiles.queries)
        return Workspace(n_tiles * tiles.queries * tiles.width, n_tiles * tiles.queries * 2, n_tiles, 1)


def workspace_size(B: int, H: int, T: int, width: int) -> int:
    """Number of float32 elements that :func:`backward` needs."""
    return sum(Workspace.of(B, H, T, width))


@functools.cache
def _make_prepare(width: int) -> Kernel:
    """delta_i = do_i . out_i and lse_i in units of log 2 for a tile of queries, zero and infinite beyond the last."""
    queries = tiles_of(width).queries
    lanes = width // VECTOR  # of a row
    rows = SMALL_BLOCK // lanes
    n_steps = queries // rows

    @kernel(name="attention.prepare_backward", starts_early=True)
    def _prepare(out_BHTD, do_BHTD, lse_BHT, rows_R, turns_S, tickets_1):
        head, tile, batch = cuda.blockIdx.x, int32(cuda.blockIdx.y), cuda.blockIdx.z
        thread = int32(cuda.threadIdx.x)
        T, D = int32(out_BHTD.shape[2]), int32(out_BHTD.shape[3])
        place = (int64(batch) * int64(cuda.gridDim.x) + int64(head)) * int64(cuda.gridDim.y) + int64(tile)
        if thread == int32(0):
            turns_S[place] = int32(0)
            if place == int64(0):
                tickets_1[0] = int32(0)
        own_row = integers.divide(thread, int32(lanes))
        d = int32(integers.remainder(thread, int32(lanes)) * int32(VECTOR))
        out_0 = (batch * out_BHTD.strides[0] + head * out_BHTD.strides[1]) // 2 + d
        do_0 = (batch * do_BHTD.strides[0] + head * do_BHTD.strides[1]) // 2 + d
        out = cuda.local.array((n_steps, VECTOR), float32)
        do = cuda.local.array((n_steps, VECTOR), float32)
        for step in range(n_steps):
            row = int32(tile * int32(queries) + own_row + int32(rows * step))
            if row < T and d < D:
                load8_once(out_BHTD, out_0 + row * (out_BHTD.strides[2] // 2), out[step], 0)
                load8(do_BHTD, do_0 + row * (do_BHTD.strides[2] // 2), do[step], 0)
            else:
                for i in range(VECTOR):
                    out[step, i] = float32(0)
                    do[step, i] = float32(0)
        for step in range(n_steps):
            delta = float32(0)
            for i in range(VECTOR):
                delta += out[step, i] * do[step, i]
            distance = lanes // 2
            while distance:
                delta += cuda.shfl_xor_sync(0xFFFFFFFF, delta, distance)
                distance //= 2
            if d == int32(0):
                in_tile = int32(own_row + int32(rows * step))
                row = int32(tile * int32(queries) + in_tile)
                lse = float32(math.inf)
                if row < T:
                    lse = lse_BHT[batch, head, row] * LOG2_E
                rows_R[place * int64(2 * queries) + in_tile] = lse
                rows_R[place * int64(2 * queries) + queries + in_tile] = delta

    return _prepare


@functools.cache
def _make_finish(width: int, dtype: str) -> Kernel:
    """A tile of dq from its sums, which lie as the accumulators of the two consumers had them."""
    queries = tiles_of(width).queries
    is_wide = width == 2 * SWIZZLED
    n_packed = DQ_REGISTERS // 2
    pack, put_packed = pack_of(dtype), make_put_packed(SWIZZLED)
    wait_until_read = tma.make_wait(0, reads_only=True)

    @kernel(name="attention.finish_backward", starts_early=True)
    def _finish(dq_E, dq_map, scale):
        base = integers.round_up_1024(integers.shared_address(cuda.shared.array(0, uint8)))
        half = sync.uniform(uint32(cuda.threadIdx.x) >> uint32(7))
        thread = uint32(cuda.threadIdx.x) & uint32(127)
        head, tile, batch = int32(cuda.blockIdx.x), int32(cuda.blockIdx.y), int32(cuda.blockIdx.z)
        place = (int64(batch) * int64(cuda.gridDim.x) + int64(head)) * int64(cuda.gridDim.y) + int64(tile)
        first = (place * int64(2) + int64(half)) * int64(DQ_HALF) + int64(thread) * int64(4)
        dq = cuda.local.array(DQ_REGISTERS, float32)
        packed = cuda.local.array(n_packed, uint32)
        for i in range(DQ_REGISTERS // 4):
            load4_once(dq_E, first + int64(i * 512), dq, 4 * i)
        for i in range(n_packed):
            packed[i] = pack(dq[2 * i] * scale, dq[2 * i + 1] * scale)
        own_tile = uint32(base + half * uint32(ROWS * ROW_BYTES))
        put_packed(packed, own_tile)
        tma.fence_async()
        cuda.syncthreads()
        if thread == uint32(0):
            row = int32(tile * int32(queries))
            tma.acquire_map(dq_map)
            if is_wide:
                tma.store_4d(dq_map, own_tile, int32(half * uint32(SWIZZLED)), row, head, batch)
            else:
                tma.store_4d(dq_map, own_tile, int32(0), int32(row + int32(half * uint32(ROWS))), head, batch)
            tma.commit()
            wait_until_read()

    return _finish


def supports(operands: Operands) -> bool:
    """Whether the kernels are right for these arrays: 16-bit, as tensor maps and 16-byte loads need them."""
    return operands.fit_copy_engine() and operands.arrays[0].shape[3] % VECTOR == 0


def backward(
    arrays: tuple[Array, ...], workspace: Array, scale: float, causal: bool, product_flops: int, stream: Stream | None
) -> None:
    """Launch the backward pass over (q, k, v, out, dout, lse, dq, dk, dv).

    Raises
    ------
    DTypeError
        If the workspace does not begin at a multiple of 16 bytes.
    """
    device = current_device()
    if device.address(workspace) % WIDEST:
        raise DTypeError(
            f"attention: the workspace begins at {device.address(workspace):#x}; the copy engine needs a multiple of "
            f"{WIDEST} bytes: allocate it by itself"
        )
    q, k, v, out, dout, lse, dq, dk, dv = arrays
    B, H, T, D = q.shape
    width, dtype = padded_width(D), wgmma_dtype(q.dtype)
    tiles = tiles_of(width)
    grid = (H, ceil_div(T, tiles.queries), B)
    n_blocks = ceil_div(k.shape[2], KEYS)
    n_items = B * H * n_blocks
    sizes = Workspace.of(B, H, T, D)
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    dq_E, rows_R = workspace[: ends[0]], workspace[ends[0] : ends[1]]
    turns_S, tickets_1 = (workspace[a:b].view(np.int32) for a, b in ((ends[1], ends[2]), (ends[2], ends[3])))
    k_map, v_map = (device.tensor_map(a, (1, 1, KEYS, SWIZZLED)) for a in (k, v))
    q_map, do_map = (device.tensor_map(a, (1, 1, tiles.queries, SWIZZLED)) for a in (q, dout))
    dq_map, dk_map, dv_map = (device.tensor_map(a, (1, 1, ROWS, SWIZZLED)) for a in (dq, dk, dv))

    _make_prepare(width)[grid, SMALL_BLOCK, stream](out, dout, lse, rows_R, turns_S, tickets_1)
    gradients = make_gradients(width, dtype, causal)
    gradients[min(n_items, device.properties.multiprocessors), THREADS, stream, tiles.nbytes](
        k_map, v_map, q_map, do_map, dk_map, dv_map, rows_R, dq_E, turns_S, tickets_1, n_items, H, T, k.shape[2], scale,
        scale * float(LOG2_E), flops=5 * product_flops,
    )  # fmt: skip
    _make_finish(width, dtype)[grid, SMALL_BLOCK, stream, 2 * ROWS * ROW_BYTES + 1024](dq_E, dq_map, scale)
