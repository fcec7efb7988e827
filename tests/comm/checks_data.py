"""Checks of what collectives and messages compute, on any number of ranks."""

from __future__ import annotations

import time

import numpy as np

from numstack.comm.protocol import Communicator
from numstack.comm.ring import CHUNK_BYTES
from numstack.comm.world import World
from numstack.device import Work, current_device, submit
from numstack.dtypes import bfloat16
from tests.comm.helpers import (
    DTYPES,
    assert_reduced,
    assert_same_bits,
    check,
    contribution,
    contributions,
    device_array,
    sizes,
)
from tests.support import poisoned

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
