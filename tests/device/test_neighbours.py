"""GPU arrays to and from PyTorch, CuPy and numba: one memory on both sides, alive as long as either needs it."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from typing import Any

import numpy as np
import pytest
from numba import cuda

from numstack import memory
from numstack.device import current_device
from numstack.device.cuda.array import CudaArray
from numstack.errors import DTypeError
from tests.support import to_host

pytestmark = pytest.mark.skipif(
    current_device().kind != "cuda", reason="needs a GPU: NUMSTACK_DEVICE=cuda make test TESTS=tests/device"
)


def ours() -> Any:
    return memory.from_host(np.arange(12, dtype=np.float32).reshape(3, 4))


class TestTorch:
    @pytest.fixture
    def torch(self) -> Any:
        return pytest.importorskip("torch")

    @pytest.mark.parametrize("take", ["from_dlpack", "as_tensor"])
    def test_takes_ours(self, torch: Any, take: str) -> None:
        x = ours()
        y = torch.from_dlpack(x) if take == "from_dlpack" else torch.as_tensor(x, device="cuda")
        assert y.data_ptr() == x.address and tuple(y.shape) == x.shape
        y += 1
        torch.cuda.synchronize()
        np.testing.assert_array_equal(to_host(x), np.arange(1, 13).reshape(3, 4))
        strided = torch.from_dlpack(x[:, 1:].T)
        assert strided.data_ptr() == x.address + 4 and strided.stride() == (1, 4)

    def test_gives_its_own(self, torch: Any) -> None:
        y = torch.arange(12, device="cuda", dtype=torch.float32).reshape(3, 4).T
        for x in (CudaArray.from_dlpack(y), CudaArray.from_interface(y)):
            assert x.address == y.data_ptr() and x.shape == (4, 3) and x.strides == (4, 16)
            np.testing.assert_array_equal(to_host(x), y.cpu().numpy())
        bits = CudaArray.from_dlpack(torch.ones(3, device="cuda", dtype=torch.bfloat16))
        assert bits.dtype == np.uint16 and to_host(bits).tolist() == [0x3F80] * 3

    def test_memory_lives_as_long_as_either_side(self, torch: Any) -> None:
        live = memory.statistics().live
        y = torch.from_dlpack(ours())
        gc.collect()
        assert memory.statistics().live > live
        assert y.sum().item() == 66
        del y
        gc.collect()
        assert memory.statistics().live == live

    def test_host_memory_is_refused(self, torch: Any) -> None:
        with pytest.raises(DTypeError, match="in host memory; copy it there"):
            CudaArray.from_dlpack(torch.ones(3))


def test_cupy_both_ways() -> None:
    cupy = pytest.importorskip("cupy")
    x = ours()
    for y in (cupy.from_dlpack(x), cupy.asarray(x)):
        assert y.data.ptr == x.address and y.shape == x.shape
    theirs = cupy.arange(6, dtype=cupy.float32).reshape(2, 3)
    for x in (CudaArray.from_dlpack(theirs), CudaArray.from_interface(theirs)):
        assert x.address == theirs.data.ptr
        np.testing.assert_array_equal(to_host(x), cupy.asnumpy(theirs))


def test_numba_both_ways() -> None:
    x = ours()
    y = cuda.as_cuda_array(x)
    assert y.device_ctypes_pointer.value == x.address and y.shape == x.shape
    theirs = cuda.to_device(np.arange(6, dtype=np.float32).reshape(2, 3))
    back = CudaArray.from_interface(theirs)
    assert back.address == theirs.device_ctypes_pointer.value
    np.testing.assert_array_equal(to_host(back), theirs.copy_to_host())


def test_kernels_take_neighbours_arrays_directly() -> None:
    from tests.device.test_kernel import _add_one

    theirs = cuda.to_device(np.zeros(100, np.float32))
    _add_one[2, 64](theirs)
    current_device().synchronize()
    np.testing.assert_array_equal(theirs.copy_to_host(), np.ones(100, np.float32))


def test_numbas_own_arrays_can_come_from_our_regions() -> None:
    program = """
        import numpy as np
        from numba import cuda
        from numstack import memory
        from numstack.memory.numba_plugin import use_our_memory
        use_our_memory()
        before = memory.statistics().live
        a = cuda.device_array(1000, np.float32)
        a[:] = 3
        assert memory.statistics().live >= before + 4000, memory.statistics()
        assert (a.copy_to_host() == 3).all()
        del a
        assert memory.statistics().live == before, memory.statistics()
        print("ours")
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=120)
    assert run.stdout.strip() == "ours", run.stderr
