"""What every communicator offers, whatever moves the bytes.

A back end is a subclass that fills in the five hooks at the end of the class, which move data and nothing else. The
rest is the same for all: arguments are checked before anything is submitted, each collective is one ``Work`` at the
device's door, and in it the ranks first agree that they all make the same call.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from numstack.comm import reduction
from numstack.comm.header import Header
from numstack.comm.peers import Message, Peers
from numstack.comm.reduction import Op
from numstack.comm.world import World
from numstack.device import Array, Event, Stream, Work, current_device, submit
from numstack.errors import CommError, DTypeError, ShapeError


class Communicator(ABC):
    """All ranks of a world, calling the same operations in the same order. Collective: all ranks must construct it.

    Operations work in place on C-contiguous arrays of the current device; ``uint16`` arrays are reduced as bfloat16.
    Each is a ``Work`` of kind ``collective`` on the communicator's own stream: it starts once ``stream`` has come to
    the present point (the stream that makes the array; by default the device's default stream), and the call returns at
    once, with an event. Let whoever uses the result wait for it: ``device.default_stream.wait(event)``. A failure is
    raised there, or by ``synchronize``.

    Parameters
    ----------
    world : World
    timeout_s : float, optional
        Longest wait for another rank; by default ``NUMSTACK_COMM_TIMEOUT_S``, else 300.

    Attributes
    ----------
    rank, size : int
    stream : Stream
        The communication stream.

    Raises
    ------
    CommError
        On every rank, where ranks call different operations or give different sizes, dtypes or options; on those that
        wait, where a rank does not call within the time-out. Naming ranks, operation, number and sizes.
    """

    backend: ClassVar[str]

    def __init__(self, world: World, *, timeout_s: float | None = None) -> None:
        self.rank, self.size = world.rank, world.size
        self.device = current_device()
        self._peers = self._make_peers(world, timeout_s)
        self.stream: Stream = self.device.create_stream(priority=1)
        self._group: list[Message] | None = None

    # collectives

    def allreduce(self, array: Array, *, op: Op = "sum", stream: Stream | None = None) -> Event:
        """Reduce ``array`` over the ranks, in place; every rank gets the same bits. Collective: all ranks must call.

        Parameters
        ----------
        array : Array
            Floating (``uint16`` is bfloat16) or integer, any shape, also empty.
        op : {"sum", "max", "min", "mean"}
            ``mean`` is for floating dtypes. 2-byte floats are summed in float32, with one rounding a step.
        stream : Stream, optional
            What makes ``array``.
        """
        _check_contiguous("allreduce", array)
        reduction.check("allreduce", array, op)
        header = _describe("allreduce", array, op=op)
        return self._submit(header, lambda s: self._allreduce(array, op, s), (array,), (array,), stream)

    def broadcast(self, array: Array, *, root: int = 0, stream: Stream | None = None) -> Event:
        """Give every rank ``root``'s ``array``. Collective: all ranks must call."""
        _check_contiguous("broadcast", array)
        self._check_rank("broadcast", "root", root)
        reads, writes = ((array,), ()) if self.rank == root else ((), (array,))
        header = _describe("broadcast", array, root=root)
        return self._submit(header, lambda s: self._broadcast(array, root, s), reads, writes, stream)

    def allgather(self, send: Array, recv: Array, *, stream: Stream | None = None) -> Event:
        """Put every rank's ``send`` into ``recv``, in the order of ranks. Collective: all ranks must call.

        Parameters
        ----------
        send : Array, n elements
            May be this rank's part of ``recv``.
        recv : Array, size x n elements, same dtype
        """
        self._check_parts("allgather", part=send, whole=recv, names=("send", "recv"))
        header = _describe("allgather", send)
        return self._submit(header, lambda s: self._allgather(send, recv, s), (send,), (recv,), stream)

    def reduce_scatter(self, send: Array, recv: Array, *, op: Op = "sum", stream: Stream | None = None) -> Event:
        """Reduce ``send`` over the ranks; rank r gets the r-th part. Collective: all ranks must call.

        Parameters
        ----------
        send : Array, size x n elements
        recv : Array, n elements, same dtype
            May be this rank's part of ``send``; the rest of ``send`` stays as it is.
        op : {"sum", "max", "min", "mean"}
        """
        self._check_parts("reduce_scatter", part=recv, whole=send, names=("recv", "send"))
        reduction.check("reduce_scatter", recv, op)
        header = _describe("reduce_scatter", recv, op=op)
        return self._submit(header, lambda s: self._reduce_scatter(send, recv, op, s), (send,), (recv,), stream)

    def barrier(self) -> Event:
        """An event that is done once all ranks have called this. Collective: all ranks must call."""
        return self._submit(Header("barrier"), lambda _: None, (), (), None)

    # point to point

    def send(self, array: Array, peer: int, *, stream: Stream | None = None) -> Event:
        """Send ``array`` to rank ``peer``, which must call ``recv`` with the same size and dtype."""
        return self._transfer("send", Message(array, peer, outgoing=True), stream)

    def recv(self, array: Array, peer: int, *, stream: Stream | None = None) -> Event:
        """Fill ``array`` with what rank ``peer`` sends."""
        return self._transfer("recv", Message(array, peer, outgoing=False), stream)

    @contextlib.contextmanager
    def group(self, *, stream: Stream | None = None) -> Iterator[None]:
        """Make all ``send`` and ``recv`` calls of the ``with`` block one operation, so that their order is free.

        Two ranks that send to each other must group the send with the receive: outside a group each call waits for its
        partner before the next one starts. The events that the calls return are of no use; wait for
        ``communicator.stream.record()``.
        """
        if self._group is not None:
            raise CommError("group: already inside a group(); groups do not nest")
        messages: list[Message] = []
        self._group = messages
        try:
            yield
        finally:
            self._group = None
        if messages:
            self._submit_messages("group", messages, stream)

    def _transfer(self, name: str, message: Message, stream: Stream | None) -> Event:
        _check_contiguous(name, message.array)
        self._check_rank(name, "peer", message.peer)
        if message.peer == self.rank:
            raise CommError(f"{name}: peer={message.peer} is this rank itself; use device.copy")
        if self._group is not None:
            self._group.append(message)
            return self.stream.record()
        return self._submit_messages(name, [message], stream)

    def _submit_messages(self, name: str, messages: Sequence[Message], after: Stream | None) -> Event:
        reads = [m.array for m in messages if m.outgoing]
        writes = [m.array for m in messages if not m.outgoing]
        return self._enqueue(
            name,
            lambda: self._peers.agree_ends(messages),
            lambda stream: self._exchange(messages, stream),
            reads,
            writes,
            after,
        )

    def synchronize(self) -> None:
        """Block the host until all that was called is done; raises what failed."""
        self.stream.synchronize()

    def close(self) -> None:
        """Wait for all that was called, then give back what the communicator holds. Collective: all ranks must call.

        A program that ends need not call it.
        """
        self.synchronize()

    # the door

    def _submit(
        self,
        header: Header,
        move: Callable[[Stream], None],
        reads: Sequence[Array],
        writes: Sequence[Array],
        after: Stream | None,
    ) -> Event:
        if self._group is not None:
            raise CommError(f"{header.operation}: a group() holds only send and recv; call it outside")
        return self._enqueue(header.operation, lambda: self._peers.agree(header), move, reads, writes, after)

    def _enqueue(
        self,
        name: str,
        agree: Callable[[], None],
        move: Callable[[Stream], None],
        reads: Sequence[Array],
        writes: Sequence[Array],
        after: Stream | None,
    ) -> Event:
        def run(stream: Stream) -> None:
            agree()
            self._peers.carry_out(move, stream)

        self.stream.wait((after or self.device.default_stream).record())
        submit(Work(f"{self.backend}.{name}", "collective", run, self.stream, reads, writes))
        return self.stream.record()

    # checks

    def _check_rank(self, operation: str, name: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise CommError(f"{operation}: {name}={rank} is no rank of a world of {self.size}")

    def _check_parts(self, operation: str, part: Array, whole: Array, names: tuple[str, str]) -> None:
        _check_contiguous(operation, part)
        _check_contiguous(operation, whole)
        if part.dtype != whole.dtype:
            raise DTypeError(
                f"{operation}: {names[0]} is {part.dtype} but {names[1]} is {whole.dtype}; make them equal"
            )
        if whole.size != self.size * part.size:
            raise ShapeError(
                f"{operation}: {names[0]} has {part.size} elements, so {names[1]} needs {self.size} x {part.size} = "
                f"{self.size * part.size} for {self.size} ranks, but it has {whole.size}"
            )

    def _make_peers(self, world: World, timeout_s: float | None) -> Peers:
        return Peers(world, timeout_s)

    # what a back end fills in: called on the communication stream once all ranks agree, never with empty arrays

    @abstractmethod
    def _allreduce(self, array: Array, op: Op, stream: Stream) -> None: ...

    @abstractmethod
    def _broadcast(self, array: Array, root: int, stream: Stream) -> None: ...

    @abstractmethod
    def _allgather(self, send: Array, recv: Array, stream: Stream) -> None: ...

    @abstractmethod
    def _reduce_scatter(self, send: Array, recv: Array, op: Op, stream: Stream) -> None: ...

    @abstractmethod
    def _exchange(self, messages: Sequence[Message], stream: Stream) -> None: ...


def _describe(operation: str, array: Array, op: str = "", root: int = -1) -> Header:
    return Header(operation, op, reduction.name_of(array.dtype), array.size, array.nbytes, root)


def _check_contiguous(operation: str, array: Array) -> None:
    if not array.flags.c_contiguous:
        raise DTypeError(
            f"{operation}: the array of shape {array.shape} has strides {array.strides}, but a collective takes one "
            "C-contiguous piece of memory; copy it first"
        )
