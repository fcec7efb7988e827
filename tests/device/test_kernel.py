"""Launching kernels: shapes, argument types, what a launch says of itself, and the errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numba import cuda, float32

from numstack import memory
from numstack.device import Kernel, current_device, kernel, narrow, widen
from numstack.errors import ConfigError, DTypeError, KernelError
from tests.device.test_streams import Recorder
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host


@kernel
def _saxpy(x_N, y_N, out_N, factor):
    i = cuda.grid(1)
    if i < x_N.size:
        out_N[i] = narrow(float32(factor) * widen(x_N[i]) + widen(y_N[i]), out_N.dtype)


@kernel
def _add_one(x_N):
    i = cuda.grid(1)
    if i < x_N.size:
        x_N[i] += 1


@kernel
def _block_sums(x_N, out_B):
    shared = cuda.shared.array(0, float32)
    i = cuda.grid(1)
    shared[cuda.threadIdx.x] = x_N[i] if i < x_N.size else float32(0)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        total = float32(0)
        for j in range(cuda.blockDim.x):
            total += shared[j]
        out_B[cuda.blockIdx.x] = total


@pytest.mark.parametrize("n", [1, 31, 64, 65, 100_000])
def test_a_launch_covers_every_element_once(n: int) -> None:
    rng = np.random.default_rng(n)
    x, y = rng.standard_normal((2, n)).astype(np.float32)
    out = to_device(poisoned(n))
    _saxpy[-(-n // 64), 64](to_device(x), to_device(y), out, 2.5)
    assert_close(to_host(out), 2.5 * x.astype(np.float64) + y)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_one_kernel_serves_every_floating_format(dtype: str) -> None:
    numpy_dtype = BFLOAT16 if dtype == "bfloat16" else np.dtype(np.float16)
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 1000)).astype(numpy_dtype)
    out = to_device(poisoned(1000, numpy_dtype))
    _saxpy[-(-1000 // 64), 64](to_device(x), to_device(y), out, 2.5)
    expected = (np.float32(2.5) * x.astype(np.float32) + y.astype(np.float32)).astype(numpy_dtype)
    assert_close(to_host(out, numpy_dtype), expected, dtype=dtype)


def test_dynamic_shared_memory_takes_its_size_at_launch() -> None:
    x = np.random.default_rng(0).standard_normal(300).astype(np.float32)
    out = to_device(poisoned(3))
    _block_sums[3, 128, current_device().default_stream, 128 * 4](to_device(x), out)
    assert_close(to_host(out), [x[i : i + 128].sum(dtype=np.float64) for i in range(0, 300, 128)])


def test_a_launch_on_another_stream_runs_there_in_order() -> None:
    stream = current_device().create_stream()
    x = to_device(np.zeros(1000, np.float32))
    current_device().synchronize()
    for _ in range(5):
        _add_one[16, 64, stream](x)
    stream.synchronize()
    np.testing.assert_array_equal(to_host(x), np.full(1000, 5, np.float32))


def test_an_empty_grid_launches_nothing() -> None:
    x = to_device(np.zeros(1, np.float32))
    with current_device().observe(Recorder()) as recorder:
        _add_one[0, 64](x)
    assert not recorder.seen


def test_what_a_kernel_reads_and_writes_comes_from_its_source() -> None:
    x, y, out = (to_device(np.zeros(10, np.float32)) for _ in range(3))
    with current_device().observe(Recorder()) as recorder:
        _saxpy[1, 64](x, y, out, 1.0, flops=20)
        _add_one[1, 64](x)
    saxpy, add_one = recorder.seen[0][1], recorder.seen[2][1]
    assert saxpy.name == "test_kernel.saxpy" and saxpy.kind == "kernel" and saxpy.flops == 20
    assert list(map(id, saxpy.reads)) == [id(x), id(y)] and list(map(id, saxpy.writes)) == [id(out)]
    assert saxpy.nbytes == 120
    assert list(map(id, add_one.reads)) == [id(x)] == list(map(id, add_one.writes))


def test_strided_arrays_and_views() -> None:
    host = np.arange(24, dtype=np.float32).reshape(4, 6)
    x = memory.from_host(host)
    _add_one[1, 64](x[1])
    _add_one[1, 64](x[:, 2])
    host[1] += 1
    host[:, 2] += 1
    np.testing.assert_array_equal(to_host(x), host)


@pytest.mark.parametrize(
    ("grid", "block", "message"),
    [
        (1, 2000, "2000 threads; a block has at most 1024"),
        (1, (32, 32, 2), "2048 threads"),
        ((1, 1, 1, 1), 32, "give one to three positive sizes"),
        (-1, 32, "give one to three positive sizes"),
        (1, 0, "give one to three positive sizes"),
    ],
)
def test_impossible_launch_shapes_are_refused(grid: Any, block: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _add_one[grid, block]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((1.0,), r"takes 4 arguments \(x_N, y_N, out_N, factor\) but 1 were given"),
        (("x", "y", "out", "factor"), "x_N is a str; pass an array"),
        ((np.zeros(3, BFLOAT16),) * 3 + (1.0,), "x_N has dtype bfloat16; pass its bits"),
    ],
)
def test_wrong_arguments_are_refused_by_name(args: Any, message: str) -> None:
    if current_device().kind == "cuda" and not isinstance(args[0], str):
        args = tuple(to_device(a).view(np.float16) if isinstance(a, np.ndarray) else a for a in args)
        if len(args) == 4:
            pytest.skip("a bfloat16 array in GPU memory is always its bits")
    with pytest.raises(DTypeError, match=message):
        _saxpy[1, 32](*args)


def test_an_int_that_does_not_fit_32_bits_is_refused() -> None:
    x = to_device(np.zeros(3, np.float32))
    with pytest.raises(DTypeError, match=rf"factor={2**31} does not fit int32; pass numpy.int64"):
        _saxpy[1, 32](x, x, x, 2**31)


def test_check_finds_what_a_launch_would_not() -> None:
    x = to_device(np.zeros(40, np.float32))
    _add_one.check[2, 32](x)
    np.testing.assert_array_equal(to_host(x), np.ones(40, np.float32))

    @kernel
    def off_by_one(x_N):
        i = cuda.grid(1)
        if i <= x_N.size:
            x_N[i] = 1

    with pytest.raises(KernelError, match=r"(?s)off_by_one.*x_N\[40\] is outside its shape.*test_kernel\.py"):
        off_by_one.check[2, 32](x)


def test_the_plain_function_can_be_lifted_into_any_numba_project() -> None:
    assert isinstance(_add_one, Kernel)
    assert cuda.jit(_add_one.py_func).py_func is _add_one.py_func
