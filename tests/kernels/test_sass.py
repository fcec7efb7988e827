"""What a kernel's source promises is in its machine code: tensor cores, TMA, wide accesses. Needs no GPU.

A kernel that calls a PTX instruction must have what the assembler makes of it, and no kernel that does may have local
memory or float64 arithmetic.
"""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda, float32

from numstack.device import Kernel, kernel, narrow, widen
from numstack.device.cuda.compiler import Architecture
from numstack.device.current import using
from numstack.device.ptx import vectors
from numstack.errors import ConfigError
from numstack.kernels.build import main
from tests.kernels.machine_code import Compiling, broken

BFLOAT16 = np.dtype(np.uint16)


def _make_planted(calls_load: bool, indexes_at_run_time: bool) -> Kernel:
    @kernel
    def planted(x_N):
        values = cuda.local.array(64, float32)
        for k in range(64):
            values[k] = widen(x_N[k])
        if calls_load:
            vectors.load8(x_N, 8 * cuda.grid(1), values, 0)
        k = cuda.threadIdx.x & 63 if indexes_at_run_time else 3
        vectors.store8(x_N, 8 * cuda.grid(1), values, 0)
        x_N[cuda.grid(1)] = narrow(values[k], x_N.dtype)

    return planted


def test_broken_promises_are_seen() -> None:
    def faults(planted: Kernel) -> list[str]:
        with using(Compiling(Architecture.parse("sm_90a"))) as device:
            planted[1, 32](device.array((512,), BFLOAT16))
            return broken([(key[0], build) for key, build in device.builds.items()])

    assert faults(_make_planted(calls_load=True, indexes_at_run_time=False)) == []
    (unkept,) = faults(_make_planted(calls_load=False, indexes_at_run_time=False))
    assert "planted: nothing came of ['load8']" in unkept
    local = faults(_make_planted(calls_load=True, indexes_at_run_time=True))
    assert any("has" in fault and "LDL" in fault for fault in local)


def test_the_command_prints_machine_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sass", "reduce.clip_scale", "--arch", "sm_80", "--dtype", "fp32"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("reduce.clip_scale (float32, float32), sm_80: ")
    assert "1 LDG, 3 STG" in printed and "EXIT" in printed
    assert main(["sass", "reduce.clip_scale", "--count"]) == 0
    assert "EXIT" not in capsys.readouterr().out


def test_words_of_no_kernel_are_refused() -> None:
    with pytest.raises(ConfigError, match="no kernel for sm_90a has 'gemm' and 'fastest' in its operation and variant"):
        main(["sass", "gemm", "fastest"])
