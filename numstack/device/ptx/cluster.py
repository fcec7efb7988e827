"""Clusters: blocks on neighbouring multiprocessors that share what the copy engine loads, and each other's barriers.

A kernel runs in clusters if it is made with ``kernel(cluster=n)``; the blocks of a cluster follow one another in x, and
their shared memory is laid out alike, so that an address of one's own names the same place in all.

Source: PTX ISA 9.7.9.25 (multicast), 9.7.8.25 (mapa), 9.7.9.11 (st), 9.7.13.15 (mbarrier.arrive on shared::cluster), 10
(%smid).
"""

from numba import float32, int32, uint16, uint32

from numstack.device.ptx.assembly import SourceMap, ptx


@ptx(
    "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
    "[$tile], [$array, {$x0, $x1}], [$barrier], $blocks;",
    touches_memory=True,
)
def load_2d(array: SourceMap, tile: uint32, barrier: uint32, blocks: uint16, x0: int32, x1: int32) -> None:
    """As ``tma.load_2d``, into the shared memory of every block whose bit is set, completing on its own barrier."""


@ptx(
    "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
    "[$tile], [$array, {$x0, $x1, $x2}], [$barrier], $blocks;",
    touches_memory=True,
)
def load_3d(array: SourceMap, tile: uint32, barrier: uint32, blocks: uint16, x0: int32, x1: int32, x2: int32) -> None:
    """The same of an array of three axes."""


@ptx(
    "{ .reg .b32 theirs; mapa.shared::cluster.u32 theirs, $barrier, $block; "
    "mbarrier.arrive.relaxed.cluster.shared::cluster.b64 _, [theirs]; }",
    touches_memory=True,
)
def arrive(barrier: uint32, block: uint32) -> None:
    """Arrive once at this barrier of another block of the cluster, or of one's own."""


@ptx("mov.u32 $result, %smid;", touches_memory=True)
def multiprocessor() -> uint32:
    """Number of the multiprocessor that runs this block."""


@ptx("mapa.shared::cluster.u32 $result, $address, $block;")
def address_of(address: uint32, block: uint32) -> uint32:
    """Where another block of the cluster, or one's own, has what lies at this address of one's own shared memory.

    What other functions do there must be between two barriers of the cluster: blocks begin and end at different times.
    """


@ptx("st.shared::cluster.f32 [$address], $x;", touches_memory=True)
def store_float32(address: uint32, x: float32) -> None:
    """x to an address of a block of the cluster."""


@ptx("ld.shared::cluster.u32 $result, [$address];", touches_memory=True)
def load_int32(address: uint32) -> int32:
    """The int32 at an address of a block of the cluster."""


@ptx(
    "{ .reg .pred p; setp.ne.u32 p, $condition, 0; @p st.shared::cluster.u32 [$address], $x; }",
    touches_memory=True,
)
def store_int32_if(condition: uint32, address: uint32, x: int32) -> None:
    """x to an address of a block of the cluster, if the condition is not 0."""


@ptx(
    "{ .reg .pred p; setp.ne.u32 p, $condition, 0; mov.u32 $result, 0xffffffff; "
    "@p atom.relaxed.cluster.shared::cluster.add.u32 $result, [$address], 1; }",
    touches_memory=True,
)
def count_if(condition: uint32, address: uint32) -> int32:
    """Add 1 to the int32 at an address of a block of the cluster, and return what it was; -1 if the condition is 0.

    Several of them are under way at once.
    """


@ptx(
    "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",
    touches_memory=True,
    by_warp=True,
)
def barrier() -> None:
    """Wait until all threads of all blocks of the cluster are here."""
