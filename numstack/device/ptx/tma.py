"""TMA: the copy engine moves boxes of 2-D to 4-D arrays between global and shared memory, one thread asking.

The array is described by a tensor map (``device.tensor_map``, see ``numstack.device.cuda.tensor_map``), a kernel
argument that the kernel sees as a uint64 address. Coordinates count elements, innermost axis first; a box may hang
over the far edges: what is read there is zero, what is written there is dropped, and the bytes counted are the whole
box's. Only loads may start before an axis begins: a store or addition at a negative coordinate stops the GPU with an
illegal instruction, and so does any innermost coordinate that is no multiple of 16 bytes (both seen on an H200; of the
second, triton-lang/triton#7385).

Loads end by completing their bytes on an mbarrier. Stores read shared memory that threads wrote, so each writer does
``fence_async()`` and a barrier before one thread stores; they belong to bulk groups of that thread: ``commit()``, then
a function of ``make_wait(pending, reads_only)``. Tiles in shared memory start at multiples of 1024 bytes (swizzled) or
128 (not).

Source: PTX ISA 9.7.9.25 (cp.async.bulk.tensor, cp.reduce.async.bulk.tensor), 9.7.9.27 (prefetch).
"""

import functools
from collections.abc import Callable

from numba import int32, uint32, uint64

from numstack.device.ptx.assembly import SourceMap, TargetMap, ptx


@ptx(
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[$tile], [$array, {$x0, $x1}], [$barrier];",
    touches_memory=True,
)
def load_2d(array: SourceMap, tile: uint32, barrier: uint32, x0: int32, x1: int32) -> None:
    """Copy the box at these coordinates into shared memory; its bytes complete on ``barrier``."""


@ptx(
    "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[$tile], [$array, {$x0, $x1, $x2}], [$barrier];",
    touches_memory=True,
)
def load_3d(array: SourceMap, tile: uint32, barrier: uint32, x0: int32, x1: int32, x2: int32) -> None:
    """Copy the box at these coordinates into shared memory; its bytes complete on ``barrier``."""


@ptx(
    "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
    "[$tile], [$array, {$x0, $x1, $x2, $x3}], [$barrier];",
    touches_memory=True,
)
def load_4d(array: SourceMap, tile: uint32, barrier: uint32, x0: int32, x1: int32, x2: int32, x3: int32) -> None:
    """Copy the box at these coordinates into shared memory; its bytes complete on ``barrier``."""


@ptx("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [$array, {$x0, $x1}], [$tile];", touches_memory=True)
def store_2d(array: TargetMap, tile: uint32, x0: int32, x1: int32) -> None:
    """Copy a tile of shared memory to the box at these coordinates."""


@ptx(
    "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [$array, {$x0, $x1, $x2}], [$tile];",
    touches_memory=True,
)
def store_3d(array: TargetMap, tile: uint32, x0: int32, x1: int32, x2: int32) -> None:
    """Copy a tile of shared memory to the box at these coordinates."""


@ptx(
    "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [$array, {$x0, $x1, $x2, $x3}], [$tile];",
    touches_memory=True,
)
def store_4d(array: TargetMap, tile: uint32, x0: int32, x1: int32, x2: int32, x3: int32) -> None:
    """Copy a tile of shared memory to the box at these coordinates."""


@ptx(
    "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [$array, {$x0, $x1}], [$tile];",
    touches_memory=True,
)
def add_2d(array: TargetMap, tile: uint32, x0: int32, x1: int32) -> None:
    """Add a tile of shared memory to the box at these coordinates, in the array's dtype, in no fixed order."""


@ptx(
    "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.tile.bulk_group [$array, {$x0, $x1, $x2}], [$tile];",
    touches_memory=True,
)
def add_3d(array: TargetMap, tile: uint32, x0: int32, x1: int32, x2: int32) -> None:
    """Add a tile of shared memory to the box at these coordinates, in the array's dtype, in no fixed order."""


@ptx(
    "cp.reduce.async.bulk.tensor.4d.global.shared::cta.add.tile.bulk_group [$array, {$x0, $x1, $x2, $x3}], [$tile];",
    touches_memory=True,
)
def add_4d(array: TargetMap, tile: uint32, x0: int32, x1: int32, x2: int32, x3: int32) -> None:
    """Add a tile of shared memory to the box at these coordinates, in the array's dtype, in no fixed order."""


@ptx("cp.async.bulk.commit_group;", touches_memory=True)
def commit() -> None:
    """Close the bulk group of the stores that this thread asked for since the last one."""


@functools.cache
def make_wait(pending: int, *, reads_only: bool) -> Callable[[], None]:
    """A function that waits until at most ``pending`` of this thread's latest bulk groups are under way.

    With ``reads_only`` until they have read shared memory, so that it may be written again; else until what they wrote
    to global memory is complete.
    """
    read = ".read" if reads_only else ""

    @ptx(f"cp.async.bulk.wait_group{read} {pending};", touches_memory=True)
    def wait() -> None:
        """Wait for this thread's bulk groups."""

    return wait


@ptx("fence.proxy.async.shared::cta;", touches_memory=True)
def fence_async() -> None:
    """Let TMA and wgmma see what this thread wrote to shared memory; before the barrier that they are behind."""


@ptx("fence.proxy.async;", touches_memory=True)
def fence_async_all() -> None:
    """The same for shared and global memory: global memory written by stores, then read by TMA."""


@ptx("prefetch.tensormap [$array];", touches_memory=True)
def prefetch_map(array: SourceMap) -> None:
    """Bring a tensor map into the cache of the copy engine."""


@ptx("fence.proxy.tensormap::generic.acquire.sys [$array], 128;", touches_memory=True)
def acquire_map(array: uint64) -> None:
    """See a tensor map as the host wrote it: by each thread that uses it, or by one with a barrier before others do.

    CUDA's programming guide asks for it where maps lie in global memory: the copy engine may have cached what was
    there.
    """
