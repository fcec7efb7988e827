"""Where the blocks of a grid run, and which of them are near each other.

The multiprocessors of a GPC (16 or 18 of an H200's 132) reach the L2 cache together: what several of them ask for at
about the same time comes once. Blocks that follow one another run in the same GPC, but clusters are dealt out to the
GPCs in turn, so that neighbours in number share nothing. Which multiprocessors belong together differs from one GPU to
the next, and no driver tells; but a grid that is watched does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda, int32, uint8

from numstack.device.kernel import Kernel, kernel
from numstack.device.ptx import cluster

if TYPE_CHECKING:
    from numstack.device.base import Array, Device

PAIR = 2
SLEEP_NS = 50_000  # longer than a grid takes to start: no multiprocessor gets a second block


def _make_watch(blocks: int) -> Kernel:
    @kernel(name=f"places of clusters of {blocks}", cluster=blocks)
    def watch(multiprocessors_B: Any) -> None:
        memory = cuda.shared.array(0, uint8)
        if cuda.threadIdx.x == 0:
            multiprocessors_B[cuda.blockIdx.x] = int32(cluster.multiprocessor())
            memory[0] = uint8(0)
        cuda.nanosleep(SLEEP_NS)

    return watch


class Places:
    """Of the pairs of blocks (clusters of two) that fill a device: ``current_device().state(Places)``.

    Attributes
    ----------
    of_pairs_W : array of int32
        The place of each pair among all W, in an order in which pairs that follow one another are near each other. A
        permutation, whatever else the device was doing when it was watched.
    """

    def __init__(self, device: Device) -> None:
        singles, pairs = _watch(device, 1), _watch(device, PAIR)
        found = near_places(singles, pairs[::PAIR])
        region = device.allocate(found.nbytes)  # for good, as the table of tensor maps is
        self.of_pairs_W: Array = device.view(region.address, found.shape, found.dtype, owner=region)
        device.copy(self.of_pairs_W, found)
        device.synchronize()


def _watch(device: Device, blocks: int) -> np.ndarray[Any, Any]:
    """The multiprocessor of each block of a grid that has one block for each, in clusters of ``blocks``."""
    n = device.properties.multiprocessors // blocks * blocks
    seen_B = device.pinned((n,), np.int32)
    seen_B[:] = -1
    on_device = device.view(seen_B.ctypes.data, seen_B.shape, seen_B.dtype, owner=seen_B)
    _make_watch(blocks)[n, 32, None, device.properties.shared_bytes_per_block](on_device)
    device.synchronize()
    return seen_B


def near_places(in_order_B: np.ndarray[Any, Any], of_worker_W: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The place of each worker, if workers are sorted by when a single block came to their multiprocessor.

    Parameters
    ----------
    in_order_B : int array
        Multiprocessors of single blocks, which fill one GPC after the other.
    of_worker_W : int array
        Multiprocessor of each worker.
    """
    first = {int(multiprocessor): b for b, multiprocessor in reversed(list(enumerate(in_order_B)))}
    order = np.argsort([first.get(int(at), len(in_order_B)) for at in of_worker_W], kind="stable")
    places = np.empty(len(of_worker_W), np.int32)
    places[order] = np.arange(len(of_worker_W), dtype=np.int32)
    return places
