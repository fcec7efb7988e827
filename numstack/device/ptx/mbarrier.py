"""mbarriers: 64-bit words in shared memory on which threads wait until arrivals, and bytes of copies, are complete.

A barrier goes through phases. A phase ends when the threads it was made for have arrived and all bytes that were
announced have landed; ``wait(barrier, parity)`` returns once the phase of that parity is over. At the start phase 0 is
under way, so that waiting for parity 1 returns at once: producers of a ring wait for ``empty`` barriers beginning with
parity 1, consumers for ``full`` ones beginning with parity 0. All addresses are of shared memory
(``integers.shared_address``), multiples of 8.

Source: PTX ISA 9.7.13.15.
"""

from numba import uint32

from numstack.device.ptx.assembly import ptx


@ptx("mbarrier.init.shared::cta.b64 [$barrier], $arrivals;", touches_memory=True)
def init(barrier: uint32, arrivals: uint32) -> None:
    """Make a barrier whose phases take this many arrivals; one thread does, then ``fence_init`` and a syncthreads."""


@ptx("fence.mbarrier_init.release.cluster;", touches_memory=True)
def fence_init() -> None:
    """Let the copy engine, and other blocks of the cluster, see barriers that this thread made."""


@ptx("mbarrier.arrive.release.cta.shared::cta.b64 _, [$barrier];", touches_memory=True)
def arrive(barrier: uint32) -> None:
    """Arrive once: what this thread read and wrote before is over for whoever waits."""


@ptx("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [$barrier];", touches_memory=True)
def arrive_when_copied(barrier: uint32) -> None:
    """Arrive once, when all copies that this thread has started by ``mma.cp_async_16`` and its like are over."""


@ptx("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [$barrier], $nbytes;", touches_memory=True)
def arrive_and_expect(barrier: uint32, nbytes: uint32) -> None:
    """Arrive once, and let the phase wait for ``nbytes`` of copies as well; before the copies start."""


@ptx("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [$barrier], $nbytes;", touches_memory=True)
def expect(barrier: uint32, nbytes: uint32) -> None:
    """Let the phase wait for ``nbytes`` of copies, without arriving."""


@ptx(
    """{
    .reg .pred done;
    again_${:uid}:
    mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [$barrier], $parity;
    @done bra over_${:uid};
    bra again_${:uid};
    over_${:uid}:
    }""",
    touches_memory=True,
)
def wait(barrier: uint32, parity: uint32) -> None:
    """Wait until the phase of this parity is over, and see what it waited for."""


@ptx(
    """{
    .reg .pred done;
    mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 done, [$barrier], $parity;
    selp.u32 $result, 1, 0, done;
    }""",
    touches_memory=True,
)
def try_wait(barrier: uint32, parity: uint32) -> uint32:
    """Wait a little; 1 if the phase of this parity is over."""
