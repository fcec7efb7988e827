"""One planted fault for each rule, found at its place; and beside each a clean twin that passes."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numba import cuda, float32, int32

from numstack.errors import KernelError
from numstack.simt.checks import KernelFault
from numstack.simt.interpret import interpret
from tests.simt.support import dim

FULL = 0xFFFFFFFF
N = 48


B0, B1 = (0, 0, 0), (1, 0, 0)
Threads = tuple[tuple[int, int, int], ...]


def at(*xs: int) -> Threads:
    return tuple((x, 0, 0) for x in xs)


@dataclass
class Case:
    """A kernel with a fault, what must be said of it, and a kernel like it without the fault."""

    faulty: Callable[..., None]
    kind: str
    threads: Threads
    says: str
    block: tuple[int, int, int]
    grid: int
    n_threads: int
    clean: Callable[..., None] | None = None

    def run(self, kernel: Callable[..., None], name: str | None = None) -> None:
        args = np.arange(2 * N, dtype=np.float32), np.zeros(2 * N, np.float32)
        interpret(kernel, dim(self.grid), dim(self.n_threads), args, shared_bytes=4 * N, name=name)


CASES: list[Case] = []


def planted(
    kind: str, threads: Threads, says: str, *, block: tuple[int, int, int] = B0, grid: int = 2, n_threads: int = N
) -> Callable[..., Any]:
    """Marks a kernel whose line ``# here`` has a fault."""

    def register(kernel: Callable[..., None]) -> Callable[..., None]:
        CASES.append(Case(kernel, kind, threads, says, block, grid, n_threads))
        return kernel

    return register


def clean(kernel: Callable[..., None]) -> Callable[..., None]:
    """Marks the clean twin of the kernel above."""
    CASES[-1].clean = kernel
    return kernel


def line_marked(kernel: Callable[..., None], mark: str = "# here") -> int:
    lines, first = inspect.getsourcelines(kernel)
    return first + next(i for i, line in enumerate(lines) if mark in line)


# ---- 1. out of bounds


@planted("out of bounds", at(47), r"x\[96\] is outside its shape \(96,\)", block=B1)
def global_past_the_end(x, out):
    i = cuda.grid(1)
    out[i] = x[i + 1]  # here


@clean
def global_past_the_end_guarded(x, out):
    i = cuda.grid(1)
    if i + 1 < x.size:
        out[i] = x[i + 1]


def global_negative(x, out):
    i = cuda.grid(1)
    out[
        i - 1  # numba would wrap -1 around to the last element
    ] = x[i]


def global_negative_guarded(x, out):
    i = cuda.grid(1)
    if i > 0:
        out[i - 1] = x[i]


@cuda.jit(device=True)
def fill_row(tile, row, value):
    for column in range(tile.shape[1] + 1):
        tile[row, column] = value  # here


@cuda.jit(device=True)
def fill_row_right(tile, row, value):
    for column in range(tile.shape[1]):
        tile[row, column] = value


@planted("out of bounds", at(0), r"tile\[0, 4\] .*shared memory")
def shared_in_a_device_function(x, out):
    tile = cuda.shared.array((N, 4), float32)
    fill_row(tile, cuda.threadIdx.x, x[cuda.grid(1)])


@clean
def shared_in_a_device_function_right(x, out):
    tile = cuda.shared.array((N, 4), float32)
    fill_row_right(tile, cuda.threadIdx.x, x[cuda.grid(1)])


@planted("out of bounds", at(0), r"recent\[7\] .*\(4,\) \(local memory\)", block=B1)
def local_past_the_end(x, out):
    recent = cuda.local.array(4, float32)
    recent[cuda.blockIdx.x * 4 + 3] = x[0]  # here


@clean
def local_within(x, out):
    recent = cuda.local.array(4, float32)
    recent[cuda.blockIdx.x * 2 + 1] = x[0]


# ---- 2. races


@planted("race", at(1, 0), r"reads tile\[0\], which thread \(0, 0, 0\) writes .*tile\[i\] = x")
def no_barrier(x, out):
    tile = cuda.shared.array(N, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    out[cuda.grid(1)] = tile[i - 1] if i > 0 else tile[i]  # here


@clean
def barrier(x, out):
    tile = cuda.shared.array(N, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    cuda.syncthreads()
    out[cuda.grid(1)] = tile[i - 1] if i > 0 else tile[i]


@planted("race", at(1, 0), r"reads tile\[0\], which thread \(0, 0, 0\) writes")
def second_tile_too_early(x, out):
    tile = cuda.shared.array(N, float32)
    i = cuda.threadIdx.x
    total = float32(0)
    for start in range(0, 2 * N, N):
        tile[i] = x[start + i]
        cuda.syncthreads()
        total += tile[0]  # here
    out[cuda.grid(1)] = total


@clean
def second_tile_in_time(x, out):
    tile = cuda.shared.array(N, float32)
    i = cuda.threadIdx.x
    total = float32(0)
    for start in range(0, 2 * N, N):
        tile[i] = x[start + i]
        cuda.syncthreads()
        total += tile[0]
        cuda.syncthreads()
    out[cuda.grid(1)] = total


@planted("race", at(2, 1), r"writes winner\[0\], which thread \(1, 0, 0\) writes")
def different_values(x, out):
    winner = cuda.shared.array(1, int32)
    winner[0] = cuda.threadIdx.x // 2  # here


@clean
def equal_values(x, out):
    winner = cuda.shared.array(1, int32)
    winner[0] = cuda.blockIdx.x


@planted("race", at(1, 0), r"updates atomically count\[0\], which thread \(0, 0, 0\) reads")
def read_beside_atomics(x, out):
    count = cuda.shared.array(1, int32)
    i = cuda.threadIdx.x
    if i == 0:
        count[0] = 0
    cuda.syncthreads()
    cuda.atomic.add(count, 0, 1)  # here
    out[cuda.grid(1)] = count[0]


@clean
def atomics_alone(x, out):
    count = cuda.shared.array(1, int32)
    i = cuda.threadIdx.x
    if i == 0:
        count[0] = 0
    cuda.syncthreads()
    cuda.atomic.add(count, 0, 1)
    cuda.atomic.max(count, 0, 5)
    cuda.syncthreads()
    out[cuda.grid(1)] = count[0]


@planted("race", at(24, 32), "no barrier", n_threads=64, grid=1)
def across_warps_after_syncwarp(x, out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    cuda.syncwarp()
    out[cuda.grid(1)] = tile[(i + 8) % 64]  # here


@clean
def within_warps_after_syncwarp(x, out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    cuda.syncwarp()
    out[cuda.grid(1)] = tile[i // 32 * 32 + (i + 8) % 32]
    cuda.syncwarp()
    tile[i ^ 1] = x[i]
    cuda.shfl_sync(FULL, i, 0)
    out[cuda.grid(1)] = tile[i]


@planted("race", at(15, 16), "no barrier", n_threads=32)
def half_a_warp(x, out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    if i < 16:
        cuda.syncwarp(0xFFFF)
        out[cuda.grid(1)] = tile[i + 1]  # here


@clean
def half_a_warp_alone(x, out):
    tile = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    if i < 16:
        cuda.syncwarp(0xFFFF)
        out[cuda.grid(1)] = tile[15 - i]


@planted("race", at(1, 0), r"out\[0\]")
def neighbours_in_global_memory(x, out):
    i = cuda.grid(1)
    out[i] = x[i]
    if cuda.threadIdx.x > 0:
        out[i] += out[i - 1]  # here


@clean
def neighbours_in_global_memory_with_a_barrier(x, out):
    i = cuda.grid(1)
    out[i] = x[i]
    cuda.syncthreads()
    if cuda.threadIdx.x > 0:
        x[i] = out[i - 1]


@planted("race", at(0, 0), r"of block \(0, 0, 0\) writes", block=B1)
def blocks_write_one_element(x, out):
    out[cuda.threadIdx.x] = x[cuda.grid(1)]  # here


@clean
def blocks_add_to_one_element(x, out):
    cuda.atomic.add(out, cuda.threadIdx.x, x[cuda.grid(1)])


@planted("race", at(0, 0), "two blocks", block=B1)
def block_reads_what_another_wrote(x, out):
    i = cuda.grid(1)
    out[i] = x[i]
    out[i] = out[cuda.threadIdx.x]  # here


@clean
def block_reads_what_another_wrote_fenced(x, out):
    i = cuda.grid(1)
    out[i] = x[i]
    cuda.threadfence()
    out[i] = out[cuda.threadIdx.x]


# ---- 3. reads of what nothing wrote


@planted("uninitialised", at(5), r"tile\[1, 5\], which nothing has written \(shared")
def shared_partly_written(x, out):
    tile = cuda.shared.array((2, N), float32)
    i = cuda.threadIdx.x
    if i != 5:
        tile[1, i] = x[i]
    cuda.syncthreads()
    out[cuda.grid(1)] = tile[1, i]  # here


@clean
def shared_all_written(x, out):
    tile = cuda.shared.array((2, N), float32)
    i = cuda.threadIdx.x
    tile[1, i] = x[i] if i != 5 else float32(0)
    cuda.syncthreads()
    out[cuda.grid(1)] = tile[1, i]


@planted("uninitialised", at(0), r"total\[1\], .* \(local")
def accumulator_not_cleared(x, out):
    total = cuda.local.array(2, float32)
    total[0] = float32(0)
    for k in range(2):
        total[k] += x[k]  # here
    out[cuda.grid(1)] = total[1]


@clean
def accumulator_cleared(x, out):
    total = cuda.local.array(2, float32)
    for k in range(2):
        total[k] = float32(0)
    for k in range(2):
        total[k] += x[k]
    out[cuda.grid(1)] = total[1]


@planted("uninitialised", at(0), r"tile\[0\]", grid=1)
def dynamic_shared_not_written(x, out):
    tile = cuda.shared.array(0, float32)
    i = cuda.threadIdx.x
    out[i] = tile[i]  # here


@clean
def dynamic_shared_written(x, out):
    tile = cuda.shared.array(0, float32)
    i = cuda.threadIdx.x
    tile[i] = x[i]
    x[i] = tile[i]


# ---- 4. barriers and warp operations that not all reach


@planted("divergence", at(0, 40), r"only 40 of .* 48 .*\(40, 0, 0\) has ended at")
def barrier_after_early_return(x, out):
    i = cuda.threadIdx.x
    if i >= 40:
        return  # ended
    cuda.syncthreads()  # here
    out[cuda.grid(1)] = x[i]


@clean
def barrier_before_return(x, out):
    i = cuda.threadIdx.x
    cuda.syncthreads()
    if i >= 40:
        return
    out[cuda.grid(1)] = x[i]


@planted("divergence", at(0, 1), r"only 24 .* waits at")
def barrier_in_a_branch(x, out):
    i = cuda.threadIdx.x
    if i % 2 == 0:
        cuda.syncthreads()  # here
    else:
        cuda.syncthreads()
    out[cuda.grid(1)] = x[i]


@clean
def barrier_in_a_uniform_branch(x, out):
    i = cuda.threadIdx.x
    if cuda.blockIdx.x % 2 == 0:
        cuda.syncthreads()
    else:
        cuda.syncthreads()
    out[cuda.grid(1)] = x[i]


@planted("divergence", at(0, 7), "only 47 .* has ended")
def one_trip_too_few(x, out):
    i = cuda.threadIdx.x
    for _ in range(3 if i != 7 else 2):
        cuda.syncthreads()  # here


@clean
def equal_trips(x, out):
    for _ in range(3 + cuda.blockIdx.x):
        cuda.syncthreads()


@planted("divergence", at(0, 16), r"0xffffffff waits for thread \(16")
def shuffle_in_a_branch(x, out):
    i = cuda.threadIdx.x
    value = i
    if i < 16:
        value = cuda.shfl_down_sync(FULL, value, 1)  # here
    cuda.syncthreads()
    out[cuda.grid(1)] = value


@clean
def shuffle_in_a_branch_with_its_mask(x, out):
    i = cuda.threadIdx.x
    value = i
    if i < 16:
        value = cuda.shfl_xor_sync(0xFFFF, value, 1)
    cuda.syncthreads()
    out[cuda.grid(1)] = value


# ---- 5. non-finite values


@planted("non-finite", at(2), r"writes inf to out\[50\]", block=B1)
def divides_by_zero(x, out):
    i = cuda.grid(1)
    out[i] = 1 / (x[i] - 50)  # here


@clean
def divides_and_means_it(x, out):
    i = cuda.grid(1)
    tile = cuda.shared.array(N, float32)
    tile[cuda.threadIdx.x] = -float32(np.inf)
    out[i] = 1 / (x[i] - 50)  # non-finite: meant


@planted("non-finite", at(1), r"writes inf to out\[0\]")
def adds_up_to_infinity(x, out):
    cuda.atomic.add(out, 0, float32(3e38) + x[0])  # here


@clean
def adds_up(x, out):
    cuda.atomic.add(out, 0, float32(3e3) + x[0])


# ---- 6. what the hardware leaves undefined


@planted("undefined", at(12), "from lane 16, .* undefined", n_threads=16)
def stores_a_shuffle_from_nowhere(x, out):
    value = cuda.shfl_down_sync(0xFFFF, cuda.threadIdx.x, 4) + 1
    out[cuda.grid(1)] = value  # here


@clean
def stores_what_is_defined(x, out):
    value = cuda.shfl_down_sync(0xFFFF, cuda.threadIdx.x, 4) + 1
    if cuda.threadIdx.x < 12:
        out[cuda.grid(1)] = value


@planted("undefined", at(4), "a branch depends on what .* lane 3", n_threads=16)
def branches_on_a_shuffle_from_nowhere(x, out):
    value = cuda.shfl_up_sync(0xFFF0, cuda.threadIdx.x, 1) if cuda.threadIdx.x >= 4 else 0
    if value > 3:  # here
        out[cuda.grid(1)] = value


@clean
def branches_on_what_is_defined(x, out):
    value = cuda.shfl_up_sync(0xFFF0, cuda.threadIdx.x, 1) if cuda.threadIdx.x >= 4 else 0
    if cuda.threadIdx.x > 4 and value > 3:
        out[cuda.grid(1)] = value


@planted("undefined", at(3), "by zero")
def divides_an_integer_by_zero(x, out):
    out[cuda.grid(1)] = 7 // (cuda.threadIdx.x - 3)  # here


@clean
def divides_an_integer(x, out):
    out[cuda.grid(1)] = 7 // (cuda.threadIdx.x + 3)


@planted("error", at(2), "UnboundLocalError")
def uses_a_name_too_early(x, out):
    if cuda.threadIdx.x == 2:
        out[0] = value  # noqa: F821  # here
    value = x[0]  # noqa: F841


@clean
def uses_a_name_in_time(x, out):
    value = x[0]
    if cuda.threadIdx.x == 2:
        out[0] = value


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.faulty.__name__)
def test_fault_is_found_where_it_is(case: Case):
    place = fill_row if case.faulty is shared_in_a_device_function else case.faulty
    with pytest.raises(KernelFault, match=case.says) as raised:
        case.run(case.faulty, "k")
    fault = raised.value
    line = line_marked(getattr(place, "py_func", place))
    assert (fault.kind, fault.kernel, fault.line, fault.block) == (case.kind, "k", line, case.block)
    assert fault.threads == case.threads
    assert fault.file == __file__
    text = str(fault)
    assert text.startswith(f"k: {case.kind}: ") and f"{__file__}:{line}, block {case.block}, thread" in text
    assert "# here" in text.splitlines()[-1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.faulty.__name__)
def test_clean_twin_passes(case: Case):
    assert case.clean is not None
    case.run(case.clean)


def test_a_negative_index_is_out_of_bounds():
    args = np.ones(N, np.float32), np.ones(N, np.float32)
    with pytest.raises(KernelFault, match=r"out\[-1\] is outside its shape \(48,\)"):
        interpret(global_negative, (1, 1, 1), (N, 1, 1), args)
    interpret(global_negative_guarded, (1, 1, 1), (N, 1, 1), args)


@pytest.mark.parametrize("faulty", [no_barrier, barrier_after_early_return, divides_by_zero, blocks_write_one_element])
def test_without_checks_the_kernel_runs_on(faulty):
    args = np.arange(2 * N, dtype=np.float32), np.zeros(2 * N, np.float32)
    interpret(faulty, (2, 1, 1), (N, 1, 1), args, checks=False)
    assert args[1].any()


def test_a_non_finite_input_is_the_callers_doing():
    x, out = np.arange(2 * N, dtype=np.float32), np.zeros(2 * N, np.float32)
    x[N + 1] = np.nan  # read by block 1 before it divides by zero
    interpret(divides_by_zero, (2, 1, 1), (N, 1, 1), (x, out))
    assert np.isnan(out[N + 1]) and np.isinf(out[50])

    def scaled(out, factor):
        out[cuda.grid(1)] = factor * 2

    interpret(scaled, (1, 1, 1), (1, 1, 1), (out, np.float32(np.inf)))
    assert out[0] == np.inf


def test_the_number_of_arguments_is_checked():
    with pytest.raises(KernelError, match=r"barrier: 1 arguments for the parameters \(x, out\)"):
        interpret(barrier, (1, 1, 1), (N, 1, 1), (np.zeros(N, np.float32),))


def test_threads_are_named_in_three_dimensions():
    def kernel(out):
        x, y, z = cuda.grid(3)
        out[z, y, x] = 1

    with pytest.raises(KernelFault) as raised:
        interpret(kernel, (1, 2, 2), (4, 2, 1), (np.zeros((2, 3, 4), np.float32),))
    assert (raised.value.block, raised.value.threads) == ((0, 1, 0), ((0, 1, 0),))
