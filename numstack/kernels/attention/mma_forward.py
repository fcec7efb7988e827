"""Attention's forward pass on tensor cores from sm_80 on: ``mma.sync``, keys and values by ``cp.async``.

A block has ``rows`` queries, a warp 16 or 32 of them. It walks over tiles of keys; the scores of a tile, their
exponentials and the result stay in registers, for the accumulators of one product are, packed to 16 bits, the first
operand of the next. While scores are made the tile's values arrive, while values are added the next tile's keys::

    copies      keys 0 | values 0         | keys 1           | values 1  ...
    warps              | scores 0         | softmax, values 0| scores 1  ...

The largest score so far, and the sum of exponentials, are kept for each row; when the maximum grows, what was summed is
corrected. Rows lie in shared memory in chunks of 16 bytes, turned (xor) by the row, so that ``ldmatrix`` reads eight
rows from different banks. Causal blocks come longest first.

Measured on an H200, causal, bfloat16: 236 TFLOP/s with heads of width 64 and 1024 times (PyTorch's FlashAttention-2:
222), 245 with heads of width 128 and 8192 times (252).

Source: Dao 2023, "FlashAttention-2".
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numba import cuda, float32, int32, uint16, uint32

from numstack.device import Array, Kernel, Stream, current_device, kernel
from numstack.device.ptx import integers, mma, vectors
from numstack.device.ptx import math as ptx_math
from numstack.kernels.attention.hopper import (
    LN2,
    MASKED,
    Operands,
    pack_of,
    padded_width,
    quad_max,
    quad_sum,
    wgmma_dtype,
)
from numstack.kernels.launch import ceil_div


class Tiles(NamedTuple):
    """How attention is cut.

    Attributes
    ----------
    width : {64, 128}
        Of heads, padded with zeros.
    warps : int
        Of a block.
    blocks_m : int
        16 queries each, of a warp.
    keys : int
        Of a tile; a multiple of 16.
    """

    width: int
    warps: int
    blocks_m: int
    keys: int

    @property
    def rows(self) -> int:
        return 16 * self.warps * self.blocks_m

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        return 2 * self.width * (self.rows + 2 * self.keys)


def tiles_of(width: int) -> Tiles:
    """For heads of this width. On a CPU the kernel shows that it is right, not that it is fast."""
    width = padded_width(width)
    if current_device().kind == "cpu":
        return Tiles(width, 2, 1, 32)
    return Tiles(width, 4, 2, 64 if width == 64 else 32)  # the result of wide heads takes half of all registers


def _make_load_rows(rows: int, width: int, threads: int) -> Any:
    """A device function: rows of a head, from ``first`` on, into shared memory; zeros beyond its rows and columns."""
    chunks = width // 8
    step = threads // chunks
    passes = rows // step

    @cuda.jit(device=True)
    def load_rows(tile_U, start, source, at, stride, first, n_rows, n_columns):
        column = cuda.threadIdx.x % chunks * 8
        first = integers.anew(first)
        for p in range(passes):
            row = cuda.threadIdx.x // chunks + p * step
            is_inside = first + row < n_rows and column < n_columns
            place = start + row * width + (column ^ ((row & 7) << 3))
            mma.cp_async_16(tile_U, place, source, at + (first + row) * stride + column, 16 if is_inside else 0)

    return load_rows


@functools.cache
def make_forward(tiles: Tiles, dtype: str, causal: bool) -> Kernel:
    """The kernel. Arrays come as one axis over all of their memory, with the strides of batch, head and time."""
    width, blocks_m, tile_keys = tiles.width, tiles.blocks_m, tiles.keys
    rows, warp_rows = tiles.rows, 16 * blocks_m
    keys_at, values_at = rows * width, (rows + tile_keys) * width
    blocks_n, blocks_d, steps_d, steps_k = tile_keys // 8, width // 8, width // 16, tile_keys // 16
    score_registers, out_registers = blocks_m * blocks_n * 4, blocks_m * blocks_d * 4
    keeps_queries = width == 64  # in registers; of wider heads they are read again for each tile
    query_registers = blocks_m * 4 * (steps_d if keeps_queries else 1)
    n_rows = 2 * blocks_m  # of a thread
    chunks = width // 8
    store_passes = warp_rows * chunks // 32
    load_queries = _make_load_rows(rows, width, tiles.threads)
    load_tile = _make_load_rows(tile_keys, width, tiles.threads)
    multiply = mma.mma_m16n8k16_bf16 if dtype == "bf16" else mma.mma_m16n8k16_f16
    pack = pack_of(dtype)
    wait = mma.cp_async_wait_group(0)

    @cuda.jit(device=True)
    def load_query_blocks(queries, first_register, tile_U, q_lane, s):
        for i in range(blocks_m):
            mma.ldmatrix_x4(queries, first_register + 4 * i, tile_U, (q_lane ^ (16 * s)) + 16 * i * width)

    @cuda.jit(device=True)
    def make_scores(scores, queries, tile_U, q_lane, k_lane):
        """Of a tile of keys."""
        block = cuda.local.array(4, uint32)
        q_lane = integers.anew(q_lane)
        k_lane = integers.anew(k_lane)
        for i in range(score_registers):
            scores[i] = float32(0)
        for s in range(steps_d):
            if not keeps_queries:
                load_query_blocks(queries, 0, tile_U, q_lane, s)
            first = 4 * blocks_m * s if keeps_queries else 0
            for j in range(blocks_n // 2):
                mma.ldmatrix_x4(block, 0, tile_U, (k_lane ^ (16 * s)) + 16 * j * width)
                for i in range(blocks_m):
                    multiply(scores, (i * blocks_n + 2 * j) * 4, queries, first + 4 * i, block, 0)
                    multiply(scores, (i * blocks_n + 2 * j + 1) * 4, queries, first + 4 * i, block, 2)

    @cuda.jit(device=True)
    def add_values(total, scores, tile_U, v_lane):
        """The values of a tile, weighted by its exponentials."""
        weights = cuda.local.array(query_weights, uint32)
        block = cuda.local.array(4, uint32)
        v_lane = integers.anew(v_lane)
        for s in range(steps_k):
            for i in range(blocks_m):
                for e in range(4):
                    at = (i * blocks_n + 2 * s) * 4 + 2 * e
                    weights[4 * i + e] = pack(scores[at], scores[at + 1])
            for j in range(blocks_d // 2):
                mma.ldmatrix_x4_trans(block, 0, tile_U, (v_lane ^ (16 * j)) + 16 * s * width)
                for i in range(blocks_m):
                    multiply(total, (i * blocks_d + 2 * j) * 4, weights, 4 * i, block, 0)
                    multiply(total, (i * blocks_d + 2 * j + 1) * 4, weights, 4 * i, block, 2)

    query_weights = 4 * blocks_m

    @cuda.jit(device=True)
    def mask(scores, first, key0, n_keys):
        """Scores of keys that do not exist, or that a query must not see."""
        thread = integers.anew(int32(cuda.threadIdx.x))  # rarely used: not worth registers that live on
        row = int32(first + (thread >> 5) * warp_rows + ((thread & 31) >> 2))
        key = int32(key0 + (thread & 3) * 2)
        for i in range(blocks_m):
            for j in range(blocks_n):
                for e in range(4):
                    of_row = int32(row + 16 * i + 8 * (e // 2))
                    of_key = int32(key + 8 * j + e % 2)
                    if of_key >= n_keys or (causal and of_key > of_row):
                        scores[(i * blocks_n + j) * 4 + e] = MASKED

    @cuda.jit(device=True)
    def weigh(scores, total, largest, sums, factor):
        """Scores become exponentials, and what was summed before is corrected for a maximum that grew."""
        for r in range(n_rows):
            i, half = r // 2, r % 2
            high = largest[r]
            for j in range(blocks_n):
                at = (i * blocks_n + j) * 4 + 2 * half
                high = ptx_math.maximum(high, ptx_math.maximum(scores[at], scores[at + 1]))
            high = quad_max(high)
            correction = ptx_math.exp2((largest[r] - high) * factor)
            largest[r] = high
            below = high * factor
            added = sums[r] * correction
            for j in range(blocks_n):
                at = (i * blocks_n + j) * 4 + 2 * half
                scores[at] = ptx_math.exp2(scores[at] * factor - below)
                scores[at + 1] = ptx_math.exp2(scores[at + 1] * factor - below)
                added += scores[at] + scores[at + 1]
            sums[r] = added
            for j in range(blocks_d):
                at = (i * blocks_d + j) * 4 + 2 * half
                total[at] *= correction
                total[at + 1] *= correction

    @kernel(name=f"attention.forward mma_sync D{width}")
    def mma_forward(
        q, k, v, out, lse_BHT, factor, n_queries, n_keys, n_columns,
        q_batch, q_head, q_time, k_batch, k_head, k_time, v_batch, v_head, v_time, out_batch, out_head, out_time,
    ):  # fmt: skip
        """Grid (tiles of queries, heads, batch); ``factor`` is the scale times log2(e)."""
        tile_U = cuda.shared.array(0, uint16)
        scores = cuda.local.array(score_registers, float32)
        total = cuda.local.array(out_registers, float32)
        queries = cuda.local.array(query_registers, uint32)
        largest = cuda.local.array(n_rows, float32)
        sums = cuda.local.array(n_rows, float32)
        lane = cuda.threadIdx.x & 31
        warp = cuda.threadIdx.x >> 5
        head = cuda.blockIdx.y
        batch = cuda.blockIdx.z
        block = cuda.gridDim.x - 1 - cuda.blockIdx.x if causal else cuda.blockIdx.x
        first = int32(block * rows)
        end = int32(min(n_keys, first + rows)) if causal else n_keys
        k_at = batch * k_batch + head * k_head
        v_at = batch * v_batch + head * v_head
        for i in range(out_registers):
            total[i] = float32(0)
        for r in range(n_rows):
            largest[r] = MASKED
            sums[r] = float32(0)

        # Where, in shared memory, the row begins that this lane names to ldmatrix; steps along a row flip bits.
        low = lane & 15
        high = lane >> 4
        near = (lane & 7) + (high << 3)
        q_lane = int32((warp * warp_rows + low) * width + ((high ^ (low & 7)) << 3))
        k_lane = int32(keys_at + near * width + ((((lane >> 3) & 1) ^ (near & 7)) << 3))
        v_lane = int32(values_at + low * width + ((high ^ (low & 7)) << 3))

        load_queries(tile_U, 0, q, batch * q_batch + head * q_head, q_time, first, n_queries, n_columns)
        load_tile(tile_U, keys_at, k, k_at, k_time, 0, n_keys, n_columns)
        mma.cp_async_commit_group()
        if keeps_queries:
            wait()
            cuda.syncthreads()
            for s in range(steps_d):
                load_query_blocks(queries, 4 * blocks_m * s, tile_U, q_lane, s)

        for key0 in range(int32(0), end, int32(tile_keys)):
            following = int32(key0 + tile_keys)
            wait()
            cuda.syncthreads()
            load_tile(tile_U, values_at, v, v_at, v_time, key0, n_keys, n_columns)
            mma.cp_async_commit_group()
            make_scores(scores, queries, tile_U, q_lane, k_lane)
            if following > n_keys or (causal and following > first):
                mask(scores, first, key0, n_keys)
            wait()
            cuda.syncthreads()
            if following < end:
                load_tile(tile_U, keys_at, k, k_at, k_time, following, n_keys, n_columns)
                mma.cp_async_commit_group()
            weigh(scores, total, largest, sums, factor)
            add_values(total, scores, tile_U, v_lane)

        # The result leaves by where the warp's own queries were, so that each lane stores 16 bytes.
        words = cuda.shared.array(0, uint32)
        column = (lane & 3) * 2
        cuda.syncwarp()
        for r in range(n_rows):
            i, half = r // 2, r % 2
            sum_of_row = quad_sum(sums[r])
            inverse = ptx_math.reciprocal(sum_of_row)
            own = warp * warp_rows + 16 * i + 8 * half + (lane >> 2)
            for j in range(blocks_d):
                at = (i * blocks_d + j) * 4 + 2 * half
                place = own * width + ((j ^ (own & 7)) << 3) + column
                words[place >> 1] = pack(total[at] * inverse, total[at + 1] * inverse)
            if column == 0 and first + own < n_queries:
                lse_BHT[batch, head, first + own] = (largest[r] * factor + ptx_math.log2(sum_of_row)) * LN2
        cuda.syncwarp()
        out_values = cuda.local.array(8, float32)
        for p in range(store_passes):
            own = warp * warp_rows + (p * 32 + lane) // chunks
            chunk = (p * 32 + lane) % chunks
            if first + own < n_queries and 8 * chunk < n_columns:
                # As bfloat16 whatever the bits mean: there and back they stay the same.
                vectors.load8(tile_U, own * width + ((chunk ^ (own & 7)) << 3), out_values, 0)
                at = batch * out_batch + head * out_head + (first + own) * out_time + 8 * chunk
                vectors.store8(out, at, out_values, 0)

    return mma_forward


def supports(operands: Operands) -> bool:
    """16-bit floats in rows of whole 16 bytes, and a scale that keeps the order of scores."""
    return operands.scale > 0 and operands.fit_copy_engine()


def forward(arrays: tuple[Array, ...], scale: float, causal: bool, product_flops: int, stream: Stream | None) -> None:
    """Launch the forward pass over (q, k, v, out, lse)."""
    launch(tiles_of(arrays[0].shape[3]), arrays, scale, causal, product_flops, stream)


def launch(
    tiles: Tiles, arrays: tuple[Array, ...], scale: float, causal: bool, product_flops: int, stream: Stream | None
) -> None:
    """Launch with tiles of a given cut."""
    *strided, lse = arrays
    q, k = strided[:2]
    B, H, T, width = q.shape
    strides = [stride // array.itemsize for array in strided for stride in array.strides[:3]]
    compiled = make_forward(tiles, wgmma_dtype(q.dtype), causal)
    compiled[(ceil_div(T, tiles.rows), H, B), tiles.threads, stream, tiles.shared_bytes](
        *map(_memory_of, strided),
        lse,
        scale * math.log2(math.e),
        T,
        k.shape[2],
        width,
        *strides,
        flops=2 * product_flops,
    )


def _memory_of(array: Array) -> Array:
    """The elements from the first to the last of a strided array, and what lies between them, as one axis of bits."""
    size = 1 + sum((n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)) // array.itemsize
    device = current_device()
    return device.view(device.address(array), (size,), np.uint16, owner=array)
