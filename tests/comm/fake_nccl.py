"""NCCL without a GPU: nccl4py's bindings over MPI and host memory, and the CPU device dressed up as a GPU.

What matters of NCCL is here: calls only enqueue; kernels wait for the other ranks for ever, also when sizes differ,
until the communicator is aborted, and then they end without a word.
"""

from __future__ import annotations

import ctypes
import enum
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from numstack.comm import nccl_library
from numstack.comm.reduction import numbers
from numstack.device import Event, Stream, Work
from numstack.device.cpu import CpuDevice, WorkerStream


class Result(enum.IntEnum):
    Success = 0
    RemoteError = 6
    InProgress = 7


class DataType(enum.IntEnum):
    Int8, Uint8, Int32, Uint32, Int64, Uint64, Float16, Float32, Float64, Bfloat16 = range(10)


class RedOp(enum.IntEnum):
    Sum, Prod, Max, Min, Avg = range(5)


class NCCLError(Exception):
    pass


STORAGE = dict(zip(DataType, ("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "u2"), strict=True))
REDUCE: dict[int, Callable[[np.ndarray], np.ndarray]] = {
    RedOp.Sum: lambda rows: rows.sum(axis=0),
    RedOp.Avg: lambda rows: rows.mean(axis=0),
    RedOp.Max: lambda rows: rows.max(axis=0),
    RedOp.Min: lambda rows: rows.min(axis=0),
}


def memory_at(address: int, nbytes: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


class FakeComm:
    """A communicator; ``n_calls`` counts what was enqueued."""

    def __init__(self, mpi: Any) -> None:
        self.mpi = mpi
        self.rank, self.size = mpi.Get_rank(), mpi.Get_size()
        self.aborted = False
        self.destroyed = False
        self.asynchronous_error = 0
        self.n_calls = 0
        self._broken = False

    def wait(self, request: Any) -> bool:
        """Until ``request`` is done; False if aborted before. A rank that has died is waited for as well."""
        while not self._is_done(request):
            if self.aborted:
                return False
            time.sleep(0.0002)
        return True

    def _is_done(self, request: Any) -> bool:
        try:
            return not self._broken and bool(request.Test())
        except Exception:  # MPI has noticed that a rank has died; NCCL would not
            self._broken = True
            return False

    def launch(self, stream: FakeStream, kernel: Callable[[], None]) -> None:
        self.n_calls += 1

        def run() -> None:
            kernel()
            if self.aborted and (error := stream.device.interruption) is not None:  # type: ignore[attr-defined]
                raise error  # as CudaDevice lets the next wait raise it

        stream.launch(run)

    def collective(
        self, stream: FakeStream, kind: tuple[int, ...], send: np.ndarray, finish: Callable[..., None]
    ) -> None:
        """Give ``finish`` the contributions of all ranks; wait for ever if their kinds differ."""

        def kernel() -> None:
            own = np.array(kind, np.int64)
            kinds = np.empty((self.size, own.size), np.int64)
            if not self.wait(self.mpi.Iallgather(own, kinds)):
                return
            while (kinds != own).any():
                if self.aborted:
                    return
                time.sleep(0.001)
            rows = np.empty((self.size, send.size), np.uint8)
            if self.wait(self.mpi.Iallgather(send.copy(), rows)):
                finish(rows)

        self.launch(stream, kernel)


def _reduced(rows: np.ndarray, dtype: int, op: int) -> np.ndarray:
    own = np.stack([numbers(row.view(STORAGE[DataType(dtype)])) for row in rows])
    wide = own.astype(np.float64) if own.dtype.kind == "f" or own.dtype.itemsize == 2 else own
    if own.dtype.itemsize <= 4 and wide is not own:
        wide = wide.astype(np.float32)
    with np.errstate(all="ignore"):
        return REDUCE[op](wide).astype(own.dtype).view(np.uint8)


class Bindings:
    """The part of ``nccl.bindings.nccl`` that is used."""

    NCCLError = NCCLError
    Result, DataType, RedOp = Result, DataType, RedOp
    UniqueId = SimpleNamespace(from_buffer=bytes)

    def __init__(self, world: Any, version: int = 23203) -> None:
        self._world = world
        self._version = version
        self._grouped: list[tuple[FakeComm, FakeStream, Callable[[], Any]]] = []

    def get_version(self) -> int:
        return self._version

    def get_library_path(self) -> str:
        return "/fake/libnccl.so.2"

    def get_unique_id(self) -> bytes:
        return bytes(range(128))

    def comm_init_rank(self, nranks: int, unique_id: bytes, rank: int) -> FakeComm:
        assert unique_id == bytes(range(128))
        comm = FakeComm(self._world.Dup())
        assert (comm.size, comm.rank) == (nranks, rank)
        return comm

    def comm_get_async_error(self, comm: FakeComm) -> int:
        return comm.asynchronous_error

    def get_error_string(self, result: int) -> str:
        return {6: "remote process exited or there was a network error"}[result]

    def get_last_error(self, comm: FakeComm) -> str:
        return "planted" if comm.asynchronous_error else ""

    def comm_abort(self, comm: FakeComm) -> None:
        comm.aborted = True

    def comm_destroy(self, comm: FakeComm) -> None:
        comm.destroyed = True

    def all_reduce(
        self, send: int, recv: int, count: int, dtype: int, op: int, comm: FakeComm, stream: FakeStream
    ) -> None:
        nbytes = count * np.dtype(STORAGE[DataType(dtype)]).itemsize
        target = memory_at(recv, nbytes)

        def finish(rows: np.ndarray) -> None:
            target[:] = _reduced(rows, dtype, op)

        comm.collective(stream, (1, count, dtype, op), memory_at(send, nbytes), finish)

    def broadcast(
        self, send: int, recv: int, count: int, dtype: int, root: int, comm: FakeComm, stream: FakeStream
    ) -> None:
        assert dtype == DataType.Uint8
        target = memory_at(recv, count)

        def finish(rows: np.ndarray) -> None:
            target[:] = rows[root]

        comm.collective(stream, (2, count, root), memory_at(send, count), finish)

    def all_gather(self, send: int, recv: int, count: int, dtype: int, comm: FakeComm, stream: FakeStream) -> None:
        assert dtype == DataType.Uint8
        target = memory_at(recv, count * comm.size)

        def finish(rows: np.ndarray) -> None:
            target[:] = rows.reshape(-1)

        comm.collective(stream, (3, count), memory_at(send, count), finish)

    def reduce_scatter(
        self, send: int, recv: int, count: int, dtype: int, op: int, comm: FakeComm, stream: FakeStream
    ) -> None:
        nbytes = count * np.dtype(STORAGE[DataType(dtype)]).itemsize
        target = memory_at(recv, nbytes)

        def finish(rows: np.ndarray) -> None:
            target[:] = _reduced(rows[:, comm.rank * nbytes :][:, :nbytes], dtype, op)

        comm.collective(stream, (4, count, dtype, op), memory_at(send, nbytes * comm.size), finish)

    def group_start(self) -> None:
        self._grouped.clear()

    def send(self, address: int, count: int, dtype: int, peer: int, comm: FakeComm, stream: FakeStream) -> None:
        self._grouped.append((comm, stream, lambda: comm.mpi.Isend(memory_at(address, count).copy(), peer)))

    def recv(self, address: int, count: int, dtype: int, peer: int, comm: FakeComm, stream: FakeStream) -> None:
        self._grouped.append((comm, stream, lambda: comm.mpi.Irecv(memory_at(address, count), peer)))

    def group_end(self) -> None:
        calls = list(self._grouped)
        if not calls:
            return
        comm, stream, _ = calls[0]

        def kernel() -> None:
            for request in [start() for _, _, start in calls]:
                if not comm.wait(request):
                    return

        comm.launch(stream, kernel)


class FakeStream(Stream):
    """Works run in the thread that submits them, as on a GPU; what they launch runs behind them, in order."""

    def __init__(self, device: CpuDevice) -> None:
        self.device = device
        self._worker = WorkerStream(device, 0)
        self.handle = self  # what the bindings get is what they launch on

    def launch(self, kernel: Callable[[], None]) -> None:
        self._worker.execute(Work("kernel", "kernel", lambda _: kernel(), self._worker))

    def execute(self, work: Work) -> None:
        work.run(self)

    def record(self) -> Event:
        return self._worker.record()

    def wait(self, event: Event) -> None:
        self._worker.wait(event)

    def synchronize(self) -> None:
        self._worker.synchronize()


def install(version: int = 23203) -> None:
    """Let this process, which has MPI, take the fake for NCCL and its CPU for a GPU."""
    from mpi4py import MPI

    bindings = Bindings(MPI.COMM_WORLD, version)

    def interrupt(self: CpuDevice, error: BaseException | None) -> None:
        self.interruption = error  # type: ignore[attr-defined]

    nccl_library._bindings = lambda: bindings
    CpuDevice.create_stream = lambda self, priority=0: FakeStream(self)  # type: ignore[method-assign]
    CpuDevice.enter = lambda self: None  # type: ignore[attr-defined]
    CpuDevice.interrupt = interrupt  # type: ignore[attr-defined]
    CpuDevice.interruption = None  # type: ignore[attr-defined]
