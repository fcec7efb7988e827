"""Checks of buckets of gradients on several ranks, and of the ring alone."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import numpy as np

from numstack import comm
from numstack.comm.protocol import Communicator
from numstack.comm.reduction import numbers
from numstack.comm.ring import RingCommunicator
from numstack.comm.world import World
from numstack.device import current_device
from numstack.dtypes import bfloat16
from numstack.errors import CommError
from tests.comm.helpers import (
    assert_reduced,
    assert_same_bits,
    check,
    check_on,
    contribution,
    contributions,
    device_array,
)
from tests.support import to_device

# gradients


@check
def buckets_average_the_buffer(world: World, communicator: Communicator) -> None:
    n = 5000
    ranges = [(4000, 5000), (2500, 4000), (2499, 2500), (100, 2499), (0, 100)]
    buffer, read = device_array(contribution(world.rank, n, np.dtype(np.float32)))
    buckets = comm.GradientBuckets(buffer, ranges, communicator, bucket_bytes=6000)
    assert buckets.n_buckets == 3
    for step in range(2):  # the second time, rank by rank in another order
        order = list(range(len(ranges)))
        np.random.default_rng([step, world.rank]).shuffle(order) if step else None
        current_device().copy(buffer, contribution(world.rank, n, np.dtype(np.float32)))
        for index in order:
            buckets.ready(index)
        buckets.finish()
        current_device().default_stream.synchronize()
        assert_reduced(read(), contributions(world.size, n, np.dtype(np.float32)), "mean", "gradients")
        assert_same_bits(world, read(), "gradients")


@check
def buckets_send_parameters_that_this_rank_did_not_use(world: World, communicator: Communicator) -> None:
    buffer, read = device_array(np.full(40, world.rank, np.float32))
    buckets = comm.GradientBuckets(buffer, [(20, 40), (10, 20), (0, 10)], communicator, bucket_bytes=1)
    if world.rank == 0:
        buckets.ready(1)
    else:
        buckets.ready(0)
        buckets.ready(2)
    buckets.finish()
    current_device().default_stream.synchronize()
    assert (read() == np.float32((world.size - 1) / 2)).all()


@check
def buckets_do_not_hold_up_backward(world: World, communicator: Communicator) -> None:
    if current_device().kind == "cuda" and communicator.backend != "nccl":
        return  # on a GPU, MPI's data move in the thread that calls
    buffer, read = device_array(np.full(1000, world.rank, np.float32))
    buckets = comm.GradientBuckets(buffer, [(500, 1000), (0, 500)], communicator, bucket_bytes=1)
    buckets.finish()  # NCCL's back end asks the others before the first step
    current_device().copy(buffer, np.full(1000, world.rank, np.float32))
    assert world.mpi is not None
    world.mpi.Barrier()
    began = time.monotonic()
    if world.rank == world.size - 1 > 0:
        time.sleep(0.5)  # a rank that is slow to come
    else:
        buckets.ready(0)
        assert time.monotonic() - began < 0.4  # ready() did not wait for it
    buckets.finish()
    current_device().default_stream.synchronize()
    assert (read() == np.float32((world.size - 1) / 2)).all()


@check
def buckets_report_a_disagreement_where_gradients_are_used(world: World, communicator: Communicator) -> None:
    if world.size == 1:
        return
    buffer = to_device(np.zeros(4010 + min(world.rank, 1), np.float32))
    buckets = comm.GradientBuckets(buffer, [(0, buffer.size)], communicator)
    try:
        buckets.finish()
        current_device().fill(buffer, 0.0)  # the first work after it
    except CommError as error:
        assert "float32[4010]" in str(error)
    else:
        raise AssertionError("no CommError")
    finally:
        with contextlib.suppress(CommError):
            communicator.synchronize()


# the ring alone


@check_on("ring")
def ring_sends_the_least_that_it_can(world: World, communicator: Communicator) -> None:
    n = 12 * 4096
    sent = 0
    post = communicator._peers.post

    def counting(messages: Any) -> Any:
        nonlocal sent
        sent += sum(message.array.nbytes for message in messages if message.outgoing)
        return post(messages)

    communicator._peers.post = counting  # type: ignore[method-assign]
    try:
        communicator.allreduce(to_device(np.ones(n, np.float32))).synchronize()
    finally:
        communicator._peers.post = post  # type: ignore[method-assign]
    assert sent == 2 * (world.size - 1) * n * 4 // world.size


@check_on("ring")
def ring_of_small_chunks(world: World, communicator: Communicator) -> None:
    small = RingCommunicator(world, chunk_bytes=64)
    for dtype in (np.dtype(np.float32), bfloat16):
        for n in (1, 15, 16 * world.size, 1001):
            array, read = device_array(contribution(world.rank, n, dtype))
            small.allreduce(array).synchronize()
            assert_reduced(read(), contributions(world.size, n, dtype), "sum", f"sum of {dtype}[{n}]")
            assert_same_bits(world, numbers(read()), f"sum of {dtype}[{n}]")
    array, read = device_array(np.arange(1000, dtype=np.int32) * (world.rank == 0))
    small.broadcast(array).synchronize()
    assert (read() == np.arange(1000)).all()
