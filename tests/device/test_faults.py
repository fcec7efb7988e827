"""A fault on the GPU is reported with the works that can have caused it. Each needs a process: a fault ends it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

import pytest

from numstack.device import current_device

pytestmark = pytest.mark.skipif(
    current_device().kind != "cuda", reason="needs a GPU: NUMSTACK_DEVICE=cuda make test TESTS=tests/device"
)

PROGRAM = """
from numba import cuda
import numpy as np
from numstack import memory
from numstack.device import current_device, kernel
from numstack.errors import DeviceError

@kernel
def harmless(x_N):
    x_N[cuda.grid(1)] = 1

@kernel
def wild(x_N, i):
    x_N[i + 2**40] = 1

x = memory.from_host(np.zeros(64, np.float32))
try:
    harmless[1, 64](x)
    wild[1, 1](x, 0)
    print("asynchronous")
    harmless[1, 64](x)
    current_device().synchronize()
except DeviceError as error:
    print(error)
"""


def run(tmp_path: os.PathLike[str], **environment: str) -> str:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=120, env={**os.environ, **environment}
    )
    return done.stdout


def test_an_asynchronous_fault_names_the_last_works_and_their_lines(tmp_path: os.PathLike[str]) -> None:
    out = run(tmp_path)
    assert out.startswith("asynchronous")
    assert "CUDA_ERROR_ILLEGAL_ADDRESS: a kernel went outside its arrays" in out
    assert "last works submitted, newest last; NUMSTACK_SYNC=1 stops at the one at fault" in out
    assert "__main__.wild grid=(1, 1, 1) block=(1, 1, 1) from" in out and "program.py:19" in out


def test_synchronous_mode_stops_at_the_one_at_fault(tmp_path: os.PathLike[str]) -> None:
    out = run(tmp_path, NUMSTACK_SYNC="1")
    assert "asynchronous" not in out
    assert "__main__.wild failed with CUDA_ERROR_ILLEGAL_ADDRESS" in out
    assert out.rstrip().splitlines()[-1].strip().startswith("__main__.wild")


def test_a_gpu_that_is_not_there_is_named() -> None:
    program = "from numstack.device import current_device; current_device()"
    environment = {**os.environ, "OMPI_COMM_WORLD_LOCAL_RANK": "99"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment)
    assert "GPU 99 was asked for but the driver shows" in done.stderr
