"""Streams, events, copies, fills and observers, on whatever device this process has."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from numstack import memory
from numstack.device import Work, current_device, submit
from numstack.errors import DeviceError, DTypeError, ShapeError
from tests.support import poisoned, to_host


@pytest.fixture
def device() -> Any:
    return current_device()


def host_work(device: Any, stream: Any, function: Any) -> Work:
    return Work("test", "host", lambda _: function(), stream)


def test_works_of_one_stream_run_in_order(device: Any) -> None:
    stream = device.create_stream()
    seen: list[int] = []
    for i in range(100):
        submit(host_work(device, stream, lambda i=i: seen.append(i)))
    stream.synchronize()
    assert seen == list(range(100))


@pytest.mark.skipif(
    current_device().kind != "cpu", reason="host works run at once on a CUDA stream; CPU streams queue them"
)
class TestWorkerStreams:
    def test_a_second_stream_does_not_hold_up_the_first(self, device: Any) -> None:
        stream, gate, seen = device.create_stream(), threading.Event(), []
        submit(host_work(device, stream, gate.wait))
        submit(host_work(device, stream, lambda: seen.append("worker")))
        submit(host_work(device, device.default_stream, lambda: seen.append("default")))
        gate.set()
        stream.synchronize()
        assert seen == ["default", "worker"]

    def test_an_event_is_done_only_once_the_works_before_it_are(self, device: Any) -> None:
        stream, gate = device.create_stream(), threading.Event()
        before = stream.record()
        before.synchronize()
        submit(host_work(device, stream, gate.wait))
        after = stream.record()
        assert before.done() and not after.done()
        with pytest.raises(DeviceError, match="not done yet"):
            before.elapsed_s(after)
        gate.set()
        after.synchronize()
        assert after.done() and before.elapsed_s(after) > 0

    @pytest.mark.parametrize("waiter", ["default", "worker"])
    def test_wait_holds_later_works_until_the_event(self, device: Any, waiter: str) -> None:
        first, gate, seen = device.create_stream(), threading.Event(), []
        second = device.default_stream if waiter == "default" else device.create_stream()
        submit(host_work(device, first, lambda: (gate.wait(), seen.append("first"))))
        second.wait(first.record())
        threading.Timer(0.05, gate.set).start()
        submit(host_work(device, second, lambda: seen.append("second")))
        second.synchronize()
        assert seen == ["first", "second"]

    def test_an_event_of_the_default_stream_includes_what_it_awaits_and_does_not_block(self, device: Any) -> None:
        other, gate, seen = device.create_stream(), threading.Event(), []
        submit(host_work(device, other, lambda: (gate.wait(), seen.append("other"))))
        device.default_stream.wait(other.record())
        event = device.default_stream.record()
        assert not event.done()
        gate.set()
        event.synchronize()
        assert event.done() and seen == ["other"]
        submit(host_work(device, device.default_stream, lambda: seen.append("default")))
        assert seen == ["other", "default"]

    def test_an_exception_skips_later_works_and_surfaces_at_synchronize(self, device: Any) -> None:
        stream, seen = device.create_stream(), []

        def fail() -> None:
            raise DeviceError("planted")

        submit(host_work(device, stream, fail))
        submit(host_work(device, stream, lambda: seen.append("skipped")))
        with pytest.raises(DeviceError, match="planted"):
            stream.synchronize()
        assert not seen
        stream.synchronize()  # reported once; the stream is usable again
        submit(host_work(device, stream, lambda: seen.append("ran")))
        stream.synchronize()
        assert seen == ["ran"]


def test_asynchronous_copies_arrive_in_order(device: Any) -> None:
    stream = device.create_stream()
    source = device.pinned((1000,), np.float32)
    source[:] = np.arange(1000)
    back = device.pinned((1000,), np.float32)
    back[:] = np.nan
    there = memory.from_host(poisoned(1000))
    device.copy(there, source, stream)
    device.copy(back, there, stream)
    stream.record().synchronize()
    np.testing.assert_array_equal(back, source)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.uint16, np.int32, np.int8])
@pytest.mark.parametrize("value", [0, 3, -1])
def test_fill(device: Any, dtype: Any, value: int) -> None:
    if value < 0 and np.dtype(dtype).kind == "u":
        value = 0x3F80
    array = memory.from_host(poisoned((3, 5), dtype))
    device.fill(array, value)
    np.testing.assert_array_equal(to_host(array), np.full((3, 5), value, dtype))


def test_copies_of_other_shape_or_dtype_are_refused(device: Any) -> None:
    there = memory.from_host(np.zeros((2, 3), np.float32))
    with pytest.raises(ShapeError, match=r"dst has shape \(2, 3\) but src has \(3, 2\)"):
        device.copy(there, np.zeros((3, 2), np.float32))
    with pytest.raises(DTypeError, match="dst is float32 but src is float64; cast first"):
        device.copy(there, np.zeros((2, 3), np.float64))


class Recorder:
    def __init__(self) -> None:
        self.seen: list[tuple[str, Work]] = []

    def before(self, work: Work) -> None:
        self.seen.append(("before", work))

    def after(self, work: Work) -> None:
        self.seen.append(("after", work))


def test_observers_see_every_work_with_what_it_reads_and_writes(device: Any) -> None:
    a, b = memory.from_host(np.ones(4, np.float32)), memory.from_host(np.zeros(4, np.float32))
    with device.observe(Recorder()) as recorder:
        device.copy(b, a)
        device.fill(a, 2)
    device.fill(a, 3)
    assert [(when, work.kind) for when, work in recorder.seen] == [
        ("before", "copy"),
        ("after", "copy"),
        ("before", "fill"),
        ("after", "fill"),
    ]
    copy = recorder.seen[0][1]
    assert copy.reads[0] is a and copy.writes[0] is b and copy.nbytes == 32


def test_an_observer_that_raises_keeps_the_work_from_running(device: Any) -> None:
    class Fault(Recorder):
        def before(self, work: Work) -> None:
            raise DeviceError("planted at the door")

    a = memory.from_host(np.ones(4, np.float32))
    with device.observe(Fault()), pytest.raises(DeviceError, match="planted at the door"):
        device.fill(a, 2)
    np.testing.assert_array_equal(to_host(a), np.ones(4, np.float32))


def test_state_is_made_once_for_a_device(device: Any) -> None:
    made = []

    def factory(for_device: Any) -> object:
        made.append(for_device)
        return object()

    assert device.state(factory) is device.state(factory)
    assert made == [device]
