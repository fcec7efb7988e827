"""What holds for the machine code of every kernel, architecture by architecture. Needs no GPU.

Kernels compile without spills, local memory or float64; and what their source promises is there: tensor cores, TMA,
wide accesses. A kernel that calls a PTX instruction must have what the assembler makes of it.

Compiling takes minutes, so there is a test file for each architecture, which workers share, with bfloat16 alone:
``.ci/run`` builds every kernel in every dtype.
"""

from __future__ import annotations

import collections
import importlib
import pkgutil
import re
from types import CodeType
from typing import Any

import numpy as np

import numstack.kernels
from numstack import simt
from numstack.device import Kernel
from numstack.device.cuda import sass
from numstack.device.cuda.compiler import Architecture
from numstack.device.current import using
from numstack.device.offline import Build, OfflineDevice
from numstack.kernels import catalogue
from numstack.kernels.build import DTYPES, build

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
        return [(key[0], built) for key, built in device.builds.items()]


def broken(builds: list[tuple[Kernel, Build]]) -> list[str]:
    """What the machine code lacks, or has and should not."""
    wrong: list[str] = []
    # A branch on a constant leaves some promises of a source to some of its kernels: one of them must keep each.
    kept: dict[CodeType, dict[str, bool]] = collections.defaultdict(dict)
    for of_source, built in builds:
        counts = sass.count(sass.disassemble(built.code))
        for promise, opcodes in promises(of_source).items():
            is_there = any(counts[opcode] for opcode in opcodes)
            if promise in MATRIX and not is_there:
                wrong.append(f"{built.kernel} calls {promise} and has no {' or '.join(opcodes)}")
            every = kept[of_source.py_func.__code__]
            every[promise] = every.get(promise, False) or is_there
        for opcode in sass.LOCAL_MEMORY + sass.FLOAT64:
            if counts[opcode]:
                wrong.append(f"{built.kernel} has {counts[opcode]} {opcode}")
    for code, found in kept.items():
        missing = [promise for promise, is_there in found.items() if not is_there]
        if missing:
            wrong.append(f"{code.co_filename}:{code.co_firstlineno} {code.co_name}: nothing came of {missing}")
    return wrong


def assert_every_kernel_is_fit_to_be_shipped(architecture: str, storage: str) -> None:
    builds = build(architecture, [DTYPES[storage]])
    assert builds
    assert not {f"{b.kernel}({b.types})": b.faults() for b in builds if b.faults()}
    assert all(b.resources.registers > 0 and 0 < b.occupancy <= 1 for b in builds)


def assert_every_kernel_is_in_the_catalogue(architecture: str) -> None:
    launched = set()

    class Noting(OfflineDevice):
        def bind(self, kernel: Kernel, *launch: Any) -> Any:
            launched.add(kernel.name)
            return lambda stream: None

    with using(Noting(Architecture.parse(architecture))) as device:
        for dtype in DTYPES.values():
            for launch in catalogue.launches(device.array, dtype):
                launch.run()
    # Clusters came with Hopper.
    here = [k for k in kernels_of_the_package() if k.cluster == 1 or architecture == "sm_90a"]
    missing = {k.name for k in here} - launched
    assert not missing, f"not in numstack/kernels/catalogue.py: {missing}"


def assert_what_the_source_promises_is_there(architecture: str) -> None:
    builds = compiled(architecture)
    assert builds, "no kernel calls a PTX instruction"
    wrong = broken(builds)
    assert not wrong, "\n".join(wrong)


def kernels_of_the_package() -> list[Kernel]:
    found = []
    for module in pkgutil.walk_packages(numstack.kernels.__path__, "numstack.kernels."):
        members = vars(importlib.import_module(module.name)).values()
        found += [member for member in members if isinstance(member, Kernel)]
    assert len(found) > 20
    return found
