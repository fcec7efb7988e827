"""Counters in global memory by which blocks take turns, and meet.

Source: PTX ISA 8.9 (memory consistency model), 9.7.9.8 (ld), 9.7.9.11 (st), 9.7.13.6 (atom).
"""

from numba import int32, uint32

from numstack.device.ptx.assembly import GlobalSource, GlobalTarget, Index, ptx


@ptx(
    """{
    .reg .pred other;
    .reg .b32 seen;
    again_${:uid}:
    ld.acquire.gpu.global.b32 seen, [$counters];
    setp.ne.s32 other, seen, $value;
    @other bra again_${:uid};
    fence.proxy.async.global;
    }""",
    touches_memory=True,
)
def wait_until_equal(counters: GlobalSource, index: Index, value: int32) -> None:
    """Wait until a counter has this value, and see what was written before it was set, bulk copies included."""


@ptx("fence.proxy.async.global; st.release.gpu.global.b32 [$counters], $value;", touches_memory=True)
def set_after(counters: GlobalTarget, index: Index, value: int32) -> None:
    """Set a counter once all this thread wrote before, its completed bulk copies included, can be seen by all."""


@ptx(
    """{
    .reg .pred is_first, over;
    .reg .b32 x, now;
    setp.eq.u32 is_first, $block, 0;
    sub.u32 x, 0x80000001, $blocks;
    selp.b32 x, x, 1, is_first;
    red.add.release.gpu.global.u32 [$counters], x;
    again_${:uid}:
    ld.acquire.gpu.global.u32 now, [$counters];
    shr.u32 now, now, 31;
    setp.ne.u32 over, now, $met;
    @!over bra again_${:uid};
    }""",
    touches_memory=True,
)
def meet(counters: GlobalTarget, index: Index, blocks: uint32, block: uint32, met: uint32) -> None:
    """Wait until one thread of each of ``blocks`` blocks is here, and see what they wrote before.

    All of the blocks must run at once. The counter begins at 0; whenever all have met, its highest bit has changed and
    the others are 0 again, so that it serves the next time as it is.
    """


@ptx("{ .reg .b32 now; ld.relaxed.gpu.global.u32 now, [$counters]; shr.u32 $result, now, 31; }", touches_memory=True)
def times_met(counters: GlobalSource, index: Index) -> uint32:
    """How often blocks have met at a counter, but for multiples of 2: 0 or 1."""
