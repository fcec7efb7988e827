"""From accumulators to c: what follows the product, through shared memory, by the copy engine.

A warpgroup has 64 rows of accumulators. It takes them in chunks of 128 bytes a row: registers, the epilogue, a buffer
in shared memory (swizzled, written by ``stmatrix``), one thread's TMA store, which clips at c's edges. The residual
comes the opposite way, by a TMA load into the buffer that the chunk leaves by.
"""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, float32, int32, uint32

from numstack.device import widen
from numstack.device.ptx import mbarrier, nonfinite, packing, shared, sync, tma
from numstack.kernels import gelu
from numstack.kernels.gemm.wgmma.boxes import make_boxes
from numstack.kernels.gemm.wgmma.config import BARRIER_BYTES, CHUNK_ROWS, CONSUMERS, SUMS_BYTES, Config


class Outputs(NamedTuple):
    """What the epilogue does; constants in the kernel's source."""

    dtype: str  # of c: "bf16", "f16" or "f32"
    has_bias: bool
    has_gelu: bool
    has_residual: bool
    has_gelu_backward: bool
    keeps_preactivation: bool
    adds_to_c: bool
    is_scaled: bool  # by alpha
    sums_columns: bool
    flags_nonfinite: bool
    is_batch: bool

    @property
    def reads_extra(self) -> bool:
        """Whether a matrix like c is read: the residual or the pre-activation."""
        return self.has_residual or self.has_gelu_backward

    @property
    def itemsize(self) -> int:
        return 4 if self.dtype == "f32" else 2

    def chunk_columns(self, config: Config) -> int:
        """Columns of c that are stored together."""
        return config.row_bytes(self.itemsize) // self.itemsize


class Epilogue(NamedTuple):
    """Device functions of a warpgroup that stores its part of a tile, and what goes with them.

    ``corner`` is the part's first row, first column and matrix in c, ``room`` what ``places`` returns, ``parity`` the
    phase in which the extra matrix of this tile is loaded first.

    Attributes
    ----------
    places
        (base, staging, loaded, consumer): addresses of its buffers, their barriers, its row of the bias, its sums.
    acquire
        (c, kept, extra): see ``tma.acquire_map``; by one thread.
    begin
        (extra, bias_N, corner, room, thread): start what can be loaded before the product is there; returns a thread's
        two elements of the bias.
    store
        (acc, ..., bias_pair): the first 64 rows, from their accumulators to c.
    store_below
        The next 64, where there are more.
    finish
        (flag, worst, thread): after the last tile.
    flips : int
        By what the parity changes from tile to tile.
    """

    places: Any
    acquire: Any
    begin: Any
    store: Any
    store_below: Any
    finish: Any
    flips: int


@cache
def make_epilogue(outputs: Outputs, config: Config) -> Epilogue:
    """That of a warpgroup that has ``config.rows`` rows of a tile."""
    tile_n, buffers = config.tile_n, config.buffers
    staging_bytes = buffers * CHUNK_ROWS * config.row_bytes(outputs.itemsize)
    chunks = tile_n // outputs.chunk_columns(config) * config.rows // 64
    first_loads = min(chunks, buffers)
    has_bias, reads_extra = outputs.has_bias, outputs.reads_extra
    keeps_preactivation, flags_nonfinite = outputs.keeps_preactivation, outputs.flags_nonfinite
    is_nonfinite = {
        "bf16": nonfinite.is_nonfinite_bf16, "f16": nonfinite.is_nonfinite_f16, "f32": nonfinite.is_nonfinite_f32
    }[outputs.dtype]  # fmt: skip
    wait_all_read = tma.make_wait(0, reads_only=True)
    load_extra = _make_load_extra(outputs, config)
    store_rows, store_below = (_make_store_rows(outputs, config, row_block) for row_block in range(2))

    @cuda.jit(device=True)
    def places(base, staging, loaded, consumer):
        my_staging = uint32(staging + uint32(consumer) * uint32(staging_bytes))
        my_loaded = uint32(loaded + uint32(consumer) * uint32(8 * buffers))
        my_bias = uint32(base + uint32(BARRIER_BYTES) + uint32(consumer * (4 * tile_n)))
        my_sums = uint32(base + uint32(BARRIER_BYTES) + uint32(consumer * SUMS_BYTES))
        return my_staging, my_loaded, my_bias, my_sums

    @cuda.jit(device=True)
    def acquire(c, kept, extra):
        tma.acquire_map(c)
        if keeps_preactivation:
            tma.acquire_map(kept)
        if reads_extra:
            tma.acquire_map(extra)

    @cuda.jit(device=True)
    def begin(extra, bias_N, corner, room, thread):
        y, x, z = corner
        staging, loaded, _, _ = room
        if reads_extra and thread == 0:
            wait_all_read()
            for first in range(first_loads):
                load_extra(extra, x, y, z, staging, loaded, first)
        left = float32(0)
        right = float32(0)
        if has_bias:
            at = int32(x + 2 * thread)
            left = widen(bias_N[at]) if at < bias_N.shape[0] else float32(0)
            right = widen(bias_N[at + 1]) if at + 1 < bias_N.shape[0] else float32(0)
        return left, right

    @cuda.jit(device=True)
    def store(acc, c, kept, extra, sums, corner, room, parity, thread, consumer, alpha, worst, bias_pair):
        _, _, bias, _ = room
        if has_bias and 2 * thread < tile_n:
            shared.store2(uint32(bias + uint32(8 * thread)), bias_pair[0], bias_pair[1])
        store_rows(acc, c, kept, extra, sums, corner, room, parity, thread, consumer, alpha, worst)

    @cuda.jit(device=True)
    def finish(flag, worst, thread):
        if flags_nonfinite and is_nonfinite(worst[0]):
            cuda.atomic.or_(flag, 0, 1)
        if thread == 0:
            wait_all_read()

    loads_a_tile = chunks // buffers  # of each buffer
    return Epilogue(places, acquire, begin, store, store_below, finish, loads_a_tile & 1)


def _make_store_rows(outputs: Outputs, config: Config, row_block: int) -> Any:
    """A device function that stores 64 rows of accumulators, the ``row_block``-th of its warpgroup."""
    chunks = config.tile_n // outputs.chunk_columns(config)
    store: Any = None
    for chunk in reversed(range(chunks)):
        store = _in_turn(_make_store_chunk(outputs, config, row_block, chunk), store)
    return store


def _in_turn(first: Any, second: Any) -> Any:
    """One after the other. A loop over chunks would do, if compilers could be relied on to unroll it: accumulators must
    be indexed by constants.
    """
    if second is None:
        return first

    @cuda.jit(device=True)
    def both(acc, c, kept, extra, sums, corner, room, parity, thread, consumer, alpha, worst):
        first(acc, c, kept, extra, sums, corner, room, parity, thread, consumer, alpha, worst)
        second(acc, c, kept, extra, sums, corner, room, parity, thread, consumer, alpha, worst)

    return both


def _make_store_chunk(outputs: Outputs, config: Config, row_block: int, chunk: int) -> Any:
    """A device function that stores 128 bytes of each of 64 rows."""
    dtype, has_bias, has_gelu, has_residual = outputs.dtype, outputs.has_bias, outputs.has_gelu, outputs.has_residual
    has_gelu_backward, reads_extra = outputs.has_gelu_backward, outputs.reads_extra
    gelu_tanh, gelu_tanh_slope = gelu.gelu_tanh_approximate, gelu.gelu_tanh_slope_approximate
    keeps_preactivation, adds_to_c = outputs.keeps_preactivation, outputs.adds_to_c
    is_scaled, sums_columns, flags_nonfinite = outputs.is_scaled, outputs.sums_columns, outputs.flags_nonfinite
    is_wide = dtype == "f32"
    row_bytes = config.row_bytes(outputs.itemsize)
    chunk_bytes, parts, fragments = CHUNK_ROWS * row_bytes, row_bytes // 32, row_bytes // outputs.itemsize // 8
    is_narrow = row_bytes == 64
    columns = outputs.chunk_columns(config)
    chunks = config.tile_n // columns
    total = chunks * config.rows // 64
    number = row_block * chunks + chunk
    a_chunk = 2 if keeps_preactivation else 1  # buffers
    buffers = config.buffers // a_chunk
    slot = (number % buffers) * a_chunk
    is_first, takes_used_buffer = number == 0, number >= buffers
    needs_bias = has_bias and reads_extra and chunk == 0
    turn = (number // buffers) & 1
    loads_next = reads_extra and number + buffers < total
    load_extra = _make_load_extra(outputs, config)
    boxes = make_boxes(outputs.is_batch)
    store, add = boxes.store, boxes.add
    wait_all_read = tma.make_wait(0, reads_only=True)
    wait_one_read = tma.make_wait(buffers - 1, reads_only=True)
    meet_first, meet_second = sync.make_barrier(1, 128), sync.make_barrier(2, 128)
    pack = packing.pack_f16 if dtype == "f16" else packing.pack_bf16
    largest = {"bf16": nonfinite.largest_bf16, "f16": nonfinite.largest_f16, "f32": nonfinite.largest_f32}[dtype]
    low = packing.low_f16 if dtype == "f16" else packing.low_bf16
    high = packing.high_f16 if dtype == "f16" else packing.high_bf16

    @cuda.jit(device=True)
    def meet_group(consumer):
        if consumer == 0:
            meet_first()
        else:
            meet_second()

    @cuda.jit(device=True)
    def store_part_float32(acc, part, at, kept_at, bias, thread, alpha, worst):
        values = cuda.local.array(4, float32)
        first = (chunk * fragments + part) * 4
        for i in range(4):
            values[i] = acc[first + i] * alpha if is_scaled else acc[first + i]
        if has_bias:
            left, right = shared.load2(uint32(bias + uint32((chunk * columns + part * 8 + (thread & 3) * 2) * 4)))
            values[0] += left
            values[1] += right
            values[2] += left
            values[3] += right
        if keeps_preactivation:
            shared.store2(kept_at, values[0], values[1])
            shared.store2(uint32(kept_at + uint32(1024)), values[2], values[3])
        if has_gelu:
            for i in range(4):
                values[i] = gelu_tanh(values[i])
        if has_residual:
            left, right = shared.load2(at)
            values[0] += left
            values[1] += right
            left, right = shared.load2(uint32(at + uint32(1024)))
            values[2] += left
            values[3] += right
        if has_gelu_backward:
            left, right = shared.load2(at)
            values[0] *= gelu_tanh_slope(left)
            values[1] *= gelu_tanh_slope(right)
            left, right = shared.load2(uint32(at + uint32(1024)))
            values[2] *= gelu_tanh_slope(left)
            values[3] *= gelu_tanh_slope(right)
        if flags_nonfinite:
            for i in range(4):
                worst[0] = largest(worst[0], packing.bits_of(values[i]))
        shared.store2(at, values[0], values[1])
        shared.store2(uint32(at + uint32(1024)), values[2], values[3])

    @cuda.jit(device=True)
    def store_part_16(acc, part, at, kept_at, bias, thread, alpha, worst):
        values = cuda.local.array(8, float32)
        words = cuda.local.array(4, uint32)
        first = (chunk * fragments + part * 2) * 4
        for i in range(8):
            values[i] = acc[first + i] * alpha if is_scaled else acc[first + i]
        if has_bias:
            from_column = uint32(bias + uint32((chunk * columns + part * 16 + (thread & 3) * 2) * 4))
            for half in range(2):
                left, right = shared.load2(uint32(from_column + uint32(32 * half)))
                values[4 * half] += left
                values[4 * half + 1] += right
                values[4 * half + 2] += left
                values[4 * half + 3] += right
        if keeps_preactivation:
            for i in range(4):
                words[i] = pack(values[2 * i], values[2 * i + 1])
            shared.store_matrices(kept_at, words, 0)
        if has_gelu:
            for i in range(8):
                values[i] = gelu_tanh(values[i])
        if has_residual:
            shared.load_matrices(at, words, 0)
            for i in range(4):
                values[2 * i] += low(words[i])
                values[2 * i + 1] += high(words[i])
        if has_gelu_backward:
            shared.load_matrices(at, words, 0)
            for i in range(4):
                values[2 * i] *= gelu_tanh_slope(low(words[i]))
                values[2 * i + 1] *= gelu_tanh_slope(high(words[i]))
        for i in range(4):
            words[i] = pack(values[2 * i], values[2 * i + 1])
            if flags_nonfinite:
                worst[0] = largest(worst[0], words[i])
        shared.store_matrices(at, words, 0)

    # Sums of columns: a warp's over its 16 rows, those of the warps in shared memory, where the room of one chunk is
    # free again two chunks later.
    sums_place = (number & 1) * CONSUMERS * SUMS_BYTES

    @cuda.jit(device=True)
    def sum_rows_of_warp(buffer, sums_at, warp, lane):
        cuda.syncwarp()
        left = float32(0)
        right = float32(0)
        for row in range(16):
            swizzled = ((lane >> 2) ^ (row & 7)) << 4
            pair = shared.load(uint32(buffer + uint32((warp * 16 + row) * 128 + swizzled + (lane & 3) * 4)))
            if is_wide:
                left += packing.value_of(pair)
            else:
                left += low(pair)
                right += high(pair)
        at = uint32(sums_at + uint32(sums_place))
        if is_wide:
            shared.store(uint32(at + uint32(warp * 128 + lane * 4)), left)
        else:
            shared.store2(uint32(at + uint32(warp * 256 + lane * 8)), left, right)

    @cuda.jit(device=True)
    def sum_warps(sums, sums_at, thread, x, y):
        total = float32(0)
        for warp in range(4):
            at = uint32(sums_at + uint32(sums_place))
            total += packing.value_of(shared.load(uint32(at + uint32(warp * columns * 4 + thread * 4))))
        row = y >> 6
        column = x + chunk * columns + thread
        if row < sums.shape[0] and column < sums.shape[1]:
            sums[row, column] = total

    store_part = store_part_float32 if is_wide else store_part_16

    @cuda.jit(device=True)
    def store_chunk(acc, c, kept, extra, sums, corner, room, parity, thread, consumer, alpha, worst):
        y, x, z = corner
        row = int32(y + 64 * row_block)
        staging, loaded, bias, sums_at = room
        lane = thread & int32(31)
        warp = thread >> int32(5)
        if is_wide:
            g = lane >> 2
            place = uint32((warp * 16 + g) * 128 + ((((lane >> 1) & 1) ^ g) << 4) + ((lane & 1) << 3))
        elif is_narrow:
            place = uint32((warp * 16 + (lane & 15)) * 64 + (((lane >> 4) ^ ((lane >> 1) & 3)) << 4))
        else:
            place = uint32((warp * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4))
        buffer = uint32(staging + uint32(slot * chunk_bytes))
        kept_buffer = uint32(buffer + uint32(chunk_bytes))
        if reads_extra:
            if needs_bias:
                meet_group(consumer)
            mbarrier.wait(loaded + uint32(8 * slot), parity ^ uint32(turn))
        else:
            if thread == 0:
                if is_first:
                    wait_all_read()
                if takes_used_buffer:
                    wait_one_read()
            meet_group(consumer)
        for part in range(parts):
            flip = uint32(part << 5)
            at = uint32(buffer + (place ^ flip))
            kept_at = uint32(kept_buffer + (place ^ flip))
            store_part(acc, part, at, kept_at, bias, thread, alpha, worst)
        if sums_columns:
            sum_rows_of_warp(buffer, sums_at, warp, lane)
        tma.fence_async()
        meet_group(consumer)
        if sums_columns and thread < columns:
            sum_warps(sums, sums_at, thread, x, row)
        if thread == 0:
            column = int32(x + chunk * columns)
            if adds_to_c:
                add(c, buffer, column, row, z)
            else:
                store(c, buffer, column, row, z)
            if keeps_preactivation:
                store(kept, kept_buffer, column, row, z)
            tma.commit()
            if loads_next:
                wait_all_read()
                load_extra(extra, x, y, z, staging, loaded, number + buffers)

    return store_chunk


@cache
def _make_load_extra(outputs: Outputs, config: Config) -> Any:
    """A device function by which one thread loads a chunk of the extra matrix into its buffer, which must be free."""
    columns = outputs.chunk_columns(config)
    chunks = config.tile_n // columns
    buffers = config.buffers
    chunk_bytes = CHUNK_ROWS * config.row_bytes(outputs.itemsize)
    load = make_boxes(outputs.is_batch).load

    @cuda.jit(device=True)
    def load_extra(extra, x, y, z, staging, loaded, number):
        slot = uint32(number % buffers)
        barrier = uint32(loaded + uint32(8) * slot)
        mbarrier.arrive_and_expect(barrier, uint32(chunk_bytes))
        column = int32(x + (number % chunks) * columns)
        row = int32(y + (number // chunks) * 64)
        load(extra, uint32(staging + uint32(chunk_bytes) * slot), barrier, column, row, z)

    return load_extra
