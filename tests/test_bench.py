"""The list of benchmarks, and how running one goes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

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
