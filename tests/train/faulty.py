"""The example with something that goes wrong on purpose: ``python faulty.py FAULT [options of the example ...]``."""

from __future__ import annotations

import os
import resource
import runpy
import signal
import sys
import time
from typing import Any

import numstack.train
from numstack.train import checkpoint
from tests.train.conftest import EXAMPLE

RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
FAULT, STEP = sys.argv[1], 7

real_step, real_save = numstack.train.train_step, checkpoint.save
n_steps = 0


def train_step(*args: Any, **options: Any) -> float:
    """In the seventh step of one rank something happens."""
    global n_steps
    n_steps += 1
    if n_steps == STEP and RANK == 1:
        if FAULT == "raises":
            raise ZeroDivisionError(f"planted at {time.time()}")
        if FAULT == "is signalled":
            os.kill(os.getpid(), signal.SIGTERM)
    if n_steps == STEP and FAULT == "interrupt mpirun" and RANK == 0:
        os.kill(os.getppid(), signal.SIGINT)
    return real_step(*args, **options)


def save(*args: Any, **options: Any) -> Any:
    """The second checkpoint finds the disk full."""
    if FAULT == "full disk" and options["step"] > 5:
        print(f"planted at {time.time()}", flush=True)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    return real_save(*args, **options)


numstack.train.train_step = train_step
checkpoint.save = save
sys.argv = [EXAMPLE, *sys.argv[2:]]
runpy.run_path(EXAMPLE, run_name="__main__")
