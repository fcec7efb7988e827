"""Everything around the training step: resuming, reports, validation, checkpoints, signals and the end.

::

    with Run(...) as run:
        for step in run.steps():
            loss = train_step(...)
            run.record(loss)

``steps`` gives the steps that are left; between two of them it does what is due. All of it is collective: the ranks
exchange two numbers after every step, the loss and whether a signal arrived, so that they stop at the same step.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from numstack.comm import World
from numstack.data import Dataset
from numstack.device import current_device
from numstack.errors import CheckpointError, DataError, NumstackError
from numstack.nn import GPT
from numstack.optim import AdamW
from numstack.train import checkpoint, plot
from numstack.train.arguments import CHECKPOINTS, Arguments
from numstack.train.console import ProgressReport
from numstack.train.metrics import MetricsFile
from numstack.train.step import Interrupted, evaluate
from numstack.train.stop import END, SAVE, Stopped, StopRequest


class Run:
    """One run of a training program. Collective: all ranks must construct it and use it alike.

    Parameters
    ----------
    arguments : Arguments
    world : World
    model : GPT
    optimizer : AdamW
    dataset : Dataset

    Attributes
    ----------
    step : int
        Steps done.
    validation_loss : float
        The newest, in nats per character.

    Raises
    ------
    CheckpointError
        If the checkpoint to go on from is damaged or does not fit.
    """

    def __init__(self, arguments: Arguments, *, world: World, model: GPT, optimizer: AdamW, dataset: Dataset) -> None:
        self.options = arguments.options
        self.folder = arguments.folder
        self.step = 0
        self.validation_loss = math.nan
        self._world = world
        self._model = model
        self._optimizer = optimizer
        self._dataset = dataset
        self._configuration = {
            "options": dataclasses.asdict(self.options),
            "model": dataclasses.asdict(model.config),
            "precision": model.precision.table(),
            "train_sha256": dataset.train.sha256(),
            "n_ranks": world.size,
        }
        self._n_tokens = self.options.batch * self.options.context  # in a step
        self._elapsed_before_s = 0.0
        self._validated_step, self._validated_s = -1, 0.0
        self._loss = math.nan
        self._saved_step = -1
        notes = self._restore(arguments.resume) if arguments.resume is not None else []
        self._reports = _Reports(self.folder, self.options.steps, self.step) if world.rank == 0 else None
        self._stop = StopRequest()
        for line in (*self._headline(), *notes):
            self._say(line)
        self._start_s = time.perf_counter()

    def __enter__(self) -> Run:
        self._stop.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stop.__exit__(kind, error, traceback)
        if self._reports is not None:
            self._reports.close()

    @property
    def elapsed_s(self) -> float:
        """Seconds of training so far, over all parts of a run that was resumed."""
        return self._elapsed_before_s + time.perf_counter() - self._start_s

    def record(self, loss: float) -> None:
        """Tell the loss of this rank in the step that was just done."""
        self._loss = loss

    def steps(self) -> Iterator[int]:
        """The steps that are left; the loop's body does one and calls ``record``.

        Raises
        ------
        Stopped
            A signal asked for the end; everything is saved.
        NumstackError
            The loss is no number any more.
        CheckpointError
            A checkpoint cannot be written; the earlier ones are whole.
        """
        self._start_s = time.perf_counter()
        while self.step < self.options.steps:
            began_s = time.perf_counter()
            yield self.step
            self.step += 1
            last = self.step == self.options.steps
            loss, level = self._exchange()
            self._report(loss=loss, tokens_per_s=self._n_tokens / (time.perf_counter() - began_s))
            self._answer(level)
            if last or self.step % self.options.evaluate_every == 0:
                self._validate()
            if last or self.step % self.options.checkpoint_every == 0:
                self._save()
        if self._validated_step != self.step:  # resumed after its last step
            self._validate()
        self._finish()

    # agreement

    def _exchange(self) -> tuple[float, int]:
        """Mean loss over the ranks, and the highest level of a stop request."""
        values = self._gather(self._loss, self._stop.level)
        loss = float(values[:, 0].mean())
        if not math.isfinite(loss):
            raise NumstackError(
                f"the loss is {loss} in step {self.step}: training has diverged; lower --learning-rate or raise "
                f"--warmup, and resume from the last checkpoint or start anew"
            )
        return loss, int(values[:, 1].max())

    def _agree(self) -> int:
        """The highest level of a stop request on any rank."""
        return int(self._gather(self._stop.level).max())

    def _gather(self, *values: float) -> np.ndarray:
        """The values of all ranks: float64, shape (ranks, values)."""
        mine = np.array(values, np.float64)
        everyone = mine[None].copy() if self._world.mpi is None else np.empty((self._world.size, mine.size))
        if self._world.mpi is not None:
            self._world.mpi.Allgather(mine, everyone)
        return everyone

    # what is due between two steps

    def _answer(self, level: int) -> None:
        """Do what a signal asks for, on all ranks."""
        if level != 0:
            self._save()
        if level > SAVE:
            self._end(signal.Signals(level - END))

    def _validate(self) -> None:
        """Set ``validation_loss``. A signal is answered first; then, if the run goes on, validation starts again."""
        totals = None
        while totals is None:
            try:
                totals = evaluate(
                    self._model,
                    self._dataset,
                    n_windows=self.options.evaluate_windows,
                    batch=self.options.batch // (self._world.size * self.options.accumulate),
                    rank=self._world.rank,
                    n_ranks=self._world.size,
                    interrupted=lambda: self._agree() != 0,
                )
            except Interrupted:
                self._answer(self._agree())
        nats, n_tokens, n_characters = self._gather(*totals).sum(axis=0)
        self.validation_loss = float(nats / max(n_characters, 1))
        self._validated_step, self._validated_s = self.step, self.elapsed_s
        measured = {"validation_loss": float(nats / n_tokens), "validation_nats_per_character": self.validation_loss}
        line = f"step {self.step}  validation loss {self.validation_loss:.4f} nats/char"
        scaler = self._optimizer.loss_scaler
        if scaler is not None:
            scale, (_, n_skipped) = scaler.scale.item(), scaler.n_steps()
            measured |= {"loss_scale": scale, "n_skipped_steps": n_skipped}
            line += f", loss scale {scale:g}, {n_skipped} steps skipped so far"
        self._report(**measured)
        self._say(line)

    def _save(self) -> None:
        """Write a checkpoint, unless this step has one. The other ranks wait for rank 0 to have it on disk."""
        self._stop.saved()
        if self._saved_step == self.step:
            return
        if self._world.rank == 0:
            checkpoint.save(
                self.folder / CHECKPOINTS,
                step=self.step,
                arrays={"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()},
                configuration=self._configuration,
                state={"elapsed_s": self.elapsed_s},
                keep=self.options.keep,
            )
        self._saved_step = self.step
        self._gather(0.0)

    def _restore(self, path: Path) -> list[str]:
        """Load a checkpoint on every rank; returns what the user should know."""
        saved = checkpoint.load(path)
        notes = [f"going on from {path} after step {saved.step}"]
        for key, what in (("model", "with another model"), ("train_sha256", "on other training data")):
            if saved.configuration[key] != self._configuration[key]:
                raise CheckpointError(
                    f"{path} is of another configuration: it was trained {what}; start anew, or give what it was "
                    f"trained with ({saved.configuration[key]})"
                )
        if saved.configuration["n_ranks"] != self._world.size:
            notes.append(
                f"note: it was trained on {saved.configuration['n_ranks']} ranks, now there are {self._world.size}: "
                f"results will agree to rounding, not bit for bit"
            )
        trained_in = saved.configuration["options"].get("precision", "fp32")
        if trained_in != self.options.precision:
            notes.append(f"note: it was trained in {trained_in}, now it goes on in {self.options.precision}")
        self._model.load_state_dict(saved.arrays["model"])
        self._optimizer.load_state_dict(saved.arrays["optimizer"])
        self.step = self._saved_step = saved.step
        self._elapsed_before_s = saved.state["elapsed_s"]
        return notes

    # words

    def _headline(self) -> list[str]:
        options, model, device = self.options, self._model.config, current_device()
        return [
            f"model: {self._model.n_parameters:,} parameters, {model.n_layer} layers, {model.n_head} heads, width "
            f"{model.n_embd}, context {model.block_size}, vocabulary {model.vocab_size}",
            f"precision: {self._model.precision}",
            f"data: {self._dataset.train.n_tokens:,} tokens for training and {self._dataset.validation.n_tokens:,} for "
            f"validation, in {self._dataset.train.path.parent}",
            f"run: {options.steps:,} steps of {self._n_tokens:,} tokens ({options.batch} sequences) on "
            f"{self._world.size} ranks, {device.name}; everything goes to {self.folder}",
        ]

    def _report(self, **measured: float) -> None:
        if self._reports is not None:
            self._reports.add(step=self.step, elapsed_s=self.elapsed_s, **measured)

    def _say(self, line: str) -> None:
        if self._reports is not None:
            self._reports.progress.say(line)

    def _end(self, number: signal.Signals) -> None:
        if self._reports is not None:
            self._reports.progress.last_words(
                f"ended by {number.name} after step {self.step} of {self.options.steps}; saved; "
                f"go on with: --resume {self.folder}"
            )
        self._gather(0.0)
        raise Stopped(number)

    def _finish(self) -> None:
        """The picture, some generated text, and the line that says how good it is."""
        if self._reports is None:
            return
        self._reports.close()
        if self.options.sample:
            prompt = self._dataset.validation.tokens[:1]
            tokens = self._model.generate(
                prompt, self.options.sample, temperature=self.options.temperature, seed=self.options.seed
            )
            self._say(f"\na sample of what it writes:\n{self._dataset.tokenizer.decode(tokens[0])}\n")
        self._say(f"loss curve: {self._reports.save_picture()}")
        self._say(
            f"validation loss: {self.validation_loss:.4f} nats/char after {self._validated_s:.1f} s "
            f"on {self._world.size} ranks"
        )


class _Reports:
    """What only rank 0 does: the files of a run, and the progress on the screen."""

    def __init__(self, folder: Path, n_steps: int, step: int) -> None:
        self._folder = folder
        with _written(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self._metrics = MetricsFile(folder / "metrics.jsonl", step=step)
        self.progress = ProgressReport(n_steps=n_steps, step=step)

    def add(self, **measured: Any) -> None:
        """One line of metrics; what concerns a training step also shows in the progress."""
        with _written(self._folder):
            self._metrics.write(**measured)
        if "loss" in measured:
            self.progress.update(measured["step"], loss=measured["loss"], tokens_per_s=measured["tokens_per_s"])

    def save_picture(self) -> Path:
        path = self._folder / "loss.png"
        with _written(path):
            plot.save_loss(path, self._metrics.rows)
        return path

    def close(self) -> None:
        self.progress.close()
        self._metrics.close()


@contextlib.contextmanager
def _written(path: Path) -> Iterator[None]:
    """Turn a failure to write into one sentence."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}); make room, then go on with --resume") from error
