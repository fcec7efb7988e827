"""Communicators whose data moves through host memory: what ``ring`` and ``mpi`` share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from numstack.comm.peers import Message
from numstack.comm.protocol import Communicator
from numstack.device import Array, Stream


class HostCommunicator(Communicator):
    """Arrays of the CPU device are host memory already; those of a GPU go through pinned memory."""

    @contextlib.contextmanager
    def _on_host(self, array: Array, stream: Stream, *, load: bool = True, store: bool = True) -> Iterator[np.ndarray]:
        """``array`` as host memory: its contents on entry with ``load``; copied back on exit with ``store``."""
        if isinstance(array, np.ndarray):
            yield array
            return
        host = self.device.pinned(array.shape, array.dtype)
        if load:
            self.device.copy(host, array, stream)
            stream.synchronize()
        yield host
        if store:
            self.device.copy(array, host, stream)
            stream.synchronize()  # the pinned memory goes away with this frame

    def _exchange(self, messages: Sequence[Message], stream: Stream) -> None:
        with contextlib.ExitStack() as stack:
            on_host = []
            for array, peer, outgoing in messages:
                staged = self._on_host(array, stream, load=outgoing, store=not outgoing)
                on_host.append(Message(stack.enter_context(staged), peer, outgoing))
            self._peers.wait(self._peers.post(on_host))
