"""Checks of what happens when ranks disagree, fail or stay away."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from numstack.comm.protocol import Communicator
from numstack.comm.ring import CHUNK_BYTES
from numstack.comm.world import World
from numstack.device import Event
from tests.comm.helpers import assert_same_bits, check, device_array, error_of, fresh, settle
from tests.support import to_device

# disagreement: on calls of kinds that nobody has made before, because NCCL's back end asks only for those


def refused(world: World, communicator: Communicator, call: Callable[[], Event], *parts: str) -> None:
    """``call`` is refused on every rank with one message that has all ``parts``; then all is as before."""
    message = error_of(call, communicator).split(" (last calls")[0]
    for part in ("collective #", "rank 0", f"rank{'s' if world.size > 2 else ''} 1", *parts):
        assert part in message, f"{part!r} not in {message!r}"
    assert_same_bits(world, np.frombuffer(message.encode().ljust(1000), np.uint8), "message")
    array, read = device_array(np.ones(10, np.float32))
    communicator.allreduce(array).synchronize()
    assert (read() == world.size).all()


@check
def different_sizes(world: World, communicator: Communicator) -> None:
    if world.size > 1:
        array = to_device(np.zeros(4000 if world.rank == 0 else 4001, np.float32))
        parts = ("allreduce(sum) of float32[4000] (16000 bytes)", "allreduce(sum) of float32[4001] (16004 bytes)")
        refused(world, communicator, lambda: communicator.allreduce(array), *parts)


@check
def empty_against_one(world: World, communicator: Communicator) -> None:
    if world.size > 1:
        array = to_device(np.zeros(4002 * min(world.rank, 1), np.float32))
        refused(world, communicator, lambda: communicator.allreduce(array), "float32[0]", "float32[4002]")


@check
def different_dtypes_of_one_size(world: World, communicator: Communicator) -> None:
    if world.size > 1:
        array = to_device(np.zeros(4003, np.float32 if world.rank == 0 else np.int32))
        refused(world, communicator, lambda: communicator.allreduce(array), "float32[4003]", "int32[4003]")


@check
def different_reductions(world: World, communicator: Communicator) -> None:
    if world.size > 1:
        array = to_device(np.zeros(4004, np.float32))
        op: Any = "sum" if world.rank == 0 else "max"
        refused(world, communicator, lambda: communicator.allreduce(array, op=op), "allreduce(sum)", "allreduce(max)")


@check
def different_operations(world: World, communicator: Communicator) -> None:
    if world.size > 1:
        array = to_device(np.zeros(4005, np.float32))
        call = communicator.allreduce if world.rank == 0 else communicator.broadcast
        refused(world, communicator, lambda: call(array), "allreduce(sum)", "broadcast(root 0)")


@check
def different_roots(world: World, communicator: Communicator) -> None:
    if world.size > 1:
        array = to_device(np.zeros(4006, np.float32))
        root = min(world.rank, 1)
        refused(world, communicator, lambda: communicator.broadcast(array, root=root), "root 0", "root 1")


@check
def the_last_rank_alone_differs(world: World, communicator: Communicator) -> None:
    if world.size > 2:
        array = to_device(np.zeros(4008 if world.rank == world.size - 1 else 4007, np.float32))
        message = error_of(lambda: communicator.allreduce(array), communicator)
        most = ", ".join(str(rank) for rank in range(world.size - 1))
        assert f"ranks {most} called allreduce(sum) of float32[4007]" in message, message
        assert f"rank {world.size - 1} called allreduce(sum) of float32[4008]" in message, message


# failure: each on a communicator of its own, which is of no use afterwards


@check
def a_rank_that_never_calls_is_named(world: World, communicator: Communicator) -> None:
    if world.size == 1:
        return
    last, own = world.size - 1, fresh(world, communicator, timeout_s=0.4)
    array = to_device(np.zeros(6, np.float32))
    own.barrier().synchronize()
    if world.rank == last:
        time.sleep(0.9)  # the others have given up by then, and say so
    began = time.monotonic()
    message = error_of(lambda: own.allreduce(array), own)
    assert time.monotonic() - began < 2
    assert "#1 allreduce(sum) of float32[6] (24 bytes)" in message, message
    assert f"rank {last} has not made the matching call" in message, message
    assert ("gave up" in message) or world.rank != last, message
    path = message.rpartition("last calls in ")[2].rstrip(")")
    with open(path) as file:
        record = file.read()
    assert "#0 barrier() done" in record, record
    # The last rank hears of it before it calls where a watchdog listens (NCCL).
    assert "#1 allreduce(sum) of float32[6] (24 bytes) failed" in record or world.rank == last, record
    again = error_of(lambda: own.allreduce(array), own)
    assert "cannot be used again" in again, again


@check
def a_rank_that_fails_in_the_middle_tells_the_others(world: World, communicator: Communicator) -> None:
    if world.size == 1:
        return
    own = fresh(world, communicator, timeout_s=20)

    def fail(*_: Any) -> None:
        time.sleep(0.5)  # by then the others wait for its data
        raise ValueError("planted")

    if world.rank == 1:
        own._allreduce = fail  # type: ignore[method-assign, assignment]
    array = to_device(np.zeros(CHUNK_BYTES, np.float32))
    began = time.monotonic()
    message = error_of(lambda: own.allreduce(array), own)
    assert "rank 1 failed: ValueError: planted" in message, message
    assert time.monotonic() - began < 5
    if own.backend in ("ring", "mpi") and own.device.kind == "cpu" and world.rank == 0:
        # Its message to rank 1 can't be taken back, so what MPI reads must stay, although nobody else holds it.
        held = weakref.ref(array)
        del array, own
        gc.collect()
        assert held() is not None


@check
def a_rank_that_stops_in_the_middle_is_a_time_out(world: World, communicator: Communicator) -> None:
    if world.size == 1:
        return
    own = fresh(world, communicator, timeout_s=0.3)
    if world.rank == 1:
        own._allreduce = lambda *_: time.sleep(0.6)  # type: ignore[method-assign]
    array = to_device(np.zeros(CHUNK_BYTES, np.float32))
    if world.rank == 1:
        own.allreduce(array)
    else:
        message = error_of(lambda: own.allreduce(array), own)
        assert ("it does not finish" if own.backend == "nccl" else "stopped moving data") in message, message
    settle(own)
    assert world.mpi is not None
    world.mpi.Barrier()


@check
def both_ends_of_a_message_must_agree(world: World, communicator: Communicator) -> None:
    if world.size == 1:
        return
    own = fresh(world, communicator, timeout_s=5)
    if world.rank < 2:
        array = to_device(np.zeros(4 + world.rank, np.float32))
        message = error_of(lambda: own.send(array, 1) if world.rank == 0 else own.recv(array, 0), own)
        assert "rank 0 called send() of float32[4] (16 bytes)" in message, message
        assert "rank 1 called recv() of float32[5] (20 bytes)" in message, message
    settle(own)


@check
def two_sends_that_face_each_other_time_out(world: World, communicator: Communicator) -> None:
    if world.size == 1:
        return
    own = fresh(world, communicator, timeout_s=0.3)
    if world.rank < 2:
        message = error_of(lambda: own.send(to_device(np.zeros(4, np.float32)), 1 - world.rank), own)
        assert "has not made the matching call" in message, message
    settle(own)
    assert world.mpi is not None
    world.mpi.Barrier()
