"""Counters in global memory by which blocks take turns.

Source: PTX ISA 8.9 (memory consistency model), 9.7.9.8 (ld), 9.7.9.11 (st).
"""

from numba import int32

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
