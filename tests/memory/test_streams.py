"""Which stream may have a freed block, and when: one case at a time, on streams that run when told to."""

from __future__ import annotations

from typing import Any

import pytest

from numstack.errors import ConfigError, OutOfMemory
from numstack.memory import MemoryManager
from numstack.memory.sizes import MIB
from tests.memory.fake import FakeDevice, FakeStream, make


@pytest.fixture
def device() -> FakeDevice:
    return FakeDevice(capacity=2 * MIB)  # one region: whoever can't have a freed block runs out of memory, or waits


@pytest.fixture
def manager(device: FakeDevice) -> MemoryManager:
    return MemoryManager(device)  # type: ignore[arg-type]


@pytest.fixture
def other() -> FakeStream:
    return FakeStream("other")


def address_of(manager: Any, device: FakeDevice, nbytes: int, stream: FakeStream | None = None) -> int:
    """Where a request lands; the array is gone on return."""
    return device.address(make(manager, device, nbytes, stream=stream))


def test_the_same_stream_has_it_at_once(manager, device):
    first = address_of(manager, device, 1000)
    device.default_stream.work()
    assert address_of(manager, device, 1000) == first
    assert address_of(manager, device, 513) == first  # joined with its neighbours, then cut again


def test_another_stream_has_it_once_an_event_is_done(manager, device, other):
    device.capacity = 4 * MIB
    first = address_of(manager, device, 2 * MIB)
    device.default_stream.work()
    blocked = make(manager, device, 2 * MIB, stream=other)
    assert device.address(blocked) != first  # a new region rather than a wait
    device.default_stream.complete()
    assert address_of(manager, device, 2 * MIB, other) == first
    assert not other.known  # and nobody had to wait


def test_an_event_recorded_before_a_free_says_nothing_about_it(manager, device, other):
    device.capacity = 8 * MIB
    early, late = make(manager, device, 2 * MIB), make(manager, device, 2 * MIB)
    address = device.address(late)
    device.default_stream.work()
    del early
    third = make(manager, device, 2 * MIB, stream=other)  # asks for an event of the default stream
    device.default_stream.complete()
    device.default_stream.work()  # the last use of late, after that event
    del late
    fourth = make(manager, device, 2 * MIB, stream=other)  # early's memory: its event is done
    fifth = make(manager, device, 2 * MIB, stream=other)
    assert address not in (device.address(third), device.address(fourth), device.address(fifth))


def test_when_memory_is_short_the_stream_waits(manager, device, other):
    first = address_of(manager, device, 2 * MIB)
    work = device.default_stream.work()
    assert address_of(manager, device, 2 * MIB, other) == first
    assert other.comes_after(device.default_stream, work) and not device.default_stream.completed


def test_neighbours_of_two_streams_join_only_when_idle(manager, device, other):
    left, right = make(manager, device, MIB), make(manager, device, MIB, stream=other)
    first = device.address(left)
    busy = other.work()
    del left, right
    # The whole region spans both; the other stream is still at work in the right half.
    whole = make(manager, device, 2 * MIB)
    assert device.address(whole) == first
    assert device.default_stream.comes_after(other, busy)


@pytest.mark.parametrize("earlier", [0, 1])
def test_joining_keeps_the_latest_use(manager, device, other, earlier):
    device.capacity = 4 * MIB
    halves: list[Any] = [make(manager, device, MIB) for _ in range(2)]
    address = device.address(halves[0])
    device.default_stream.work()
    halves[earlier] = None
    make(manager, device, 2 * MIB, stream=other)  # asks for an event, gets a new region
    device.default_stream.complete()
    work = device.default_stream.work()
    halves.clear()  # joined with the idle half: the whole is as late as this
    whole = [make(manager, device, 2 * MIB, stream=other) for _ in range(2)]
    assert address in [device.address(array) for array in whole]
    assert other.comes_after(device.default_stream, work)


def test_a_busy_neighbour_is_not_joined(manager, device, other):
    left, right = make(manager, device, MIB), make(manager, device, MIB, stream=other)
    work = device.default_stream.work()
    del left
    start = make(manager, device, 512)  # the rest of left is now in the default stream's free list
    del right
    wide = make(manager, device, MIB + 512, stream=other)
    assert device.address(wide) == device.address(start) + 512
    assert other.comes_after(device.default_stream, work)


def test_the_rest_of_a_split_is_no_more_idle_than_the_whole(manager, device, other):
    address_of(manager, device, 2 * MIB)
    work = device.default_stream.work()
    part = make(manager, device, MIB)
    rest = make(manager, device, MIB, stream=other)
    assert device.address(rest) == device.address(part) + MIB
    assert other.comes_after(device.default_stream, work)


def test_recorded_use_delays_reuse_on_its_own_stream(manager, device, other):
    device.capacity = 4 * MIB
    array = make(manager, device, 2 * MIB)
    first = device.address(array)
    manager.record_use(array[5:], other)
    other.work()
    del array
    assert manager.statistics().waiting == 2 * MIB and manager.statistics().free == 0
    elsewhere = make(manager, device, 2 * MIB)
    assert device.address(elsewhere) != first
    other.complete()
    assert manager.statistics().waiting == 0
    assert address_of(manager, device, 2 * MIB) == first
    other.work()
    assert address_of(manager, device, 2 * MIB) == first  # the new array was never used on the other stream
    assert not device.default_stream.known


def test_recorded_use_and_memory_is_short(manager, device, other):
    array = make(manager, device, 2 * MIB)
    first = device.address(array)
    manager.record_use(array, other)
    work = other.work()
    del array
    assert address_of(manager, device, 2 * MIB) == first
    assert device.default_stream.comes_after(other, work)


def test_recorded_use_a_third_stream_waits_for_both(manager, device, other):
    third = FakeStream("third")
    array = make(manager, device, 2 * MIB)
    manager.record_use(array, other)
    works = device.default_stream.work(), other.work()
    del array
    make(manager, device, 2 * MIB, stream=third)
    assert third.comes_after(device.default_stream, works[0]) and third.comes_after(other, works[1])


def test_waiting_for_a_recorded_use_makes_nothing_idle(manager, device, other):
    device.capacity = 4 * MIB
    third = FakeStream("third")
    arrays = [make(manager, device, MIB) for _ in range(2)]
    for array in arrays:
        manager.record_use(array, other)
    work = other.work()
    del array
    arrays.clear()
    filler = make(manager, device, 2 * MIB, stream=third)  # finds that the default stream is done with all it freed
    half = make(manager, device, MIB)  # memory is short: the default stream waits for the other one
    assert device.default_stream.comes_after(other, work)
    rest = make(manager, device, MIB, stream=third)
    assert abs(device.address(rest) - device.address(half)) == MIB
    assert third.comes_after(other, work), filler


def test_waiting_in_one_scope_does_not_help_another(manager, device, other):
    array = make(manager, device, 2 * MIB, "comm")
    manager.record_use(array, other)
    other.work()
    del array
    # Only a whole region changes scope, so the host waits and gives it back first.
    make(manager, device, 2 * MIB, "forward")
    assert other.completed == 1
    assert manager.statistics().by_scope["comm"].reserved == 0


def test_recorded_use_on_its_own_stream_is_nothing(manager, device):
    array = make(manager, device, 512)
    manager.record_use(array, device.default_stream)
    del array
    assert manager.statistics().waiting == 0


def test_recorded_use_of_foreign_memory(manager, device, other):
    foreign = make(MemoryManager(device), device, 512)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"record_use: the array at 0x[0-9a-f]+ is not of numstack.memory"):
        manager.record_use(foreign, other)


def test_regions_go_back_only_after_their_streams(manager, device, other):
    array = make(manager, device, 512, stream=other)
    manager.record_use(array, device.default_stream)
    other.work()
    device.default_stream.work()
    del array
    assert manager.release_unused() == 2 * MIB
    assert other.completed == 1 and device.default_stream.completed == 1 and not device.granted


def test_what_is_freed_while_release_waits_is_not_idle(manager, device, other):
    first, second, third = (make(manager, device, n * MIB // 4, stream=other) for n in (1, 2, 1))
    late = [third]
    del third, first
    first = make(manager, device, MIB // 4, stream=other)  # so that its size is the first to be joined
    other.work()
    del second

    def free_third() -> None:
        if late:
            late.clear()
            other.work()
            manager.statistics()

    other.on_complete = free_third
    assert manager.release_unused() == 0
    assert not late and other.completed < other.submitted
    wide = make(manager, device, 3 * MIB // 4)
    assert device.address(wide) == device.address(first) + MIB // 4
    assert device.default_stream.comes_after(other, other.submitted)


def test_a_request_too_large_waits_for_everything_and_fails(manager, device, other):
    make(manager, device, MIB, stream=other)
    other.work()
    with pytest.raises(OutOfMemory, match="the fake device has only"):
        make(manager, device, 3 * MIB)
    assert not device.granted  # what was unused went back first
