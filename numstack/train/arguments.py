"""From the command line of a training program to its options, its folder and the checkpoint that it goes on from."""

from __future__ import annotations

import argparse
import dataclasses
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numstack.device import current_device
from numstack.errors import CheckpointError, ConfigError
from numstack.train import checkpoint
from numstack.train.options import AUTO, FREE_TO_CHANGE, Options, add_arguments, flag

CHECKPOINTS = "checkpoints"


@dataclass(frozen=True)
class Arguments:
    """What a training program was asked to do.

    Attributes
    ----------
    options : Options
    folder : where the run leaves its files; only rank 0 writes there
    resume : the checkpoint to go on from, or None
    """

    options: Options
    folder: Path
    resume: Path | None


def parse(description: str | None, *, rank: int = 0, arguments: list[str] | None = None) -> Arguments:
    """Read the command line. Exits with code 0 after ``--help`` and 2 if an option is unknown; only rank 0 prints.

    Parameters
    ----------
    description : what ``--help`` starts with
    rank : int
    arguments : instead of the command line

    Raises
    ------
    ConfigError
        If an option has a value that cannot work, or ``--out`` holds another run.
    CheckpointError
        If ``--resume`` names no usable checkpoint, or one of another configuration.
    """
    parser = (_Parser if rank == 0 else _QuietParser)(
        usage="%(prog)s [options]",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser)
    files = parser.add_argument_group("files")
    files.add_argument("--out", type=Path, metavar="DIR", help="folder of the run (default: runs/gpt-DATE-TIME)")
    files.add_argument(
        "--resume",
        type=Path,
        metavar="DIR",
        help="go on with the run in DIR from its newest checkpoint, or from the checkpoint DIR, with its options; "
        f"only these may be given anew: {', '.join(sorted(map(flag, FREE_TO_CHANGE)))}",
    )
    given = vars(parser.parse_args(arguments))
    out: Path | None = given.pop("out")
    resume: Path | None = given.pop("resume")
    if resume is not None:
        return _resumed(given, out, resume)
    options = for_device(Options(**given))
    if out is None:
        return Arguments(options, Path("runs") / time.strftime("gpt-%Y%m%d-%H%M%S"), None)
    found = checkpoint.latest(out / CHECKPOINTS)
    if found is not None:
        raise ConfigError(f"{out} holds a run ({found}); go on with --resume {out}, or give another --out")
    return Arguments(options, out, None)


def _resumed(given: dict[str, Any], out: Path | None, resume: Path) -> Arguments:
    path = resume if (resume / checkpoint.MANIFEST).exists() else checkpoint.latest(resume / CHECKPOINTS)
    if path is None:
        raise CheckpointError(f"{resume}: there is no checkpoint in it; give the folder of a run, or of one checkpoint")
    saved = checkpoint.read_configuration(path)["options"]
    for name, value in given.items():
        if name not in FREE_TO_CHANGE and saved[name] != value:
            raise CheckpointError(
                f"{path} is of another configuration: it was trained with {flag(name)} {saved[name]}, not {value}; "
                f"leave {flag(name)} out to go on with it, or start anew"
            )
    home = path.parent.parent if path.parent.name == CHECKPOINTS else path.parent
    return Arguments(for_device(Options(**(saved | given))), out or home, path)


def for_device(options: Options) -> Options:
    """The options with what is left to the device decided: those that a run records and computes with."""
    if options.precision != AUTO:
        return options
    return dataclasses.replace(options, precision="bf16" if current_device().kind == "cuda" else "fp32")


class _Parser(argparse.ArgumentParser):
    """Says where to look when an option is unknown."""

    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: error: {message}; --help lists the options\n")


class _QuietParser(_Parser):
    """For the ranks that leave talking to rank 0."""

    def _print_message(self, message: str, file: Any = None) -> None:
        pass
