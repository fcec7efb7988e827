"""Who watches over collectives that move without the host, and so would wait for ever.

NCCL's kernels wait on the GPU for the other ranks, without a time-out, and never compare sizes: where ranks disagree
they stop or give wrong sums. So each communicator has a thread that looks, many times a second,

- which collectives have finished, and whether the oldest that has not is overdue;
- whether NCCL has met an error since (``ncclCommGetAsyncError``);
- what the other ranks have called: the watchdogs tell each other over MPI, which works when NCCL does not, and compare.

When something is wrong it writes the flight record to a file, tells the other watchdogs why, and aborts the NCCL
communicator, which ends the kernels that wait. Whoever waits for the GPU then gets the reason as a ``CommError``.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from numstack.comm.calls import NBYTES, CallLog
from numstack.comm.header import Header, name_ranks
from numstack.comm.peers import MAX_NOTICE_BYTES
from numstack.comm.record import Call, FlightRecorder
from numstack.errors import CommError

if TYPE_CHECKING:
    from mpi4py import MPI

    from numstack.device import Event

# How often a watchdog looks. A look that finds nothing new costs microseconds.
PERIOD_S = 0.05
# Between telling the others and aborting: an abort can make another rank's kernel finish with whatever it had, so that
# rank must know first that something is wrong.
GRACE_S = 4 * PERIOD_S
# Longest time that ending NCCL's kernels may take before the whole job is ended instead.
ABORT_S = 60.0
# Messages stay so small that MPI sends them at once, whether or not the other side receives.
CALLS_A_MESSAGE = MAX_NOTICE_BYTES // NBYTES

TAG_CALLS, TAG_FAILURE, TAG_END = range(1, 4)


class _Outstanding(NamedTuple):
    call: Call
    event: Event
    since_s: float


class Watchdog:
    """The thread that watches one communicator of one rank.

    Parameters
    ----------
    comm : MPI.Intracomm
        Of all ranks, used by nobody else.
    record : FlightRecorder
    timeout_s : float
        Longest time without progress.
    enter : callable
        Called first thing in the thread: makes the device usable there.
    asynchronous_error : callable
        What went wrong in the library since, or ``None``.
    abort : callable
        Ends whatever waits in the library, on the device as well.
    on_failure : callable
        Called with the error, in the watchdog's thread, before ``abort``.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        record: FlightRecorder,
        *,
        timeout_s: float,
        enter: Callable[[], None],
        asynchronous_error: Callable[[], str | None],
        abort: Callable[[], None],
        on_failure: Callable[[CommError], None],
    ) -> None:
        self.error: CommError | None = None
        self._wire = _Wire(comm)
        self._record = record
        self._timeout_s = timeout_s
        self._enter = enter
        self._asynchronous_error = asynchronous_error
        self._abort = abort
        self._on_failure = on_failure
        self._log = CallLog(comm.Get_rank(), comm.Get_size())
        self._outstanding: deque[_Outstanding] = deque()
        self._progress_s = 0.0  # when a collective was last seen to finish
        self._ended: set[int] = set()
        self._reported: str | None = None
        self._stopping = threading.Event()
        self._aborted = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="numstack-watchdog", daemon=True)
        self._thread.start()

    # from the thread that calls

    def called(self, call: Header, *, asked: bool) -> None:
        """This rank makes its next collective, which all ranks should make; ``asked``: not before all agree."""
        self._log.called(call, asked=asked)

    def watch(self, call: Call, event: Event) -> None:
        """``call`` is on its way and finished once ``event`` is done."""
        self._outstanding.append(_Outstanding(call, event, time.monotonic()))

    def report(self, reason: str) -> None:
        """This rank has given up, and its caller knows; let the others know, and abort."""
        self._reported = reason

    def wait_until_aborted(self) -> None:
        """Wait until a failure has been dealt with, so that the caller can use the device, and communicators, anew.

        An abort gives memory back, for which the driver waits for all kernels of the process: also for one that is
        started meanwhile, and waits for other ranks itself.
        """
        while not self._aborted.wait(PERIOD_S) and self._thread.is_alive():
            pass

    def stop(self) -> None:
        """Wait until nothing is outstanding or all has failed, tell the others that this rank is done, and end."""
        self._stopping.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # the thread

    def _watch(self) -> None:
        self._enter()
        period_s = min(PERIOD_S, self._timeout_s / 10)
        while True:
            stopping = self._stopping.wait(period_s)
            if self.error is None:
                try:
                    self._look()
                except Exception as error:  # of MPI or of the driver: nothing can be relied on any more
                    self._give_up(f"{self._present()}rank {self._wire.rank} failed: {type(error).__name__}: {error}")
            if stopping and (self.error is not None or not self._outstanding):
                break
        with contextlib.suppress(Exception):
            self._wire.send(TAG_END, b"")

    def _look(self) -> None:
        self._settle()
        self._tell()
        reason = self._reported or self._listen() or self._log.compare() or self._asynchronous() or self._overdue()
        if reason is not None:
            self._give_up(reason)

    def _settle(self) -> None:
        """Forget what has finished."""
        while self._outstanding and self._outstanding[0].event.done():
            self._outstanding.popleft().call.reached("done")
            self._progress_s = time.monotonic()

    def _tell(self) -> None:
        calls = self._log.take_new()
        step = CALLS_A_MESSAGE * NBYTES
        for start in range(0, len(calls), step):
            self._wire.send(TAG_CALLS, calls[start : start + step])

    def _listen(self) -> str | None:
        """Take in what the other watchdogs say; the reason if one has given up, or will never make a call of ours."""
        for rank, tag, data in self._wire.receive():
            if tag == TAG_FAILURE:
                return f"rank {rank} gave up: {data.decode(errors='replace')}"
            if tag == TAG_END:
                self._ended.add(rank)
            else:
                self._log.heard(rank, data)
        gone = sorted(rank for rank in self._ended if self._log.n_heard(rank) < self._log.n_called)
        if not gone:
            return None
        calls = self._last_calls(gone)
        return f"{name_ranks(gone)} ended without making the matching call{calls}; look there for an error"

    def _asynchronous(self) -> str | None:
        error = self._asynchronous_error()
        return f"{self._present()}rank {self._wire.rank} had an error in NCCL: {error}" if error else None

    def _overdue(self) -> str | None:
        if not self._outstanding:
            return None
        oldest = self._outstanding[0]
        if time.monotonic() - max(oldest.since_s, self._progress_s) <= self._timeout_s:
            return None
        header = oldest.call.header
        waited = f"rank {self._wire.rank} waited {self._timeout_s:g} s"
        missing = [rank for rank in self._wire.others if self._log.n_heard(rank) <= header.sequence]
        if header.is_collective and missing:
            have = "have" if len(missing) > 1 else "has"
            return (
                f"{self._present()}{waited}, but {name_ranks(missing)} {have} not made the matching call"
                f"{self._last_calls(missing)}; look there for an error, or raise NUMSTACK_COMM_TIMEOUT_S"
            )
        if header.is_collective:
            what = "and all ranks have made this call, but it does not finish"
        else:
            what = "but the rank at the other end has not made the matching call, or the data do not arrive"
        return (
            f"{self._present()}{waited}, {what}; look for errors of ranks, GPUs and links (numstack doctor, dmesg, "
            "NCCL_DEBUG=INFO), or raise NUMSTACK_COMM_TIMEOUT_S"
        )

    def _present(self) -> str:
        return f"{self._outstanding[0].call.header.title}: " if self._outstanding else ""

    def _last_calls(self, ranks: list[int]) -> str:
        """`` (rank 1 last called #6 ...)``."""
        lasts = []
        for rank in ranks:
            last = self._log.last_heard(rank)
            lasts.append(f"rank {rank} {f'last called {last.title}' if last else 'has called nothing'}")
        return f" ({', '.join(lasts)})"

    # failure

    def _give_up(self, reason: str) -> None:
        """Tell everybody, then end the kernels that wait: whoever they wake finds the error."""
        for outstanding in list(self._outstanding):
            outstanding.call.reached("not finished")
        error = CommError(f"{reason} ({self._record.dump(reason)})")
        with contextlib.suppress(Exception):  # MPI may be what failed
            self._wire.send(TAG_FAILURE, reason.encode()[:MAX_NOTICE_BYTES])
        self.error = error
        if self._reported is None:
            self._on_failure(error)
        time.sleep(GRACE_S)
        timer = threading.Timer(ABORT_S, self._end_job, [reason])
        timer.daemon = True
        timer.start()
        with contextlib.suppress(Exception):  # the device may have failed, which wakes those who wait for it
            self._abort()
        timer.cancel()
        self._aborted.set()

    def _end_job(self, reason: str) -> None:
        where = f"error on rank {self._wire.rank}"
        sys.stderr.write(f"{where}: {reason}; NCCL does not end within {ABORT_S:g} s, so all ranks are ended\n")
        sys.stderr.flush()
        self._wire.comm.Abort(1)


class _Wire:
    """Small messages between the watchdogs."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.comm = comm
        self.rank = comm.Get_rank()
        self.others = [rank for rank in range(comm.Get_size()) if rank != self.rank]
        self._under_way: list[MPI.Request] = []

    def send(self, tag: int, data: bytes) -> None:
        """To all others."""
        self._under_way = [request for request in self._under_way if not request.Test()]
        self._under_way += [self.comm.Isend(data, rank, tag) for rank in self.others]

    def receive(self) -> Iterator[tuple[int, int, bytes]]:
        """Rank, tag and contents of every message that has arrived."""
        status = self._mpi.Status()
        while self.comm.Iprobe(self._mpi.ANY_SOURCE, self._mpi.ANY_TAG, status):
            data = bytearray(status.Get_count(self._mpi.BYTE))
            self.comm.Recv(data, status.Get_source(), status.Get_tag())
            yield status.Get_source(), status.Get_tag(), bytes(data)
