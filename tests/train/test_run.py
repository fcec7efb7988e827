"""Runs of the example on one rank, in this process: same bits, resuming, signals, and what is left behind."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

import numstack.train
from numstack.errors import CheckpointError, ConfigError, DataError, NumstackError
from numstack.train import Stopped, checkpoint, metrics
from tests.train.conftest import Train

DROPOUT = ("--dropout", "0.1")


def newest(folder: Path) -> checkpoint.Checkpoint:
    path = checkpoint.latest(folder / "checkpoints")
    assert path is not None
    return checkpoint.load(path)


def bits(folder: Path) -> dict[str, bytes]:
    """Every array of the newest checkpoint."""
    arrays = newest(folder).arrays
    return {f"{file}/{name}": array.tobytes() for file in arrays for name, array in arrays[file].items()}


def losses(folder: Path) -> list[tuple[float, ...]]:
    """What was measured, without times."""
    rows = metrics.read(folder / "metrics.jsonl")
    return [tuple(value for key, value in row.items() if key not in ("elapsed_s", "tokens_per_s")) for row in rows]


def act_at_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Any) -> None:
    """Let ``action()`` happen in the middle of training step number ``step`` (the first is 1)."""
    real = numstack.train.train_step
    done = 0

    def train_step(*args: Any, **options: Any) -> float:
        nonlocal done
        done += 1
        if done == step:
            action()
        return real(*args, **options)

    monkeypatch.setattr(numstack.train, "train_step", train_step)


def test_what_a_run_leaves_and_prints(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train("run", "--checkpoint-every", "5", "--keep", "2", "--sample", "30")
    assert sorted(os.listdir(folder)) == ["checkpoints", "loss.png", "metrics.jsonl"]
    assert sorted(os.listdir(folder / "checkpoints")) == ["step_00000015", "step_00000020"]
    rows = metrics.read(folder / "metrics.jsonl")
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, 21))
    assert [row["step"] for row in rows if "validation_loss" in row] == [10, 20]
    assert rows[-2]["loss"] < rows[0]["loss"] - 0.1
    output = capsys.readouterr().out
    assert re.fullmatch(r"validation loss: \d\.\d{4} nats/char after \d+\.\d s on 1 ranks", output.splitlines()[-1])
    assert f"{rows[-1]['validation_nats_per_character']:.4f}" in output.splitlines()[-1]
    sample = re.search(r"a sample of what it writes:\n(.*?)\n\nloss curve", output, re.DOTALL)
    assert sample is not None and len(sample[1]) == 31


def test_same_seed_same_bits(train: Train) -> None:
    first, second = train("first", *DROPOUT), train("second", *DROPOUT)
    assert bits(first) == bits(second)
    assert losses(first) == losses(second)
    assert bits(train("other", *DROPOUT, "--seed", "1")) != bits(first)


def test_accumulating_micro_batches_changes_rounding_only(train: Train) -> None:
    whole, parts = losses(train("whole")), losses(train("parts", "--accumulate", "4"))
    assert whole == [pytest.approx(row, rel=1e-5) for row in parts]


def test_resumed_run_equals_uninterrupted(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run killed without warning after its checkpoint goes on with the same bits, dropout included."""
    straight = train("straight", *DROPOUT)

    class Killed(BaseException):
        pass

    def kill() -> None:
        raise Killed

    with monkeypatch.context() as patch:
        act_at_step(patch, 13, kill)
        with pytest.raises(Killed):
            train("killed", *DROPOUT, "--checkpoint-every", "9")
    folder = straight.parent / "killed"
    assert newest(folder).step == 9
    train("killed", "--resume", str(folder))
    assert bits(folder) == bits(straight)
    assert losses(folder) == losses(straight)


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGUSR2, 140)],
)
def test_signal_saves_first(
    train: Train,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    code: int,
) -> None:
    folder = tmp_path / "stopped"
    before = signal.getsignal(number)  # a shell that starts the tests in the background has it ignored
    with monkeypatch.context() as patch:
        act_at_step(patch, 7, lambda: signal.raise_signal(number))
        with pytest.raises(Stopped) as stopped:
            train("stopped", *DROPOUT)
    assert stopped.value.code == code
    line = f"ended by {number.name} after step 7 of 20; saved; go on with: --resume {folder}"
    assert capfd.readouterr().err.splitlines()[-1] == line
    assert newest(folder).step == 7
    train("stopped", "--resume", str(folder))
    assert bits(folder) == bits(train("straight", *DROPOUT))
    assert signal.getsignal(number) == before


def test_signal_during_validation_breaks_it_off(train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mpirun leaves too little time to finish a validation first."""

    def evaluate(*args: Any, **options: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return numstack.train.evaluate(*args, **options)

    monkeypatch.setattr("numstack.train.run.evaluate", evaluate)
    with pytest.raises(Stopped):
        train("stopped")
    assert newest(tmp_path / "stopped").step == 10
    assert [row[0] for row in losses(tmp_path / "stopped")] == list(range(1, 11))


def test_precision_is_said_recorded_and_resumed(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    """Checkpoints of a run in float16 hold float32 and the loss scale; it goes on with the same bits, or in another."""
    folder = train("run", "--precision", "fp16", "--checkpoint-every", "10")
    output = capsys.readouterr().out
    words = "float32 in embedding, softmax, norms, reductions, optimiser; float16 in attention, mlp, head"
    assert f"precision: {words}" in output
    assert "nats/char, loss scale 65536, 0 steps skipped so far" in output
    row = metrics.read(folder / "metrics.jsonl")[-1]
    assert (row["loss_scale"], row["n_skipped_steps"]) == (65536.0, 0)
    saved = newest(folder)
    assert saved.configuration["options"]["precision"] == "fp16"
    assert saved.configuration["precision"]["mlp"] == {"storage": "float16", "computation": "float16"}
    assert all(array.dtype == "float32" for array in saved.arrays["model"].values())
    assert saved.arrays["optimizer"]["loss_scale.scale"].tolist() == [65536.0]

    expected = bits(folder)
    train("run", "--resume", str(folder / "checkpoints" / "step_00000010"))
    assert bits(folder) == expected
    capsys.readouterr()
    train("run", "--resume", str(folder), "--steps", "22", "--precision", "fp32")
    assert "note: it was trained in fp16, now it goes on in fp32" in capsys.readouterr().out
    assert newest(folder).step == 22


def test_resume_after_the_last_step_only_reports(train: Train, capsys: pytest.CaptureFixture[str]) -> None:
    folder = train("run")
    before, line = bits(folder), capsys.readouterr().out.splitlines()[-1]
    train("run", "--resume", str(folder))
    again = capsys.readouterr().out.splitlines()[-1]
    assert bits(folder) == before
    assert again.split(" after ")[0] == line.split(" after ")[0]


def test_more_steps(train: Train) -> None:
    folder = train("run")
    train("run", "--resume", str(folder), "--steps", "22")
    assert newest(folder).step == 22
    assert [row[0] for row in losses(folder) if len(row) == 2] == list(range(1, 23))


def test_another_configuration(train: Train) -> None:
    folder = train("run")
    with pytest.raises(CheckpointError, match=r"of another configuration: it was trained with --layers 1, not 2"):
        train("run", "--resume", str(folder), "--layers", "2")
    train("run", "--resume", str(folder), "--layers", "1")  # the same value may be repeated


def test_other_data(train: Train, tmp_path: Path) -> None:
    folder = train("run")
    (tmp_path / "other.txt").write_text("to be or not to be " * 1000)
    numstack.data.prepare(tmp_path / "other", [tmp_path / "other.txt"])
    with pytest.raises(CheckpointError, match=r"of another configuration: it was trained with another model"):
        train("run", "--resume", str(folder), "--data", str(tmp_path / "other"))


def test_damaged_checkpoint_is_named_and_an_older_one_can_be_taken(train: Train) -> None:
    folder = train("run", "--checkpoint-every", "10")
    expected = bits(folder)
    broken = folder / "checkpoints" / "step_00000020" / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-3])
    with pytest.raises(CheckpointError, match=r"step_00000020/model\.safetensors: truncated"):
        train("run", "--resume", str(folder))
    train("run", "--resume", str(folder / "checkpoints" / "step_00000010"))
    assert bits(folder) == expected


def test_nothing_to_resume(train: Train, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint in it"):
        train("run", "--resume", str(tmp_path / "nowhere"))


def test_a_run_is_not_overwritten(train: Train) -> None:
    folder = train("run")
    before = bits(folder)
    with pytest.raises(ConfigError, match=r"holds a run .*; go on with --resume .*, or give another --out"):
        train("run")
    assert bits(folder) == before


def test_divergence_is_an_error_and_is_not_saved(train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numstack.train, "train_step", lambda *args, **options: float("nan"))
    with pytest.raises(NumstackError, match=r"the loss is nan in step 1: training has diverged; lower --learning-rate"):
        train("run")


def test_output_folder_that_cannot_be_written(train: Train, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        train("file/run")


def test_manifest_is_complete(train: Train) -> None:
    folder = train("run")
    manifest = json.loads((folder / "checkpoints" / "step_00000020" / "manifest.json").read_text())
    assert manifest["version"] == 1
    assert manifest["configuration"]["model"]["n_layer"] == 1
    assert manifest["configuration"]["options"]["seed"] == 1337
    assert manifest["configuration"]["n_ranks"] == 1
    assert manifest["files"].keys() == {"model.safetensors", "optimizer.safetensors"}
