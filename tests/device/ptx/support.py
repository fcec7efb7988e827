"""Hopper's instructions run where there is a Hopper GPU; elsewhere the tests compile them, and then skip."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from numstack.device import offline
from tests.support import to_device, to_host

COMMAND = "NUMSTACK_DEVICE=cuda python -m pytest tests/device/ptx"


class Bench:
    """Arrays for the device that kernels are launched on."""

    def __init__(self, offline_device: offline.OfflineDevice | None) -> None:
        self._offline = offline_device

    def array(self, host: np.ndarray) -> Any:
        """``host`` on the device; only its shape and dtype where there is none."""
        return to_device(host) if self._offline is None else self._offline.array(host.shape, host.dtype)

    def result(self, array: Any) -> np.ndarray:
        """A host copy of what the kernel wrote; without a Hopper GPU the test ends here."""
        if self._offline is None:
            return to_host(array)
        faults = {build.kernel: build.faults() for build in self._offline.builds.values() if build.faults()}
        assert not faults, faults
        assert self._offline.builds
        pytest.skip(f"compiles; running it needs a Hopper GPU: {COMMAND}")
