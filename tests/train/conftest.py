"""What the training tests share: a small text, a tiny model, and the example run in this process."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from numstack.data import prepare, shipped
from tests.mpirun import ROOT

EXAMPLE = str(ROOT / "examples" / "train_gpt.py")

Train = Callable[..., Path]


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of token files: 30,000 characters of Shakespeare."""
    folder = tmp_path_factory.mktemp("text")
    (folder / "text.txt").write_bytes(shipped.read("shakespeare.txt")[:30_000])
    prepare(folder / "tokens", [folder / "text.txt"])
    return folder / "tokens"


@pytest.fixture(scope="session")
def tiny(text: Path) -> list[str]:
    """Options of a model that trains in a second."""
    options = f"--data {text} --layers 1 --heads 2 --width 16 --context 8 --batch 8 --steps 20"
    return [*options.split(), "--evaluate-every", "10", "--evaluate-windows", "12", "--sample", "0"]


@pytest.fixture
def train(tiny: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Train:
    """Run examples/train_gpt.py in this process, on one rank: ``train("name", *options)`` returns the run's folder."""

    def run(name: str, *options: str) -> Path:
        folder = tmp_path / name
        where = [] if "--resume" in options else [*tiny, "--out", str(folder)]
        monkeypatch.setattr(sys, "argv", [EXAMPLE, *where, *options])
        monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # so that it is put back
        monkeypatch.setattr("threading.excepthook", __import__("threading").excepthook)
        runpy.run_path(EXAMPLE, run_name="__main__")
        return folder

    return run
