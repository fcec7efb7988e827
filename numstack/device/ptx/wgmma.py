"""wgmma: a warpgroup (four warps, the first a multiple of four) multiplies 64 x 16 by 16 x n, asynchronously.

``multiply(acc, a, b, keep)``: acc_64n = a b (+ acc if ``keep`` is 1); bf16 or fp16 in, float32 accumulators, n a
multiple of 8 up to 256. Descriptors say where and how the operands lie in shared memory, 128-byte swizzled as TMA
leaves them (``k_major``, ``make_mn_major``). In a group::

    fence()                                    # registers and shared memory written before are visible to it
    for k in range(4): multiply(acc, a + 2 * k, b + 2 * k, 1)
    commit()
    wait(acc)                                  # of make_wait(0, n // 2): acc may be read afterwards

Between ``fence`` and the wait nothing may touch acc; reading it earlier makes the assembler serialise everything
(C7514, C7517), which the build takes for a fault.

Accumulators, for warp w of the group and lane l, g = l // 4, t = l % 4: register i holds row 16 w + g + 8 (i // 2 % 2),
column 8 (i // 4) + 2 t + i % 2. A from registers, four of two 16-bit values for each k16: row g columns 2t, 2t+1; row
g + 8 the same; row g columns 2t + 8, 2t + 9; row g + 8 the same: the accumulators of n = 16 j.. packed by twos.

Descriptor: bits 0-13 address / 16, 16-29 leading offset / 16, 32-45 stride offset / 16, 62-63 swizzle (1 = 128
bytes, 2 = 64). The swizzle: address ^= ((address >> 7) & 7) << 4, addresses from a multiple of 1024; of 64 bytes & 3.

Source: PTX ISA 9.7.15 (asynchronous warpgroup matrix multiply-accumulate).
"""

import functools
from collections.abc import Callable
from typing import Any

from numba import cuda, float32, int32, uint32, uint64

from numstack.device.ptx.assembly import In, Index, InOut, Out, ptx

# Stride offset 1024 (eight rows of 128 bytes), leading offset unused (1), 128-byte swizzle.
_K_MAJOR = (1 << 62) | (1024 // 16 << 32) | (1 << 16)


@cuda.jit(device=True)
def k_major(address):  # type: ignore[no-untyped-def]
    """Descriptor of an operand whose rows (m or n) are 64 values of k, 128 bytes: a TMA box {64 k, rows}.

    The next 16 k are 2 further, the next 64 rows 512.
    """
    return uint64(_K_MAJOR) | uint64((address & uint32(0x3FFFF)) >> uint32(4))


@functools.cache
def make_mn_major(depth: int, width: int = 64) -> Any:
    """A function for the descriptor of an operand whose rows are 64 values of m or n: TMA boxes {64 mn, depth}.

    The boxes for the next 64 m or n follow one another, depth * 128 bytes each. The next 16 k are 128 further. The
    matching operand of :func:`make_multiply` is transposed. A ``width`` of 32 is for boxes {32 mn, depth}, swizzled by
    64 bytes: half of all these distances.
    """
    row = 2 * width
    swizzle = {128: 1, 64: 2}[row]
    bits = (swizzle << 62) | (8 * row // 16 << 32) | (depth * row // 16 << 16)

    @cuda.jit(device=True)
    def mn_major(address):  # type: ignore[no-untyped-def]
        return uint64(bits) | uint64((address & uint32(0x3FFFF)) >> uint32(4))

    return mn_major


def _multiply(n: int, dtype: str, operands: str, options: str, keep: str = "setp.ne.b32 keep, $keep, 0;") -> str:
    return (
        f"{{ .reg .pred keep; {keep} "
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{dtype}.{dtype} {{$acc}}, {operands}, keep, 1, 1{options}; }}"
    )


@functools.cache
def make_multiply(n: int, dtype: str, transpose_a: bool = False, transpose_b: bool = False) -> Callable[..., None]:
    """wgmma with both operands in shared memory; ``dtype`` is bf16 or f16, transposed operands are MN-major."""

    @ptx(_multiply(n, dtype, "$a, $b", f", {int(transpose_a)}, {int(transpose_b)}"), touches_memory=True, by_warp=True)
    def multiply(acc: InOut[float32, n // 2], a: uint64, b: uint64, keep: int32) -> None:
        """acc = a b, plus acc if keep is not 0; a and b are descriptors."""

    return multiply


@functools.cache
def make_first_multiply(
    n: int, dtype: str, transpose_a: bool = False, transpose_b: bool = False
) -> Callable[..., None]:
    """wgmma that begins a sum: what acc held before is of no interest, so its registers are free until then."""
    options = f", {int(transpose_a)}, {int(transpose_b)}"

    @ptx(_multiply(n, dtype, "$a, $b", options, "mov.pred keep, 0;"), touches_memory=True, by_warp=True)
    def multiply(acc: Out[float32, n // 2], a: uint64, b: uint64) -> None:
        """acc = a b; a and b are descriptors."""

    return multiply


@functools.cache
def make_multiply_registers(n: int, dtype: str, transpose_b: bool = False) -> Callable[..., None]:
    """wgmma with a in four registers a thread, of two 16-bit values each."""

    @ptx(_multiply(n, dtype, "{$a}, $b", f", {int(transpose_b)}"), touches_memory=True, by_warp=True)
    def multiply(acc: InOut[float32, n // 2], a: In[uint32, 4], first: Index, b: uint64, keep: int32) -> None:
        """acc = a b, plus acc if keep is not 0; a from element ``first`` of a local array on, b a descriptor."""

    return multiply


@ptx("wgmma.fence.sync.aligned;", touches_memory=True, by_warp=True)
def fence() -> None:
    """Order this thread's accesses to accumulators before the multiplications that follow."""


@ptx("wgmma.commit_group.sync.aligned;", touches_memory=True, by_warp=True)
def commit() -> None:
    """Close the group of the multiplications since the last one."""


@functools.cache
def make_wait(pending: int, n_registers: int = 0) -> Callable[..., None]:
    """A function that waits until at most ``pending`` of the latest groups are under way.

    With ``n_registers`` it takes the accumulators that are complete then, ``wait(acc)``: the compiler moves no use of
    them to before the wait, which a mere memory barrier does not forbid.
    """
    text = f"wgmma.wait_group.sync.aligned {pending};"
    if n_registers:

        @ptx(text, touches_memory=True, by_warp=True)
        def wait(acc: InOut[float32, n_registers]) -> None:
            """Wait for the groups that made acc."""

        return wait

    @ptx(text, touches_memory=True, by_warp=True)
    def wait_only() -> None:
        """Wait for groups."""

    return wait_only
