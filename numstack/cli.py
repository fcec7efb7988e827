"""The command ``numstack``: a table of subcommands, each imported only when it is called."""

from __future__ import annotations

import importlib
import sys

from numstack.errors import NumstackError

# Name: the module whose main(arguments) does it, and one line for --help.
SUBCOMMANDS = {
    "train": ("numstack.launch", "start a training program on several ranks; Ctrl-C saves first"),
    "doctor": ("numstack.doctor", "say whether this machine is fit to train, and what to do where it is not"),
    "bench": ("numstack.bench", "list the benchmarks of this checkout, and run some or all of them"),
    "tune": ("numstack.tune", "find the fastest way to cut matrix products on this GPU, and keep it"),
    "kernels": ("numstack.kernels.build", "compile kernels for a GPU that is not here: resources, machine code"),
    "data": ("numstack.data.command", "turn text into token files, and look into them"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one subcommand; returns the exit code: 0, 1 after an error (one line), 2 if the arguments are wrong."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name not in SUBCOMMANDS:
        print(f"numstack: there is no command {name!r}; the commands are {', '.join(SUBCOMMANDS)}", file=sys.stderr)
        return 2
    try:
        code: int | None = importlib.import_module(SUBCOMMANDS[name][0]).main(rest)
    except NumstackError as error:
        print(f"numstack {name}: {error}", file=sys.stderr)
        return 1
    return code or 0


def _usage() -> str:
    lines = [f"  {name:<8} {summary}" for name, (_, summary) in SUBCOMMANDS.items()]
    return "\n".join(["usage: numstack COMMAND ...", "", *lines, "", "`numstack COMMAND --help` says more."])


if __name__ == "__main__":
    sys.exit(main())
