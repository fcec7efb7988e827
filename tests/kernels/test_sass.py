"""What a kernel's source promises is in its machine code: tensor cores, TMA, wide accesses. Needs no GPU.

A kernel that calls a PTX instruction must have what the assembler makes of it, and no kernel that does may have local
memory or float64 arithmetic.
"""

from __future__ import annotations

import collections
import re
from types import CodeType
from typing import Any

import numpy as np
import pytest
from numba import cuda, float32

from numstack import simt
from numstack.device import Kernel, kernel, narrow, widen
from numstack.device.cuda import sass
from numstack.device.cuda.compiler import Architecture
from numstack.device.current import using
from numstack.device.offline import Build, OfflineDevice
from numstack.device.ptx import vectors
from numstack.errors import ConfigError
from numstack.kernels import catalogue
from numstack.kernels.build import main

BFLOAT16 = np.dtype(np.uint16)

# Text of a PTX instruction, and the opcodes of which one must be there.
MATRIX = {r"wgmma\.mma_async": ("HGMMA",), r"\bmma\.sync": ("HMMA",)}
OTHERS = {
    r"ldmatrix": ("LDSM",),
    r"stmatrix": ("STSM",),
    r"cp\.async\.bulk\.tensor\.\dd\.shared": ("UTMALDG",),
    r"cp\.async\.bulk\.tensor\.\dd\.global": ("UTMASTG",),
    r"cp\.reduce\.async\.bulk\.tensor": ("UTMAREDG",),
    r"cp\.reduce\.async\.bulk\.global": ("UBLKRED",),
    r"cp\.async\.c[ag]\.shared": ("LDGSTS",),
    r"setmaxnreg": ("USETMAXREG",),
    r"mbarrier\.(try_wait|arrive|init)": ("SYNCS",),
    r"ex2\.approx": ("MUFU.EX2",),
    r"tanh\.approx": ("MUFU.TANH",),
    r"cvt\.rn\.(bf16x2|f16x2)": ("F2FP",),
}
# Of device.ptx.vectors, on 16-bit elements; in shared memory as well as in global.
VECTORS = {"load8": ("LDG.E.128", "LDG.E.EF.128", "LDS.128"), "store8": ("STG.E.128", "STG.E.EF.128", "STS.128")}


class Compiling(OfflineDevice):
    """Compiles only kernels that call PTX instructions; the others have nothing to show."""

    def bind(self, kernel: Kernel, *launch: Any) -> Any:
        return super().bind(kernel, *launch) if promises(kernel) else lambda stream: None


def promises(kernel: Kernel) -> dict[str, tuple[str, ...]]:
    """What in a kernel's source promises something, and the opcodes of which one must be there."""
    found: dict[str, tuple[str, ...]] = {}
    for function in simt.functions_reached(kernel.py_func):
        text = getattr(function, "assembly", "")
        found |= {pattern: opcodes for pattern, opcodes in (MATRIX | OTHERS).items() if re.search(pattern, text)}
        if function.__module__ == "numstack.device.ptx.vectors":
            found |= {name: opcodes for name, opcodes in VECTORS.items() if function.__name__.startswith(name)}
    return found


def compiled(architecture: str) -> list[tuple[Kernel, Build]]:
    with using(Compiling(Architecture.parse(architecture))) as device:
        for launch in catalogue.launches(device.array, BFLOAT16):
            launch.run()
        return [(key[0], build) for key, build in device.builds.items()]


def broken(builds: list[tuple[Kernel, Build]]) -> list[str]:
    """What the machine code lacks, or has and should not."""
    wrong: list[str] = []
    # A branch on a constant leaves some promises of a source to some of its kernels: one of them must keep each.
    kept: dict[CodeType, dict[str, bool]] = collections.defaultdict(dict)
    for of_source, build in builds:
        counts = sass.count(sass.disassemble(build.code))
        for promise, opcodes in promises(of_source).items():
            is_there = any(counts[opcode] for opcode in opcodes)
            if promise in MATRIX and not is_there:
                wrong.append(f"{build.kernel} calls {promise} and has no {' or '.join(opcodes)}")
            every = kept[of_source.py_func.__code__]
            every[promise] = every.get(promise, False) or is_there
        for opcode in sass.LOCAL_MEMORY + sass.FLOAT64:
            if counts[opcode]:
                wrong.append(f"{build.kernel} has {counts[opcode]} {opcode}")
    for code, found in kept.items():
        missing = [promise for promise, is_there in found.items() if not is_there]
        if missing:
            wrong.append(f"{code.co_filename}:{code.co_firstlineno} {code.co_name}: nothing came of {missing}")
    return wrong


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_80"])
@pytest.mark.timeout(600)
def test_what_the_source_promises_is_there(architecture: str) -> None:
    builds = compiled(architecture)
    assert builds, "no kernel calls a PTX instruction"
    wrong = broken(builds)
    assert not wrong, "\n".join(wrong)


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
