"""What ranks do in the tests: ``mpirun -n N python -m tests.comm.body ring mpi`` runs every check of some back ends.

A launch costs seconds, so it runs many checks, on any number of ranks. Rank 0 prints ``ok NAME`` once all ranks have
passed one; the first failure ends the launch, with the traceback of the rank it happened on. ``test_ranks.py`` and
``test_nccl_ranks.py`` make one test of each line. ``fake-nccl`` is NCCL's back end on ``fake_nccl.py``, without a GPU.
"""

from __future__ import annotations

import os
import sys
import tempfile

from numstack import comm
from numstack.comm.protocol import Communicator
from numstack.comm.world import World
from tests.comm import checks_data, checks_failure, checks_gradients, checks_nccl, fake_nccl  # noqa: F401
from tests.comm.helpers import checks

KINDS: dict[str, type[Communicator]] = {
    "ring": comm.RingCommunicator,
    "mpi": comm.MpiCommunicator,
    "nccl": comm.NcclCommunicator,
    "fake-nccl": comm.NcclCommunicator,
}


def names(backend: str) -> list[str]:
    """What a back end's checks print, in order."""
    return [f"{backend}.{name}" for name in checks(backend)]


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
