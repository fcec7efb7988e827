"""What PyTorch says about the kernels: from torch_kernels.npz, or computed now where NUMSTACK_ORACLES=1."""

import os
from functools import cache
from pathlib import Path

import numpy as np

FILE = Path(__file__).with_name("torch_kernels.npz")

LAYERNORM_EPS = 1e-5
IGNORED = -1
ADAMW = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "decay": 0.1}


@cache
def _cases() -> dict[str, dict[str, np.ndarray]]:
    if os.environ.get("NUMSTACK_ORACLES") == "1":
        from tests.golden.make_torch_kernels import collect

        return collect()
    cases: dict[str, dict[str, np.ndarray]] = {}
    with np.load(FILE, allow_pickle=False) as file:
        for key in file.files:
            case, name = key.split("/")
            cases.setdefault(case, {})[name] = file[key]
    return cases


def torch_case(name: str) -> dict[str, np.ndarray]:
    """The arrays of one case of make_torch_kernels.py, float32 inputs and float64 results."""
    return _cases()[name]
