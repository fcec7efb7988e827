"""The example on 1, 2 and 4 ranks of one GPU, through NCCL and the ring: the losses must be those of one rank.

``NUMSTACK_DEVICE=cuda python -m tests.comm.gpu_parity`` prints how far they are apart, and fails beyond 1e-4. On a
machine with several GPUs, ``NUMSTACK_RANKS_PER_GPU=1`` gives each rank its own. What it does not know goes to the
example: ``... -m tests.comm.gpu_parity --ranks 2 --layers 12 --width 768``.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from numstack.train import metrics
from tests.mpirun import ROOT, mpirun

ALLOWED = 1e-4
STEPS = 20


def losses(n: int, communicator: str, folder: Path, arguments: Sequence[str] = ()) -> np.ndarray:
    """The training loss of each of ``STEPS`` steps, with the same global batch on any number of ranks."""
    out = folder / f"{communicator}-{n}"
    program = [str(ROOT / "examples" / "train_gpt.py"), "--steps", str(STEPS), "--communicator", communicator]
    # A quarter of the default: with all of it, 20 steps are so wild that they blow up a rounding to 3e-3 of the loss.
    program += ["--learning-rate", "1e-3"]
    reports = ["--sample", "0", "--evaluate-windows", "16", "--out", str(out)]
    # Four ranks on one GPU, unless the caller has more of them.
    env = {"NUMSTACK_RANKS_PER_GPU": os.environ.get("NUMSTACK_RANKS_PER_GPU", "4")}
    finished = mpirun(n, *program, *reports, *arguments, timeout_s=280, env=env)
    assert finished.returncode == 0, finished.output
    found = np.array([row["loss"] for row in metrics.read(out / "metrics.jsonl") if "loss" in row])
    assert found.shape == (STEPS,) and np.isfinite(found).all(), found
    return found


def difference(got: np.ndarray, expected: np.ndarray) -> float:
    """The largest relative difference of any step."""
    return float(np.max(np.abs(got - expected) / np.abs(expected)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--communicators", nargs="+", default=["nccl", "ring"])
    options, arguments = parser.parse_known_args()
    worst = 0.0
    with tempfile.TemporaryDirectory() as directory:
        alone = losses(1, "auto", Path(directory), arguments)
        print(f"1 rank: loss {alone[0]:.6f} to {alone[-1]:.6f} in {STEPS} steps", flush=True)
        for communicator in options.communicators:
            for n in options.ranks:
                off = difference(losses(n, communicator, Path(directory), arguments), alone)
                worst = max(worst, off)
                print(f"{n} ranks, {communicator}: off by {off:.1e} of the loss at most", flush=True)
    if worst > ALLOWED:
        sys.exit(f"more than {ALLOWED:g}")


if __name__ == "__main__":
    main()
