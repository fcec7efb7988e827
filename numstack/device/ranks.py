"""What the launcher says about this process, before anything touches MPI or CUDA."""

from __future__ import annotations

import os

from numstack.errors import ConfigError

# Open MPI, MPICH and Intel MPI, Slurm; torchrun's come last.
LOCAL_RANK_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID", "LOCAL_RANK")
LOCAL_SIZE_VARIABLES = ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "SLURM_NTASKS_PER_NODE", "LOCAL_WORLD_SIZE")


def local_rank() -> int:
    """Index of this process among those of its machine; 0 without a launcher."""
    return _first(LOCAL_RANK_VARIABLES, 0)


def local_size() -> int:
    """Processes that the launcher started on this machine; 1 without a launcher."""
    return max(1, _first(LOCAL_SIZE_VARIABLES, 1))


def ranks_per_gpu() -> int:
    """``NUMSTACK_RANKS_PER_GPU``: local ranks that share a GPU, for class rooms and tests; 1 by default."""
    return positive("NUMSTACK_RANKS_PER_GPU", 1)


def positive(variable: str, default: int) -> int:
    """An environment variable that must be a positive whole number.

    Raises
    ------
    ConfigError
        If it is set to anything else.
    """
    value = os.environ.get(variable)
    if not value:
        return default
    if not value.isdigit() or int(value) < 1:
        raise ConfigError(f"{variable}={value!r} is no positive whole number; set it to one, or leave it unset")
    return int(value)


def _first(variables: tuple[str, ...], default: int) -> int:
    for name in variables:
        value = os.environ.get(name, "")
        if value.isdigit():
            return int(value)
    return default
