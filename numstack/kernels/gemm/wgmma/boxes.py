"""Boxes of matrices, or of matrix z of a batch, moved by the copy engine."""

from functools import cache
from typing import Any, NamedTuple

from numba import cuda, uint16

from numstack.device.ptx import cluster, tma


class Boxes(NamedTuple):
    """Device functions that take a tensor map, an address in shared memory, column, row and matrix of a box."""

    load: Any  # (array, tile, barrier, x, y, z)
    load_for_pair: Any  # the same into the shared memory of both blocks of a cluster
    store: Any  # (array, tile, x, y, z)
    add: Any


@cache
def make_boxes(is_batch: bool) -> Boxes:
    """Those for batches, or for single matrices, which have no z."""

    @cuda.jit(device=True)
    def load(array, tile, barrier, x, y, z):
        if is_batch:
            tma.load_3d(array, tile, barrier, x, y, z)
        else:
            tma.load_2d(array, tile, barrier, x, y)

    @cuda.jit(device=True)
    def load_for_pair(array, tile, barrier, x, y, z):
        if is_batch:
            cluster.load_3d(array, tile, barrier, uint16(3), x, y, z)
        else:
            cluster.load_2d(array, tile, barrier, uint16(3), x, y)

    def from_shared(move_2d: Any, move_3d: Any) -> Any:
        @cuda.jit(device=True)
        def move(array, tile, x, y, z):
            if is_batch:
                move_3d(array, tile, x, y, z)
            else:
                move_2d(array, tile, x, y)

        return move

    store, add = from_shared(tma.store_2d, tma.store_3d), from_shared(tma.add_2d, tma.add_3d)
    return Boxes(load, load_for_pair, store, add)
