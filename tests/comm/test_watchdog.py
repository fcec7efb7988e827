"""The watchdog of one rank, with another rank played by the test."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from numstack.comm import watchdog as module
from numstack.comm.calls import CallLog
from numstack.comm.header import Header
from numstack.comm.record import FlightRecorder
from numstack.comm.watchdog import TAG_CALLS, TAG_END, TAG_FAILURE, Watchdog
from numstack.errors import CommError

A = Header("allreduce", "sum", "float32", 10, 40)


class Wire:
    """What goes between rank 0, under test, and rank 1."""

    rank, others = 0, [1]

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.sent: list[tuple[int, bytes]] = []
        self.arriving: list[tuple[int, int, bytes]] = []
        self.broken = False

    def send(self, tag: int, data: bytes) -> None:
        self.sent.append((tag, data))

    def receive(self) -> Iterator[tuple[int, int, bytes]]:
        if self.broken:
            raise RuntimeError("the network is down")
        while self.arriving:
            yield self.arriving.pop(0)


class Comm:
    """Of two ranks; ``aborted`` once it was."""

    def __init__(self) -> None:
        self.aborted = threading.Event()

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 2

    def Abort(self, code: int) -> None:
        self.aborted.set()


class Point:
    """An event that the test lets happen."""

    def __init__(self) -> None:
        self.reached = False

    def done(self) -> bool:
        return self.reached


class Scene:
    """A watchdog and everything around it; ``happened`` lists what it did, in order."""

    def __init__(self, timeout_s: float) -> None:
        self.happened: list[str] = []
        self.errors: list[CommError] = []
        self.asynchronous: str | None = None
        self.abort: Callable[[], None] = lambda: None
        self.comm = Comm()
        self.record = FlightRecorder(0)
        self.other = CallLog(1, 2)
        self.dog = Watchdog(
            self.comm,  # type: ignore[arg-type]
            self.record,
            timeout_s=timeout_s,
            enter=lambda: self.happened.append("enter"),
            asynchronous_error=lambda: self.asynchronous,
            abort=self._abort,
            on_failure=self._on_failure,
        )
        self.wire: Wire = self.dog._wire  # type: ignore[assignment]

    def _abort(self) -> None:
        self.happened.append("abort")
        self.abort()

    def _on_failure(self, error: CommError) -> None:
        assert self.dog.error is error  # whoever is woken by it finds it
        self.errors.append(error)
        self.happened.append("on_failure")

    def call(self, number: int, header: Header = A) -> Point:
        """This rank makes a call that is on its way."""
        self.record.begin(header.numbered(number))
        self.dog.called(header.numbered(number), asked=False)
        point = Point()
        self.dog.watch(self.record.present, point)  # type: ignore[arg-type]
        return point

    def other_calls(self, number: int, header: Header = A) -> None:
        self.other.called(header.numbered(number), asked=False)
        self.wire.arriving.append((1, TAG_CALLS, self.other.take_new()))

    def failure(self) -> str:
        """What the watchdog found; within seconds."""
        deadline = time.monotonic() + 5
        while "abort" not in self.happened and time.monotonic() < deadline:
            time.sleep(0.005)
        assert self.dog.error is not None, "no failure"
        return str(self.dog.error)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[float], Scene]]:
    monkeypatch.setattr(module, "_Wire", Wire)
    monkeypatch.setenv("NUMSTACK_COMM_RECORD_DIR", str(tmp_path))
    scenes = []

    def make(timeout_s: float = 60) -> Scene:
        scenes.append(Scene(timeout_s))
        return scenes[-1]

    yield make
    for made in scenes:
        made.dog.report("the test is over")
        made.dog.stop()


def test_what_finishes_is_marked_and_nothing_fails(scene: Callable[..., Scene]) -> None:
    here = scene(1.5)
    for number in range(3):
        point = here.call(number)
        here.other_calls(number)
        time.sleep(0.6)  # longer in all than the time-out, which is for each
        point.reached = True
    time.sleep(0.6)
    assert here.dog.error is None
    assert [line.split(" ", 1)[1].partition(" after")[0] for line in here.record.lines()] == [
        f"#{number} allreduce(sum) of float32[10] (40 bytes) done" for number in range(3)
    ]


def test_a_rank_that_does_not_call(scene: Callable[..., Scene]) -> None:
    here = scene(0.3)
    here.call(0).reached = True
    here.other_calls(0)
    here.call(1)
    message = here.failure()
    assert message.startswith(
        "#1 allreduce(sum) of float32[10] (40 bytes): rank 0 waited 0.3 s, but rank 1 has not made the matching call "
        "(rank 1 last called #0 allreduce(sum) of float32[10] (40 bytes)); look there for an error, or raise "
        "NUMSTACK_COMM_TIMEOUT_S (last calls in "
    )
    assert here.happened == ["enter", "on_failure", "abort"]
    assert (TAG_FAILURE, message.split(" (last calls")[0].encode()) in here.wire.sent
    record = Path(message.rpartition("last calls in ")[2].rstrip(")")).read_text()
    assert "#0 allreduce(sum) of float32[10] (40 bytes) done" in record
    assert "#1 allreduce(sum) of float32[10] (40 bytes) not finished" in record


def test_a_rank_that_has_called_nothing(scene: Callable[..., Scene]) -> None:
    here = scene(0.2)
    here.call(0)
    assert "(rank 1 has called nothing)" in here.failure()


def test_a_call_that_all_made_does_not_finish(scene: Callable[..., Scene]) -> None:
    here = scene(0.2)
    here.call(0)
    here.other_calls(0)
    assert "rank 0 waited 0.2 s, and all ranks have made this call, but it does not finish" in here.failure()


def test_a_message_that_does_not_finish(scene: Callable[..., Scene]) -> None:
    here = scene(0.2)
    here.record.begin(Header("recv", "", "float32", 10, 40, sequence=4))
    here.dog.watch(here.record.present, Point())  # type: ignore[arg-type]
    assert "#4 recv() of float32[10] (40 bytes): rank 0 waited 0.2 s, but the rank at the other end" in here.failure()


def test_calls_that_differ(scene: Callable[..., Scene]) -> None:
    here = scene()
    here.call(0)
    here.other_calls(0, Header("broadcast", "", "float32", 10, 40, root=0))
    assert "rank 0 called allreduce(sum) of float32[10] (40 bytes), but rank 1 called broadcast(root 0)" in (
        here.failure()
    )


def test_an_asynchronous_error(scene: Callable[..., Scene]) -> None:
    here = scene()
    here.call(0)
    here.asynchronous = "unhandled system error: no route to host"
    assert "#0 allreduce(sum) of float32[10] (40 bytes): rank 0 had an error in NCCL: unhandled system error: no" in (
        here.failure()
    )


def test_another_rank_gives_up(scene: Callable[..., Scene]) -> None:
    here = scene()
    here.wire.arriving.append((1, TAG_FAILURE, b"#7 broadcast(root 0): planted"))
    assert here.failure().startswith("rank 1 gave up: #7 broadcast(root 0): planted")


def test_another_rank_ends(scene: Callable[..., Scene]) -> None:
    here = scene()
    here.call(0).reached = True
    here.other_calls(0)
    here.wire.arriving.append((1, TAG_END, b""))
    time.sleep(0.2)
    assert here.dog.error is None  # all that was called was called by both
    here.call(1)
    assert "rank 1 ended without making the matching call (rank 1 last called #0 allreduce" in here.failure()


def test_the_caller_s_own_failure_is_passed_on_and_not_raised_again(scene: Callable[..., Scene]) -> None:
    here = scene()
    here.dog.report("#3 barrier(): rank 0 waited 60 s")
    assert here.failure().startswith("#3 barrier(): rank 0 waited 60 s")
    assert here.happened == ["enter", "abort"]
    assert (TAG_FAILURE, b"#3 barrier(): rank 0 waited 60 s") in here.wire.sent


def test_a_fault_of_mpi_or_of_the_driver(scene: Callable[..., Scene]) -> None:
    here = scene()
    here.call(0)
    here.wire.broken = True
    assert "#0 allreduce(sum) of float32[10] (40 bytes): rank 0 failed: RuntimeError: the network" in here.failure()


def test_an_abort_that_hangs_ends_the_job(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "ABORT_S", 0.1)
    here = scene()
    here.abort = lambda: setattr(here, "hung", here.comm.aborted.wait(5))
    here.dog.report("planted")
    assert here.comm.aborted.wait(5)
    assert "error on rank 0: planted; NCCL does not end within 0.1 s, so all ranks are ended\n" in (
        capsys.readouterr().err
    )


def test_the_end_waits_for_what_is_outstanding(scene: Callable[..., Scene]) -> None:
    here = scene()
    point = here.call(0)
    end = threading.Thread(target=here.dog.stop)
    end.start()
    time.sleep(0.2)
    assert end.is_alive()
    point.reached = True
    end.join(5)
    assert not end.is_alive()
    assert here.wire.sent[-1] == (TAG_END, b"")
    assert here.wire.sent[0] == (TAG_CALLS, b"!" + A.numbered(0).pack())


def test_others_know_before_the_abort_and_the_caller_goes_on_after_it(scene: Callable[..., Scene]) -> None:
    here = scene(60)
    when: list[float] = []

    def abort() -> None:
        when.append(time.monotonic())
        time.sleep(0.3)  # the driver gives memory back
        when.append(time.monotonic())

    here.abort = abort
    began = time.monotonic()
    here.dog.report("this rank has given up")
    here.dog.wait_until_aborted()
    assert len(when) == 2 and time.monotonic() >= when[1]
    assert when[0] - began >= module.GRACE_S
    assert any(tag == TAG_FAILURE for tag, _ in here.wire.sent)


def test_nobody_waits_for_the_abort_of_a_watchdog_that_has_ended(scene: Callable[..., Scene]) -> None:
    here = scene(60)
    here.dog.stop()
    here.dog.wait_until_aborted()
    assert "abort" not in here.happened
