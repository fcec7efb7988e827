"""Fixtures of the kernel tests."""

from collections.abc import Iterator

import pytest

from numstack.device import current_device


@pytest.fixture
def under_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Launches run under simt's checks: bounds, races, uninitialised reads, divergent barriers, non-finite values."""
    device = current_device()
    if device.kind != "cpu":
        pytest.skip("checks run on the CPU device: NUMSTACK_DEVICE=cpu runs this test")
    monkeypatch.setattr(device, "checks", True)
    yield
