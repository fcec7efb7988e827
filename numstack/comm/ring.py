"""Our own ring all-reduce, on any device: for learning, and for machines without NCCL.

Every rank sends to its right neighbour and receives from its left one. The array is cut into as many segments as there
are ranks. In the first n - 1 steps, a reduce-scatter, each segment travels round the ring and every rank adds its own
numbers to it as it comes by; segment r is complete on rank r. In the next n - 1 steps, an all-gather, the complete
segments travel round and everyone keeps a copy::

    step                  0         1         2      |    3         4         5          (4 ranks)
    rank r sends      segment r-1   r-2       r-3    |    r        r-1       r-2
    rank r receives   segment r-2   r-3       r      |   r-1       r-2       r-3
                      adds its own to what comes in  |   keeps what comes in

A rank sends 2 (n - 1) / n of the array's bytes, the least that any all-reduce can do. Each segment is added up in one
order, and all ranks copy the result of one rank, so all get the same bits.

Segments are cut into chunks, and several chunks are under way at a time (``N_LANES``): while one is being added up, the
next one travels.

The steps are generators that yield what to send and receive next and know nothing of MPI; ``RingCommunicator`` drives
them with MPI's messages, and the tests with queues.

Source: Patarasuk and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from numstack.comm import reduction
from numstack.comm.host import HostCommunicator
from numstack.comm.peers import Message, Pending
from numstack.comm.reduction import Op
from numstack.comm.world import World
from numstack.device import Array, Stream

# Chunks under way at a time, and bytes of one: smaller ones cost messages, larger ones leave less to overlap.
N_LANES = 2
CHUNK_BYTES = 512 * 1024


class Exchange(NamedTuple):
    """What a rank does next: send to the right neighbour, receive from the left one, wait for both."""

    send: np.ndarray | None
    recv: np.ndarray | None


def segments(array: np.ndarray, size: int) -> list[np.ndarray]:
    """Cut a flat array into ``size`` views whose lengths differ by at most one element."""
    bounds = [array.size * i // size for i in range(size + 1)]
    return [array[low:high] for low, high in itertools.pairwise(bounds)]


def chunks(parts: Sequence[np.ndarray], chunk: int) -> Iterator[list[np.ndarray]]:
    """Cut parallel arrays into pieces of at most ``chunk`` elements; the i-th list has the i-th piece of each part.

    >>> [[piece.tolist() for piece in pieces] for pieces in chunks([np.arange(3), np.arange(10, 12)], 2)]
    [[[0, 1], [10, 11]], [[2], []]]
    """
    for start in range(0, max(part.size for part in parts), chunk):
        yield [part[start : start + chunk] for part in parts]


def reduce_scatter(
    rank: int, pieces: Sequence[np.ndarray], out: np.ndarray, scratch: np.ndarray, op: Op
) -> Iterator[Exchange]:
    """Reduce piece r of all ranks onto rank r; this rank's goes to ``out``.

    Parameters
    ----------
    pieces : sequence of arrays, one a rank
        This rank's contributions. Not changed, unless ``out`` is one of them.
    out : array, like ``pieces[rank]``
    scratch : array, shape (2, elements of the longest piece)
        What came in last is being sent on while the next comes in.
    """
    size = len(pieces)
    if size == 1:
        out[...] = pieces[0]
        return
    partial = pieces[(rank - 1) % size]
    for i in range(size - 1):
        own = pieces[(rank - i - 2) % size]
        incoming = scratch[i % 2, : own.size]
        yield Exchange(partial, incoming)
        if i < size - 2:
            reduction.step(op, incoming, own, incoming)
            partial = incoming
        else:
            reduction.step(op, incoming, own, out, divide_by=size if op == "mean" else 1)


def all_gather(rank: int, pieces: Sequence[np.ndarray]) -> Iterator[Exchange]:
    """Give every rank all pieces, of which each brings its own."""
    size = len(pieces)
    for i in range(size - 1):
        yield Exchange(pieces[(rank - i) % size], pieces[(rank - i - 1) % size])


def all_reduce(rank: int, pieces: Sequence[np.ndarray], scratch: np.ndarray, op: Op) -> Iterator[Exchange]:
    """Reduce all pieces over the ranks, in place."""
    yield from reduce_scatter(rank, pieces, pieces[rank], scratch, op)
    yield from all_gather(rank, pieces)


def broadcast(rank: int, size: int, root: int, piece: np.ndarray) -> Iterator[Exchange]:
    """Hand ``piece`` on from ``root`` along the ring."""
    distance = (rank - root) % size
    if distance > 0:
        yield Exchange(None, piece)
    if distance < size - 1:
        yield Exchange(piece, None)


class RingCommunicator(HostCommunicator):
    """The protocol on a ring of non-blocking MPI messages. Collective: all ranks must construct it.

    A world of one sends nothing and needs no MPI.
    """

    backend: ClassVar[str] = "ring"

    def __init__(self, world: World, *, timeout_s: float | None = None, chunk_bytes: int = CHUNK_BYTES) -> None:
        super().__init__(world, timeout_s=timeout_s)
        self._left, self._right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        self._scratch = np.empty((N_LANES, 2, chunk_bytes), np.uint8)

    def _allreduce(self, array: Array, op: Op, stream: Stream) -> None:
        with self._on_host(array, stream) as host:
            parts = segments(reduction.numbers(host), self.size)
            self._drive(parts, lambda pieces, scratch: all_reduce(self.rank, pieces, scratch, op))

    def _broadcast(self, array: Array, root: int, stream: Stream) -> None:
        is_root = self.rank == root
        with self._on_host(array, stream, load=is_root, store=not is_root) as host:
            self._drive([host.reshape(-1)], lambda pieces, _: broadcast(self.rank, self.size, root, pieces[0]))

    def _allgather(self, send: Array, recv: Array, stream: Stream) -> None:
        with self._on_host(send, stream, store=False) as source, self._on_host(recv, stream, load=False) as host:
            parts = segments(host.reshape(-1), self.size)
            np.copyto(parts[self.rank], source.reshape(-1))
            self._drive(parts, lambda pieces, _: all_gather(self.rank, pieces))

    def _reduce_scatter(self, send: Array, recv: Array, op: Op, stream: Stream) -> None:
        with self._on_host(send, stream, store=False) as source, self._on_host(recv, stream, load=False) as host:
            parts = [*segments(reduction.numbers(source), self.size), reduction.numbers(host)]
            self._drive(parts, lambda pieces, scratch: reduce_scatter(self.rank, pieces[:-1], pieces[-1], scratch, op))

    def _drive(
        self,
        parts: Sequence[np.ndarray],
        steps: Callable[[list[np.ndarray], np.ndarray], Iterator[Exchange]],
    ) -> None:
        """Cut ``parts`` into chunks and carry out ``steps(pieces, scratch)`` for each, ``N_LANES`` side by side.

        All ranks post the messages of the lanes in one order, and wait for the oldest: so messages meet, and no rank
        waits for a message whose partner waits for it.
        """
        scratch = self._scratch.view(parts[0].dtype)
        blocks = list(chunks(parts, scratch.shape[-1]))

        def lane(index: int) -> Iterator[Exchange]:
            for pieces in blocks[index::N_LANES]:
                yield from steps(pieces, scratch[index])

        under_way: deque[tuple[Iterator[Exchange], Pending]] = deque()

        def advance(exchanges: Iterator[Exchange]) -> None:
            exchange = next(exchanges, None)
            if exchange is not None:
                under_way.append((exchanges, self._post(exchange)))

        for index in range(N_LANES):
            advance(lane(index))
        while under_way:
            exchanges, pending = under_way.popleft()
            self._peers.wait(pending)
            advance(exchanges)

    def _post(self, exchange: Exchange) -> Pending:
        messages = []
        if exchange.recv is not None:
            messages.append(Message(exchange.recv, self._left, outgoing=False))
        if exchange.send is not None:
            messages.append(Message(exchange.send, self._right, outgoing=True))
        return self._peers.post(messages)
