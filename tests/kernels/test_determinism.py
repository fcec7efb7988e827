"""Every kernel that is made for GPUs gives the same bits a hundred times: no race, no order of sums left to chance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numba import cuda

from numstack import memory, simt
from numstack.device import Kernel, current_device, kernel
from numstack.device.work import Work
from numstack.kernels import catalogue
from tests.kernels.every_launch import random_array
from tests.kernels.portable import portable_variants

REPETITIONS = 100
BLOCK = 256
BLOCKS = 1024
COMMAND = "NUMSTACK_DEVICE=cuda python -m pytest tests/kernels/test_determinism.py"


@kernel
def _count_different(a_N, b_N, count_1):
    stride = BLOCK * BLOCKS
    for i in range(cuda.grid(1), a_N.shape[0], stride):
        if a_N[i] != b_N[i]:
            cuda.atomic.add(count_1, 0, 1)


class Written:
    """Observes launches: which kernels ran, and which of the arrays made here they wrote."""

    def __init__(self) -> None:
        self.arrays: list[Any] = []
        self.kernels: set[Kernel] = set()
        self.written: dict[int, Any] = {}

    def array(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A new array of random numbers, or of small indices."""
        array = random_array(shape, dtype, len(self.arrays))
        self.arrays.append(array)
        return array

    def before(self, work: Work) -> None:
        """Note what a launch writes."""
        if work.kernel is not None:
            self.kernels.add(work.kernel)
        for array in work.writes:
            address = current_device().address(array)
            for owner in self.arrays:
                first = current_device().address(owner)
                if first <= address < first + owner.nbytes:
                    self.written[first] = owner

    def after(self, work: Work) -> None:
        """Nothing."""

    def calls_instructions(self) -> bool:
        """Whether a kernel that ran calls PTX instructions or vector accesses: all made for GPUs do."""
        return any(
            hasattr(function, "assembly") or function.__module__ == "numstack.device.ptx.vectors"
            for kernel in self.kernels
            for function in simt.functions_reached(kernel.py_func)
        )


def _words(array: Any) -> Any:
    flat = array.reshape(array.size)
    return flat.view(np.uint32 if array.itemsize == 4 else np.uint16)


def _copies(arrays: list[Any]) -> list[Any]:
    copies = [memory.empty(array.shape, array.dtype) for array in arrays]
    for copy, array in zip(copies, arrays, strict=True):
        current_device().copy(copy, array)
    return copies


@pytest.mark.timeout(280)
@pytest.mark.skipif(current_device().kind != "cuda", reason=f"blocks take turns on a CPU; on a GPU: {COMMAND}")
@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("family", catalogue.FAMILIES, ids=lambda family: family.__name__.lstrip("_"))
def test_a_hundred_repetitions_give_equal_bits(family: Callable[..., Any], dtype: type) -> None:
    device = current_device()
    count = memory.zeros((1,), np.int32)
    seen = Written()
    different: list[str] = []
    portable = portable_variants()
    for launch in family(seen.array, np.dtype(dtype)):
        if launch.variant in portable:
            continue
        launch.prepare()
        seen.kernels, seen.written = set(), {}
        inputs = _copies(seen.arrays)
        with device.observe(seen):
            launch.run()
        if not seen.calls_instructions():
            continue
        outputs = [array for array in seen.written.values() if not any(array is other for other in launch.scratch)]
        before = [copy for copy, array in zip(inputs, seen.arrays, strict=True) if any(array is o for o in outputs)]
        outputs = [array for array in seen.arrays if any(array is o for o in outputs)]
        first = _copies(outputs)
        device.fill(count, 0)
        for _ in range(REPETITIONS - 1):
            for array, copy in zip(outputs, before, strict=True):
                device.copy(array, copy)
            launch.run()
            for array, copy in zip(outputs, first, strict=True):
                _count_different[BLOCKS, BLOCK](_words(array), _words(copy), count)
        n_different = int(memory.to_host(count)[0])
        if n_different:
            different.append(f"{launch.operation} {launch.variant}: {n_different} elements")
        for array, copy in zip(outputs, before, strict=True):
            device.copy(array, copy)
    assert not different
