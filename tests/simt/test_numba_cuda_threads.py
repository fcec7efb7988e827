"""numba-cuda's own tests of thread indices, barriers and warp operations, as launches of simt.

Each case names the test that it was made from, in ``numba/cuda/tests/cudapy`` of the numba-cuda 0.30.4 wheel.
"""

import numpy as np
import pytest
from numba import cuda, float32, int32

from tests.simt.support import Cases
from tests.support import poisoned

case = Cases()
FULL = 0xFFFFFFFF
LANES = np.arange(32)

# ---- test_intrinsics.py: indices


@case("test_intrinsics.simple_threadidx", poisoned(1, np.int32), expected=0)
def thread_index(out):
    i = cuda.threadIdx.x
    out[0] = i


@case("test_intrinsics.fill_threadidx", poisoned(10, np.int32), expected=np.arange(10), block=10)
def fill(out):
    i = cuda.threadIdx.x
    out[i] = i


PRODUCTS = np.multiply.outer(np.multiply.outer(np.arange(4) + 1, np.arange(5) + 1), np.arange(6) + 1)


@case("test_intrinsics.fill3d_threadidx[C]", poisoned((4, 5, 6), np.int32), expected=PRODUCTS, block=(4, 5, 6))
@case(
    "test_intrinsics.fill3d_threadidx[F]",
    np.asfortranarray(poisoned((4, 5, 6), np.int32)),
    expected=PRODUCTS,
    block=(4, 5, 6),
)
def fill_3d(out):
    i = cuda.threadIdx.x
    j = cuda.threadIdx.y
    k = cuda.threadIdx.z
    out[i, j, k] = (i + 1) * (j + 1) * (k + 1)


@case("test_intrinsics.simple_grid1d", poisoned(21, np.int32), expected=np.arange(21), grid=7, block=3)
def grid_1d(out):
    i = cuda.grid(1)
    out[i] = i


@case(
    "test_intrinsics.simple_grid2d",
    poisoned((20, 18), np.int32),
    expected=np.add.outer(np.arange(20), np.arange(18)),
    grid=(5, 6),
    block=(4, 3),
)
def grid_2d(out):
    i, j = cuda.grid(2)
    out[i, j] = i + j


@case("test_intrinsics.simple_gridsize1d", poisoned(1, np.int32), expected=21, grid=7, block=3)
def gridsize_1d(out):
    i = cuda.grid(1)
    x = cuda.gridsize(1)
    if i == 0:
        out[0] = x


@case(
    "test_intrinsics.simple_gridsize2d", poisoned(2, np.int32), expected=np.array([20, 18]), grid=(5, 6), block=(4, 3)
)
def gridsize_2d(out):
    i, j = cuda.grid(2)
    x, y = cuda.gridsize(2)
    if i == 0 and j == 0:
        out[0] = x
        out[1] = y


@case(
    "test_intrinsics.intrinsic_forloop_step",
    poisoned((20, 18), np.int32),
    expected=np.add.outer(np.arange(20), np.arange(18)),
    grid=(2, 3),
    block=(4, 3),
)
def grid_stride_loops(out):
    start_x, start_y = cuda.grid(2)
    grid_x = cuda.gridDim.x * cuda.blockDim.x
    grid_y = cuda.gridDim.y * cuda.blockDim.y
    height, width = out.shape
    for x in range(start_x, width, grid_x):
        for y in range(start_y, height, grid_y):
            out[y, x] = x + y


@case("test_intrinsics.3dgrid", poisoned((9, 9, 9), np.int32), expected=9**3, grid=(3, 3, 3), block=(3, 3, 3))
def gridsize_3d(out):
    x, y, z = cuda.grid(3)
    a, b, c = cuda.gridsize(3)
    out[x, y, z] = a * b * c


@case("test_intrinsics.3dgrid_2", np.zeros((12, 6, 8), np.bool_), expected=True, grid=(4, 3, 2), block=(3, 2, 4))
def grid_3d_is_right(out):
    x, y, z = cuda.grid(3)
    a, b, c = cuda.gridsize(3)
    grid_is_right = (
        x == cuda.threadIdx.x + cuda.blockIdx.x * cuda.blockDim.x
        and y == cuda.threadIdx.y + cuda.blockIdx.y * cuda.blockDim.y
        and z == cuda.threadIdx.z + cuda.blockIdx.z * cuda.blockDim.z
    )
    gridsize_is_right = (
        a == cuda.blockDim.x * cuda.gridDim.x
        and b == cuda.blockDim.y * cuda.gridDim.y
        and c == cuda.blockDim.z * cuda.gridDim.z
    )
    out[x, y, z] = grid_is_right and gridsize_is_right


@case("test_intrinsics.simple_laneid", poisoned(64, np.int32), expected=np.tile(LANES, 2), block=64)
def lane_index(out):
    i = cuda.grid(1)
    out[i] = cuda.laneid


@case("test_intrinsics.simple_warpsize", poisoned(1, np.int32), expected=32)
def warp_size(out):
    out[0] = cuda.warpsize


SEVENTEEN = np.full(32, 17, np.int64)
CHOSEN = np.where(np.arange(32) > 4, 17, 3)


@case("test_intrinsics.selp[if]", np.arange(32), np.int64(6), SEVENTEEN, expected=CHOSEN, grid=32)
def branching(a, b, c):
    i = cuda.grid(1)
    if a[i] > 4:
        if b % 2 == 0:
            a[i] = c[i]
        else:
            a[i] = 13
    else:
        a[i] = 3


@case("test_intrinsics.selp[selp]", np.arange(32), np.int64(6), SEVENTEEN, expected=CHOSEN, grid=32)
def selecting(a, b, c):
    i = cuda.grid(1)
    inner = cuda.selp(b % 2 == 0, c[i], 13)
    a[i] = cuda.selp(a[i] > 4, inner, 3)


@case("test_lang.issue_872", np.zeros((2, 3)), expected=1, block=(2, 3))
def ids_assigned_in_loops(out):
    for _ in range(2):
        tx = cuda.threadIdx.x
    for _ in range(3):
        ty = cuda.threadIdx.y
    tile = cuda.shared.array((2, 3), float32)
    tile[tx, ty] = 1.0
    out[tx, ty] = tile[tx, ty]


# ---- test_sync.py


@case("test_sync.useless_syncthreads", poisoned(10, np.int32), expected=np.arange(10), block=10)
def useless_syncthreads(out):
    i = cuda.grid(1)
    cuda.syncthreads()
    out[i] = i


@case("test_sync.useless_syncwarp", poisoned(10, np.int32), expected=np.arange(10), block=10)
def useless_syncwarp(out):
    i = cuda.grid(1)
    cuda.syncwarp()
    out[i] = i


@case("test_sync.useless_syncwarp_with_mask", poisoned(10, np.int32), expected=np.arange(10), block=10)
def useless_syncwarp_with_mask(out):
    i = cuda.grid(1)
    cuda.syncwarp(0xFFFF)
    out[i] = i


@case("test_sync.coop_syncwarp", np.zeros(1, np.int32), expected=496, block=32)
def sum_by_shrinking_warps(out):
    partial = cuda.shared.array(32, int32)
    i = cuda.grid(1)
    partial[i] = i
    cuda.syncwarp()
    if i < 16:
        partial[i] = partial[i] + partial[i + 16]
        cuda.syncwarp(0xFFFF)
    if i < 8:
        partial[i] = partial[i] + partial[i + 8]
        cuda.syncwarp(0xFF)
    if i < 4:
        partial[i] = partial[i] + partial[i + 4]
        cuda.syncwarp(0xF)
    if i < 2:
        partial[i] = partial[i] + partial[i + 2]
        cuda.syncwarp(0x3)
    if i == 0:
        out[0] = partial[0] + partial[1]


@case("test_sync.threadfence_codegen", np.zeros(10, np.int32), expected=np.array([444] + 9 * [0]))
def threadfence(x):
    x[0] += 123
    cuda.threadfence()
    x[0] += 321


@case("test_sync.threadfence_block_codegen", np.zeros(10, np.int32), expected=np.array([444] + 9 * [0]))
def threadfence_block(x):
    x[0] += 123
    cuda.threadfence_block()
    x[0] += 321


@case("test_sync.threadfence_system_codegen", np.zeros(10, np.int32), expected=np.array([444] + 9 * [0]))
def threadfence_system(x):
    x[0] += 123
    cuda.threadfence_system()
    x[0] += 321


def count(out, x):
    i = cuda.grid(1)
    out[i] = cuda.syncthreads_count(x[i])


def all_of(out, x):
    i = cuda.grid(1)
    out[i] = cuda.syncthreads_and(x[i])


def any_of(out, x):
    i = cuda.grid(1)
    out[i] = cuda.syncthreads_or(x[i])


for suffix, dtype in (("", np.int32), ("_upcast", np.int16), ("_downcast", np.int64)):
    mostly_ones = np.ones(72, dtype)
    mostly_ones[[31, 42]] = 0
    case(f"test_sync.syncthreads_count{suffix}", poisoned(72, np.int32), mostly_ones, expected=70, block=72)(count)
    for kernel, name, other in ((all_of, "and", 0), (any_of, "or", 1)):
        x = np.full(100, 1 - other, dtype)
        case(f"test_sync.syncthreads_{name}{suffix}[equal]", poisoned(100, np.int32), x, expected=1 - other, block=100)(
            kernel
        )
        x = x.copy()
        x[31] = other
        case(f"test_sync.syncthreads_{name}{suffix}[one]", poisoned(100, np.int32), x, expected=other, block=100)(
            kernel
        )


# ---- test_warp_ops.py


@case("test_warp_ops.useful_syncwarp", poisoned(32, np.int32), expected=42, block=32)
def useful_syncwarp(out):
    i = cuda.grid(1)
    if i == 0:
        out[0] = 42
    cuda.syncwarp(FULL)
    value = out[0]
    cuda.syncwarp(FULL)  # numba-cuda's test writes out[0] while other lanes read it
    out[i] = value


@case("test_warp_ops.shfl_sync_idx", poisoned(32, np.int32), np.int32(4), expected=4, block=32)
def shuffle_index(out, lane):
    i = cuda.grid(1)
    out[i] = cuda.shfl_sync(FULL, i, lane)


@case(
    "test_warp_ops.shfl_sync_up",
    poisoned(32, np.int32),
    np.int32(4),
    expected=np.where(LANES < 4, LANES, LANES - 4),
    block=32,
)
def shuffle_up(out, delta):
    i = cuda.grid(1)
    out[i] = cuda.shfl_up_sync(FULL, i, delta)


@case(
    "test_warp_ops.shfl_sync_down",
    poisoned(32, np.int32),
    np.int32(4),
    expected=np.where(LANES < 28, LANES + 4, LANES),
    block=32,
)
def shuffle_down(out, delta):
    i = cuda.grid(1)
    out[i] = cuda.shfl_down_sync(FULL, i, delta)


@case("test_warp_ops.shfl_sync_xor", poisoned(32, np.int32), np.int32(16), expected=LANES ^ 16, block=32)
def shuffle_xor(out, mask):
    i = cuda.grid(1)
    out[i] = cuda.shfl_xor_sync(FULL, i, mask)


def shuffle_value(out, value):
    i = cuda.grid(1)
    out[i] = cuda.shfl_sync(FULL, value, 0)


for value in (np.int32(-1), np.int64(1 << 42), np.float32(np.pi), np.float64(np.pi)):
    case(f"test_warp_ops.shfl_sync_types[{value.dtype}]", poisoned(32, value.dtype), value, expected=value, block=32)(
        shuffle_value
    )


def vote_all(out, x):
    i = cuda.grid(1)
    out[i] = cuda.all_sync(FULL, x[i])


def vote_any(out, x):
    i = cuda.grid(1)
    out[i] = cuda.any_sync(FULL, x[i])


def vote_equal(out, x):
    i = cuda.grid(1)
    out[i] = cuda.eq_sync(FULL, x[i])


ONES, ZEROS = np.ones(32, np.int32), np.zeros(32, np.int32)
ONE_ZERO, TWO_ONES = np.where(LANES == 31, 0, 1).astype(np.int32), np.isin(LANES, (2, 5)).astype(np.int32)
for kernel, name, inputs in (
    (vote_all, "all", ((ONES, 1), (ONE_ZERO, 0))),
    (vote_any, "any", ((ZEROS, 0), (TWO_ONES, 1))),
    (vote_equal, "eq", ((ZEROS, 1), (TWO_ONES, 0), (ONES, 1))),
):
    for x, outcome in inputs:
        case(f"test_warp_ops.vote_sync_{name}[{x.sum()}]", poisoned(32, np.int32), x, expected=outcome, block=32)(
            kernel
        )


@case("test_warp_ops.vote_sync_ballot", poisoned(32, np.uint32), expected=FULL, block=32)
def ballot(out):
    i = cuda.threadIdx.x
    out[i] = cuda.ballot_sync(FULL, True)


@case("test_warp_ops.vote_sync_type_validation[literal]", poisoned(32, np.int32), expected=1, block=32)
def vote_on_a_literal(out):
    i = cuda.grid(1)
    if i < out.shape[0]:
        out[i] = cuda.all_sync(FULL, 1)


def vote_with_masks(out, mask, x):
    i = cuda.grid(1)
    out[i] = cuda.all_sync(mask[i], x[i])


for mask_dtype, dtype in ((np.uint32, np.uint32), (np.int64, np.int64), (np.uint32, np.bool_)):
    case(
        f"test_warp_ops.vote_sync_type_validation[{np.dtype(mask_dtype)}-{np.dtype(dtype)}]",
        poisoned(32, np.int32),
        np.full(32, FULL, mask_dtype),
        np.ones(32, dtype),
        expected=1,
        block=32,
    )(vote_with_masks)


def match_any(out, x):
    i = cuda.grid(1)
    out[i] = cuda.match_any_sync(FULL, x[i])


def match_all(out, x):
    i = cuda.grid(1)
    mask, equal = cuda.match_all_sync(FULL, x[i])
    out[i] = mask if equal else 0


@case("test_warp_ops.independent_scheduling", poisoned(32, np.uint32), expected=0x11111111 << (LANES % 4), block=32)
def independent_scheduling(out):
    i = cuda.threadIdx.x
    if i % 4 == 0:
        ballot = cuda.ballot_sync(0x11111111, True)
    elif i % 4 == 1:
        ballot = cuda.ballot_sync(0x22222222, True)
    elif i % 4 == 2:
        ballot = cuda.ballot_sync(0x44444444, True)
    else:
        ballot = cuda.ballot_sync(0x88888888, True)
    out[i] = ballot


def lanes_below(out):
    i = cuda.grid(1)
    out[i] = cuda.lanemask_lt()


# What the compiler does not take; Python under checks does.
PARITY, FOUR = (np.arange(10) % 2).astype(np.int32), np.where(np.arange(10) == 1, 4, 0).astype(np.int32)
ONLY_CHECKED = ("checked",)
case(
    "test_warp_ops.match_any_sync",
    poisoned(10, np.int32),
    PARITY,
    expected=np.where(PARITY, 0b1010101010, 0b0101010101),
    block=10,
    ways=ONLY_CHECKED,
)(match_any)
case(
    "test_warp_ops.match_all_sync[equal]",
    poisoned(10, np.int32),
    ZEROS[:10],
    expected=0b1111111111,
    block=10,
    ways=ONLY_CHECKED,
)(match_all)
case("test_warp_ops.match_all_sync[one]", poisoned(10, np.int32), FOUR, expected=0, block=10, ways=ONLY_CHECKED)(
    match_all
)
case("test_warp_ops.lanemask_lt", poisoned(32, np.uint32), expected=(1 << LANES) - 1, block=32, ways=ONLY_CHECKED)(
    lanes_below
)


@pytest.mark.parametrize("case, way", case.parameters())
def test_case(case, way):
    case.run(way)
