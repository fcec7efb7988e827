"""What the benchmarks share: timing, the table they print, and the JSON that says where a figure came from.

A benchmark is a program, ``python -m benchmarks.NAME [--json PATH]``::

    options = harness.parse_options(__doc__)
    rows = [("copy", 1e3 * harness.median_s(lambda: ...))]
    harness.report("copy", ("what", "ms"), rows, options)
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import os
import platform
import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from numstack.device import current_device

LIBRARIES = ("numpy", "numba", "numba-cuda", "llvmlite", "torch", "mpi4py", "nccl4py")


def parse_options(doc: str | None, add_options: Callable[[argparse.ArgumentParser], None] | None = None) -> Any:
    """The command line: ``--json``, and what ``add_options`` adds; ``--help`` prints the module's docstring."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures and the machine here")
    if add_options is not None:
        add_options(parser)
    return parser.parse_args()


def median_s(
    run: Callable[[], Any], *, synchronize: Callable[[], Any] | None = None, least_s: float = 0.2, least_runs: int = 5
) -> float:
    """Median seconds of one call, after one that is not counted (it compiles, and warms the caches).

    Parameters
    ----------
    run : callable
    synchronize : callable, optional
        Waits until what ``run`` started is done; by default the current device's.
    least_s, least_runs
        Repeats until both are reached.
    """
    synchronize = synchronize or current_device().synchronize
    run()
    synchronize()
    times: list[float] = []
    total = 0.0
    while total < least_s or len(times) < least_runs:
        start = time.perf_counter()
        run()
        synchronize()
        times.append(time.perf_counter() - start)
        total += times[-1]
    return statistics.median(times)


def interleaved_s(calls: dict[str, Callable[[], Any]], runs: int = 20, warm: int = 2) -> dict[str, float]:
    """Median seconds of each call on a GPU, between events on the default stream, the calls in turns, in random order.

    A clock that falls as the card grows warm then falls for all of them, and no call always runs behind the same other.
    """
    stream = current_device().default_stream
    for call in [*calls.values()] * warm:
        call()
    events: dict[str, list[Any]] = {name: [] for name in calls}
    order = random.Random(0)
    for _ in range(runs):
        for name, call in order.sample(list(calls.items()), len(calls)):
            start = stream.record()
            call()
            events[name].append((start, stream.record()))
    current_device().synchronize()
    return {name: statistics.median(a.elapsed_s(b) for a, b in pairs) for name, pairs in events.items()}


def one_threaded_torch() -> Any | None:
    """PyTorch held to one thread; None where it is not installed, or where what is measured is no CPU."""
    if current_device().kind != "cpu":
        return None
    try:
        torch = importlib.import_module("torch")
    except ImportError:
        return None
    torch.set_num_threads(1)
    return torch


def machine() -> dict[str, Any]:
    """Everything that a figure depends on, as far as this process can tell."""
    device = current_device()
    libraries = {}
    for name in LIBRARIES:
        try:
            libraries[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "device": device.name,
        "device_kind": device.kind,
        "threads": device.n_threads,
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "libraries": libraries,
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _commit() -> str:
    """The commit of this checkout, with a + where files differ from it; outside of one what NUMSTACK_COMMIT says."""
    root = Path(__file__).resolve().parent.parent
    try:
        commit = subprocess.run(
            ["git", "describe", "--always", "--exclude=*", "--abbrev=12", "--dirty=+"],
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("NUMSTACK_COMMIT", "")
    return commit.stdout.strip()


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def report(name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], options: Any) -> None:
    """Print a table under a line about the machine, and write both to ``options.json`` if it is given."""
    about = machine()
    print(f"{name}: {about['device']}, {about['threads']} thread(s), commit {about['commit'] or 'unknown'}")
    cells = [list(columns), *[[_text(value) for value in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    is_number = [all(isinstance(row[i], (int, float)) for row in rows) for i in range(len(columns))]
    for row in cells:
        print("  ".join(c.rjust(widths[i]) if is_number[i] else c.ljust(widths[i]) for i, c in enumerate(row)).rstrip())
    if options.json is not None:
        figures = [dict(zip(columns, row, strict=True)) for row in rows]
        options.json.write_text(json.dumps({"benchmark": name, "machine": about, "rows": figures}, indent=1) + "\n")
        print(f"written to {options.json}")
