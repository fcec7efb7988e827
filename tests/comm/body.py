"""What ranks do in the tests: ``mpirun -n N python -m tests.comm.body ring mpi`` runs every check of some back ends.

A launch costs seconds, so it runs many checks, on any number of ranks. Rank 0 prints ``ok NAME`` once all ranks have
passed one; the first failure ends the launch, with the traceback of the rank it happened on. ``test_ranks.py`` and
``test_nccl_ranks.py`` make one test of each line. ``fake-nccl`` is NCCL's back end on ``fake_nccl.py``, without a GPU.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from numstack import comm
from numstack.comm.protocol import Communicator
from numstack.comm.reduction import numbers
from numstack.comm.ring import CHUNK_BYTES, RingCommunicator
from numstack.comm.world import World
from numstack.device import Array, Event, Work, current_device, submit
from numstack.dtypes import bfloat16
from numstack.errors import CommError
from tests.comm import fake_nccl
from tests.support import poisoned, to_device, to_host

Check = Callable[[World, Communicator], None]
CHECKS: dict[str, Check] = {}
RING_CHECKS: dict[str, Check] = {}

# Largest relative rounding of one addition.
EPSILON = {"float32": 2**-24, "float64": 2**-53, "float16": 2**-11, "bfloat16": 2**-8}
DTYPES = [np.dtype(d) for d in (np.float32, np.float64, np.float16, bfloat16, np.int32, np.int64, np.uint8)]


def check(function: Check) -> Check:
    """Run ``function`` for every back end."""
    CHECKS[function.__name__] = function
    return function


def checks(backend: str) -> dict[str, Check]:
    """All checks of a back end."""
    return CHECKS | (RING_CHECKS if backend == "ring" else {})


# helpers


def contribution(rank: int, n: int, dtype: np.dtype[Any]) -> np.ndarray:
    """What ``rank`` brings: every rank can compute that of every other."""
    rng = np.random.default_rng([rank, n])
    if np.issubdtype(dtype, np.integer):
        return rng.integers(0, 50, n).astype(dtype)
    return rng.standard_normal(n).astype(dtype)


def contributions(size: int, n: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Those of all ranks in float64, one row each."""
    return np.stack([contribution(rank, n, dtype).astype(np.float64) for rank in range(size)])


def reduced(rows: np.ndarray, op: str) -> np.ndarray:
    """The float64 reference."""
    return {"sum": rows.sum, "mean": rows.mean, "max": rows.max, "min": rows.min}[op](axis=0)  # type: ignore[operator, no-any-return]


def assert_reduced(got: np.ndarray, rows: np.ndarray, op: str, what: str) -> None:
    """Exact for integers and for max and min; else within one rounding for each step and one for the mean."""
    expected = reduced(rows, op)
    allowed = np.zeros(expected.shape)
    if op in ("sum", "mean") and got.dtype.name in EPSILON:
        allowed = EPSILON[got.dtype.name] * len(rows) * np.abs(rows).sum(axis=0)
        if op == "mean":
            allowed = allowed / len(rows) + EPSILON[got.dtype.name] * np.abs(expected)
    error = np.abs(got.astype(np.float64) - expected)
    assert got.shape == expected.shape and (error <= allowed).all(), f"{what}: off by {error.max()} of {got.dtype}"


def assert_same_bits(world: World, array: np.ndarray, what: str) -> None:
    """Collective."""
    digest = np.frombuffer(hashlib.sha256(array.tobytes()).digest(), np.uint8)
    digests = np.empty((world.size, digest.size), np.uint8)
    assert world.mpi is not None
    world.mpi.Allgather(digest, digests)
    assert (digests == digests[0]).all(), f"{what}: bits differ between ranks"


def device_array(host: np.ndarray) -> tuple[Array, Callable[[], np.ndarray]]:
    """An array on the device with the contents of ``host``, and what reads it back in ``host``'s dtype."""
    array = to_device(host)
    return array, lambda: to_host(array, host.dtype)


def error_of(call: Callable[[], Event], communicator: Communicator) -> str:
    """The message of the CommError that ``call``, or waiting for its event, raises; then the stream works again."""
    try:
        call().synchronize()
    except CommError as error:
        with contextlib.suppress(CommError):
            communicator.synchronize()
        return str(error)
    raise AssertionError("no CommError")


def sizes(world: World) -> Iterable[int]:
    """Empty, one element, fewer than ranks, not divisible, and one that takes several chunks on few ranks."""
    return (0, 1, 2, world.size, world.size + 1, 7, 1000, 65537, 300_001)


# sums


@check
def allreduce_sizes_and_dtypes(world: World, communicator: Communicator) -> None:
    for dtype in DTYPES:
        for n in sizes(world) if dtype in (np.float32, bfloat16) else (0, 1, 7, 1001):
            array, read = device_array(contribution(world.rank, n, dtype))
            communicator.allreduce(array).synchronize()
            assert_reduced(read(), contributions(world.size, n, dtype), "sum", f"sum of {dtype}[{n}]")
            assert_same_bits(world, read(), f"sum of {dtype}[{n}]")


@check
def allreduce_ops(world: World, communicator: Communicator) -> None:
    for dtype in DTYPES:
        for op in ("max", "min", "mean"):
            if op == "mean" and np.issubdtype(dtype, np.integer):
                continue
            array, read = device_array(contribution(world.rank, 1003, dtype))
            communicator.allreduce(array, op=op).synchronize()  # type: ignore[arg-type]
            assert_reduced(read(), contributions(world.size, 1003, dtype), op, f"{op} of {dtype}")
            assert_same_bits(world, read(), f"{op} of {dtype}")


@check
def allreduce_of_any_shape(world: World, communicator: Communicator) -> None:
    array, read = device_array(contribution(world.rank, 60, np.dtype(np.float32)).reshape(3, 4, 5))
    communicator.allreduce(array).synchronize()
    rows = contributions(world.size, 60, np.dtype(np.float32))
    assert_reduced(read().reshape(-1), rows, "sum", "sum of shape (3, 4, 5)")


@check
def allreduce_twice_gives_the_same_bits(world: World, communicator: Communicator) -> None:
    results = []
    for _ in range(2):
        array, read = device_array(contribution(world.rank, 40_001, np.dtype(np.float32)))
        communicator.allreduce(array).synchronize()
        results.append(read().tobytes())
    assert results[0] == results[1]


@check
def what_is_not_finite_comes_out_everywhere(world: World, communicator: Communicator) -> None:
    for op in ("sum", "mean"):
        values = np.ones(world.size + 3, np.float32)
        values[world.rank] = np.nan
        values[world.size] = np.inf
        array, read = device_array(values)
        communicator.allreduce(array, op=op).synchronize()  # type: ignore[arg-type]
        assert np.isnan(read()[: world.size]).all() and np.isinf(read()[world.size])
        assert np.isfinite(read()[world.size + 1 :]).all()


@check
def bfloat16_rounds_to_even_once_a_step(world: World, communicator: Communicator) -> None:
    # 256 + 1 lies half way between two bfloat16 numbers, 256 and 258, and rounds to the even one.
    array, read = device_array(np.array([256 if world.rank == 0 else 1 if world.rank == 1 else 0], bfloat16))
    communicator.allreduce(array).synchronize()
    assert read()[0] == 256, read()
    array, read = device_array(np.array([256 if world.rank == 0 else 3 if world.rank == 1 else 0], bfloat16))
    communicator.allreduce(array).synchronize()
    assert read()[0] == (256 if world.size == 1 else 260), read()


# the cases of mpi4py's test_cco_buf.py (blocking), test_cco_nb_buf.py (not waited for one by one), test_p2p_buf.py


@check
def mpi4py_barrier(world: World, communicator: Communicator) -> None:
    communicator.barrier().synchronize()


@check
def barrier_waits_for_the_last(world: World, communicator: Communicator) -> None:
    assert world.mpi is not None
    world.mpi.Barrier()
    began = time.monotonic()
    if world.rank == world.size - 1:
        time.sleep(0.2)
    communicator.barrier().synchronize()
    assert time.monotonic() - began >= 0.19


@check
def mpi4py_broadcast(world: World, communicator: Communicator) -> None:
    for dtype in (*DTYPES, np.dtype(bool), np.dtype(np.int16)):
        for root in range(world.size):
            array, read = device_array(np.full(root, root if world.rank == root else 77).astype(dtype))
            communicator.broadcast(array, root=root).synchronize()
            assert (read() == np.full(root, root).astype(dtype)).all()


@check
def broadcast_of_many_chunks(world: World, communicator: Communicator) -> None:
    n = CHUNK_BYTES // 4 * 3 + 3
    for root in range(world.size):
        expected = contribution(root, n, np.dtype(np.float32))
        array, read = device_array(expected if world.rank == root else poisoned(n))
        communicator.broadcast(array, root=root).synchronize()
        assert (read() == expected).all()


@check
def mpi4py_allgather(world: World, communicator: Communicator) -> None:
    for dtype in DTYPES:
        for root in range(world.size):
            send, _ = device_array(np.full(root + 1, root).astype(dtype))
            recv, read = device_array(poisoned((world.size, root + 1), dtype))
            communicator.allgather(send, recv).synchronize()
            assert (read() == np.full(1, root).astype(dtype)).all()


@check
def mpi4py_allgather_in_place(world: World, communicator: Communicator) -> None:
    for count in range(1, 10):
        values = np.full((world.size, count), -1, np.int32)
        values[world.rank] = world.rank * 10 + count
        recv, read = device_array(values)
        communicator.allgather(recv[world.rank], recv).synchronize()
        assert (read() == np.arange(world.size)[:, None] * 10 + count).all()


@check
def allgather_of_many_chunks(world: World, communicator: Communicator) -> None:
    n = CHUNK_BYTES // 4 + 1
    send, _ = device_array(contribution(world.rank, n, np.dtype(np.float32)))
    recv, read = device_array(poisoned((world.size, n)))
    communicator.allgather(send, recv).synchronize()
    assert (read() == contributions(world.size, n, np.dtype(np.float32))).all()


@check
def mpi4py_allreduce(world: World, communicator: Communicator) -> None:
    for dtype in DTYPES:
        expected = {"sum": np.arange(world.size) * world.size, "max": np.arange(world.size)}
        for op, values in {**expected, "min": expected["max"]}.items():
            array, read = device_array(np.arange(world.size).astype(dtype))
            communicator.allreduce(array, op=op).synchronize()  # type: ignore[arg-type]
            assert (read() == values.astype(dtype)).all()


@check
def mpi4py_reduce_scatter_block(world: World, communicator: Communicator) -> None:
    total = world.size * (world.size - 1) // 2
    for dtype in DTYPES:
        for count in range(world.size + 1):
            for op, value in {"sum": total, "max": world.size - 1, "min": 0}.items():
                send, read_send = device_array(np.full(count * world.size, world.rank).astype(dtype))
                recv, read = device_array(poisoned(count, dtype))
                communicator.reduce_scatter(send, recv, op=op).synchronize()  # type: ignore[arg-type]
                assert (read() == np.full(count, value).astype(dtype)).all()
                assert (read_send() == np.full(1, world.rank).astype(dtype)).all()  # not changed


@check
def mpi4py_reduce_scatter_block_in_place(world: World, communicator: Communicator) -> None:
    total = world.size * (world.size - 1) // 2
    for count in range(1, world.size + 1):
        send, read = device_array(np.full((world.size, count), world.rank, np.float32))
        communicator.reduce_scatter(send, send[world.rank]).synchronize()
        expected = np.full((world.size, count), world.rank, np.float32)
        expected[world.rank] = total
        assert (read() == expected).all()


@check
def reduce_scatter_of_many_chunks(world: World, communicator: Communicator) -> None:
    n = CHUNK_BYTES // 4 + 5
    send, _ = device_array(contribution(world.rank, n * world.size, np.dtype(np.float32)))
    recv, read = device_array(poisoned(n))
    communicator.reduce_scatter(send, recv, op="mean").synchronize()
    rows = contributions(world.size, n * world.size, np.dtype(np.float32))
    assert_reduced(read(), rows[:, world.rank * n :][:, :n], "mean", f"mean of part {world.rank}")


@check
def mpi4py_many_at_once(world: World, communicator: Communicator) -> None:
    arrays = [device_array(np.full(n + 1, world.rank + n, np.float32)) for n in range(30)]
    for array, _ in arrays:
        communicator.allreduce(array)
    communicator.synchronize()
    for n, (_, read) in enumerate(arrays):
        assert (read() == sum(rank + n for rank in range(world.size))).all()


@check
def mpi4py_sendrecv(world: World, communicator: Communicator) -> None:
    right, left = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    if world.size == 1:
        return
    for dtype in DTYPES:
        for n in range(world.size + 1):
            send, _ = device_array(np.full(n, n).astype(dtype))
            recv, read = device_array(poisoned(n + 1, dtype))
            with communicator.group():
                communicator.send(send, right)
                communicator.recv(recv[:n], left)
            communicator.synchronize()
            assert (read()[:-1] == np.full(1, n).astype(dtype)).all()
            assert read()[-1:].tobytes() == poisoned(1, dtype).tobytes()  # one element past the end


@check
def send_and_receive_in_turn(world: World, communicator: Communicator) -> None:
    array, read = device_array(np.full(100_000, world.rank, np.float32))
    if world.rank > 0:
        communicator.recv(array, world.rank - 1)
    if world.rank < world.size - 1:
        communicator.send(array, world.rank + 1)
    communicator.synchronize()
    assert (read() == 0).all()


@check
def all_to_all_in_a_group(world: World, communicator: Communicator) -> None:
    others = [rank for rank in range(world.size) if rank != world.rank]
    send, _ = device_array(np.array([[world.rank, peer] for peer in range(world.size)], np.int32))
    recv, read = device_array(np.full((world.size, 2), -1, np.int32))
    with communicator.group():
        for peer in others:
            communicator.send(send[peer], peer)
        for peer in reversed(others):
            communicator.recv(recv[peer], peer)
    communicator.synchronize()
    for peer in others:
        assert (read()[peer] == [peer, world.rank]).all()


# streams and the door


@check
def a_collective_waits_for_the_stream_that_makes_its_array(world: World, communicator: Communicator) -> None:
    device = current_device()
    producer = device.create_stream()
    array, read = device_array(np.zeros(1000, np.float32))
    ones = np.ones(1000, np.float32)
    submit(Work("slow", "host", lambda _: time.sleep(0.05), producer))
    device.copy(array, ones, producer)
    event = communicator.allreduce(array, stream=producer)
    device.default_stream.wait(event)
    device.default_stream.synchronize()
    assert (read() == world.size).all()


class Watcher:
    """Keeps the works that passed the door."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def before(self, work: Work) -> None:
        self.works.append(work)

    def after(self, work: Work) -> None:
        pass


@check
def every_collective_is_a_work_that_can_be_replayed(world: World, communicator: Communicator) -> None:
    array, read = device_array(np.ones(10, np.float32))
    with current_device().observe(Watcher()) as watcher:
        communicator.allreduce(array)
    communicator.synchronize()
    (work,) = (work for work in watcher.works if work.kind == "collective")  # type: ignore[attr-defined]
    assert work.name == f"{communicator.backend}.allreduce" and work.stream is communicator.stream
    assert work.reads == (array,) and work.writes == (array,)
    submit(work)
    communicator.synchronize()
    assert (read() == world.size**2).all()


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


def fresh(world: World, communicator: Communicator, timeout_s: float) -> Communicator:
    """Collective."""
    assert world.mpi is not None
    created = type(communicator)(world, timeout_s=timeout_s)
    world.mpi.Barrier()
    return created


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
        raise ValueError("planted")

    if world.rank == 1:
        own._allreduce = fail  # type: ignore[method-assign, assignment]
    array = to_device(np.zeros(CHUNK_BYTES, np.float32))
    began = time.monotonic()
    message = error_of(lambda: own.allreduce(array), own)
    assert "rank 1 failed: ValueError: planted" in message, message
    assert time.monotonic() - began < 5


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


@check
def two_sends_that_face_each_other_time_out(world: World, communicator: Communicator) -> None:
    if world.size == 1:
        return
    own = fresh(world, communicator, timeout_s=0.3)
    if world.rank < 2:
        message = error_of(lambda: own.send(to_device(np.zeros(4, np.float32)), 1 - world.rank), own)
        assert "has not made the matching call" in message, message
    assert world.mpi is not None
    world.mpi.Barrier()


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


RING_CHECKS["ring_sends_the_least_that_it_can"] = ring_sends_the_least_that_it_can
RING_CHECKS["ring_of_small_chunks"] = ring_of_small_chunks

KINDS: dict[str, type[Communicator]] = {
    "ring": RingCommunicator,
    "mpi": comm.MpiCommunicator,
    "nccl": comm.NcclCommunicator,
    "fake-nccl": comm.NcclCommunicator,
}


def main() -> None:
    world = World.from_mpi()
    comm.abort_on_error(world)
    assert world.mpi is not None
    backends = sys.argv[1:]
    if "fake-nccl" in backends:
        fake_nccl.install()
    communicators = {backend: KINDS[backend](world, timeout_s=20) for backend in backends}
    with tempfile.TemporaryDirectory() as directory:
        os.environ["NUMSTACK_COMM_RECORD_DIR"] = directory
        for backend in backends:
            for name, function in checks(backend).items():
                function(world, communicators[backend])
                world.mpi.Barrier()
                if world.rank == 0:
                    print(f"ok {backend}.{name}", flush=True)


if __name__ == "__main__":
    main()
