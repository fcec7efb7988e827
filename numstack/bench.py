"""``numstack bench``: list the benchmarks of this checkout, and run some or all of them."""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from numstack.errors import ConfigError

# Benchmarks are programs beside the package, not part of it: they need a checkout.
FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"
NOT_BENCHMARKS = {"__init__", "harness", "simt_kernels", "step_profile"}


def benchmarks() -> dict[str, str]:
    """Name of each benchmark, and the first line of its docstring.

    Raises
    ------
    ConfigError
        If numstack was installed without its checkout.
    """
    if not FOLDER.is_dir():
        raise ConfigError(f"there is no folder {FOLDER}; benchmarks come with a clone: pip install -e . inside it")
    programs = sorted(path for path in FOLDER.glob("*.py") if path.stem not in NOT_BENCHMARKS)
    return {path.stem: (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0] for path in programs}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if a benchmark fails.

    Raises
    ------
    ConfigError
        If a name is none of a benchmark.
    """
    known = benchmarks()
    parser = argparse.ArgumentParser(prog="numstack bench", description="List benchmarks, or run some.")
    parser.add_argument("names", nargs="*", metavar="NAME", help='benchmarks to run, or "all"; none lists them')
    parser.add_argument(
        "--out", type=Path, default=Path("runs/bench"), help="folder for the JSON (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    if not options.names:
        for name, summary in known.items():
            print(f"{name:<14} {summary}")
        return 0
    names = list(known) if options.names == ["all"] else options.names
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ConfigError(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(known)}")
    options.out.mkdir(parents=True, exist_ok=True)
    failed = []
    for name in names:
        command = [sys.executable, "-m", f"benchmarks.{name}", "--json", str((options.out / f"{name}.json").resolve())]
        if subprocess.run(command, cwd=FOLDER.parent, check=False).returncode:
            failed.append(name)
        print()
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0
