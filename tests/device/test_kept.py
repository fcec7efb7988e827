"""numstack.device.kept."""

from __future__ import annotations

from numstack.device import current_device
from numstack.device.kept import Kept
from tests.support import to_host


def test_arrays_are_zero_at_first_and_kept() -> None:
    kept = current_device().state(Kept)
    array = kept.zeros("test of kept", 5)
    assert to_host(array).tolist() == [0] * 5
    current_device().fill(array, 7)
    assert to_host(kept.zeros("test of kept", 5)).tolist() == [7] * 5
    assert to_host(kept.zeros("test of kept", 4)).tolist() == [0] * 4
    assert to_host(kept.zeros("another test of kept", 5)).tolist() == [0] * 5
