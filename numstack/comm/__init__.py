"""Ranks that train together: the world a launcher made, collectives between its ranks, buckets of gradients.

>>> from numstack import comm
>>> world = comm.World.from_mpi()            # of one, if no launcher started this process
>>> comm.abort_on_error(world)               # one rank's exception ends all
>>> ranks = comm.create(world, "ring")
>>> event = ranks.allreduce(array, op="mean")          # doctest: +SKIP

Importing this touches no MPI. ``world`` who takes part; ``protocol`` what every communicator offers; ``peers`` how
ranks agree on a call before data moves; ``ring`` our own all-reduce; ``mpi`` the library's; ``buckets`` gradients.
"""

from numstack.comm.abort import abort_on_error
from numstack.comm.buckets import GradientBuckets
from numstack.comm.mpi import MpiCommunicator
from numstack.comm.protocol import Communicator
from numstack.comm.ring import RingCommunicator
from numstack.comm.world import World
from numstack.errors import CommError, ConfigError

__all__ = [
    "CommError",
    "Communicator",
    "GradientBuckets",
    "MpiCommunicator",
    "RingCommunicator",
    "World",
    "abort_on_error",
    "create",
]

BACKENDS = ("ring", "mpi")


def create(world: World, backend: str = "ring", *, timeout_s: float | None = None) -> Communicator:
    """The communicator of all ranks of ``world``. Collective: all ranks must call.

    Parameters
    ----------
    world : World
        One without MPI always gets the ring, which then has nothing to send.
    backend : {"ring", "mpi"}
        Our own ring, or MPI's collectives.
    timeout_s : float, optional
        Longest wait for another rank; by default ``NUMSTACK_COMM_TIMEOUT_S``, else 300.

    Raises
    ------
    ConfigError
        If there is no such back end.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r} is no communicator; take one of {', '.join(BACKENDS)}")
    if backend == "ring" or world.mpi is None:
        return RingCommunicator(world, timeout_s=timeout_s)
    return MpiCommunicator(world, timeout_s=timeout_s)
