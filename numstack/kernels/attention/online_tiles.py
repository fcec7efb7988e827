"""Attention by tiles: a block has 32 rows of its own, and takes the other side's rows in tiles through shared memory.

A block is (32, WARPS) threads. Lane x has row x of the block's 32; the warps share the work on it: of a tile's scores,
warp y makes rows y * OWN .. (y + 1) * OWN, of the result it makes columns y * SLICE .. (y + 1) * SLICE. The block's own
rows lie in shared memory by columns, q_DR[d, x], so that the lanes of a warp read neighbours; the tile lies by rows,
k_JD[j, d], which a warp reads as one value for all lanes.

Sizes of shared and local arrays are constants of the compiled kernel, so there is one kernel for each width D (a
multiple of 16, the rest padded with zeros) and tile.
"""

import functools
import math

from numba import cuda, float32

from numstack.device import Array, Kernel, Stream, kernel, narrow, widen
from numstack.kernels.launch import ceil_div
from numstack.kernels.warp import LOWEST, WARP

ROWS = WARP  # own rows of a block: one for each lane


@cuda.jit(device=True)
def _load_rows(x_BHTD, batch, head, first, factor, rows_DR):
    """Put 32 rows times ``factor`` into shared memory by columns; beyond the array: 0."""
    D = rows_DR.shape[0]
    for r0 in range(0, ROWS, cuda.blockDim.y):
        row = r0 + cuda.threadIdx.y
        time = first + row
        for d0 in range(0, D, WARP):
            d = d0 + cuda.threadIdx.x
            if d < D:
                value = float32(0)
                if time < x_BHTD.shape[2] and d < x_BHTD.shape[3]:
                    value = widen(x_BHTD[batch, head, time, d]) * factor
                rows_DR[d, row] = value


@cuda.jit(device=True)
def _load_tile(x_BHTD, batch, head, first, factor, tile_JD):
    """Put a tile of rows times ``factor`` into shared memory; beyond the array: 0."""
    D = tile_JD.shape[1]
    for j0 in range(0, tile_JD.shape[0], cuda.blockDim.y):
        row = j0 + cuda.threadIdx.y
        time = first + row
        for d0 in range(0, D, WARP):
            d = d0 + cuda.threadIdx.x
            if d < D:
                value = float32(0)
                if time < x_BHTD.shape[2] and d < x_BHTD.shape[3]:
                    value = widen(x_BHTD[batch, head, time, d]) * factor
                tile_JD[row, d] = value


@cuda.jit(device=True)
def _store_rows(rows_DR, x_BHTD, batch, head, first):
    """Write 32 rows that lie in shared memory by columns."""
    for r0 in range(0, ROWS, cuda.blockDim.y):
        row = r0 + cuda.threadIdx.y
        time = first + row
        for d0 in range(0, rows_DR.shape[0], WARP):
            d = d0 + cuda.threadIdx.x
            if time < x_BHTD.shape[2] and d < x_BHTD.shape[3]:
                x_BHTD[batch, head, time, d] = narrow(rows_DR[d, row], x_BHTD.dtype)


@functools.cache
def _make_forward(D: int, TILE: int, WARPS: int) -> Kernel:
    OWN = TILE // WARPS
    SLICE = D // WARPS

    @kernel(name=f"attention.forward online_tiles D{D}")
    def _forward(q_BHTD, k_BHTD, v_BHTD, out_BHTD, lse_BHT, scale, causal):
        """Grid (tiles of 32 queries, heads, batch)."""
        q_DR = cuda.shared.array((D, ROWS), float32)
        k_JD = cuda.shared.array((TILE, D), float32)
        v_JD = cuda.shared.array((TILE, D), float32)
        p_JR = cuda.shared.array((TILE, ROWS), float32)
        warps_WR = cuda.shared.array((WARPS, ROWS), float32)
        score = cuda.local.array(OWN, float32)
        result = cuda.local.array(SLICE, float32)
        lane = cuda.threadIdx.x
        warp = cuda.threadIdx.y
        first = cuda.blockIdx.x * ROWS
        head = cuda.blockIdx.y
        batch = cuda.blockIdx.z
        query = first + lane
        keys = k_BHTD.shape[2]
        end = min(keys, first + ROWS) if causal else keys

        _load_rows(q_BHTD, batch, head, first, scale, q_DR)
        largest = LOWEST
        total = float32(0)  # of this warp's keys
        for d in range(SLICE):
            result[d] = float32(0)

        for key0 in range(0, end, TILE):
            _load_tile(k_BHTD, batch, head, key0, float32(1), k_JD)
            _load_tile(v_BHTD, batch, head, key0, float32(1), v_JD)
            cuda.syncthreads()

            for j in range(OWN):
                score[j] = float32(0)
            for d in range(D):
                q = q_DR[d, lane]
                for j in range(OWN):
                    score[j] += q * k_JD[warp * OWN + j, d]
            own_largest = LOWEST
            for j in range(OWN):
                key = key0 + warp * OWN + j
                if key >= keys or (causal and key > query):
                    score[j] = LOWEST
                own_largest = max(own_largest, score[j])
            warps_WR[warp, lane] = own_largest
            cuda.syncthreads()

            before = largest
            for w in range(WARPS):
                largest = max(largest, warps_WR[w, lane])
            correction = math.exp(before - largest)
            total *= correction
            for j in range(OWN):
                p = math.exp(score[j] - largest)
                p_JR[warp * OWN + j, lane] = p
                total += p
            for d in range(SLICE):
                result[d] *= correction
            cuda.syncthreads()

            for j in range(TILE):
                p = p_JR[j, lane]
                for d in range(SLICE):
                    result[d] += p * v_JD[j, warp * SLICE + d]
            cuda.syncthreads()

        warps_WR[warp, lane] = total
        cuda.syncthreads()
        total = float32(0)
        for w in range(WARPS):
            total += warps_WR[w, lane]
        for d in range(SLICE):
            q_DR[warp * SLICE + d, lane] = result[d] / total
        if warp == 0 and query < q_BHTD.shape[2]:
            lse_BHT[batch, head, query] = largest + math.log(total)
        cuda.syncthreads()
        _store_rows(q_DR, out_BHTD, batch, head, first)

    return _forward


@functools.cache
def _make_dq(D: int, TILE: int, WARPS: int) -> Kernel:
    OWN = TILE // WARPS
    SLICE = D // WARPS

    @kernel(name=f"attention.dq online_tiles D{D}")
    def _dq(q_BHTD, k_BHTD, v_BHTD, out_BHTD, dout_BHTD, lse_BHT, dq_BHTD, delta_BHT, scale, causal):
        """Grid (tiles of 32 queries, heads, batch); makes delta as well."""
        q_DR = cuda.shared.array((D, ROWS), float32)
        dout_DR = cuda.shared.array((D, ROWS), float32)
        k_JD = cuda.shared.array((TILE, D), float32)
        v_JD = cuda.shared.array((TILE, D), float32)
        ds_JR = cuda.shared.array((TILE, ROWS), float32)
        warps_WR = cuda.shared.array((WARPS, ROWS), float32)
        score = cuda.local.array(OWN, float32)
        dp = cuda.local.array(OWN, float32)
        result = cuda.local.array(SLICE, float32)
        lane = cuda.threadIdx.x
        warp = cuda.threadIdx.y
        first = cuda.blockIdx.x * ROWS
        head = cuda.blockIdx.y
        batch = cuda.blockIdx.z
        query = first + lane
        queries = q_BHTD.shape[2]
        keys = k_BHTD.shape[2]
        end = min(keys, first + ROWS) if causal else keys

        _load_rows(q_BHTD, batch, head, first, scale, q_DR)
        _load_rows(dout_BHTD, batch, head, first, float32(1), dout_DR)
        for d in range(SLICE):
            result[d] = float32(0)
        cuda.syncthreads()

        lse = float32(0)
        product = float32(0)
        if query < queries:
            lse = lse_BHT[batch, head, query]
            for d in range(warp * SLICE, min((warp + 1) * SLICE, q_BHTD.shape[3])):
                product += widen(out_BHTD[batch, head, query, d]) * dout_DR[d, lane]
        warps_WR[warp, lane] = product
        cuda.syncthreads()
        delta = float32(0)
        for w in range(WARPS):
            delta += warps_WR[w, lane]
        if warp == 0 and query < queries:
            delta_BHT[batch, head, query] = delta

        for key0 in range(0, end, TILE):
            _load_tile(k_BHTD, batch, head, key0, float32(1), k_JD)
            _load_tile(v_BHTD, batch, head, key0, float32(1), v_JD)
            cuda.syncthreads()

            for j in range(OWN):
                score[j] = float32(0)
                dp[j] = float32(0)
            for d in range(D):
                q = q_DR[d, lane]
                for j in range(OWN):
                    score[j] += q * k_JD[warp * OWN + j, d]
            for d in range(D):
                dout = dout_DR[d, lane]
                for j in range(OWN):
                    dp[j] += dout * v_JD[warp * OWN + j, d]
            for j in range(OWN):
                key = key0 + warp * OWN + j
                p = math.exp(score[j] - lse)
                if key >= keys or (causal and key > query):
                    p = float32(0)
                ds_JR[warp * OWN + j, lane] = p * (dp[j] - delta)
            cuda.syncthreads()

            for j in range(TILE):
                ds = ds_JR[j, lane]
                for d in range(SLICE):
                    result[d] += ds * k_JD[j, warp * SLICE + d]
            cuda.syncthreads()

        for d in range(SLICE):
            q_DR[warp * SLICE + d, lane] = scale * result[d]
        cuda.syncthreads()
        _store_rows(q_DR, dq_BHTD, batch, head, first)

    return _dq


@functools.cache
def _make_dkv(D: int, TILE: int, WARPS: int) -> Kernel:
    OWN = TILE // WARPS
    SLICE = D // WARPS

    @kernel(name=f"attention.dkv online_tiles D{D}")
    def _dkv(q_BHTD, k_BHTD, v_BHTD, dout_BHTD, lse_BHT, dk_BHTD, dv_BHTD, delta_BHT, scale, causal):
        """Grid (tiles of 32 keys, heads, batch)."""
        k_DR = cuda.shared.array((D, ROWS), float32)
        v_DR = cuda.shared.array((D, ROWS), float32)
        q_ID = cuda.shared.array((TILE, D), float32)
        dout_ID = cuda.shared.array((TILE, D), float32)
        p_IR = cuda.shared.array((TILE, ROWS), float32)
        ds_IR = cuda.shared.array((TILE, ROWS), float32)
        score = cuda.local.array(OWN, float32)
        dp = cuda.local.array(OWN, float32)
        dk = cuda.local.array(SLICE, float32)
        dv = cuda.local.array(SLICE, float32)
        lane = cuda.threadIdx.x
        warp = cuda.threadIdx.y
        first = cuda.blockIdx.x * ROWS
        head = cuda.blockIdx.y
        batch = cuda.blockIdx.z
        key = first + lane
        queries = q_BHTD.shape[2]

        _load_rows(k_BHTD, batch, head, first, float32(1), k_DR)
        _load_rows(v_BHTD, batch, head, first, float32(1), v_DR)
        for d in range(SLICE):
            dk[d] = float32(0)
            dv[d] = float32(0)
        cuda.syncthreads()  # also where no query sees these keys, and the loop below runs not once

        for query0 in range(first if causal else 0, queries, TILE):
            _load_tile(q_BHTD, batch, head, query0, scale, q_ID)
            _load_tile(dout_BHTD, batch, head, query0, float32(1), dout_ID)
            cuda.syncthreads()

            for i in range(OWN):
                score[i] = float32(0)
                dp[i] = float32(0)
            for d in range(D):
                k = k_DR[d, lane]
                for i in range(OWN):
                    score[i] += k * q_ID[warp * OWN + i, d]
            for d in range(D):
                v = v_DR[d, lane]
                for i in range(OWN):
                    dp[i] += v * dout_ID[warp * OWN + i, d]
            for i in range(OWN):
                query = query0 + warp * OWN + i
                lse = float32(0)
                delta = float32(0)
                if query < queries:
                    lse = lse_BHT[batch, head, query]
                    delta = delta_BHT[batch, head, query]
                p = math.exp(score[i] - lse)
                if query >= queries or (causal and key > query):
                    p = float32(0)
                ds = p * (dp[i] - delta)
                p_IR[warp * OWN + i, lane] = p
                ds_IR[warp * OWN + i, lane] = ds
            cuda.syncthreads()

            for i in range(TILE):
                p = p_IR[i, lane]
                for d in range(SLICE):
                    dv[d] += p * dout_ID[i, warp * SLICE + d]
            for i in range(TILE):
                ds = ds_IR[i, lane]
                for d in range(SLICE):
                    dk[d] += ds * q_ID[i, warp * SLICE + d]
            cuda.syncthreads()

        for d in range(SLICE):
            k_DR[warp * SLICE + d, lane] = dk[d]
            v_DR[warp * SLICE + d, lane] = dv[d]
        cuda.syncthreads()
        _store_rows(k_DR, dk_BHTD, batch, head, first)
        _store_rows(v_DR, dv_BHTD, batch, head, first)

    return _dkv


def _sizes(width: int) -> tuple[int, int, int]:
    """``(D, TILE, WARPS)``: the width rounded up; a tile that fits in 48 KiB beside the block's rows; and warps.

    A thread then sums at most eight columns of a result, up to D = 64: the vectors of 32 lanes stay in registers on a
    CPU as well.
    """
    D = 16 * ceil_div(width, 16)
    return D, 32 if D <= 64 else 8, 4 if D <= 32 else 8


def forward(arrays: tuple[Array, ...], scale: float, causal: bool, product_flops: int, stream: Stream | None) -> None:
    """Launch the forward pass over (q, k, v, out, lse)."""
    B, H, T, width = arrays[0].shape
    D, TILE, WARPS = _sizes(width)
    grid, block = (ceil_div(T, ROWS), H, B), (WARP, WARPS)
    _make_forward(D, TILE, WARPS)[grid, block, stream](*arrays, scale, causal, flops=2 * product_flops)


def backward(arrays: tuple[Array, ...], scale: float, causal: bool, product_flops: int, stream: Stream | None) -> None:
    """Launch the backward pass over (q, k, v, out, dout, lse, dq, dk, dv, delta)."""
    q, k, v, out, dout, lse, dq, dk, dv, delta = arrays
    B, H, T, width = q.shape
    D, TILE, WARPS = _sizes(width)
    block = (WARP, WARPS)
    _make_dq(D, TILE, WARPS)[(ceil_div(T, ROWS), H, B), block, stream](
        q, k, v, out, dout, lse, dq, delta, scale, causal, flops=3 * product_flops
    )
    _make_dkv(D, TILE, WARPS)[(ceil_div(k.shape[2], ROWS), H, B), block, stream](
        q, k, v, dout, lse, dk, dv, delta, scale, causal, flops=4 * product_flops
    )
