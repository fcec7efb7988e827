"""What a launcher's variables mean, and the threads that follow from them."""

from __future__ import annotations

import os

import pytest

from numstack.device import ranks
from numstack.device.cpu import share_of_cores
from numstack.errors import ConfigError


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        *ranks.LOCAL_RANK_VARIABLES,
        *ranks.LOCAL_SIZE_VARIABLES,
        "NUMSTACK_THREADS",
        "NUMSTACK_RANKS_PER_GPU",
    ):
        monkeypatch.delenv(name, raising=False)


def test_without_a_launcher_there_is_one_rank_with_all_cores() -> None:
    assert (ranks.local_rank(), ranks.local_size(), ranks.ranks_per_gpu()) == (0, 1, 1)
    assert share_of_cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("rank", "size"),
    [("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"), ("MPI_LOCALRANKID", "MPI_LOCALNRANKS")],
)
def test_every_launchers_variables_are_read(rank: str, size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(rank, "3")
    monkeypatch.setenv(size, "4")
    assert (ranks.local_rank(), ranks.local_size()) == (3, 4)


@pytest.mark.parametrize(
    ("cores", "machine", "local_size", "threads"),
    [
        (8, 8, 1, 8),  # alone
        (8, 8, 2, 4),  # two ranks that see all cores share them
        (2, 8, 4, 2),  # bound: each rank's cores are its own
        (1, 2, 2, 1),  # bound to one core each
        (2, 2, 4, 1),  # more ranks than cores
    ],
)
def test_ranks_of_a_machine_share_its_cores(
    cores: int, machine: int, local_size: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    monkeypatch.setattr(os, "cpu_count", lambda: machine)
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", str(local_size))
    assert share_of_cores() == threads


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5"])
def test_a_bad_count_is_named(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMSTACK_THREADS", value)
    with pytest.raises(ConfigError, match=f"NUMSTACK_THREADS='{value}' is no positive whole number"):
        share_of_cores()
