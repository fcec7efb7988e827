"""The MPI messages of one communicator: agreeing on a call before data moves, and waiting that always ends.

Every call starts with an exchange of 64-byte headers, each rank's to each other rank. That costs one latency and gives
three things: ranks that disagree learn it on every rank before any data has moved, so that the communicator is still
usable; a rank that never calls is named, since exactly its header is missing; and no rank starts to move data before
all are there. Waiting polls, with pauses that grow, so that it can time out, hears of other ranks' failures, and leaves
the cores to those who compute.
"""

from __future__ import annotations

import math
import os
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from numstack.comm import header as headers
from numstack.comm.header import Header, disagreement, name_ranks
from numstack.comm.record import FlightRecorder
from numstack.comm.world import World
from numstack.errors import CommError, ConfigError

if TYPE_CHECKING:
    from mpi4py import MPI

    from numstack.device import Stream

DEFAULT_TIMEOUT_S = 300.0

# A message's tag says what it is; messages of one tag between two ranks arrive in the order they were sent.
TAG_HEADER, TAG_SENDER, TAG_RECEIVER, TAG_DATA, TAG_FAILURE, TAG_END = range(1, 7)

# Waiting: so many polls at once (about 1 us each), then pauses that grow. MPI moves data only while it is polled.
N_EAGER_POLLS = 30
FIRST_PAUSE_S = 20e-6
LONGEST_PAUSE_S = 200e-6
# What a failing rank tells the others; below every MPI's limit for messages that need no partner.
MAX_NOTICE_BYTES = 1000

# Communicators that failed. MPI cannot take back messages that are under way, and may move their bytes until the
# process ends, so neither the arrays nor the headers of one may ever be freed.
_FAILED: list[Peers] = []


class Message(NamedTuple):
    """One half of a point-to-point message: ``array`` (on the device or the host) goes to ``peer`` or comes from it."""

    array: Any
    peer: int
    outgoing: bool


class Pending(NamedTuple):
    """MPI's requests for messages under way, the rank at the other end of each (``ANYONE`` if unknown), their memory.

    mpi4py's requests do not keep the arrays of collectives alive.
    """

    requests: Sequence[MPI.Request]
    peers: Sequence[int]
    arrays: Sequence[np.ndarray]


class Peers:
    """What a communicator needs of the other ranks, over MPI. Collective: all ranks must construct it.

    Parameters
    ----------
    world : World
    timeout_s : float, optional
        Longest wait for the other ranks; by default ``NUMSTACK_COMM_TIMEOUT_S``, else 300.

    Notes
    -----
    After construction, only one thread may use it: that of the communicator's stream.
    """

    def __init__(self, world: World, timeout_s: float | None = None) -> None:
        self.rank, self.size = world.rank, world.size
        self.record = FlightRecorder(world.rank)
        self.timeout_s = timeout() if timeout_s is None else timeout_s
        self._sequence = 0
        self._n_groups = 0
        self._n_messages: Counter[tuple[int, bool]] = Counter()  # by peer and direction
        self._under_way: dict[int, Pending] = {}  # by identity: requests are equal once they are done
        self._failure: str | None = None
        self._others = [rank for rank in range(world.size) if rank != world.rank]
        if world.mpi is None:
            return
        from mpi4py import MPI

        self._mpi = MPI
        self.comm: MPI.Intracomm = world.mpi.Dup()
        self._own = np.zeros(headers.NBYTES, np.uint8)
        self._theirs = np.zeros((world.size, headers.NBYTES), np.uint8)
        # Persistent: set up once, started by one call.
        self._header_requests: list[MPI.Prequest] = [
            *(self.comm.Recv_init(self._theirs[rank], rank, TAG_HEADER) for rank in self._others),
            *(self.comm.Send_init(self._own, rank, TAG_HEADER) for rank in self._others),
        ]
        self._ended: set[int] = set()
        weakref.finalize(self, _say_end, self.comm, self._others)  # at the end of the program at the latest

    def agree(self, call: Header) -> None:
        """Wait until every rank has made the same call. Collective: all ranks must call.

        Raises
        ------
        CommError
            On every rank if they disagree. On those that wait, if one does not come in time.
        """
        self._begin(call.numbered(self._sequence))
        self._sequence += 1
        if self._others:
            self._own[:] = np.frombuffer(self._call.pack(), np.uint8)
            self._mpi.Prequest.Startall(self._header_requests)
            self._wait_for_headers(Pending(self._header_requests, self._others * 2, [self._own, self._theirs]))
            self._compare()
            self._hear_failure()

    def carry_out(self, move: Callable[[Stream], None], stream: Stream) -> None:
        """Let ``move(stream)`` move the agreed call's data, if it has any; if that fails, the other ranks are told."""
        self.record.reached("moving data")
        try:
            if self._call.nbytes:
                move(stream)
        except CommError:
            raise
        except Exception as error:
            raise self.fail(f"rank {self.rank} failed: {type(error).__name__}: {error}") from error
        self.record.reached("done")

    def post(self, messages: Sequence[Message]) -> Pending:
        """Start messages of whole host arrays, which must not be touched before they are done."""
        requests: list[MPI.Request] = []
        for array, peer, outgoing in messages:
            start = self.comm.Isend if outgoing else self.comm.Irecv
            requests.append(start(as_bytes(array), peer, TAG_DATA))
        arrays = [message.array for message in messages]
        pending = Pending(requests, [message.peer for message in messages], arrays)
        self._under_way[id(pending)] = pending
        return pending

    def _compare(self) -> None:
        self._theirs[self.rank] = self._own
        if (self._theirs == self._own).all():
            return
        problem = disagreement({rank: Header.unpack(self._theirs[rank].tobytes()) for rank in range(self.size)})
        assert problem is not None
        self.record.reached("refused")
        raise CommError(f"{problem} ({self.record.dump(problem)})")

    def wait(self, pending: Pending) -> None:
        """Wait for data of the present call.

        Raises
        ------
        CommError
            After the time-out, naming the ranks that have stopped; at once if another rank has given up.
        """
        self._wait(pending, "stopped moving data", lambda: None)

    def _wait_for_headers(self, pending: Pending) -> None:
        self._wait(pending, "not made the matching call", lambda: self._hear_end(pending))

    def _wait(self, pending: Pending, complaint: str, listen: Callable[[], None]) -> None:
        self._under_way[id(pending)] = pending
        self._poll(pending, complaint, listen)
        del self._under_way[id(pending)]

    def _poll(self, pending: Pending, complaint: str, listen: Callable[[], None]) -> None:
        test = self._mpi.Request.Testall
        for _ in range(N_EAGER_POLLS):
            if test(pending.requests):
                return
        deadline = time.monotonic() + self.timeout_s
        pause_s = FIRST_PAUSE_S
        while not test(pending.requests):
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
            if pause_s == LONGEST_PAUSE_S:
                self._hear_failure()
                listen()
            if time.monotonic() > deadline:
                missing = _unfinished(pending)
                raise self.fail(
                    f"rank {self.rank} waited {self.timeout_s:g} s, but {name_ranks(missing)} "
                    f"{'have' if len(missing) > 1 else 'has'} {complaint}; look there for an error, or raise "
                    "NUMSTACK_COMM_TIMEOUT_S"
                )

    def _hear_end(self, pending: Pending) -> None:
        """Raise CommError if a rank whose header is awaited has ended its program: it will never call."""
        status = self._mpi.Status()
        while self.comm.Iprobe(self._mpi.ANY_SOURCE, TAG_END, status):
            self.comm.Recv(bytearray(), status.Get_source(), TAG_END)
            self._ended.add(status.Get_source())
        # A header sent before the end has arrived before it: messages between two ranks keep their order.
        gone = sorted(self._ended.intersection(_unfinished(pending))) if self._ended else []
        if gone:
            raise self.fail(f"{name_ranks(gone)} ended without making the matching call; look there for an error")

    def fail(self, problem: str) -> CommError:
        """Give up on the present call: tell the other ranks, refuse all further calls, return the error to raise."""
        self._failure = f"{self._call.title}: {problem}"
        notice = np.frombuffer(self._failure.encode()[:MAX_NOTICE_BYTES], np.uint8)
        # Nobody waits for these: they need no partner.
        self._notices = [self.comm.Isend(notice, rank, TAG_FAILURE) for rank in self._others]
        return self._error(self._failure)

    def _hear_failure(self) -> None:
        """Raise CommError if another rank has given up."""
        status = self._mpi.Status()
        if not self.comm.Iprobe(self._mpi.ANY_SOURCE, TAG_FAILURE, status):
            return
        notice = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
        self.comm.Recv(notice, status.Get_source(), TAG_FAILURE)
        reason = notice.tobytes().decode(errors="replace")
        self._failure = f"{self._call.title}: rank {status.Get_source()} gave up: {reason}"
        raise self._error(self._failure)

    def _error(self, reason: str) -> CommError:
        self.record.reached("failed")
        _FAILED.append(self)
        return CommError(f"{reason} ({self.record.dump(reason)})")

    def _begin(self, call: Header) -> None:
        if self._failure is not None:
            raise CommError(f"{call}: this communicator failed before and cannot be used again: {self._failure}")
        self._call = call
        self.record.begin(call)

    # point to point

    def agree_ends(self, messages: Sequence[Message]) -> None:
        """Wait until the rank at the other end of each message has made the matching call.

        Both ends tell each other what they expect, so that both learn of a difference. The communicator is of no use
        after that, because further ranks may wait for these two.
        """
        self._meet(self._begin_messages(messages))

    def _begin_messages(self, messages: Sequence[Message]) -> list[tuple[Message, Header]]:
        own = [self._describe(message) for message in messages]
        nbytes = sum(header.nbytes for header in own)
        self._begin(own[0] if len(own) == 1 else Header("group", "", "uint8", nbytes, nbytes, sequence=self._n_groups))
        self._n_groups += 1
        return list(zip(messages, own, strict=True))

    def _meet(self, messages: Sequence[tuple[Message, Header]]) -> None:
        theirs = np.zeros((len(messages), headers.NBYTES), np.uint8)
        own = [np.frombuffer(header.pack(), np.uint8) for _, header in messages]
        requests: list[MPI.Request] = []
        for (message, _), answer, question in zip(messages, theirs, own, strict=True):
            tags = (TAG_SENDER, TAG_RECEIVER) if message.outgoing else (TAG_RECEIVER, TAG_SENDER)
            requests.append(self.comm.Irecv(answer, message.peer, tags[1]))
            requests.append(self.comm.Isend(question, message.peer, tags[0]))
        peers = [message.peer for message, _ in messages for _ in range(2)]
        self._wait_for_headers(Pending(requests, peers, [*own, theirs]))
        for (message, header), answer in zip(messages, theirs, strict=True):
            self._compare_ends(message.peer, header, Header.unpack(answer.tobytes()))

    def _describe(self, message: Message) -> Header:
        array, key = message.array, (message.peer, message.outgoing)
        sequence = self._n_messages[key]
        self._n_messages[key] += 1
        name = "send" if message.outgoing else "recv"
        return Header(name, "", array.dtype.name, array.size, array.nbytes, sequence=sequence)

    def _compare_ends(self, peer: int, own: Header, theirs: Header) -> None:
        if (own.dtype, own.count, own.sequence) == (theirs.dtype, theirs.count, theirs.sequence):
            return
        by_rank = sorted([(self.rank, own), (peer, theirs)])
        sayings = ", but ".join(f"rank {rank} called {header} as #{header.sequence}" for rank, header in by_rank)
        raise self.fail(f"{sayings}; both ends of a message must have the same size and dtype")


def _unfinished(pending: Pending) -> list[int]:
    return sorted({peer for request, peer in zip(pending.requests, pending.peers, strict=True) if not request.Test()})


def _say_end(comm: MPI.Intracomm, others: Sequence[int]) -> None:
    for rank in others:
        comm.Isend(bytearray(), rank, TAG_END)  # empty: gone at once


def as_bytes(array: np.ndarray) -> np.ndarray:
    """The memory of a C-contiguous array, as MPI takes it whatever the dtype."""
    return array.reshape(-1).view(np.uint8)


def timeout() -> float:
    """Seconds of ``NUMSTACK_COMM_TIMEOUT_S``, else 300.

    Raises
    ------
    ConfigError
        If it is no positive number.
    """
    text = os.environ.get("NUMSTACK_COMM_TIMEOUT_S") or str(DEFAULT_TIMEOUT_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not seconds > 0:
        raise ConfigError(f"NUMSTACK_COMM_TIMEOUT_S={text!r} is no positive number of seconds")
    return seconds
