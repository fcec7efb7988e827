"""The lock of the memory manager."""

from __future__ import annotations

import threading

from numstack.errors import DeviceError


class Guard:
    """A lock that a thread may hold once; a second entry raises instead of hanging.

    Any Python code can be interrupted by the garbage collector or a signal, and so by finalisers and signal handlers.
    The manager's own finaliser takes no lock. Somebody else's that asks for memory would find the manager half-way
    through a change: that must be neither a dead lock nor a corrupted list.
    """

    __slots__ = ("_entered", "_lock")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._entered = False

    def __enter__(self) -> None:
        self._lock.acquire()
        if self._entered:
            self._lock.release()
            raise DeviceError(
                "memory: asked for memory while this thread was already being served, so from a finaliser or a signal "
                "handler; let it set a flag and do the work later"
            )
        self._entered = True

    def __exit__(self, *error: object) -> None:
        self._entered = False
        self._lock.release()
