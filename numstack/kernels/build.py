"""``numstack kernels``: compile kernels for a GPU that is not here, say what each takes from it, show machine code."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Hashable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor

import numpy as np
from rich.console import Console
from rich.table import Table

from numstack import simt
from numstack.device import offline
from numstack.device.cuda import sass
from numstack.errors import ConfigError
from numstack.kernels import catalogue

# bfloat16 is stored as its bits.
DTYPES: dict[str, np.dtype] = {"fp32": np.dtype(np.float32), "bf16": np.dtype(np.uint16), "fp16": np.dtype(np.float16)}
STORAGE = tuple(DTYPES.values())


def build(architecture: str, dtypes: Iterable[np.dtype] = STORAGE, words: Sequence[str] = ()) -> list[offline.Build]:
    """Compile launches of the catalogue for an architecture such as ``sm_90a``.

    Parameters
    ----------
    architecture : str
    dtypes : iterable of dtype
        In which activations and weights are stored.
    words : sequence of str
        Only launches whose operation and variant contain each of these; all by default.

    Raises
    ------
    KernelError
        If a kernel does not compile, or there is no such architecture.
    """
    return list(_built(architecture, dtypes, words).values())


def build_all(architectures: Sequence[str], jobs: int = 1, words: Sequence[str] = ()) -> dict[str, list[offline.Build]]:
    """What `build` makes in every dtype, for some architectures; ``jobs`` processes share out these and the dtypes.

    Raises
    ------
    KernelError
        If a kernel does not compile, or there is no such architecture.
    """
    tasks = [(architecture, (dtype,), words) for architecture in architectures for dtype in STORAGE]
    if min(jobs, len(tasks)) == 1:
        parts = [_built(*task) for task in tasks]
    else:
        with ProcessPoolExecutor(min(jobs, len(tasks)), multiprocessing.get_context("spawn")) as pool:
            parts = list(pool.map(_built, *zip(*tasks, strict=True)))
    builds: dict[str, dict[Hashable, offline.Build]] = {architecture: {} for architecture in architectures}
    for (architecture, *_), part in zip(tasks, parts, strict=True):
        builds[architecture] |= part  # kernels that have no activations are in each dtype's
    return {architecture: list(found.values()) for architecture, found in builds.items()}


def _built(architecture: str, dtypes: Iterable[np.dtype], words: Sequence[str] = ()) -> dict[Hashable, offline.Build]:
    """Kernels by what makes them differ, in whichever process they were compiled."""
    with offline.device(architecture) as device:
        for dtype in dtypes:
            for launch in catalogue.launches(device.array, dtype):
                if all(word in f"{launch.operation} {launch.variant}" for word in words):
                    launch.run()
    return {
        (built.kernel, simt.source_digest(of_source.py_func), *types): built
        for (of_source, *types), built in device.builds.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if a kernel is not fit to be shipped.

    Raises
    ------
    ConfigError
        If no launch has the words asked for, or there are no processes to work.
    """
    parser = argparse.ArgumentParser(prog="numstack kernels", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    building = actions.add_parser("build", help="compile every kernel; print registers, shared memory, spills, faults")
    building.add_argument(
        "--arch", action="append", metavar="SM", help="sm_80, sm_90a...; may be repeated (default: sm_80 and sm_90a)"
    )
    building.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="processes (default: one for each core)"
    )
    reading = actions.add_parser(
        "sass", help="print the machine code of some kernels, under a count of its instructions"
    )
    reading.add_argument("words", nargs="+", metavar="WORD", help="of the operation and variant: gemm NN register_tile")
    reading.add_argument("--arch", default="sm_90a", metavar="SM", help="default: %(default)s")
    reading.add_argument("--dtype", choices=list(DTYPES), default="bf16", help="default: %(default)s")
    reading.add_argument("--count", action="store_true", help="the count only")
    options = parser.parse_args(arguments)
    if options.action == "sass":
        _print_sass(options.words, options.arch, options.dtype, count_only=options.count)
        return 0
    if options.jobs < 1:
        raise ConfigError(f"--jobs {options.jobs}: no process would compile; give 1 or more")
    return _print_builds(options.arch or ["sm_80", "sm_90a"], options.jobs)


def _print_builds(architectures: Sequence[str], jobs: int) -> int:
    n_faulty = 0
    console = Console()
    for architecture, builds in build_all(architectures, jobs).items():
        console.print(_table(architecture, builds))
        n_faulty += sum(bool(b.faults()) for b in builds)
        console.print(f"{architecture}: {len(builds)} kernels built, {n_faulty} at fault")
    return 1 if n_faulty else 0


def _print_sass(words: Sequence[str], architecture: str, dtype: str, *, count_only: bool) -> None:
    builds = build(architecture, (DTYPES[dtype],), words)
    if not builds:
        raise ConfigError(
            f"no kernel for {architecture} has {' and '.join(map(repr, words))} in its operation and variant; "
            "give words of a name such as: gemm NN register_tile"
        )
    for b in builds:
        instructions = sass.disassemble(b.code)
        print(f"{b.kernel} ({b.types}), {architecture}: {len(instructions)} instructions")
        counts = sass.count(instructions)
        telling = {opcode: counts[opcode] for opcode in sass.TELLING if counts[opcode]}
        print("  " + ", ".join(f"{n} {opcode}" for opcode, n in telling.items()))
        if not count_only:
            print("\n".join(map(str, instructions)) + "\n")


def _table(architecture: str, builds: list[offline.Build]) -> Table:
    table = Table(title=f"kernels for {architecture}")
    for column in ("kernel", "arrays", "threads", "registers", "shared B", "spill B", "local B", "occupancy", "faults"):
        table.add_column(column, justify="left" if column in ("kernel", "arrays", "faults") else "right")
    for b in sorted(builds, key=lambda b: (b.kernel, b.types)):
        r = b.resources
        figures = (b.threads, r.registers, r.shared_bytes + b.shared_bytes, r.spill_bytes, r.stack_bytes)
        faults = "; ".join(b.faults())
        row = (b.kernel, b.types, *map(str, figures), f"{b.occupancy:.0%}", faults)
        table.add_row(*row, style="red" if faults else None)
    return table
