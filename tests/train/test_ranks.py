"""Runs of the example on two ranks: the same result as on one, and one clear line and a prompt end when it fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from numstack.data import write_tokens
from numstack.train import checkpoint, metrics
from tests.mpirun import ENVIRONMENT, ROOT, Finished, mpirun
from tests.train.conftest import EXAMPLE, Train
from tests.train.test_run import bits, losses, newest

FAULTY = str(ROOT / "tests" / "train" / "faulty.py")
# Importing, and compiling the first time, take their while on a busy machine; what must be prompt is the end after the
# fault.
PATIENCE_S = 240
PROMPT_S = 10


def launch(*arguments: str, n: int = 2) -> Finished:
    return mpirun(
        n,
        *arguments,
        timeout_s=PATIENCE_S,
        env={"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )


def complaint(result: Finished) -> str:
    """The one line that numstack prints when it fails; fails if there is none, or more than one."""
    lines = [line for line in result.output.splitlines() if "error on rank" in line or ": error:" in line]
    assert len(lines) == 1, result.output
    assert result.returncode != 0
    assert "Traceback" not in result.output
    return lines[0]


def seconds_since_fault(result: Finished) -> float:
    """From when faulty.py says that it planted its fault until now."""
    planted = re.search(r"planted at ([0-9.]+)", result.output)
    assert planted is not None, result.output
    return time.time() - float(planted[1])


def hear_interrupts() -> None:
    """Undo what a shell does to what it starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_one_and_two_ranks_agree(train: Train, tiny: list[str], tmp_path: Path) -> None:
    """The same global batch: 20 steps to 1e-5, and the same again with MPI's own all-reduce."""
    one = np.array([row[1] for row in losses(train("one"))])
    for communicator in ("ring", "mpi"):
        folder = tmp_path / communicator
        result = launch(EXAMPLE, *tiny, "--communicator", communicator, "--out", str(folder))
        assert result.returncode == 0, result.output
        assert result.output.splitlines()[-1].endswith("s on 2 ranks")
        two = np.array([row[1] for row in losses(folder)])
        np.testing.assert_allclose(two, one, rtol=1e-5)


def test_signal_on_one_rank_stops_both_at_the_same_step(tiny: list[str], tmp_path: Path) -> None:
    dropout = ("--dropout", "0.1")
    assert launch(EXAMPLE, *tiny, *dropout, "--out", str(tmp_path / "straight")).returncode == 0
    folder = tmp_path / "stopped"
    result = launch(FAULTY, "is signalled", *tiny, *dropout, "--out", str(folder))
    assert result.returncode == 143
    assert f"ended by SIGTERM after step 7 of 20; saved; go on with: --resume {folder}" in result.output
    assert newest(folder).step == 7
    assert launch(EXAMPLE, "--resume", str(folder)).returncode == 0
    assert bits(folder) == bits(tmp_path / "straight")
    assert losses(folder) == losses(tmp_path / "straight")


def test_interrupting_mpirun_saves(tiny: list[str], tmp_path: Path) -> None:
    """mpirun gives its ranks half a second."""
    result = launch(FAULTY, "interrupt mpirun", *tiny, "--steps", "100000", "--out", str(tmp_path / "run"))
    assert result.returncode != 0
    assert newest(tmp_path / "run").step >= 7
    assert "ended by SIGTERM after step" in result.output


def test_launcher_lets_ranks_save(tiny: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "numstack.cli", "train", "-n", "2", EXAMPLE, *tiny, "--steps", "100000"]
    process = subprocess.Popen(
        [*command, "--communicator", "ring", "--out", str(tmp_path / "run")],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=hear_interrupts,
    )
    path = tmp_path / "run" / "metrics.jsonl"
    while process.poll() is None and len(metrics.read(path)) < 5:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130, errors
    assert "go on with: --resume" in errors
    assert newest(tmp_path / "run").step == metrics.read(path)[-1]["step"]


def test_one_rank_raising_shows_its_traceback_and_ends_all(tiny: list[str], tmp_path: Path) -> None:
    result = launch(FAULTY, "raises", *tiny, "--checkpoint-every", "5", "--out", str(tmp_path / "run"))
    assert result.returncode != 0
    assert result.output.count("Traceback") == 1
    assert "ZeroDivisionError: planted" in result.output
    assert seconds_since_fault(result) < PROMPT_S
    assert newest(tmp_path / "run").step == 5


def test_full_disk_keeps_the_previous_checkpoint(tiny: list[str], tmp_path: Path) -> None:
    result = launch(FAULTY, "full disk", *tiny, "--checkpoint-every", "5", "--out", str(tmp_path / "run"))
    assert seconds_since_fault(result) < PROMPT_S
    assert "the checkpoint of step 10 cannot be written" in complaint(result)
    assert "step_00000005 is whole, resume from it" in complaint(result)
    assert newest(tmp_path / "run").step == 5
    result = launch(EXAMPLE, "--resume", str(tmp_path / "run"))
    assert result.returncode == 0, result.output
    assert newest(tmp_path / "run").step == 20


def test_bad_input_is_one_line_from_both_ranks(train: Train, tiny: list[str], text: Path, tmp_path: Path) -> None:
    """What both ranks notice is printed once, and both are gone at once."""
    run = train("run")
    for file in ("empty", "short", "vocabulary"):
        (tmp_path / file).mkdir()
        (tmp_path / file / "tokenizer.json").write_bytes((text / "tokenizer.json").read_bytes())
        write_tokens(tmp_path / file / "validation.bin", np.arange(20))
    (tmp_path / "empty" / "train.bin").write_bytes(b"")
    write_tokens(tmp_path / "short" / "train.bin", np.arange(15))
    write_tokens(tmp_path / "vocabulary" / "train.bin", np.arange(1000))
    cases = [
        (["--data", str(tmp_path / "nowhere")], "there is no such folder"),
        (["--data", str(tmp_path / "empty")], "the file is empty"),
        (["--data", str(tmp_path / "short"), "--context", "8"], "too short: 15 tokens"),
        (["--data", str(tmp_path / "vocabulary")], "beyond the vocabulary of"),
        (["--batch", "7"], "a global batch of 7 sequences cannot be shared equally by 2 ranks"),
        (["--resume", str(run), "--layers", "3"], "of another configuration"),
    ]
    for options, message in cases:
        result = launch(EXAMPLE, *options)
        assert message in complaint(result)


def test_unknown_option(tmp_path: Path) -> None:
    result = launch(EXAMPLE, "--learning-rat", "1")
    assert "unrecognized arguments: --learning-rat" in complaint(result)
    assert result.returncode == 2


def test_help_is_printed_once() -> None:
    result = launch(EXAMPLE, "--help")
    assert result.returncode == 0
    assert result.output.count("Train a GPT on text") == 1
    assert "--learning-rate X" in result.output


def test_resuming_on_another_number_of_ranks_says_so(train: Train) -> None:
    folder = train("run")
    result = launch(EXAMPLE, "--resume", str(folder), "--steps", "22")
    assert "note: it was trained on 1 ranks, now there are 2" in result.output
    assert checkpoint.load(folder / "checkpoints" / "step_00000022").step == 22
