"""The list of benchmarks, and how running one goes."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import benchmarks
from benchmarks.simt import simulator_s
from numstack import bench
from numstack.errors import ConfigError


def test_every_benchmark_is_listed_with_what_it_measures(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert {"gemm", "gelu", "launch", "simt", "attention"} <= set(names)
    assert all(len(line.split()) > 3 for line in lines)


def test_unknown_names_are_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match=r"there is no benchmark nonsense; there are .*gemm"):
        bench.main(["gemm", "nonsense"])


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "good.py").write_text('"""Writes its figures."""\nimport sys\nopen(sys.argv[2], "w").write("{}")\n')
    (folder / "bad.py").write_text('"""Fails."""\nraise SystemExit(3)\n')
    monkeypatch.setattr(bench, "FOLDER", folder)
    return tmp_path


def test_figures_are_written_and_a_failure_does_not_stop_the_rest(
    programs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert bench.main(["all", "--out", str(programs / "out")]) == 1
    assert json.loads((programs / "out" / "good.json").read_text()) == {}
    assert "failed: bad" in capfd.readouterr().err
    assert bench.main(["good", "--out", str(programs / "out")]) == 0


# the benchmark of training


def run_gpt2(*arguments: str) -> None:
    command = [sys.executable, "-m", "benchmarks.gpt2", *arguments]
    run = subprocess.run(command, cwd=bench.FOLDER.parent, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_gpt2_measures_a_step_and_what_it_is_made_of(tmp_path: Path) -> None:
    run_gpt2("--smoke", "--peer", "none", "--json", str(tmp_path / "gpt2.json"))
    [row] = json.loads((tmp_path / "gpt2.json").read_text())["rows"]
    assert row["tokens/s"] > 0 and row["peak GiB"] > 0 and 4 < row["last loss"] < 6
    operations = json.loads((tmp_path / "gpt2-operations.json").read_text())
    works = {row["operation"]: row["works"] for row in operations["rows"]}
    assert works["gemm, forward"] == works["gemm, input gradients"] == works["gemm, weight gradients"] == 2 * 4 + 1
    assert {"attention forward", "attention backward", "layernorm backward", "cross-entropy", "adamw"} <= set(works)
    assert works["all works"] == sum(row["n_works"] for row in operations["works"])


def test_gpt2_plan_needs_no_gpu(tmp_path: Path) -> None:
    """Batch 32 of GPT-2 124M takes no more memory than in PyTorch compiled, and nothing runs oftener than it must."""
    run_gpt2("--plan", "--json", str(tmp_path / "plan.json"))
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["peak_bytes"] < 15.1 * 2**30
    times = Counter[str]()
    for row in plan["rows"]:
        if not row["work"].endswith("gather"):  # the second kernel of a product that is cut along k
            times[row["operation"]] += row["times"]
    assert times["gemm, forward"] == times["gemm, input gradients"] == times["gemm, weight gradients"] == 12 * 4 + 1
    assert times["attention forward"] == 12 and times["layernorm forward"] == 25 and times["adamw"] == 1
    products = {row["work"] for row in plan["rows"] if row["operation"].startswith(("gemm", "attention forward"))}
    assert all("wgmma" in work for work in products), products


def test_numba_s_simulator_runs_what_it_is_timed_with() -> None:
    assert simulator_s(16) > 0


def test_every_benchmark_fits_the_package() -> None:
    """Those for GPUs too, which nothing else here imports."""
    for module in pkgutil.iter_modules(benchmarks.__path__, "benchmarks."):
        if not module.ispkg:
            importlib.import_module(module.name)
