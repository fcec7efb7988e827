"""The assembler's report and the occupancy arithmetic, against figures of NVIDIA's occupancy calculator."""

from __future__ import annotations

import pytest

from numstack.device.cuda.resources import Resources, parse_report

REPORT = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
ptxas         .     48 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem, 576 bytes cmem[0]
ptxas warning : Double precision instructions are used in 'k'
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
"""


def test_a_report_is_read_and_its_faults_are_named() -> None:
    resources = parse_report(REPORT)
    assert (resources.registers, resources.shared_bytes) == (168, 1024)
    assert (resources.stack_bytes, resources.spill_bytes) == (48, 40)
    faults = "\n".join(resources.faults())
    for words in ("C7510", "Double precision", "spills 40 bytes", "48 bytes of local memory"):
        assert words in faults


def test_a_clean_report_has_no_faults() -> None:
    clean = "ptxas info : Used 18 registers, used 0 barriers\nptxas . 0 bytes stack frame, 0 bytes spill stores"
    assert parse_report(clean).faults() == []


@pytest.mark.parametrize(
    ("registers", "shared", "threads", "capability", "occupancy"),
    [
        (32, 0, 256, (9, 0), 1.0),
        (64, 0, 256, (9, 0), 0.5),  # registers: 65536 / (64 * 256) = 4 blocks of 8 warps
        (168, 0, 384, (9, 0), 0.1875),  # one warp-specialised block
        (32, 49152, 256, (8, 0), 0.375),  # shared memory: 164 KiB / 49 KiB = 3 blocks
        (32, 0, 32, (8, 0), 0.5),  # 32 blocks of one warp
        (40, 0, 1024, (8, 6), 2 / 3),  # 1536 threads a multiprocessor
    ],
)
def test_occupancy(registers: int, shared: int, threads: int, capability: tuple[int, int], occupancy: float) -> None:
    resources = Resources(registers, shared, 0, 0, ())
    assert resources.occupancy(threads, capability) == pytest.approx(occupancy)
