"""The cache: a warm start compiles nothing, whatever the code depends on is in its key, damage is noticed."""

import os
import subprocess
import sys

import numpy as np
import pytest
from numba import cuda, typeof

from numstack.simt import cache, compile_kernel, source_digest
from numstack.simt import compile as compiler
from tests.support import poisoned

X = np.arange(8, dtype=np.float32)


def make(factor):
    @cuda.jit(device=True)
    def scaled(value):
        return value * factor

    def kernel(x, out):
        i = cuda.grid(1)
        if i < x.size:
            out[i] = scaled(x[i])

    return kernel


@pytest.fixture
def directory(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMSTACK_CACHE", str(tmp_path))
    return tmp_path


def run(kernel):
    out = poisoned(8, np.float32)
    compile_kernel(kernel, (typeof(X), typeof(out)), (32, 1, 1))((1, 1, 1), 0, 1, 0, X, out)
    return out


def test_a_warm_start_compiles_nothing(directory, monkeypatch):
    np.testing.assert_array_equal(run(make(2)), 2 * X)
    [file] = (directory / "cpu").iterdir()
    monkeypatch.setattr(compiler, "flatten", lambda source: pytest.fail("it was compiled again"))
    np.testing.assert_array_equal(run(make(2)), 2 * X)
    assert list((directory / "cpu").iterdir()) == [file]


def test_a_constant_of_a_device_function_is_part_of_the_key(directory):
    assert source_digest(make(2)) == source_digest(make(2))
    assert source_digest(make(2)) != source_digest(make(3))
    np.testing.assert_array_equal(run(make(2)), 2 * X)
    np.testing.assert_array_equal(run(make(3)), 3 * X)
    assert len(list((directory / "cpu").iterdir())) == 2


@pytest.mark.parametrize("keep", [0, 20, -1])
def test_a_damaged_file_is_compiled_again(directory, keep):
    run(make(2))
    [file] = (directory / "cpu").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:keep])
    np.testing.assert_array_equal(run(make(2)), 2 * X)
    assert cache.load(file) is not None


def test_a_directory_that_cannot_be_written_is_no_reason_to_stop(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMSTACK_CACHE", str(tmp_path / "file"))
    np.testing.assert_array_equal(run(make(5)), 5 * X)


PROGRAM = """
import numpy as np
from tests.simt.test_cache import X, make, run
np.testing.assert_array_equal(run(make(7)), 7 * X)
"""


def test_two_processes_at_once_and_a_third_that_loads(directory):
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    both = [subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment) for _ in range(2)]
    assert [process.wait(120) for process in both] == [0, 0]
    assert len(list((directory / "cpu").iterdir())) == 1
    np.testing.assert_array_equal(run(make(7)), 7 * X)


KERNELS = """
import numpy as np
from numba import cuda, float32, typeof
from numstack.simt import compile_kernel
from tests.simt.test_cache import X, make, run

def searches(x, out):
    i = cuda.grid(1)
    if i < out.size:
        for k in range(x.size):
            if x[k] > i:
                out[i] = k
                break

def sums(x, out):
    lane = cuda.threadIdx.x
    total = float32(0)
    for k in range(lane, x.size, cuda.blockDim.x):
        total += x[k] if x[k] > 0 else x[k - 1]
    for distance in (16, 8, 4, 2, 1):
        total += cuda.shfl_xor_sync(0xFFFFFFFF, total, distance)
    out[lane] = total

run(make(7))
for kernel in (searches, sums):
    out = np.zeros(32, np.float32)
    compile_kernel(kernel, (typeof(X), typeof(out)), (32, 1, 1))((1, 1, 1), 0, 1, 0, X, out)
"""


def test_a_cold_compile_says_nothing(directory):
    (directory / "kernels.py").write_text(KERNELS)
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, str(directory / "kernels.py")]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")
    assert len(list((directory / "cpu").iterdir())) == 3


def test_the_digest_follows_a_global_constant(monkeypatch):
    def kernel(x):
        x[0] = LIMIT

    before = source_digest(kernel)
    monkeypatch.setitem(globals(), "LIMIT", 4)
    assert source_digest(kernel) != before


LIMIT = 3
