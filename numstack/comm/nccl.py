"""NCCL under the protocol: data moves between GPUs without the host, and so do waiting and failing.

Ranks agree over MPI before the first call of each kind (operation, dtype, size, options); so a difference is refused on
all of them before data moves, as with every other back end. A call that they have agreed on once costs no exchange any
more: it is enqueued, and the watchdogs compare afterwards what was called. ``NUMSTACK_COMM_CHECK=1`` lets ranks agree
before every call, which finds the place in the program where they part; each then costs the host a barrier.

The mean is ncclAvg: no second pass over the data, and gradients are divided before they are summed, so that a sum in
float16 does not overflow. It multiplies by 1/n in the array's dtype: exact for n = 2, 4, 8...; for other n a bfloat16
result is off by about 2^-8 of it. ``max`` and ``min`` may lose a NaN: NCCL takes the number.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from numstack import memory
from numstack.comm import nccl_library, reduction
from numstack.comm.header import ANYONE, Header
from numstack.comm.peers import Message, Peers, Pending
from numstack.comm.protocol import Communicator
from numstack.comm.reduction import Op
from numstack.comm.watchdog import Watchdog
from numstack.comm.world import World
from numstack.device import Array, Stream
from numstack.errors import CommError, ConfigError

# Names in nccl4py's DataType and RedOp; uint16 arrays hold bfloat16.
DTYPES = {
    "float32": "Float32",
    "float64": "Float64",
    "float16": "Float16",
    "uint16": "Bfloat16",
    "int8": "Int8",
    "uint8": "Uint8",
    "int32": "Int32",
    "uint32": "Uint32",
    "int64": "Int64",
    "uint64": "Uint64",
}
OPS: dict[Op, str] = {"sum": "Sum", "mean": "Avg", "max": "Max", "min": "Min"}
UNIQUE_ID_BYTES = 128

# Connecting takes seconds, however short the time-out of calls is.
LEAST_CONNECT_S = 60.0
# Aborting waits so long for a thread that is inside NCCL; it comes out in microseconds, unless it is stuck there.
LEAVE_S = 5.0
JOIN_POLL_S = 0.02


class NcclError(RuntimeError):
    """What NCCL says of a call that failed."""


class NcclCommunicator(Communicator):
    """The protocol on NCCL, for arrays on a GPU. Collective: all ranks must construct it.

    Raises
    ------
    CommError
        If ``world`` has no MPI, NCCL is missing or too old, or the ranks cannot be connected within the time-out.
    """

    backend: ClassVar[str] = "nccl"
    _peers: NcclPeers

    def __init__(self, world: World, *, timeout_s: float | None = None) -> None:
        if world.mpi is None:
            raise CommError("this world has no MPI; start with mpirun, or make it by World.from_mpi(always=True)")
        self._library = nccl_library.load()
        super().__init__(world, timeout_s=timeout_s)
        self._peers.start(self._connect, self.stream)
        self._peers.watchdog = Watchdog(
            self._peers.comm.Dup(),
            self._peers.record,
            timeout_s=self._peers.timeout_s,
            enter=self.device.enter,  # type: ignore[attr-defined]
            asynchronous_error=self._handle.asynchronous_error,
            abort=self._handle.abort,
            on_failure=self.device.interrupt,  # type: ignore[attr-defined]
        )
        weakref.finalize(self, self._peers.watchdog.stop)  # at the end of the program at the latest

    def _make_peers(self, world: World, timeout_s: float | None) -> NcclPeers:
        interrupt = self.device.interrupt  # type: ignore[attr-defined]
        return NcclPeers(world, timeout_s, on_raise=lambda: interrupt(None))

    def _connect(self) -> None:
        """Make NCCL's communicator, in a thread of its own: NCCL waits for all ranks without a time-out."""
        library = self._library
        unique_id = library.UniqueId.from_buffer(self._peers.share(lambda: bytes(library.get_unique_id())))
        made: list[Any] = []

        def meet() -> None:
            try:
                self.device.enter()  # type: ignore[attr-defined]
                made.append(library.comm_init_rank(self.size, unique_id, self.rank))
            except Exception as error:
                made.append(error)

        thread = threading.Thread(target=meet, name="numstack-nccl-init", daemon=True)
        thread.start()
        self._peers.join(thread)
        if isinstance(made[0], Exception):
            raise made[0]
        self._handle = _Handle(library, made[0])

    def synchronize(self) -> None:
        super().synchronize()
        self._peers.check()

    def close(self) -> None:
        self.barrier()
        self.synchronize()
        assert self._peers.watchdog is not None
        self._peers.watchdog.stop()
        self._handle.destroy()

    # moving data: every call only enqueues

    def _allreduce(self, array: Array, op: Op, stream: Stream) -> None:
        address = self._claim(array, stream)
        with self._handle.use() as comm:
            self._library.all_reduce(
                address, address, array.size, self._dtype(array), self._op(op), comm, _driver_stream(stream)
            )

    def _broadcast(self, array: Array, root: int, stream: Stream) -> None:
        address = self._claim(array, stream)
        with self._handle.use() as comm:
            self._library.broadcast(address, address, array.nbytes, self._bytes, root, comm, _driver_stream(stream))

    def _allgather(self, send: Array, recv: Array, stream: Stream) -> None:
        source, target = self._claim(send, stream), self._claim(recv, stream)
        with self._handle.use() as comm:
            self._library.all_gather(source, target, send.nbytes, self._bytes, comm, _driver_stream(stream))

    def _reduce_scatter(self, send: Array, recv: Array, op: Op, stream: Stream) -> None:
        source, target = self._claim(send, stream), self._claim(recv, stream)
        with self._handle.use() as comm:
            self._library.reduce_scatter(
                source, target, recv.size, self._dtype(recv), self._op(op), comm, _driver_stream(stream)
            )

    def _exchange(self, messages: Sequence[Message], stream: Stream) -> None:
        with self._handle.use() as comm:
            self._library.group_start()
            try:
                for array, peer, outgoing in messages:
                    if array.nbytes:
                        call = self._library.send if outgoing else self._library.recv
                        call(self._claim(array, stream), array.nbytes, self._bytes, peer, comm, _driver_stream(stream))
            finally:
                self._library.group_end()

    def _claim(self, array: Array, stream: Stream) -> int:
        """The array's address; its memory is not given to others before ``stream`` is done with it."""
        with contextlib.suppress(ConfigError):  # another library's memory, which lives as long as its owner says
            memory.record_use(array, stream)
        return self.device.address(array)

    def _dtype(self, array: Array) -> int:
        return int(getattr(self._library.DataType, DTYPES[reduction.name_of(array.dtype)]))

    @property
    def _bytes(self) -> int:
        """What is moved and not computed with has no dtype."""
        return int(self._library.DataType.Uint8)

    def _op(self, op: Op) -> int:
        return int(getattr(self._library.RedOp, OPS[op]))


def _driver_stream(stream: Stream) -> int:
    return stream.handle  # type: ignore[attr-defined, no-any-return]


class _Handle:
    """NCCL's communicator: used by the thread that calls, ended by the watchdog."""

    def __init__(self, library: Any, comm: Any) -> None:
        self._library = library
        self._comm: Any | None = comm
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def use(self) -> Iterator[Any]:
        """NCCL's communicator, which is not aborted meanwhile.

        Raises
        ------
        NcclError
            If NCCL refuses a call, or the communicator was closed or aborted before.
        """
        with self._lock:
            if self._comm is None:
                raise NcclError("NCCL's communicator was closed or aborted")
            try:
                yield self._comm
            except self._library.NCCLError as error:
                raise NcclError(self._explained(str(error))) from error

    def asynchronous_error(self) -> str | None:
        """What went wrong since, if anything did."""
        result = self._library.comm_get_async_error(self._comm)
        if result in (self._library.Result.Success, self._library.Result.InProgress):
            return None
        return self._explained(self._library.get_error_string(result))

    def _explained(self, error: str) -> str:
        last = self._library.get_last_error(self._comm)
        return f"{error}: {last}" if last else error

    def abort(self) -> None:
        """End all its kernels. A thread that stays inside NCCL does not keep it from that."""
        entered = self._lock.acquire(timeout=LEAVE_S)
        try:
            comm, self._comm = self._comm, None
            if comm is not None:
                self._library.comm_abort(comm)
        finally:
            if entered:
                self._lock.release()

    def destroy(self) -> None:
        """Give its memory back. NCCL waits for the other ranks of the machine: all must call."""
        with self._lock:
            comm, self._comm = self._comm, None
            if comm is not None:
                self._library.comm_destroy(comm)


class NcclPeers(Peers):
    """Agreement once for each kind of call; a watchdog for what comes after.

    Parameters
    ----------
    world, timeout_s
        As of ``Peers``.
    on_raise : callable
        Called before the watchdog's error is raised here.
    """

    def __init__(self, world: World, timeout_s: float | None, *, on_raise: Callable[[], None]) -> None:
        super().__init__(world, timeout_s)
        self.watchdog: Watchdog | None = None
        self._on_raise = on_raise
        self._always = os.environ.get("NUMSTACK_COMM_CHECK", "") not in ("", "0")
        self._agreed: set[Header] = set()
        self._agreed_ends: set[tuple[int, bool, Header]] = set()

    # the start

    def start(self, initialise: Callable[[], None], stream: Stream) -> None:
        """Let all ranks ``initialise``; if one fails, all hear of it. Collective: all ranks must call."""
        timeout_s, self.timeout_s = self.timeout_s, max(self.timeout_s, LEAST_CONNECT_S)
        self._begin(Header("init", "", "uint8", UNIQUE_ID_BYTES, UNIQUE_ID_BYTES))
        super().carry_out(lambda _: initialise(), stream)
        self.timeout_s = timeout_s

    def share(self, make: Callable[[], bytes]) -> bytes:
        """What ``make()`` of rank 0 returns, ``UNIQUE_ID_BYTES`` bytes, on all ranks."""
        data = np.zeros(UNIQUE_ID_BYTES, np.uint8)
        if self.rank == 0:
            data[:] = np.frombuffer(make(), np.uint8)
        self.wait(Pending([self.comm.Ibcast(data, 0)], [ANYONE], [data]))
        return data.tobytes()

    def join(self, thread: threading.Thread) -> None:
        """Wait for a thread that meets those of all ranks; raises if it takes too long, or another rank gives up."""
        deadline = time.monotonic() + self.timeout_s
        while thread.is_alive():
            thread.join(JOIN_POLL_S)
            self._hear_failure()
            if time.monotonic() > deadline:
                raise self.fail(
                    f"rank {self.rank} waited {self.timeout_s:g} s for NCCL to connect all ranks; NCCL_DEBUG=INFO says "
                    "how far it came; NUMSTACK_COMM_TIMEOUT_S is how long to wait"
                )

    # every call

    def agree(self, call: Header) -> None:
        self._hear_watchdog()
        asked = self._always or call not in self._agreed
        numbered = call.numbered(self._sequence)
        self._watching.called(numbered, asked=asked)
        if asked:
            super().agree(call)
        else:
            self._begin(numbered)
            self._sequence += 1
        if call.nbytes:  # ranks that move no data meet in no other way, so they ask every time
            self._agreed.add(call)

    def agree_ends(self, messages: Sequence[Message]) -> None:
        self._hear_watchdog()
        own = self._begin_messages(messages)
        kinds = [(message.peer, message.outgoing, header.numbered(0)) for message, header in own]
        self._meet([end for end, kind in zip(own, kinds, strict=True) if self._always or kind not in self._agreed_ends])
        self._agreed_ends.update(kinds)

    def carry_out(self, move: Callable[[Stream], None], stream: Stream) -> None:
        super().carry_out(move, stream)
        if self._call.nbytes:
            self.record.reached("enqueued")
            self._watching.watch(self.record.present, stream.record())

    # failure, here or behind the calls

    def fail(self, problem: str) -> CommError:
        error = super().fail(problem)
        if self.watchdog is not None:
            self.watchdog.report(str(self._failure))
            self.watchdog.wait_until_aborted()
        return error

    def check(self) -> None:
        """Raise what has failed.

        Raises
        ------
        CommError
        """
        self._hear_watchdog()
        if self._failure is not None:
            raise CommError(self._failure)

    def _hear_failure(self) -> None:
        self._hear_watchdog()
        super()._hear_failure()

    def _hear_watchdog(self) -> None:
        """Raise the watchdog's error, the first time; later calls are refused because of it."""
        if self.watchdog is None:
            return
        error = self.watchdog.error
        if error is not None and self._failure is None:
            self.watchdog.wait_until_aborted()
            self._failure = str(error)
            self._on_raise()
            raise CommError(self._failure)

    @property
    def _watching(self) -> Watchdog:
        assert self.watchdog is not None, "called before the ranks were connected"
        return self.watchdog
