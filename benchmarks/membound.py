"""Operations that wait for memory, beside a copy and beside PyTorch, eager and compiled, in one run.

usage: python -m benchmarks.membound [--only NAME ...] [--no-compile] [--check] [--json PATH]
       python -m benchmarks.membound --ladder                         our variants, each rung of each ladder
       NUMSTACK_DEVICE=cpu python -m benchmarks.membound --small      tiny sizes, to see that it works

GB/s are of the least bytes that the operation can move: each array read or written once. "of copy" is the share of the
rate at which PyTorch copies 1 GiB on the device, "of equal copy" of that at which it copies as many bytes as the
operation moves: small operations do not reach the first. Each operation is checked against PyTorch's result, its
outputs filled with NaN before; "error" is the norm of the difference over the norm. Times are medians by events, behind
work that keeps the GPU busy until all is queued. Ours, PyTorch's ways and the equal copy run in turns, in random order,
so that neither a clock that drifts nor what ran before favours one of them; each finds the L2 cache as one more run of
its own left it, or empty if small. Those that tie with the fastest go on taking turns, the shorter the more. The ends
of a run blur its time by a microsecond, so these turns, and the equal copy's, are IN_A_ROW runs, one behind the other
as in a training step, where the cache cannot hold what one leaves for the next.
"""

from __future__ import annotations

import argparse
import importlib
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks import harness
from benchmarks.membound_cases import FAMILIES, FULL, LADDERS, SMALL, Case
from numstack.device import current_device
from numstack.errors import ConfigError

RUNS = 25
SLOW_S, SLOW_RUNS = 0.02, 3  # what takes longer runs less often
TIE = 1.04  # what takes at most that much of the least time ties with it, and runs again
TIE_S, TIE_RUNS = 0.3, 200  # for so long, or so often at most
IN_A_ROW = 10
IN_A_ROW_BYTES = 1 << 27  # bytes moved, from which on runs follow one another
COPY_BYTES = 1 << 30
L2_BYTES = 1 << 28  # what is read to empty the cache; several times its size
SMALL_CASE = 1 << 29  # bytes moved, below which the cache is emptied before
WAIT_CYCLES = 600_000  # what the GPU is kept busy with while a run is queued: some 0.3 ms
COLUMNS = ("operation", "shape", "MB", "GB/s", "of copy", "of equal copy", "PyTorch GB/s", "which", "ratio", "error")
LADDER_COLUMNS = ("operation", "shape", "variant", "GB/s", "of copy")
OURS, EQUAL_COPY = "ours", "equal copy"  # beside the names of PyTorch's ways
TOO_SLOW = {"scan"}  # minutes at full size: every row of the table looks through all tokens

Runs = Mapping[str, Callable[[], Any]]


def main() -> None:
    options = harness.parse_options(__doc__, add_options)
    torch = importlib.import_module("torch")
    clock: Any = GpuClock(torch) if current_device().kind == "cuda" else HostClock()
    if options.check:
        clock = NoClock()
    sizes = SMALL if options.small else FULL
    place = "cuda" if current_device().kind == "cuda" else "cpu"
    torch.manual_seed(0)
    copies = Copies(torch, clock, place, 1 << 20 if options.small else COPY_BYTES)
    rows: list[list[Any]] = []
    for name in options.only or FAMILIES:
        for case in FAMILIES[name](torch, sizes, place):
            if options.ladder:
                rows += measure_ladder(case, clock, copies)
            else:
                rows.append(measure(torch, case, clock, copies, compiles=options.compile and place == "cuda"))
            if rows:
                print(*rows[-1], flush=True)
    harness.report("membound", LADDER_COLUMNS if options.ladder else COLUMNS, rows, options)
    print(f"copy of {copies.whole_bytes >> 20} MiB: {copies.whole:.4g} GB/s")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", nargs="+", choices=FAMILIES, metavar="NAME", help=f"of {', '.join(FAMILIES)}")
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="PyTorch's eager operations only")
    parser.add_argument("--check", action="store_true", help="results only; what they take is measured by nobody")
    parser.add_argument("--ladder", action="store_true", help="each of our variants, without PyTorch")
    parser.add_argument("--small", action="store_true", help="tiny sizes")


class GpuClock:
    """Median seconds by events, of runs in turns."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._other = torch.zeros(L2_BYTES // 4, device="cuda")

    def medians(self, runs: Runs, nbytes: int) -> dict[str, float]:
        slow = {name: run for name, run in runs.items() if self._is_slow(run)}
        quick = {name: run for name, run in runs.items() if name not in slow}
        times = self._in_turns(slow, SLOW_RUNS, nbytes) | self._in_turns(quick, RUNS, nbytes)
        medians = {name: statistics.median(seconds) for name, seconds in times.items()}
        least = min(medians.values(), default=0.0)
        ties = {name: run for name, run in quick.items() if medians[name] < TIE * least and name != EQUAL_COPY}
        if len(ties) > 1:
            in_a_row = IN_A_ROW if nbytes >= IN_A_ROW_BYTES else 1
            again = {name: run for name, run in quick.items() if name in ties or name == EQUAL_COPY}
            more = self._in_turns(again, min(TIE_RUNS, int(TIE_S / least / in_a_row)), nbytes, in_a_row)
            medians |= {name: statistics.median(seconds) for name, seconds in more.items()}
        return medians

    def _in_turns(self, runs: Runs, n_turns: int, nbytes: int, in_a_row: int = 1) -> dict[str, list[float]]:
        """Seconds of a run of each, in each turn."""
        events: dict[str, list[Any]] = {name: [] for name in runs}
        order = random.Random(0)  # what ran before a run moves it by up to 3%
        for _ in range(n_turns):
            for name, run in order.sample(list(runs.items()), len(runs)):
                events[name].append(self._timed(run, nbytes, in_a_row))
        self._torch.cuda.synchronize()
        to_s = 1e-3 / in_a_row
        return {name: [to_s * start.elapsed_time(end) for start, end in pairs] for name, pairs in events.items()}

    def _is_slow(self, run: Callable[[], Any]) -> bool:
        """Whether a few runs must do; the first of two may compile."""
        cuda = self._torch.cuda
        run()
        cuda.synchronize()
        started = time.perf_counter()
        run()
        cuda.synchronize()
        return time.perf_counter() - started >= SLOW_S

    def _timed(self, run: Callable[[], Any], nbytes: int, in_a_row: int) -> tuple[Any, Any]:
        """Events around so many runs."""
        cuda = self._torch.cuda
        start, end = (cuda.Event(enable_timing=True) for _ in range(2))
        # Lines that someone else wrote would have to leave the cache while we measure.
        if nbytes < SMALL_CASE:
            self._other.sum()
        else:
            run()
        cuda._sleep(WAIT_CYCLES)
        start.record()
        for _ in range(in_a_row):
            run()
        end.record()
        return start, end


class HostClock:
    """Median seconds on a CPU."""

    def medians(self, runs: Runs, nbytes: int) -> dict[str, float]:
        return {name: harness.median_s(run, least_s=0.01) for name, run in runs.items()}


class NoClock:
    """Runs and takes no time."""

    def medians(self, runs: Runs, nbytes: int) -> dict[str, float]:
        for run in runs.values():
            run()
        return dict.fromkeys(runs, math.nan)


class Copies:
    """Copies within the device, and the rate of the largest in GB/s read and written."""

    def __init__(self, torch: Any, clock: Any, place: str, whole_bytes: int) -> None:
        self._source = torch.zeros(whole_bytes, dtype=torch.uint8, device=place)
        self._target = torch.empty_like(self._source)
        self.whole_bytes = whole_bytes
        run, nbytes = self.moving(2 * whole_bytes)
        self.whole = 1e-9 * nbytes / clock.medians({"copy": run}, nbytes)["copy"]

    def moving(self, nbytes: int) -> tuple[Callable[[], Any], int]:
        """A copy that reads and writes ``nbytes`` in all, or the largest, and what it does move."""
        half = min(nbytes // 2, self.whole_bytes)
        return partial(self._target[:half].copy_, self._source[:half]), 2 * half


def measure(torch: Any, case: Case, clock: Any, copies: Copies, *, compiles: bool) -> list[Any]:
    """The row of an operation."""
    expected = [tensor.clone() for tensor in tensors_of(case.expected())]
    for output in case.poisoned:
        output.fill_(float("nan"))
    case.run()
    error = max(distance(torch, *pair) for pair in zip(case.outputs, expected, strict=True))
    if not error <= case.tolerance:
        raise AssertionError(f"{case.name}: differs from PyTorch by {error:.3g}, more than {case.tolerance:g}")
    del expected
    equal_copy, copied_bytes = copies.moving(case.nbytes)
    runs = {OURS: case.run, **peers_of(torch, case, compiles), EQUAL_COPY: equal_copy}
    seconds = clock.medians(runs, case.nbytes)
    equal = 1e-9 * copied_bytes / seconds.pop(EQUAL_COPY)
    peers = {name: 1e-9 * case.nbytes / s for name, s in seconds.items()}
    rate = peers.pop(OURS)
    best = max(peers, key=lambda name: peers[name] if peers[name] == peers[name] else 0)
    shares = (rate / copies.whole, rate / equal)
    figures = (peers[best], best, rate / peers[best], error)
    return [case.name, case.shape, case.nbytes / 1e6, rate, *shares, *figures]


def measure_ladder(case: Case, clock: Any, copies: Copies) -> list[list[Any]]:
    """A row for each variant that supports the operation's sizes."""
    ladder = LADDERS.get(case.run.func)
    runs: dict[str, Callable[[], Any]] = {}
    for name in [] if ladder is None else ladder.runnable():
        run = partial(case.run, variant=name)
        if name not in TOO_SLOW and fits(run):
            runs[name] = run
    rates = {name: 1e-9 * case.nbytes / s for name, s in clock.medians(runs, case.nbytes).items()}
    return [[case.name, case.shape, name, rate, rate / copies.whole] for name, rate in rates.items()]


def fits(run: Callable[[], Any]) -> bool:
    """Whether the variant supports the operation's sizes."""
    try:
        run()
    except ConfigError:
        return False
    return True


def peers_of(torch: Any, case: Case, compiles: bool) -> dict[str, Callable[[], Any]]:
    """PyTorch's ways."""
    compiles = compiles and case.compiles
    if compiles:
        torch.compiler.reset()  # what was compiled before does not count against these
    peers: dict[str, Callable[[], Any]] = {}
    for name, function, inputs in case.peers:
        peers[name] = partial(function, *inputs)
        if compiles:
            peers[f"{name}, compiled"] = torch.compile(lambda f=function, a=inputs: f(*a), dynamic=False)
    return peers


def tensors_of(result: Any) -> Sequence[Any]:
    return result if isinstance(result, (tuple, list)) else [result]


def distance(torch: Any, got: Any, expected: Any) -> float:
    """Norm of the difference over the norm of what was expected; infinite if one of them is not finite."""
    difference = torch.linalg.vector_norm(got.float().flatten() - expected.float().flatten())
    distance = float(difference / torch.linalg.vector_norm(expected.float()).clamp(min=1e-30))
    return distance if math.isfinite(distance) else math.inf


if __name__ == "__main__":
    main()
