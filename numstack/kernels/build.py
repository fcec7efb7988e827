"""``numstack kernels build``: compile every kernel for a GPU that is not here, and say what each takes from it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from numstack.device import offline
from numstack.kernels import catalogue

# float32, bfloat16 as its bits, float16.
STORAGE = (np.dtype(np.float32), np.dtype(np.uint16), np.dtype(np.float16))


def build(architecture: str, dtypes: Iterable[np.dtype] = STORAGE) -> list[offline.Build]:
    """Compile every launch of the catalogue for an architecture such as ``sm_90a``.

    Raises
    ------
    KernelError
        If a kernel does not compile, or there is no such architecture.
    """
    with offline.device(architecture) as device:
        for dtype in dtypes:
            for launch in catalogue.launches(device.array, dtype):
                launch.run()
    return list(device.builds.values())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if a kernel is not fit to be shipped."""
    parser = argparse.ArgumentParser(prog="numstack kernels", description=__doc__)
    parser.add_argument("action", choices=["build"])
    parser.add_argument(
        "--arch", action="append", metavar="SM", help="sm_80, sm_90a...; may be repeated (default: sm_80 and sm_90a)"
    )
    options = parser.parse_args(arguments)
    n_faulty = 0
    console = Console()
    for architecture in options.arch or ["sm_80", "sm_90a"]:
        builds = build(architecture)
        console.print(_table(architecture, builds))
        n_faulty += sum(bool(b.faults()) for b in builds)
        console.print(f"{architecture}: {len(builds)} kernels built, {n_faulty} at fault")
    return 1 if n_faulty else 0


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
