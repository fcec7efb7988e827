"""All-reduce of float32: every back end that works here under one protocol, beside plain MPI_Allreduce.

usage: mpirun -n 2 --bind-to none python -m benchmarks.allreduce [--json PATH]

On GPUs, NCCL comes first, in one process a GPU (NUMSTACK_RANKS_PER_GPU=4 lets four ranks share one: right, but slow).

``us`` is the median time of a call, of the slowest rank, from the first call to the end of ``synchronize``; several
calls are under way at a time, as buckets of gradients are. GB/s is bus bandwidth: 2 (n - 1) / n of the array's bytes,
what each rank must send, over the time; so it can be compared over numbers of ranks, and with the links. The first rows
are what the host pays: for a barrier, which is what ranks pay to agree on a call, and for a call that NCCL knows.
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
from numstack.comm.protocol import Communicator
from numstack.device import Array, current_device

SIZES = [4**k for k in range(5, 13)]
GPU_SIZES = [2**10, 2**16, 2**20, 2**24, 2**26, 2**28, 2**30]
# Every rank must repeat as often as the others, so the number depends on nothing that is measured.
BYTES_IN_ALL, MOST, LEAST = 2**27, 50, 7
GPU_BYTES_IN_ALL = 2**34
UNDER_WAY = 4


def main() -> None:
    options = harness.parse_options(__doc__, add_options)
    world = comm.World.from_mpi(always=True)
    comm.abort_on_error(world)
    from mpi4py import MPI  # after World has seen to its initialisation

    on_gpu = current_device().kind == "cuda"

    def median_us(run: Callable[[], Any], repetitions: int, calls: int = 1) -> float:
        times = []
        for _ in range(repetitions + 1):
            MPI.COMM_WORLD.Barrier()
            start = time.perf_counter()
            run()
            times.append(MPI.COMM_WORLD.allreduce(time.perf_counter() - start, MPI.MAX))
        return 1e6 * float(statistics.median(times[1:])) / calls

    def reduce(communicator: Communicator, array: Array, calls: int) -> None:
        for _ in range(calls):
            communicator.allreduce(array)
        communicator.synchronize()

    communicators = {name: comm.create(world, name) for name in options.backends or comm.backends()}
    rows: list[list[Any]] = [["barrier, host"], ["known call, host"]]
    small = memory.from_host(np.zeros(256, np.float32), scope="comm")
    for communicator in communicators.values():
        rows[0] += [median_us(partial(meet, communicator), MOST), ""]
        rows[1] += [host_us(communicator, small), ""]
    rows[0] += [median_us(MPI.COMM_WORLD.Barrier, MOST), ""]
    rows[1] += ["", ""]
    for nbytes in options.sizes or (GPU_SIZES if on_gpu else SIZES):
        array = memory.from_host(np.zeros(nbytes // 4, np.float32), scope="comm")
        plain = np.zeros(nbytes // 4, np.float32)
        sent = 2 * (world.size - 1) / world.size * nbytes
        row: list[Any] = [nbytes]
        for name, communicator in communicators.items():
            in_all = GPU_BYTES_IN_ALL if name == "nccl" else BYTES_IN_ALL
            repetitions = max(LEAST, min(MOST, in_all // (nbytes * UNDER_WAY)))
            us = median_us(partial(reduce, communicator, array, UNDER_WAY), repetitions, UNDER_WAY)
            row += [us, 1e-3 * sent / us]
        us = median_us(
            partial(MPI.COMM_WORLD.Allreduce, MPI.IN_PLACE, plain), max(LEAST, min(MOST, BYTES_IN_ALL // nbytes))
        )
        rows.append([*row, us, 1e-3 * sent / us])
    if world.rank == 0:
        names = (*communicators, "MPI_Allreduce on the host" if on_gpu else "MPI_Allreduce")
        columns = [f"{name} {unit}" for name in names for unit in ("us", "GB/s")]
        harness.report(f"allreduce on {world.size} ranks", ["bytes", *columns], rows, options)


def meet(communicator: Communicator) -> None:
    """A barrier, until it is done."""
    communicator.barrier()
    communicator.synchronize()


def host_us(communicator: Communicator, array: Array) -> float:
    """Time that a call takes from the caller when ranks have made it before; what it starts goes on behind it."""
    times = []
    for _ in range(MOST):
        start = time.perf_counter()
        communicator.allreduce(array)
        times.append(time.perf_counter() - start)
    communicator.synchronize()
    return 1e6 * statistics.median(times)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backends", nargs="+", metavar="NAME", help="nccl, ring, mpi (default: all that work here)")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="BYTES", help="of the array")


if __name__ == "__main__":
    main()
