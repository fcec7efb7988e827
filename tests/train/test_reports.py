"""Metrics, picture and progress: what a run leaves behind and shows."""

import io
import json
import time
from pathlib import Path

import pytest

from numstack.errors import DataError
from numstack.train import console, metrics, plot


def test_metrics_are_json_lines(tmp_path: Path) -> None:
    file = metrics.MetricsFile(tmp_path / "metrics.jsonl")
    file.write(step=1, loss=2.5)
    file.write(step=2, loss=2.25, validation_loss=2.3)
    assert [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [
        {"step": 1, "loss": 2.5},
        {"step": 2, "loss": 2.25, "validation_loss": 2.3},
    ]
    file.close()


def test_a_resumed_run_drops_later_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n{"step": 3, "lo')
    file = metrics.MetricsFile(path, step=1)
    file.write(step=2, loss=2.0)
    file.close()
    assert [row["step"] for row in metrics.read(path)] == [1, 2]


def test_metrics_that_are_damaged(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(DataError, match="line 1 is no JSON"):
        metrics.read(path)


def test_picture(tmp_path: Path) -> None:
    rows = [{"step": s, "loss": 4.0 / s} | ({"validation_loss": 3.0} if s % 5 == 0 else {}) for s in range(1, 20)]
    plot.save_loss(tmp_path / "loss.png", rows)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    plot.save_loss(tmp_path / "empty.png", [])
    assert (tmp_path / "empty.png").stat().st_size > 1000


def test_plain_lines_every_few_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    stream = io.StringIO()
    report = console.ProgressReport(n_steps=1000, step=500, stream=stream)
    for step in range(501, 701):
        now += 0.125
        report.update(step, loss=2.0, tokens_per_s=12345.6)
    report.say("[brackets] stay")
    report.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "step 540/1000  loss 2.0000  12,346 tokens/s  0:58 left"
    assert lines[-1] == "[brackets] stay"
    assert len(lines) == 6


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "launched_by_mpirun", lambda: False)
    stream = Terminal()
    report = console.ProgressReport(n_steps=10, stream=stream)
    report.update(5, loss=1.5, tokens_per_s=100)
    report.say("[brackets] stay")
    report.close()
    assert "5/10" in stream.getvalue() and "loss 1.5000" in stream.getvalue()
    assert "[brackets] stay" in stream.getvalue()


def test_last_words_start_a_line_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "launched_by_mpirun", lambda: False)
    for stream, expected in ((io.StringIO(), "the end\n"), (Terminal(), "\nthe end\n")):
        report = console.ProgressReport(n_steps=10, stream=stream)
        report.last_words("the end")
        report.close()
        assert capsys.readouterr().err == expected


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (62.4, "1:02"), (3602, "1:00:02")])
def test_duration(seconds: float, text: str) -> None:
    assert console.duration(seconds) == text
