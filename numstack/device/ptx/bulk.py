"""Bulk copies of plain memory: the copy engine moves bytes that lie side by side, with no tensor map.

Addresses and sizes are multiples of 16 bytes. Loads complete their bytes on an mbarrier; stores and additions belong to
bulk groups of the thread that asks, as those of ``tma``.

Source: PTX ISA 9.7.9.25 (cp.async.bulk, cp.reduce.async.bulk).
"""

from numba import uint32

from numstack.device.ptx.assembly import GlobalSource, GlobalTarget, Index, ptx


@ptx(
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$target], [$array], $nbytes, [$barrier];",
    touches_memory=True,
)
def load(array: GlobalSource, first: Index, target: uint32, nbytes: uint32, barrier: uint32) -> None:
    """Copy ``nbytes`` of an array from element ``first`` on into shared memory."""


@ptx("cp.async.bulk.global.shared::cta.bulk_group [$array], [$source], $nbytes;", touches_memory=True)
def store(array: GlobalTarget, first: Index, source: uint32, nbytes: uint32) -> None:
    """Copy ``nbytes`` of shared memory to an array from element ``first`` on."""


@ptx(
    "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [$array], [$source], $nbytes;",
    touches_memory=True,
)
def add_float32(array: GlobalTarget, first: Index, source: uint32, nbytes: uint32) -> None:
    """Add ``nbytes`` of float32 in shared memory to an array from element ``first`` on."""
