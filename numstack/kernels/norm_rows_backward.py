"""Layer normalisation and RMS normalisation on GPUs, backward: a grid that stays.

A thread keeps to its columns through all rows that its block takes, so the sums over rows, dweight and dbias, grow in
its registers, and leave the block once. The sums along a row, which all its threads wait for, would leave the memory
idle meanwhile; so the next rows are always on their way to shared memory (``cp.async``). Each thread fetches what it
will take itself, and needs nobody's leave to take it.

Blocks take rows in turns, so that at any time all are at neighbouring rows: with a stretch of rows for each, some came
to be a tenth slower than the mean, perhaps since they met on the same channels of the memory (H200, 65536 x 768: rows
over after 59 to 73 us, now 65 to 69). They ask for some 40 KiB at once, whatever the dtypes: with twice as much, where
dx is float32 and added to, rows of 768 took 8% longer, of 1024 9%, of 1600 5%; with half, 10%. More stages did nothing.
Short blocks for those that are done first helped less; a cache policy by which what is read leaves first cost 4%;
statistics that lanes fetch for 32 rows at once, and shuffles hand out, made rows of 1600 faster by 2% and those of 1024
slower by 3%; a vector a thread, for fewer idle lanes, took 4% longer at 1600.

dx may be float32 where dy and x have 16 bits: a residual stream is, and then what it held passes through shared memory
as float32 beside them.

A second kernel adds what the blocks leave. From Hopper on its blocks start while the last of the first kernel's end.
"""

import functools
from typing import Any, NamedTuple

from numba import cuda, float32, from_dtype, int32, int64, uint32, uint64

from numstack.device import Array, Kernel, Stream, current_device, kernel, narrow, ptx, widen
from numstack.device.ptx.sync import make_numbered_barrier
from numstack.kernels.launch import are_aligned, ceil_div, flat
from numstack.kernels.norm_rows import MOST_THREADS, layout_of, supports
from numstack.kernels.reduce_vectors import ODD
from numstack.kernels.rows import VECTOR, Layout, Row, row_functions
from numstack.kernels.warp import WARP, warp_sum, warp_sum_of_two

MOST_THREADS_16_BIT = {1: 512, 2: 512, 3: 384}  # of a block, by vectors of a thread: 128 registers, or 168, are enough
MOST_THREADS_OF_THREE = 256  # where a thread has three vectors of rows that several warps share, which takes a few more
MOST_THREADS_32_BIT = 256  # rows of float32 take some more registers
STAGES = 3  # rows of a thread that are on their way or in use
BYTES_AT_ONCE = 40 << 10  # that a block asks for at once, about


class Fetched(NamedTuple):
    """What is fetched of a row: dy and x, and what dx holds if it is added to.

    Attributes
    ----------
    itemsize : int
        Of dy and x.
    old : int
        Of dx if it is added to, else 0.
    """

    itemsize: int
    old: int

    @property
    def nbytes(self) -> int:
        """Of an element of all of them."""
        return 2 * self.itemsize + self.old


def supports_backward(row: Row, dx: Array) -> bool:
    """Whether the backward pass can take such dy and x, of one dtype, and dx, and shared memory hold their rows."""
    is_known = row.itemsize > 0 and dx.itemsize in (row.itemsize, 4) and are_aligned(dx)
    return is_known and supports(row) and _most_rows(row.columns, Fetched(row.itemsize, dx.itemsize)) > 0


def _most_rows(columns: int, fetched: Fetched) -> int:
    """Rows of a block of the backward pass whose threads, and two stages in shared memory, there is room for."""
    threads, vectors, _ = layout_of(columns, MOST_THREADS)
    most_threads = MOST_THREADS_16_BIT[vectors] if fetched.itemsize == 2 else MOST_THREADS_32_BIT
    if vectors == 3 and threads > WARP:
        most_threads = MOST_THREADS_OF_THREE
    return min(
        most_threads // threads,
        max(1, BYTES_AT_ONCE // (columns * fetched.nbytes)),
        _shared_bytes() // (2 * stage_bytes(Layout(threads, vectors, 1), fetched)),
    )


def _shared_bytes() -> int:
    """What of a block's shared memory may hold rows."""
    return current_device().properties.shared_bytes_per_block * 15 // 16


class Plan(NamedTuple):
    """How the grid of the backward pass, which stays, goes through the rows.

    Attributes
    ----------
    layout : Layout
        Of a block: ``rows`` rows at a time.
    stages : int
        Rows of a thread that are on their way or in use.
    blocks : int
        Of the grid; at any time they are at neighbouring rows.
    """

    layout: Layout
    stages: int
    blocks: int


def plan_backward(n_rows: int, columns: int, fetched: Fetched) -> Plan:
    """A grid for rows of which this is fetched."""
    threads, vectors, _ = layout_of(columns, MOST_THREADS)
    layout = Layout(threads, vectors, max(1, _most_rows(columns, fetched)))
    stages = min(STAGES, _shared_bytes() // stage_bytes(layout, fetched))
    blocks = max(1, min(current_device().properties.multiprocessors, ceil_div(n_rows, layout.rows)))
    return Plan(layout, stages, blocks)


def stage_bytes(layout: Layout, fetched: Fetched) -> int:
    """Shared memory of a block for one stage."""
    return layout.rows * layout.vectors * layout.threads * VECTOR * fetched.nbytes


def n_blocks(n_rows: int, columns: int) -> int:
    """The most blocks of the backward pass, of any dtypes: as many rows of partial sums does it leave."""
    kinds = (Fetched(2, 0), Fetched(2, 2), Fetched(2, 4), Fetched(4, 0), Fetched(4, 4))
    return max(plan_backward(n_rows, columns, fetched).blocks for fetched in kinds)


def launch(
    arrays: tuple[Array, ...],
    sums: tuple[Array, ...],
    workspace: Array,
    accumulate: bool,
    accumulate_dx: bool,
    stream: Stream | None,
) -> None:
    """dx of ``arrays`` (dy, x, weight, mean, rstd, dx), and ``sums`` over rows: dweight, and dbias if there is a mean.

    ``workspace``: float32, ``len(sums)`` times ``n_blocks`` rows.
    """
    dy, x, weight, mean, rstd, dx = arrays
    R, C = x.shape
    device = current_device()
    centred = len(sums) == 2
    fetched = Fetched(x.itemsize, dx.itemsize if accumulate_dx else 0)
    layout, stages, blocks = plan_backward(R, C, fetched)
    is_full = layout.threads == WARP and layout.vectors * VECTOR * WARP == C
    if R > 0:  # nothing lies where arrays without elements are, so nothing is fetched from there
        types = from_dtype(x.dtype), from_dtype(dx.dtype)
        staged_rows = backward(layout, stages, is_full, centred, accumulate_dx, *types)
        shared_bytes = stages * stage_bytes(layout, fetched)
        staged_rows[blocks, layout.block, stream, shared_bytes](
            flat(dy), flat(x), weight, mean, rstd, flat(dx), workspace, 1 / C, flops=16 * R * C
        )
    else:
        blocks = 0
    rounds = ceil_div(device.properties.multiprocessors, WARP)
    sum_of_blocks = sum_blocks(rounds)
    sum_of_blocks[(ceil_div(C, WARP), len(sums)), (WARP, WARP), stream](
        workspace, sums[0], sums[-1], blocks, accumulate
    )


@functools.cache
def _sums_of_row(threads: int, centred: bool) -> Any:
    """``sums(a, b, shared, turn)``: a and b, each summed over the threads of a row, in each of them.

    Without ``centred`` there is no b. ``shared``: (64, 2) float32; calls, which ``turn`` counts, take turns between
    its halves, so that one barrier, of the row's threads, is enough.
    """
    n_warps = threads // WARP
    barrier = make_numbered_barrier(threads)

    @cuda.jit(device=True)
    def by_warp(a, b, shared, turn):
        if centred:
            mine = warp_sum_of_two(a, b)
            other = cuda.shfl_xor_sync(0xFFFFFFFF, mine, 16)
            is_low = uint32(cuda.threadIdx.x) % uint32(WARP) < uint32(16)
            return (mine if is_low else other), (other if is_low else mine)
        return warp_sum(a), b

    @cuda.jit(device=True)
    def by_block(a, b, shared, turn):
        mine = warp_sum_of_two(a, b) if centred else warp_sum(a)
        thread = uint32(cuda.threadIdx.x)
        # Unsigned: of signed indices numba looks whether they count from the end.
        first = uint64(turn % uint32(2) * uint32(WARP) + uint32(n_warps) * uint32(cuda.threadIdx.y))
        if thread % uint32(16) == uint32(0):
            shared[first + uint64(thread // uint32(WARP)), uint64(thread // uint32(16) % uint32(2))] = mine
        barrier(uint32(1 + cuda.threadIdx.y))
        a = shared[first, 0]
        b = shared[first, 1]
        for w in range(1, n_warps):
            a += shared[first + uint64(w), 0]
            b += shared[first + uint64(w), 1]
        return a, b

    return by_warp if threads == WARP else by_block


@functools.cache
def backward(
    layout: Layout,
    stages: int,
    is_full: bool,
    centred: bool,
    accumulate: bool,
    storage: Any,
    dx_storage: Any,
) -> Kernel:
    """dx, and each block's sums over its rows: dweight, and if ``centred`` dbias, in ``partial_N``, shape (2, G, C).

    ``storage`` is the numba type of what dy and x hold, ``dx_storage`` of what dx does: as many bits, or float32;
    ``is_full``: a warp has a row and no place past its end; ``accumulate``: dx is added to.
    """
    threads, vectors, rows = layout
    elements = VECTOR * vectors
    centred_elements = elements if centred else 1
    n_sums = 2 if centred else 1
    is_wider = dx_storage.bitwidth > storage.bitwidth
    across = VECTOR * threads  # elements from one vector of a thread to its next
    of_row = elements * threads
    of_fetched = (2 + (dx_storage.bitwidth // storage.bitwidth if accumulate else 0)) * of_row  # in elements of storage
    of_stage = rows * of_fetched
    of_all = stages * of_stage
    halves = 2 * vectors
    of_sums = (2 * WARP, 2)
    sums_of_row = _sums_of_row(threads, centred)
    load, _, _, _ = row_functions(threads, vectors)
    wait_for_oldest = ptx.cp_async_wait_group(stages - 1)
    wait_for_all = ptx.cp_async_wait_group(0)

    @cuda.jit(device=True)
    def is_always_there(v, columns):
        return True

    @cuda.jit(device=True)
    def is_in_row(v, columns):
        return v * across + VECTOR * cuda.threadIdx.x < columns

    is_there = is_always_there if is_full else is_in_row

    def make_fetch(bits):
        per_copy = 128 // bits
        copies = VECTOR // per_copy

        @cuda.jit(device=True)
        def fetch(staged, to, x_N, start, nbytes, is_row):
            for v in range(vectors):
                n = nbytes[v] if is_row else int32(0)  # of what is not there, zeros are fetched
                for k in range(copies):
                    ptx.cp_async_16(staged, to + v * across + k * per_copy, x_N, start + v * across + k * per_copy, n)

        return fetch

    fetch, fetch_old = make_fetch(storage.bitwidth), make_fetch(dx_storage.bitwidth)

    @cuda.jit(device=True)
    def behind_x(at):
        return at + uint32(2 * of_row)

    @cuda.jit(device=True)
    def behind_x_of_half_the_size(at):
        # ``at`` counts 16 bits up to the row and a vector a thread; of both, half as many are twice as wide.
        return (at >> uint32(1)) + uint32(of_row + VECTOR // 2 * cuda.threadIdx.x)

    place_of_old = behind_x_of_half_the_size if is_wider else behind_x

    @cuda.jit(device=True)
    def fetch_row(staged, old, to, dy_N, x_N, dx_N, start, nbytes, is_row):
        fetch(staged, to, dy_N, start, nbytes, is_row)
        fetch(staged, to + of_row, x_N, start, nbytes, is_row)
        if accumulate:
            fetch_old(old, place_of_old(uint32(to)), dx_N, start, nbytes, is_row)
        ptx.cp_async_commit_group()

    @cuda.jit(device=True)
    def take(staged, at, values):
        for v in range(vectors):
            ptx.load8(staged, at + v * across, values, VECTOR * v)

    @kernel(name=f"{'layernorm' if centred else 'rmsnorm'}.backward staged_rows")
    def staged_rows(dy_N, x_N, weight_C, mean_R, rstd_R, dx_N, partial_N, inverse_C):
        weight = cuda.local.array(elements, float32)
        dweight = cuda.local.array(elements, float32)
        dbias = cuda.local.array(centred_elements, float32)
        g = cuda.local.array(elements, float32)  # dy, then dy weight, then dx
        normal = cuda.local.array(elements, float32)  # x, then as normalised
        nbytes = cuda.local.array(vectors, int32)  # that are fetched of a vector: none past the row's end
        shared = cuda.shared.array(of_sums, float32)
        staged = cuda.shared.array(0, storage)
        old = cuda.shared.array(0, dx_storage)  # the same memory
        C = of_row if is_full else weight_C.size
        R = rstd_R.size
        row0 = cuda.blockIdx.x * rows
        row = row0 + cuda.threadIdx.y
        step = cuda.gridDim.x * rows
        further = step * C
        start = row * C + VECTOR * cuda.threadIdx.x
        ahead = start
        place = cuda.threadIdx.y * of_fetched + VECTOR * cuda.threadIdx.x
        for v in range(vectors):
            nbytes[v] = int32(16) if is_there(v, C) else int32(0)
        for stage in range(stages - 1):
            is_row = row + stage * step < R
            fetch_row(staged, old, place + stage * of_stage, dy_N, x_N, dx_N, ahead, nbytes, is_row)
            ahead += further
        load(weight_C, 0, C, weight, 0, float32(0))
        for i in range(elements):
            dweight[i] = float32(0)
            if centred:
                dbias[i] = float32(0)
        mean = float32(0)
        rstd = float32(0)
        if row < R:
            rstd = rstd_R[uint32(row)]
            if centred:
                mean = mean_R[uint32(row)]

        taken = uint32(place)
        filled = uint32(place + (stages - 1) * of_stage)
        turn = uint32(0)
        while row0 < R:
            is_row = row + (stages - 1) * step < R
            fetch_row(staged, old, filled, dy_N, x_N, dx_N, ahead, nbytes, is_row)
            next_mean = float32(0)
            next_rstd = float32(0)
            if row + step < R:
                next_rstd = rstd_R[uint32(row + step)]
                if centred:
                    next_mean = mean_R[uint32(row + step)]
            wait_for_oldest()
            take(staged, taken, g)
            take(staged, taken + uint32(of_row), normal)
            offset = -mean * rstd
            sum_gn = float32(0)
            sum_g = float32(0)
            for v in range(vectors):
                of_vector_gn = float32(0)
                of_vector_g = float32(0)
                for i in range(VECTOR * v, VECTOR * v + VECTOR):
                    normal[i] = normal[i] * rstd + offset
                    dweight[i] += g[i] * normal[i]
                    if centred:
                        dbias[i] += g[i]
                    g[i] *= weight[i]
                    of_vector_gn += g[i] * normal[i]
                    if centred:
                        of_vector_g += g[i]
                sum_gn += of_vector_gn
                sum_g += of_vector_g
            sum_gn, sum_g = sums_of_row(sum_gn, sum_g, shared, turn)
            slope = -rstd * (sum_gn * inverse_C)
            shift = -rstd * (sum_g * inverse_C) if centred else float32(0)
            for i in range(elements):
                g[i] = g[i] * rstd + (normal[i] * slope + shift)
            if row < R:
                if accumulate:
                    take(old, place_of_old(taken), normal)
                    for i in range(elements):
                        g[i] += normal[i]
                for v in range(vectors):
                    if is_there(v, C):
                        ptx.store8(dx_N, start + v * across, g, VECTOR * v)
            mean = next_mean
            rstd = next_rstd
            row += step
            row0 += step
            start += further
            ahead += further
            taken = uint32(taken + uint32(of_stage))
            if taken >= of_all:
                taken = uint32(taken - uint32(of_all))
            filled = uint32(filled + uint32(of_stage))
            if filled >= of_all:
                filled = uint32(filled - uint32(of_all))
            turn = uint32(turn + uint32(1))

        # The sums of the block's rows meet in the memory that the rows passed through: halves of vectors one after the
        # other, so that neighbours write and read neighbours.
        wait_for_all()
        cuda.syncthreads()
        of_rows = cuda.shared.array(0, float32)
        mine = cuda.threadIdx.y * n_sums * of_row + 4 * cuda.threadIdx.x
        for half in range(halves):
            ptx.store4(of_rows, mine + 4 * threads * half, dweight, 4 * half)
            if centred:
                ptx.store4(of_rows, mine + of_row + 4 * threads * half, dbias, 4 * half)
        cuda.syncthreads()
        for j in range(cuda.threadIdx.y * threads + cuda.threadIdx.x, n_sums * of_row // 4, threads * rows):
            for k in range(4):
                normal[k] = float32(0)
            for y in range(rows):
                ptx.load4(of_rows, y * n_sums * of_row + 4 * j, g, 0)
                for k in range(4):
                    normal[k] += g[k]
            which = 1 if 4 * j >= of_row else 0
            place = j - which * (of_row // 4)
            half = int64(uint32(place) // uint32(threads))
            c = (half >> 1) * across + (place - half * threads) * VECTOR + (half & 1) * 4
            if c < C:
                ptx.store4(partial_N, (which * cuda.gridDim.x + cuda.blockIdx.x) * C + c, normal, 0)

    return staged_rows


@functools.cache
def sum_blocks(rounds: int) -> Kernel:
    """Sums of columns of ``n_blocks`` rows, at most 32 ``rounds``, of each of the arrays in ``partial_N``.

    Block (32, 32), of 32 columns of one array: warp y adds rows y, y + 32, ..., all of them on their way at once; then
    it adds up, by shuffles, the 32 sums of column y.
    """

    @kernel(name="norm.sum_blocks", starts_early=True)
    def sums_of_blocks(partial_N, dweight_C, dbias_C, n_blocks, accumulate):
        shared = cuda.shared.array((WARP, ODD), float32)
        values = cuda.local.array(rounds, float32)
        lane = cuda.threadIdx.x
        warp = cuda.threadIdx.y
        C = dweight_C.size
        c = cuda.blockIdx.x * WARP + lane
        first = cuda.blockIdx.y * n_blocks * C + c
        for k in range(rounds):
            block = k * WARP + warp
            values[k] = float32(0)
            if block < n_blocks and c < C:
                values[k] = partial_N[first + block * C]
        total = float32(0)
        for k in range(rounds):
            total += values[k]
        shared[warp, lane] = total
        cuda.syncthreads()
        total = warp_sum(shared[lane, warp])
        c = cuda.blockIdx.x * WARP + warp
        if lane == 0 and c < C:
            if cuda.blockIdx.y == 0:
                if accumulate:
                    total += widen(dweight_C[c])
                dweight_C[c] = narrow(total, dweight_C.dtype)
            else:
                if accumulate:
                    total += widen(dbias_C[c])
                dbias_C[c] = narrow(total, dbias_C.dtype)

    return sums_of_blocks
