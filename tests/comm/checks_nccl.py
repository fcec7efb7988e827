"""Checks of what is NCCL's own: calls that ask nobody, and a watchdog behind them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from numstack.comm.nccl import NcclCommunicator
from numstack.comm.protocol import Communicator
from numstack.comm.world import World
from numstack.device import Event, current_device
from numstack.errors import CommError
from tests.comm.helpers import check_on, device_array, error_of, fresh
from tests.support import to_device, to_host

# A watchdog looks every 50 ms and hears of the others in the next look; the rest is for busy machines.
SOON_S = 2.0

check = check_on("nccl", "fake-nccl")


def floats(n: int) -> Any:
    return to_device(np.ones(n, np.float32))


def known(world: World, communicator: Communicator, *sizes: int, timeout_s: float = 20) -> Communicator:
    """A communicator of its own on which ranks have agreed on all-reduces of some sizes. Collective."""
    own = fresh(world, communicator, timeout_s)
    for size in sizes:
        own.allreduce(floats(size)).synchronize()
    return own


def soon_error_of(call: Callable[[], Event], communicator: Communicator) -> str:
    """As ``error_of``, where NCCL may have moved something before the watchdogs find that it was wrong."""
    deadline = time.monotonic() + SOON_S
    try:
        call().synchronize()
        while time.monotonic() < deadline:
            time.sleep(0.02)
            communicator.synchronize()
    except CommError as error:
        with contextlib.suppress(CommError):
            communicator.synchronize()
        return str(error)
    raise AssertionError("no CommError")


@contextlib.contextmanager
def counted(communicator: Communicator) -> Iterator[list[int]]:
    """How often this rank asks the others meanwhile."""
    peers = communicator._peers
    compare, asked = peers._compare, [0]

    def counting() -> None:
        asked[0] += 1
        compare()

    peers._compare = counting  # type: ignore[method-assign]
    try:
        yield asked
    finally:
        peers._compare = compare  # type: ignore[method-assign]


@check
def a_kind_of_call_asks_once(world: World, communicator: Communicator) -> None:
    others = int(world.size > 1)
    with counted(communicator) as asked:
        for _ in range(3):
            communicator.allreduce(floats(5001)).synchronize()
        assert asked[0] == others
        communicator.allreduce(floats(5001), op="max").synchronize()
        assert asked[0] == 2 * others
        for _ in range(3):
            communicator.barrier()
        assert asked[0] == 5 * others  # a barrier is the meeting itself


@check
def a_kind_of_message_asks_once(world: World, communicator: Communicator) -> None:
    if world.size == 1:
        return
    peers, meet, met = communicator._peers, communicator._peers._meet, []
    peers._meet = lambda messages: met.append(len(messages)) or meet(messages)  # type: ignore[func-returns-value, method-assign]
    send, recv = floats(5002), floats(5002)
    try:
        for _ in range(2):
            with communicator.group():
                communicator.send(send, (world.rank + 1) % world.size)
                communicator.recv(recv, (world.rank - 1) % world.size)
            communicator.synchronize()
    finally:
        peers._meet = meet  # type: ignore[method-assign]
    assert met == [2, 0], met


@check
def every_call_asks_when_told_to(world: World, communicator: Communicator) -> None:
    if world.size == 1:
        return
    os.environ["NUMSTACK_COMM_CHECK"] = "1"
    try:
        own = known(world, communicator, 10, 20)
    finally:
        del os.environ["NUMSTACK_COMM_CHECK"]
    # A difference in calls that are known is refused as well, and all is as before.
    message = error_of(lambda: own.allreduce(floats(10 if world.rank == 0 else 20)), own)
    assert "collective #2: rank 0 called allreduce(sum) of float32[10] (40 bytes), but rank" in message, message
    array, read = device_array(np.ones(10, np.float32))
    own.allreduce(array).synchronize()
    assert (read() == world.size).all()
    own.close()


@check
def known_calls_that_differ(world: World, communicator: Communicator) -> None:
    if world.size == 1:
        return
    own = known(world, communicator, 10, 20)
    message = soon_error_of(lambda: own.allreduce(floats(10 if world.rank == 0 else 20)), own)
    for part in ("#2: rank 0 called allreduce(sum) of float32[10] (40 bytes)", "float32[20] (80 bytes)", "rank"):
        assert part in message, message


@check
def a_known_call_against_a_new_one(world: World, communicator: Communicator) -> None:
    if world.size == 1:
        return
    own = known(world, communicator, 10)
    message = soon_error_of(lambda: own.allreduce(floats(10 if world.rank == 0 else 11)), own)
    for part in ("#1: rank 0 called allreduce(sum) of float32[10] (40 bytes)", "float32[11] (44 bytes)"):
        assert part in message, message


@check
def a_rank_that_does_not_make_a_known_call(world: World, communicator: Communicator) -> None:
    if world.size == 1:
        return
    last, own = world.size - 1, known(world, communicator, 10, 6, timeout_s=2)
    began = time.monotonic()
    if world.rank == last:
        time.sleep(3)  # the others have given up by then
        message = error_of(lambda: own.allreduce(floats(6)), own)
        assert "gave up" in message, message
    else:
        message = error_of(lambda: own.allreduce(floats(6)), own)
        assert time.monotonic() - began < 2 + SOON_S
    assert "#2 allreduce(sum) of float32[6] (24 bytes)" in message, message
    assert f"waited 2 s, but rank {last} has not made the matching call" in message, message
    assert f"(rank {last} last called #1 allreduce(sum) of float32[6] (24 bytes))" in message, message
    with open(message.rpartition("last calls in ")[2].rstrip(")")) as file:
        record = file.read()
    assert "#0 allreduce(sum) of float32[10] (40 bytes) done after" in record, record
    if world.rank != last:
        assert "#2 allreduce(sum) of float32[6] (24 bytes) not finished" in record, record
    for _ in range(2):  # and every later call is refused with it
        assert "has not made the matching call" in error_of(lambda: own.allreduce(floats(6)), own)


@check
def whoever_waits_for_the_device_gets_the_error(world: World, communicator: Communicator) -> None:
    if world.size == 1:
        return
    device, own = current_device(), known(world, communicator, 10, timeout_s=2)
    if world.rank == world.size - 1:
        time.sleep(3)
        with contextlib.suppress(CommError):
            own.synchronize()
        return
    array = floats(10)
    device.default_stream.wait(own.allreduce(array))
    try:
        to_host(array)  # as the training loop reads its loss
    except CommError as error:
        assert "has not made the matching call" in str(error)
    else:
        raise AssertionError("no CommError")
    with contextlib.suppress(CommError):
        own.synchronize()


@check
def a_rank_that_is_done_is_named_at_once(world: World, communicator: Communicator) -> None:
    if world.size == 1:
        return
    own = known(world, communicator, 10)
    if world.rank == 0:
        assert isinstance(own, NcclCommunicator) and own._peers.watchdog is not None
        own._peers.watchdog.stop()  # as at the end of the program
        return
    began = time.monotonic()
    message = error_of(lambda: own.allreduce(floats(10)), own)
    assert "rank 0 ended without making the matching call" in message, message
    assert time.monotonic() - began < SOON_S


@check
def an_asynchronous_error_ends_all(world: World, communicator: Communicator) -> None:
    if world.size == 1:
        return
    own = known(world, communicator, 10)
    assert isinstance(own, NcclCommunicator) and own._peers.watchdog is not None
    if world.rank == 1:  # does not call, but finds that NCCL has failed
        time.sleep(0.2)
        own._peers.watchdog._asynchronous_error = lambda: "remote process exited: planted"
        call: Callable[[], Event] = own.stream.record
        deadline = time.monotonic() + SOON_S
        while own._peers.watchdog.error is None and time.monotonic() < deadline:
            time.sleep(0.01)
    else:
        call = lambda: own.allreduce(floats(10))  # noqa: E731
    began = time.monotonic()
    try:
        message = error_of(call, own)
    except AssertionError:  # nothing was outstanding on rank 1, so its stream knows of no error
        message = str(own._peers.watchdog.error)
    assert "rank 1 had an error in NCCL: remote process exited: planted" in message, message
    assert time.monotonic() - began < SOON_S


@check
def a_communicator_that_is_closed_makes_room_for_another(world: World, communicator: Communicator) -> None:
    for _ in range(2):
        own = known(world, communicator, 10)
        own.close()
    assert "aborted" in error_of(lambda: own.allreduce(floats(10)), own)
