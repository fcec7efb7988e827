"""New memory holds NaN in every test of this folder, so that nothing passes by what happened to lie there."""

import numpy as np
import pytest

from numstack import memory
from numstack.device import current_device
from tests.support import poisoned


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    empty = memory.empty

    def poison(shape, dtype, **options):
        array = empty(shape, dtype, **options)
        current_device().copy(array, poisoned(array.shape, array.dtype))
        current_device().synchronize()
        return array

    monkeypatch.setattr(memory, "empty", poison)


@pytest.fixture
def rng():
    return np.random.default_rng(0)
