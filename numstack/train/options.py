"""The options of a training run: one table that the command line, the manifest and ``--help`` are made from."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from numstack.errors import ConfigError
from numstack.precision import NAMES as PRECISIONS


def _option(default: Any, group: str, text: str, *, choices: tuple[str, ...] = ()) -> Any:
    return field(default=default, metadata={"group": group, "help": text, "choices": choices})


AUTO = "auto"
DATA = "data"
MODEL = "model"
TRAINING = "training"
REPORTS = "evaluation and output"
RUN = "run"


@dataclass(frozen=True)
class Options:
    """What a run is started with; the defaults train a small GPT on Shakespeare, on two CPU cores, in a minute or two.

    Raises
    ------
    ConfigError
        If a number is out of its range, or two contradict each other.
    """

    data: str = _option("", DATA, "folder of `numstack data prepare` (default: the shipped works of Shakespeare)")
    tokenizer: str = _option(
        "characters", DATA, "how the shipped works are cut into tokens", choices=("characters", "gpt2")
    )

    layers: int = _option(4, MODEL, "transformer blocks")
    heads: int = _option(4, MODEL, "attention heads in a block")
    width: int = _option(128, MODEL, "numbers that represent a token; a multiple of --heads")
    context: int = _option(64, MODEL, "tokens that the model sees at once")
    dropout: float = _option(0.0, MODEL, "probability with which an activation is dropped in training")

    precision: str = _option(
        AUTO,
        MODEL,
        "16 bits take half the memory, and tensor cores want them; weights are float32 in any case. auto: bf16 on a "
        "GPU, fp32 on a CPU",
        choices=(AUTO, *PRECISIONS),
    )

    steps: int = _option(1000, TRAINING, "optimiser steps")
    batch: int = _option(12, TRAINING, "sequences in a step, over all ranks; a multiple of ranks x --accumulate")
    accumulate: int = _option(1, TRAINING, "micro-batches that a rank adds up before a step")
    learning_rate: float = _option(4e-3, TRAINING, "at its peak")
    final_learning_rate: float = _option(4e-4, TRAINING, "at the end of the schedule")
    warmup: int = _option(100, TRAINING, "first steps, in which the learning rate grows to its peak")
    decay: int = _option(200, TRAINING, "last steps of warmup_stable_decay, in which it falls")
    schedule: str = _option(
        "cosine",
        TRAINING,
        "how the learning rate changes",
        choices=("constant", "linear", "cosine", "warmup_stable_decay"),
    )
    weight_decay: float = _option(0.1, TRAINING, "AdamW's, on matrices only")
    beta1: float = _option(0.9, TRAINING, "AdamW's decay of the mean of gradients")
    beta2: float = _option(0.99, TRAINING, "AdamW's decay of the mean of squared gradients")
    clip: float = _option(1.0, TRAINING, "largest global norm of the gradient; 0: no limit")
    seed: int = _option(1337, TRAINING, "of weights, batches and dropout; the same seed gives the same bits")

    evaluate_every: int = _option(200, REPORTS, "steps between two validations")
    evaluate_windows: int = _option(1024, REPORTS, "windows of the validation text, spread evenly over it")
    sample: int = _option(400, REPORTS, "tokens of text to generate at the end; 0: none")
    temperature: float = _option(0.8, REPORTS, "of the generated text: below 1 is safer, above 1 is wilder")
    checkpoint_every: int = _option(200, REPORTS, "steps between two checkpoints")
    keep: int = _option(3, REPORTS, "checkpoints to keep")

    communicator: str = _option(
        "auto",
        RUN,
        "how ranks add up gradients; auto: NCCL between GPUs, else the ring",
        choices=("auto", "nccl", "ring", "mpi"),
    )

    def __post_init__(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}; give a number of at least 1")
        for name in _NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}; give a number that is not negative")
        for name in ("dropout", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{flag(name)} is {getattr(self, name)}; give a number from 0 to below 1")
        if self.width % self.heads:
            raise ConfigError(f"--width {self.width} is no multiple of --heads {self.heads}; change one of them")
        for item in dataclasses.fields(self):
            choices = item.metadata["choices"]
            if choices and getattr(self, item.name) not in choices:
                raise ConfigError(
                    f"{flag(item.name)} is {getattr(self, item.name)!r}; give one of {', '.join(choices)}"
                )


_POSITIVE = (
    "layers", "heads", "width", "context", "steps", "batch", "accumulate",
    "evaluate_every", "evaluate_windows", "checkpoint_every", "keep",
)  # fmt: skip
_NOT_NEGATIVE = (
    "learning_rate", "final_learning_rate", "warmup", "decay", "weight_decay", "clip", "seed", "sample", "temperature",
)  # fmt: skip

_FREE = (
    "data", "precision", "steps",
    "evaluate_every", "evaluate_windows", "sample", "temperature", "checkpoint_every", "keep",
)  # fmt: skip
FREE_TO_CHANGE = frozenset(_FREE)
"""What a resumed run may set anew: where the data lies (its content is checked), how long it runs, what is shown; and
the precision, for checkpoints hold float32 in any case."""


def flag(name: str) -> str:
    """The command-line spelling of an option: ``--learning-rate`` of ``learning_rate``."""
    return "--" + name.replace("_", "-")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add every field of ``Options`` to ``parser``, in groups. Only what the user gives ends up in the namespace."""
    groups = {title: parser.add_argument_group(title) for title in (DATA, MODEL, TRAINING, REPORTS, RUN)}
    for item in dataclasses.fields(Options):
        choices = item.metadata["choices"]
        kind = type(item.default)
        groups[item.metadata["group"]].add_argument(
            flag(item.name),
            type=kind,
            default=argparse.SUPPRESS,
            choices=choices or None,
            metavar=None if choices else {int: "N", float: "X", str: "PATH"}[kind],
            help=item.metadata["help"] + (f" (default: {item.default})" if item.default != "" else ""),
        )
