"""A memory manager with nothing in it, in place of the one that other tests have filled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from numstack.device import current_device
from numstack.memory import MemoryManager


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryManager]:
    """The manager that ``numstack.memory`` uses in this test; everything must have come back at its end."""
    device = current_device()
    manager = MemoryManager(device)
    monkeypatch.setitem(device._state, MemoryManager, manager)
    yield manager
    manager.release_unused()
    left = manager.statistics()
    assert (left.live, left.reserved) == (0, 0), f"the test leaks:\n{left}"
