"""Ranks that train together: the world a launcher made, collectives between its ranks, buckets of gradients.

>>> from numstack import comm
>>> world = comm.World.from_mpi()            # of one, if no launcher started this process
>>> comm.abort_on_error(world)               # one rank's exception ends all
>>> ranks = comm.create(world)
>>> event = ranks.allreduce(array, op="mean")          # doctest: +SKIP

Importing this touches no MPI and no NCCL. ``world`` who takes part; ``protocol`` what every communicator offers;
``peers`` how ranks agree on a call before data moves; ``nccl`` NVIDIA's collectives between GPUs, with a ``watchdog``;
``ring`` our own all-reduce, on any device; ``mpi`` the library's; ``buckets`` gradients.
"""

from numstack.comm import nccl_library
from numstack.comm.abort import abort_on_error
from numstack.comm.alone import AloneCommunicator
from numstack.comm.buckets import GradientBuckets
from numstack.comm.mpi import MpiCommunicator
from numstack.comm.nccl import NcclCommunicator
from numstack.comm.protocol import Communicator
from numstack.comm.ring import RingCommunicator
from numstack.comm.world import World
from numstack.device import current_device
from numstack.errors import CommError, ConfigError

__all__ = [
    "BACKENDS",
    "AloneCommunicator",
    "CommError",
    "Communicator",
    "GradientBuckets",
    "MpiCommunicator",
    "NcclCommunicator",
    "RingCommunicator",
    "World",
    "abort_on_error",
    "backends",
    "create",
]

BACKENDS = ("auto", "nccl", "ring", "mpi")


def backends() -> list[str]:
    """The back ends that can be used here, the best first."""
    on_gpu = current_device().kind == "cuda" and nccl_library.available()
    return ["nccl", "ring", "mpi"] if on_gpu else ["ring", "mpi"]


def create(world: World, backend: str = "auto", *, timeout_s: float | None = None) -> Communicator:
    """The communicator of all ranks of ``world``. Collective: all ranks must call.

    Parameters
    ----------
    world : World
        One of a single rank gets a communicator that has nothing to send, whatever ``backend`` says.
    backend : {"auto", "nccl", "ring", "mpi"}
        NCCL, for GPUs; our own ring, for any device; MPI's collectives. ``auto`` is NCCL on a GPU where nccl4py is
        installed, else the ring.
    timeout_s : float, optional
        Longest wait for another rank; by default ``NUMSTACK_COMM_TIMEOUT_S``, else 300.

    Raises
    ------
    ConfigError
        If there is no such back end, or it cannot be used on the current device.
    CommError
        If NCCL cannot be loaded.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend={backend!r} is no communicator; take one of {', '.join(BACKENDS)}")
    if world.size == 1:
        return AloneCommunicator(world, timeout_s=timeout_s)
    if backend == "auto":
        backend = backends()[0]
    if backend == "nccl" and current_device().kind != "cuda":
        raise ConfigError(
            f"backend='nccl' is for GPUs, but the device is {current_device().name}; take the ring, or set "
            "NUMSTACK_DEVICE=cuda"
        )
    if backend == "nccl":
        return NcclCommunicator(world, timeout_s=timeout_s)
    if backend == "ring":
        return RingCommunicator(world, timeout_s=timeout_s)
    return MpiCommunicator(world, timeout_s=timeout_s)
