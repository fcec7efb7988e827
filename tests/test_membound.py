"""benchmarks.membound at tiny sizes: every operation agrees with PyTorch, and the figures come out."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.membound import COLUMNS


@pytest.mark.skipif(
    importlib.util.find_spec("torch") is None, reason="needs PyTorch beside numstack: pip install torch"
)
@pytest.mark.timeout(300)
def test_every_operation_agrees_with_torch(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.membound", "--small", "--no-compile", "--check"]
    path = tmp_path / "figures.json"
    subprocess.run([*command, "--json", str(path)], cwd=Path(__file__).parents[1], check=True)
    rows = json.loads(path.read_text())["rows"]
    assert len(rows) > 20 and all(set(row) == set(COLUMNS) for row in rows)
    assert all(row["error"] <= 1e-2 for row in rows)
