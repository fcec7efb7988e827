"""On a GPU, ranks train as one rank does, through NCCL and through the ring."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from numstack.device import current_device
from tests.comm.gpu_parity import ALLOWED, difference, losses

pytestmark = pytest.mark.skipif(
    current_device().kind != "cuda",
    reason="needs a GPU: NUMSTACK_DEVICE=cuda python -m pytest tests/comm/test_gpu_parity.py",
)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> np.ndarray:
    return losses(1, "auto", tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("n", [2, 4])
@pytest.mark.parametrize("communicator", ["nccl", "ring"])
def test_losses_are_those_of_one_rank(alone: np.ndarray, communicator: str, n: int, tmp_path: Path) -> None:
    assert difference(losses(n, communicator, tmp_path), alone) <= ALLOWED
