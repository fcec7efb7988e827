"""Every kernel compiles for GPUs, here where there is none, and none spills, uses local memory or float64."""

from __future__ import annotations

import importlib
import pkgutil

import numpy as np
import pytest
from numba import cuda, float64

import numstack.kernels
from numstack.device import Kernel, kernel, offline
from numstack.errors import KernelError
from numstack.kernels.build import build, main


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a"])
@pytest.mark.timeout(600)
def test_every_kernel_is_fit_to_be_shipped(architecture: str) -> None:
    builds = build(architecture)
    faulty = {f"{b.kernel}({b.types})": b.faults() for b in builds if b.faults()}
    assert not faulty
    built = {b.kernel for b in builds}
    missing = {k.name for k in kernels_of_the_package()} - built
    assert not missing, f"not in numstack/kernels/catalogue.py: {missing}"
    assert all(b.resources.registers > 0 and 0 < b.occupancy <= 1 for b in builds)


def kernels_of_the_package() -> list[Kernel]:
    found = []
    for module in pkgutil.walk_packages(numstack.kernels.__path__, "numstack.kernels."):
        members = vars(importlib.import_module(module.name)).values()
        found += [member for member in members if isinstance(member, Kernel)]
    assert len(found) > 20
    return found


def build_one(py_func: Kernel, dtype: type, block: int = 64) -> list[str]:
    with offline.device("sm_90a") as device:
        py_func[1, block](device.array((1024,), dtype))
    (built,) = device.builds.values()
    return built.faults()


def test_float64_arithmetic_is_a_fault() -> None:
    @kernel
    def slipped(x_N):
        i = cuda.grid(1)
        x_N[i] = x_N[i] * 0.1 + 0.5

    @kernel
    def sound(x_N):
        i = cuda.grid(1)
        x_N[i] = x_N[i] * np.float32(0.1) + np.float32(0.5)

    assert any("double" in fault.lower() for fault in build_one(slipped, np.float32))
    assert build_one(sound, np.float32) == []


def test_local_memory_is_a_fault() -> None:
    @kernel
    def indexed_at_run_time(x_N):
        i = cuda.grid(1)
        kept = cuda.local.array(64, float64)
        for j in range(64):
            kept[j] = x_N[j]
        x_N[i] = kept[int(x_N[i]) % 64]

    assert any("bytes of local memory" in fault for fault in build_one(indexed_at_run_time, np.float64))


def test_what_does_not_compile_says_so() -> None:
    @kernel
    def broken(x_N):
        x_N[0] = no_such_name  # noqa: F821

    with pytest.raises(KernelError, match=r"(?s)broken: numba could not compile it for sm_90a.*no_such_name"):
        build_one(broken, np.float32)


@pytest.mark.parametrize("name", ["sm_70", "90a", "sm_900", "ampere"])
def test_unknown_architectures_are_refused(name: str) -> None:
    with pytest.raises(KernelError, match=f"--arch {name}: no architecture"), offline.device(name):
        pass


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numstack.kernels.build.STORAGE", (np.dtype(np.float32),))
    monkeypatch.setattr("numstack.kernels.catalogue.launches", lambda array, dtype: iter(()))
    assert main(["build", "--arch", "sm_80"]) == 0
    assert "sm_80: 0 kernels built, 0 at fault" in capsys.readouterr().out
