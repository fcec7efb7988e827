"""A world of one: nothing to send, nobody to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from numstack.comm.peers import Message
from numstack.comm.protocol import Communicator
from numstack.comm.reduction import Op
from numstack.device import Array, Stream


class AloneCommunicator(Communicator):
    """The protocol for one rank, on any device: reductions leave the array as it is."""

    backend: ClassVar[str] = "alone"

    def _allreduce(self, array: Array, op: Op, stream: Stream) -> None:
        pass

    def _broadcast(self, array: Array, root: int, stream: Stream) -> None:
        pass

    def _allgather(self, send: Array, recv: Array, stream: Stream) -> None:
        self._copy(recv, send, stream)

    def _reduce_scatter(self, send: Array, recv: Array, op: Op, stream: Stream) -> None:
        self._copy(recv, send, stream)

    def _exchange(self, messages: Sequence[Message], stream: Stream) -> None:
        raise AssertionError("there is no rank to send to, so the protocol refuses all messages")

    def _copy(self, dst: Array, src: Array, stream: Stream) -> None:
        if isinstance(dst, np.ndarray):  # this runs in the stream's own thread: a copy submitted to it would come later
            np.copyto(dst.reshape(-1), src.reshape(-1))
        elif self.device.address(dst) != self.device.address(src):
            self.device.copy(dst.reshape(-1), src.reshape(-1), stream)
