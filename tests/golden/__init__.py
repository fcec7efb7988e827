"""Expected values computed by others, kept in files so that `make test` needs none of the others.

``onnx.npz`` holds the backend node cases of the ONNX project (Apache-2.0) for the operations that numstack has;
``make_onnx.py`` writes it. Where NUMSTACK_ORACLES=1, ``test_golden.py`` collects the cases again from the installed
onnx and compares.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

ONNX_FILE = Path(__file__).with_name("onnx.npz")


class OnnxCase(NamedTuple):
    """One call of one ONNX operator, with the outputs that ONNX expects."""

    name: str
    attributes: dict[str, Any]
    inputs: list[np.ndarray]
    outputs: list[np.ndarray]


def _restored(array: np.ndarray) -> np.ndarray:
    """An array of the file; the format knows no bfloat16 and keeps its two bytes as they are."""
    return array.view(ml_dtypes.bfloat16) if array.dtype == np.dtype("V2") else array


@cache
def _read_onnx() -> dict[str, list[OnnxCase]]:
    cases: dict[str, list[OnnxCase]] = {}
    with np.load(ONNX_FILE, allow_pickle=False) as file:
        for entry in json.loads(str(file["index"])):
            name = entry["name"]
            inputs = [_restored(file[f"{name}/input{i}"]) for i in range(entry["n_inputs"])]
            outputs = [_restored(file[f"{name}/output{i}"]) for i in range(entry["n_outputs"])]
            cases.setdefault(entry["operator"], []).append(OnnxCase(name, entry["attributes"], inputs, outputs))
    return cases


def onnx_cases(operator: str) -> list[OnnxCase]:
    """The cases of one operator ("Gemm", ...), for ``pytest.mark.parametrize(..., ids=lambda case: case.name)``."""
    return _read_onnx()[operator]
