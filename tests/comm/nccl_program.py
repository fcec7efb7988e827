"""A program that trains, as far as NCCL can tell, until rank 1 goes: ``exit``, ``raise``, ``kill`` or ``sleep``.

``mpirun -n 2 python -m tests.comm.nccl_program kill [--fake]``
"""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np

from numstack import comm
from numstack.device import current_device
from tests.comm import fake_nccl
from tests.support import to_device


def go(how: str) -> None:
    """Leave in one of the ways in which ranks do."""
    if how == "exit":
        sys.exit(3)
    if how == "raise":
        raise ValueError("planted")
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(600)


def main() -> None:
    world = comm.World.from_mpi()
    comm.abort_on_error(world)
    if "--fake" in sys.argv:
        fake_nccl.install()
    ranks = comm.NcclCommunicator(world)
    gradients = to_device(np.ones(1000, np.float32))
    for step in range(100):
        if step == 10 and world.rank == 1:
            go(sys.argv[1])
        current_device().default_stream.wait(ranks.allreduce(gradients, op="mean"))
        current_device().synchronize()
    print("never reached by rank 0")


if __name__ == "__main__":
    main()
