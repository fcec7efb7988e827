"""All-reduce of float32: numstack's ring and MPI's collectives under one protocol, beside plain MPI_Allreduce.

usage: mpirun -n 2 --bind-to none python -m benchmarks.allreduce [--json PATH]

Times are medians, of the slowest rank, from the call to the end of ``synchronize``. The first row is a barrier: what
it costs to agree on a call. Bus bandwidth is 2 (n - 1) / n of the array's bytes, what each rank must send, over the
time: so it can be compared over numbers of ranks, and with the links.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks import harness
from numstack import comm, memory

SIZES = [4**k for k in range(5, 13)]
# Every rank must repeat as often as the others, so the number depends on nothing that is measured.
BYTES_IN_ALL, MOST, LEAST = 2**27, 100, 7


def main() -> None:
    options = harness.parse_options(__doc__, add_options)
    world = comm.World.from_mpi(always=True)
    comm.abort_on_error(world)
    from mpi4py import MPI  # after World has seen to its initialisation

    def median_us(run: Callable[[], Any], repetitions: int) -> float:
        times = []
        for _ in range(repetitions + 1):
            MPI.COMM_WORLD.Barrier()
            start = time.perf_counter()
            run()
            times.append(MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX))
        return 1e6 * float(statistics.median(times[1:]))

    def call(communicator: comm.Communicator, array: Any = None) -> None:
        communicator.barrier() if array is None else communicator.allreduce(array)
        communicator.synchronize()

    communicators = {name: comm.create(world, name) for name in comm.BACKENDS}
    rows: list[list[Any]] = [["barrier"]]
    for communicator in communicators.values():
        rows[0] += [median_us(partial(call, communicator), MOST), ""]
    rows[0] += [median_us(MPI.COMM_WORLD.Barrier, MOST), ""]
    for nbytes in options.sizes:
        array = memory.from_host(np.zeros(nbytes // 4, np.float32), scope="comm")
        plain = np.zeros(nbytes // 4, np.float32)
        runs = [partial(call, communicator, array) for communicator in communicators.values()]
        runs.append(partial(MPI.COMM_WORLD.Allreduce, MPI.IN_PLACE, plain))
        sent = 2 * (world.size - 1) / world.size * nbytes
        row: list[Any] = [nbytes]
        for run in runs:
            us = median_us(run, max(LEAST, min(MOST, BYTES_IN_ALL // nbytes)))
            row += [us, 1e-3 * sent / us]
        rows.append(row)
    if world.rank == 0:
        columns = [f"{name} {unit}" for name in (*communicators, "MPI_Allreduce") for unit in ("us", "GB/s")]
        harness.report(f"allreduce on {world.size} ranks", ["bytes", *columns], rows, options)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, metavar="BYTES", help="of the array")


if __name__ == "__main__":
    main()
