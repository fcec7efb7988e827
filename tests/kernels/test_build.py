"""What makes a kernel unfit to be shipped is seen, and the command that lists all kernels says so."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float64

from numstack.device import Kernel, kernel, offline
from numstack.errors import ConfigError, KernelError
from numstack.kernels.build import build_all, main


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
    assert main(["build", "--arch", "sm_80", "--jobs", "1"]) == 0
    assert "sm_80: 0 kernels built, 0 at fault" in capsys.readouterr().out


def test_processes_share_the_work() -> None:
    """A kernel without activations is in each dtype's part; it is listed once."""
    words = ("reduce.clip_scale",)
    here, shared_out = build_all(["sm_80", "sm_90a"], words=words), build_all(["sm_80", "sm_90a"], 2, words)
    assert [len(builds) for builds in here.values()] == [1, 1]
    for architecture, builds in here.items():
        assert [(b.kernel, b.resources) for b in shared_out[architecture]] == [(b.kernel, b.resources) for b in builds]


def test_no_process_is_refused() -> None:
    with pytest.raises(ConfigError, match="--jobs 0: no process would compile"):
        main(["build", "--jobs", "0"])
