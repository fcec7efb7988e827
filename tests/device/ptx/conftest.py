"""The fixture of the tests of Hopper's instructions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from numstack.device import current_device, offline
from tests.device.ptx.support import Bench


@pytest.fixture
def hopper() -> Iterator[Bench]:
    """A Hopper GPU, or a stand-in that compiles for one."""
    device = current_device()
    if device.kind == "cuda" and device.properties.compute_capability == (9, 0):
        yield Bench(None)
    else:
        with offline.device("sm_90a") as stand_in:
            yield Bench(stand_in)
