"""Which CUDA versions meet in this process: the driver's, the compiler's (NVVM), the linker's, NVRTC's."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, tuple[int, ...]]:
    """Major and minor version of each part that loads: ``driver``, ``nvvm``, ``nvjitlink``, ``nvrtc``."""
    parts: dict[str, Callable[[], tuple[int, ...]]] = {
        "driver": _driver,
        "nvvm": _nvvm,
        "nvjitlink": _nvjitlink,
        "nvrtc": _nvrtc,
    }
    found = {}
    for name, ask in parts.items():
        try:
            found[name] = ask()
        except Exception:  # missing or broken: the doctor says so
            continue
    return found


def _driver() -> tuple[int, ...]:
    from cuda.bindings import driver

    result, number = driver.cuDriverGetVersion()
    if result or not number:
        raise RuntimeError("no driver")
    return number // 1000, number % 1000 // 10


def _nvvm() -> tuple[int, ...]:
    from numba.cuda.cudadrv.nvvm import NVVM

    NVVM()  # loads the library
    try:
        major, minor = version("nvidia-nvvm").split(".")[:2]
    except PackageNotFoundError:  # of a system-wide toolkit, which has one version for all parts
        return _nvrtc()
    return int(major), int(minor)


def _nvjitlink() -> tuple[int, ...]:
    from cuda.bindings import nvjitlink

    return tuple(nvjitlink.version())


def _nvrtc() -> tuple[int, ...]:
    from cuda.bindings import nvrtc

    result, major, minor = nvrtc.nvrtcVersion()
    if result:
        raise RuntimeError("no NVRTC")
    return major, minor
