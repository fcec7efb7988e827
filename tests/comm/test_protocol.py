"""A world of one without MPI, and arguments that are refused before anything is submitted."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from numstack import comm
from numstack.comm import Communicator, World
from numstack.device import current_device
from numstack.errors import CommError, ConfigError, DTypeError, ShapeError
from tests.mpirun import ROOT
from tests.support import poisoned, to_device, to_host


@pytest.fixture(scope="module")
def alone() -> Communicator:
    return comm.create(World())


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_a_reduction_over_one_rank_changes_nothing(alone: Communicator, op: comm.reduction.Op) -> None:
    array = to_device(np.arange(5, dtype=np.float32))
    alone.allreduce(array, op=op).synchronize()
    alone.broadcast(array).synchronize()
    assert to_host(array).tolist() == [0, 1, 2, 3, 4]


def test_parts_are_copied_in_a_world_of_one(alone: Communicator) -> None:
    send, recv = to_device(np.arange(5, dtype=np.float32)), to_device(poisoned(5))
    alone.allgather(send, recv).synchronize()
    assert (to_host(recv) == to_host(send)).all()
    recv = to_device(poisoned(5))
    alone.reduce_scatter(send, recv, op="mean").synchronize()
    assert (to_host(recv) == to_host(send)).all()


def test_a_world_of_one_waits_for_nobody(alone: Communicator) -> None:
    alone.barrier().synchronize()
    with alone.group():
        pass


@pytest.mark.parametrize("backend", comm.BACKENDS)
def test_one_rank_needs_no_back_end(backend: str) -> None:
    assert comm.create(World(), backend).backend == "alone"


@pytest.mark.parametrize("kind", [comm.MpiCommunicator, comm.NcclCommunicator])
def test_back_ends_that_need_mpi(kind: type[Communicator]) -> None:
    with pytest.raises(CommError, match="this world has no MPI; start with mpirun"):
        kind(World())


def test_an_unknown_back_end() -> None:
    with pytest.raises(ConfigError, match="backend='gloo' is no communicator; take one of auto, nccl, ring, mpi"):
        comm.create(World(), "gloo")


@pytest.mark.skipif(current_device().kind == "cuda", reason="needs the CPU device: NUMSTACK_DEVICE=cpu runs it")
def test_nccl_needs_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"backend='nccl' is for GPUs, but the device is CPU .*; take the ring"):
        comm.create(World(0, 2), "nccl")
    assert comm.backends() == ["ring", "mpi"]


def test_strided_arrays(alone: Communicator) -> None:
    array = to_device(np.zeros((4, 6), np.float32))
    with pytest.raises(DTypeError, match=r"allreduce: the array of shape \(4, 3\) has strides \(24, 4\)"):
        alone.allreduce(array[:, :3])


def test_parts_that_do_not_make_the_whole(alone: Communicator) -> None:
    with pytest.raises(ShapeError, match="allgather: send has 3 elements, so recv needs 1 x 3 = 3 for 1 ranks, but it"):
        alone.allgather(to_device(np.zeros(3, np.float32)), to_device(np.zeros(4, np.float32)))
    with pytest.raises(ShapeError, match="reduce_scatter: recv has 3 elements, so send needs"):
        alone.reduce_scatter(to_device(np.zeros(4, np.float32)), to_device(np.zeros(3, np.float32)))
    with pytest.raises(DTypeError, match="allgather: send is float32 but recv is int32; make them equal"):
        alone.allgather(to_device(np.zeros(3, np.float32)), to_device(np.zeros(3, np.int32)))


def test_ranks_that_do_not_exist(alone: Communicator) -> None:
    array = to_device(np.zeros(3, np.float32))
    with pytest.raises(CommError, match="broadcast: root=1 is no rank of a world of 1"):
        alone.broadcast(array, root=1)
    with pytest.raises(CommError, match="send: peer=-1 is no rank of a world of 1"):
        alone.send(array, -1)
    with pytest.raises(CommError, match=r"recv: peer=0 is this rank itself; use device\.copy"):
        alone.recv(array, 0)


def test_what_a_group_holds(alone: Communicator) -> None:
    array = to_device(np.zeros(3, np.float32))
    with alone.group():
        with pytest.raises(CommError, match=r"allreduce: a group\(\) holds only send and recv"):
            alone.allreduce(array)
        with pytest.raises(CommError, match="groups do not nest"), alone.group():
            pass
    alone.allreduce(array).synchronize()


class OnCard:
    """An array that is not host memory, as far as a communicator can tell."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values

    def __getattr__(self, name: str) -> Any:
        return getattr(self.values, name)


def test_arrays_of_a_gpu_go_through_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    copies, synchronized, pinned = [], [], []
    ring = comm.RingCommunicator(World())

    def copy(dst: Any, src: Any, stream: Any) -> None:
        copies.append((type(src), type(dst), stream))
        np.copyto(getattr(dst, "values", dst), getattr(src, "values", src))

    def pin(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        pinned.append(shape)
        return poisoned(shape, dtype)

    stream: Any = SimpleNamespace(synchronize=lambda: synchronized.append(len(copies)))
    monkeypatch.setattr(ring.device, "copy", copy)
    monkeypatch.setattr(ring.device, "pinned", pin)
    for n in (5, 3):
        send, recv = OnCard(np.arange(n, dtype=np.float32)), OnCard(poisoned(n))
        ring._allgather(send, recv, stream)  # type: ignore[arg-type]
        assert recv.values.tolist() == list(range(n))
    assert copies == [(OnCard, np.ndarray, stream), (np.ndarray, OnCard, stream)] * 2
    assert synchronized == [1, 2, 3, 4]  # before the data are read, and before the pinned memory serves another call
    assert pinned == [(20,), (20,)]  # and the second call uses it again


@pytest.mark.parametrize("value", ["0", "-3", "soon", "nan"])
def test_a_time_out_that_is_none(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("NUMSTACK_COMM_TIMEOUT_S", value)
    with pytest.raises(ConfigError, match=f"NUMSTACK_COMM_TIMEOUT_S='{value}' is no positive number of seconds"):
        comm.create(World())


def test_importing_and_a_world_of_one_leave_mpi_alone() -> None:
    program = (
        "import sys\n"
        "from numstack import comm\n"
        "world = comm.World.from_mpi()\n"
        "comm.create(world, 'mpi').barrier().synchronize()\n"
        "assert (world.rank, world.size, world.local_rank, world.local_size) == (0, 1, 0, 1)\n"
        "assert not any(name.startswith('mpi4py') for name in sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=60)
