"""What a kernel takes from a multiprocessor, by the assembler's report, and the occupancy that leaves."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Of a multiprocessor, by compute capability: threads, blocks, shared memory in bytes (programming guide, table 30).
LIMITS = {
    (8, 0): (2048, 32, 167_936),
    (8, 6): (1536, 16, 102_400),
    (8, 9): (1536, 24, 102_400),
    (9, 0): (2048, 32, 233_472),
    (10, 0): (2048, 32, 233_472),
    (12, 0): (1536, 24, 102_400),
}
REGISTERS_PER_MULTIPROCESSOR = 65_536
# Granularity of allocation: registers by warp, shared memory by block with 1 KiB kept by the system.
REGISTER_UNIT = 256
SHARED_UNIT = 128
SHARED_RESERVED = 1024

# Warnings of ptxas that mean a slow path: register budgets ignored, wgmma serialised.
SLOW_PATH_WARNINGS = ("C7508", *(f"C75{n}" for n in range(10, 30)))


@dataclass(frozen=True, slots=True)
class Resources:
    """A kernel's use of registers and memory, and what the assembler warned of.

    Attributes
    ----------
    registers : int
        A thread.
    shared_bytes : int
        Static shared memory of a block.
    stack_bytes, spill_bytes : int
        Local memory of a thread: declared arrays that did not fit registers, and spills (stores and loads).
    warnings : tuple of str
        Lines of the assembler that mean a slow path, or float64 arithmetic.
    """

    registers: int
    shared_bytes: int
    stack_bytes: int
    spill_bytes: int
    warnings: tuple[str, ...]

    def faults(self) -> list[str]:
        """Why the kernel is not fit to be shipped; empty if it is."""
        found = list(self.warnings)
        if self.spill_bytes:
            found.append(f"spills {self.spill_bytes} bytes of registers")
        if self.stack_bytes:
            found.append(f"uses {self.stack_bytes} bytes of local memory a thread")
        return found

    def blocks_per_multiprocessor(
        self, threads: int, compute_capability: tuple[int, int], shared_bytes: int = 0
    ) -> int:
        """Blocks of ``threads`` that fit a multiprocessor, with ``shared_bytes`` of dynamic shared memory each."""
        most_threads, most_blocks, most_shared = LIMITS[compute_capability]
        n_warps = -(-threads // 32)
        registers = _round_up(max(self.registers, 1) * 32, REGISTER_UNIT) * n_warps
        shared = _round_up(self.shared_bytes + shared_bytes + SHARED_RESERVED, SHARED_UNIT)
        return min(
            most_blocks,
            most_threads // (n_warps * 32),
            REGISTERS_PER_MULTIPROCESSOR // registers,
            most_shared // shared,
        )

    def occupancy(self, threads: int, compute_capability: tuple[int, int], shared_bytes: int = 0) -> float:
        """Resident threads as a fraction of the most a multiprocessor can hold."""
        blocks = self.blocks_per_multiprocessor(threads, compute_capability, shared_bytes)
        return blocks * _round_up(threads, 32) / LIMITS[compute_capability][0]


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def parse_report(report: str) -> Resources:
    """Read what ``ptxas -v`` printed through nvJitLink."""

    def number(pattern: str) -> int:
        found = re.search(pattern, report)
        return int(found.group(1)) if found else 0

    warnings = []
    for line in report.splitlines():
        slow = any(code in line for code in SLOW_PATH_WARNINGS)
        if slow or ("warning" in line.lower() and "double" in line.lower()):
            warnings.append(" ".join(line.split()))
    return Resources(
        registers=number(r"Used (\d+) registers"),
        shared_bytes=number(r"(\d+) bytes smem"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
        warnings=tuple(warnings),
    )
