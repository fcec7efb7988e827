"""What becomes of an exception in a work that another thread runs."""

import pytest

from numstack.device import Stream, Work, submit
from numstack.device.cpu import CpuDevice

DEVICE = CpuDevice()


def fail(stream: Stream) -> None:
    raise ValueError("planted")


@pytest.fixture
def failed() -> Stream:
    stream = DEVICE.create_stream()
    submit(Work("fails", "host", fail, stream))
    return stream


def test_an_event_after_the_failure_raises_it(failed: Stream) -> None:
    with pytest.raises(ValueError, match="planted"):
        failed.record().synchronize()


def test_an_event_before_the_failure_does_not() -> None:
    stream = DEVICE.create_stream()
    before = stream.record()
    submit(Work("fails", "host", fail, stream))
    before.synchronize()


def test_works_after_it_are_skipped_until_synchronize_has_raised_it(failed: Stream) -> None:
    ran: list[str] = []
    submit(Work("skipped", "host", lambda _: ran.append("skipped"), failed))
    with pytest.raises(ValueError, match="planted"):
        failed.synchronize()
    submit(Work("runs", "host", lambda _: ran.append("runs"), failed))
    failed.synchronize()
    assert ran == ["runs"]


def test_the_default_stream_raises_it_when_it_waits(failed: Stream) -> None:
    event = failed.record()
    with pytest.raises(ValueError, match="planted"):
        DEVICE.default_stream.wait(event)
        DEVICE.default_stream.synchronize()


def test_a_stream_that_waits_fails_with_it(failed: Stream) -> None:
    waiting = DEVICE.create_stream()
    waiting.wait(failed.record())
    ran: list[str] = []
    submit(Work("skipped", "host", lambda _: ran.append("skipped"), waiting))
    with pytest.raises(ValueError, match="planted"):
        waiting.synchronize()
    assert ran == []
