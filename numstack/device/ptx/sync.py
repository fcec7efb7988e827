"""Roles within a block: register budgets, named barriers, one lane of a warp, clusters; and kernels that overlap.

Source: PTX ISA 9.7.13 (barrier, elect, griddepcontrol), 9.7.19 (setmaxnreg).
"""

import functools
from collections.abc import Callable

from numba import cuda, uint32

from numstack.device.ptx.assembly import ptx


@functools.cache
def make_set_registers(change: str, count: int) -> Callable[[], None]:
    """A function by which a warpgroup gives registers back ("dec") or takes more ("inc"): ``count`` a thread.

    All warps of a warpgroup call it, each role in its own branch. A multiple of 8 from 24 to 240; a kernel of 384
    threads has 168 at entry, so that 24 for one warpgroup and 240 for two is exact: with less given back than taken
    they wait for ever.
    """

    @ptx(f"setmaxnreg.{change}.sync.aligned.u32 {count};", touches_memory=True, by_warp=True)
    def set_registers() -> None:
        """Change this warpgroup's registers."""

    return set_registers


@functools.cache
def make_barrier(number: int, threads: int) -> Callable[[], None]:
    """A function that waits until ``threads`` threads (whole warps) are at barrier ``number``, 1 to 15.

    Number 0 is ``cuda.syncthreads()``'s. The number is part of the instruction: in a register it costs all sixteen.
    """

    @ptx(f"bar.sync {number}, {threads};", touches_memory=True, by_warp=True)
    def barrier() -> None:
        """Wait at a named barrier."""

    return barrier


@functools.cache
def make_barrier_arrive(number: int, threads: int) -> Callable[[], None]:
    """A function that counts this warp at barrier ``number`` of ``threads`` threads without waiting there."""

    @ptx(f"bar.arrive {number}, {threads};", touches_memory=True, by_warp=True)
    def arrive() -> None:
        """Arrive at a named barrier."""

    return arrive


@functools.cache
def make_numbered_barrier(threads: int) -> Callable[[int], None]:
    """A function that waits until ``threads`` threads (whole warps) are at barrier ``number``, 1 to 15, of the block.

    For groups of warps that do the same, each with a barrier of its own. A block then takes all sixteen barriers of its
    multiprocessor, so that there is no other beside it. On a CPU all threads wait, so all must come equally often.
    """

    @ptx(f"bar.sync $number, {threads};", touches_memory=True, by_warp=True)
    def barrier(number: uint32) -> None:
        """Wait at a barrier."""
        cuda.syncthreads()

    return barrier  # type: ignore[no-any-return]


@ptx(
    "{ .reg .pred chosen; elect.sync _|chosen, 0xffffffff; selp.u32 $result, 1, 0, chosen; }",
    touches_memory=True,
    by_warp=True,
)
def elect() -> uint32:
    """1 on one lane of the warp, 0 on the others; the compiler knows that one lane follows."""


@ptx("shfl.sync.idx.b32 $result, $x, 0, 31, 0xffffffff;", by_warp=True)
def uniform(x: uint32) -> uint32:
    """The first lane's x: the same in all lanes, and the compiler may keep it in a register of the whole warp."""


@ptx(
    "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;",
    touches_memory=True,
    by_warp=True,
)
def cluster_barrier() -> None:
    """Wait until all threads of all blocks of the cluster are here."""


@ptx(
    "{ .reg .pred is_last; .reg .u32 n, left, x, y, z; "
    "mov.u32 y, %nctaid.y; mov.u32 z, %nctaid.z; mul.lo.u32 left, y, z; "
    "mov.u32 x, %nctaid.x; mul.lo.u32 left, left, x; "
    "mov.u32 z, %ctaid.z; mov.u32 n, %ctaid.y; mad.lo.u32 n, z, y, n; "
    "mov.u32 z, %ctaid.x; mad.lo.u32 n, n, x, z; sub.u32 left, left, n; "
    "setp.le.u32 is_last, left, 8192; @is_last griddepcontrol.launch_dependents; }",
    touches_memory=True,
    is_nothing_on_cpu=True,
)
def let_next_kernel_start() -> None:
    """Let blocks of the next kernel on the stream start, if it may start early, once all of this one's have.

    They take what room is left, and wait for the end of this kernel: what is saved is the time that it takes to start
    them. From Hopper on. Only the last 8,192 blocks say so (``griddepcontrol.launch_dependents``), more than a GPU has
    at once; those before are over by then. If each says it, blocks start at half the rate: on an H200 0.8 instead of
    1.6 a nanosecond.
    """


@ptx("griddepcontrol.wait;", touches_memory=True, is_nothing_on_cpu=True)
def wait_for_kernel_before() -> None:
    """Wait until the kernel before this one on the stream is over, and see what it wrote. From Hopper on."""
