"""Communicators whose data moves through host memory: what ``ring`` and ``mpi`` share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from numstack.comm.peers import Message
from numstack.comm.protocol import Communicator
from numstack.comm.world import World
from numstack.device import Array, Stream


class HostCommunicator(Communicator):
    """Arrays of the CPU device are host memory already; those of a GPU go through pinned memory.

    On a GPU a call returns once its data have moved, because MPI moves them in the calling thread; errors come from
    the call itself.
    """

    def __init__(self, world: World, *, timeout_s: float | None = None) -> None:
        super().__init__(world, timeout_s=timeout_s)
        self._staging: list[np.ndarray] = []  # pinned memory that no call uses now: to pin it takes milliseconds

    @contextlib.contextmanager
    def _on_host(self, array: Array, stream: Stream, *, load: bool = True, store: bool = True) -> Iterator[np.ndarray]:
        """``array`` as host memory: its contents on entry with ``load``; copied back on exit with ``store``."""
        if isinstance(array, np.ndarray):
            yield array
            return
        staging = self._take_staging(array.nbytes)
        host = staging[: array.nbytes].view(array.dtype).reshape(array.shape)
        if load:
            self.device.copy(host, array, stream)
            stream.synchronize()
        yield host
        if store:
            self.device.copy(array, host, stream)
            stream.synchronize()  # the next call may use the pinned memory
        self._staging.append(staging)  # not after an error: MPI may still write there

    def _take_staging(self, nbytes: int) -> np.ndarray:
        for index, staging in enumerate(self._staging):
            if staging.nbytes >= nbytes:
                return self._staging.pop(index)
        if self._staging:
            self._staging.pop()  # too small, so a larger one takes its place
        return self.device.pinned((max(nbytes, 1),), np.uint8)

    def _exchange(self, messages: Sequence[Message], stream: Stream) -> None:
        with contextlib.ExitStack() as stack:
            on_host = []
            for array, peer, outgoing in messages:
                staged = self._on_host(array, stream, load=outgoing, store=not outgoing)
                on_host.append(Message(stack.enter_context(staged), peer, outgoing))
            self._peers.wait(self._peers.post(on_host))
