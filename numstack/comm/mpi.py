"""MPI's own collectives under the protocol: what the ring is measured against, and MPI's choice of algorithm.

The non-blocking forms are used and polled, so that a rank that dies in the middle is a ``CommError`` and not a hang.
MPI has no bfloat16 and no portable float16: both are reduced in float32 and rounded once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from numstack.comm import reduction
from numstack.comm.header import ANYONE
from numstack.comm.host import HostCommunicator
from numstack.comm.peers import Pending, as_bytes
from numstack.comm.reduction import Op
from numstack.comm.world import World
from numstack.device import Array, Stream
from numstack.errors import CommError

if TYPE_CHECKING:
    from mpi4py import MPI


class MpiCommunicator(HostCommunicator):
    """The protocol on MPI's collectives. Collective: all ranks must construct it.

    Raises
    ------
    CommError
        If ``world`` has no MPI.
    """

    backend: ClassVar[str] = "mpi"

    def __init__(self, world: World, *, timeout_s: float | None = None) -> None:
        if world.mpi is None:
            raise CommError("this world has no MPI; start with mpirun, or make it by World.from_mpi(always=True)")
        super().__init__(world, timeout_s=timeout_s)
        from mpi4py import MPI

        self._in_place: Any = MPI.IN_PLACE
        self._ops = {"sum": MPI.SUM, "mean": MPI.SUM, "max": MPI.MAX, "min": MPI.MIN}

    def _allreduce(self, array: Array, op: Op, stream: Stream) -> None:
        with self._on_host(array, stream) as host:
            numbers = reduction.numbers(host)
            wide = _widened(numbers)
            self._wait(self._comm.Iallreduce(self._in_place, wide, self._ops[op]), wide)
            self._store(wide, numbers, op)

    def _broadcast(self, array: Array, root: int, stream: Stream) -> None:
        is_root = self.rank == root
        with self._on_host(array, stream, load=is_root, store=not is_root) as host:
            self._wait(self._comm.Ibcast(as_bytes(host), root), host)

    def _allgather(self, send: Array, recv: Array, stream: Stream) -> None:
        with self._on_host(send, stream, store=False) as source, self._on_host(recv, stream, load=False) as host:
            np.copyto(host.reshape(self.size, -1)[self.rank], source.reshape(-1))
            self._wait(self._comm.Iallgather(self._in_place, as_bytes(host)), host)

    def _reduce_scatter(self, send: Array, recv: Array, op: Op, stream: Stream) -> None:
        with self._on_host(send, stream, store=False) as source, self._on_host(recv, stream, load=False) as host:
            wide = _widened(reduction.numbers(source))
            result = np.empty(host.size, wide.dtype)  # recv may be a part of send, which MPI does not allow
            self._wait(self._comm.Ireduce_scatter_block(wide, result, self._ops[op]), wide, result)
            self._store(result, reduction.numbers(host), op)

    @property
    def _comm(self) -> MPI.Intracomm:
        return self._peers.comm

    def _wait(self, request: MPI.Request, *arrays: np.ndarray) -> None:
        self._peers.wait(Pending([request], [ANYONE], arrays))

    def _store(self, result: np.ndarray, out: np.ndarray, op: Op) -> None:
        if op == "mean":
            np.divide(result, result.dtype.type(self.size), out=result)
        if result is not out:
            with np.errstate(over="ignore"):
                out[...] = result


def _widened(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float32) if numbers.dtype.itemsize == 2 else numbers
