"""Which blocks of a grid are near each other."""

from __future__ import annotations

import numpy as np
import pytest

from numstack.device import current_device, offline
from numstack.device.places import Places, near_places

IS_HOPPER = current_device().kind == "cuda" and current_device().properties.compute_capability == (9, 0)


def test_workers_are_sorted_by_when_a_single_block_came_to_their_multiprocessor() -> None:
    in_order = np.array([6, 7, 0, 2, 4, 1, 3, 5])  # two singles, then GPCs {0, 2, 4} and {1, 3, 5}
    dealt_out = np.array([6, 0, 1, 2, 3, 4, 5, 7])
    assert near_places(in_order, dealt_out).tolist() == [0, 2, 5, 3, 6, 4, 7, 1]


@pytest.mark.parametrize("seen", [[0, 0, 0, 0], [3, 3, -1, 9], [-1, -1, -1, -1]])
def test_places_are_a_permutation_whatever_was_seen(seen: list[int]) -> None:
    for workers in ([0, 1, 2, 3], [5, 5, 5, 5]):
        assert sorted(near_places(np.array(seen), np.array(workers))) == [0, 1, 2, 3]


def test_what_watches_compiles_for_hopper() -> None:
    with offline.device("sm_90a") as device:
        places = device.state(Places)
        assert places.of_pairs_W.shape == (66,) and device.state(Places) is places
        assert [build.faults() for build in device.builds.values()] == [[], []]


def test_what_is_allocated_offline_is_aligned() -> None:
    with offline.device("sm_90a") as device:
        device.allocate(264)
        assert device.allocate(8).address % device.properties.alignment == 0


@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU: NUMSTACK_DEVICE=cuda runs it there")
def test_of_a_gpu() -> None:
    device = current_device()
    n = device.properties.multiprocessors // 2
    assert sorted(device.to_host(device.state(Places).of_pairs_W)) == list(range(n))
