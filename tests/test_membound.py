"""benchmarks.membound at tiny sizes: every operation agrees with PyTorch, and the figures come out."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.membound import COLUMNS, EQUAL_COPY, IN_A_ROW, IN_A_ROW_BYTES, RUNS, SLOW_RUNS, TIE_RUNS, GpuClock


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


class FakeGpu:
    """PyTorch, as far as a clock sees it: a kernel takes time on the GPU, and the host waits for it."""

    def __init__(self) -> None:
        self.now = self.waited = 0.0
        self.counts: dict[str, int] = {}
        self.cuda = SimpleNamespace(Event=self.event, _sleep=lambda cycles: None, synchronize=self.synchronize)

    def zeros(self, n: int, device: str) -> Any:
        return SimpleNamespace(sum=lambda: None)

    def event(self, enable_timing: bool) -> Any:
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.now)
        event.elapsed_time = lambda later: 1e3 * (later.at - event.at)
        return event

    def synchronize(self) -> None:
        self.waited = self.now

    def kernel(self, name: str, seconds: float) -> None:
        self.now += seconds
        self.counts[name] = self.counts.get(name, 0) + 1


@pytest.mark.parametrize(("nbytes", "in_a_row"), [(IN_A_ROW_BYTES - 1, 1), (IN_A_ROW_BYTES, IN_A_ROW)])
def test_ties_and_the_copy_beside_them_run_more_often(
    monkeypatch: pytest.MonkeyPatch, nbytes: int, in_a_row: int
) -> None:
    """One behind the other, where the cache cannot hold what one leaves for the next."""
    gpu = FakeGpu()
    monkeypatch.setattr("benchmarks.membound.time.perf_counter", lambda: gpu.waited)
    seconds = {"ours": 65e-6, "compiled": 66e-6, "eager": 80e-6, "slow": 0.5, EQUAL_COPY: 65e-6}
    runs = {name: partial(gpu.kernel, name, s) for name, s in seconds.items()}
    medians = GpuClock(gpu).medians(runs, nbytes)
    assert medians == pytest.approx(seconds)
    to_begin = 2  # one that may compile, one that tells what is slow
    often, seldom, rarely = to_begin + RUNS + TIE_RUNS * in_a_row, to_begin + RUNS, to_begin + SLOW_RUNS
    assert gpu.counts == {"ours": often, "compiled": often, "eager": seldom, "slow": rarely, EQUAL_COPY: often}


def test_what_nothing_ties_with_does_not_run_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = FakeGpu()
    monkeypatch.setattr("benchmarks.membound.time.perf_counter", lambda: gpu.waited)
    runs = {name: partial(gpu.kernel, name, s) for name, s in (("ours", 1e-3), ("eager", 1.1e-3), (EQUAL_COPY, 1e-3))}
    GpuClock(gpu).medians(runs, nbytes=1 << 28)
    assert set(gpu.counts.values()) == {2 + RUNS}
    assert GpuClock(gpu).medians({}, nbytes=1 << 28) == {}
