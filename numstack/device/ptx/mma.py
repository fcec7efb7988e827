"""Tensor cores of sm_80 and later: ``mma.sync``, the loads and stores of its fragments, and copies into shared memory.

A *fragment* is a small matrix spread over the registers of a warp. In what follows a register is a ``uint32`` with two
16-bit elements (the low half first), ``g = lane // 4`` and ``t = lane % 4``. ``mma.sync`` takes 8 x 8 blocks of 16-bit
elements, each in one register of every lane:

===========  ================================  ============================================
block        register of a lane                that is what gives it
===========  ================================  ============================================
of A, of C   row g, columns 2t and 2t + 1      ``ldmatrix`` of rows of A
of B         rows 2t and 2t + 1, column g      ``ldmatrix`` of rows of B^T, or
                                               ``ldmatrix_trans`` of rows of B
===========  ================================  ============================================

Source: PTX ISA 9.0, "Matrix multiply-accumulate instructions" and "cp.async".
"""

import functools
from collections.abc import Callable
from typing import Any

from numba import float32, int32, uint32

from numstack.device.ptx.assembly import GlobalSource, In, Index, InOut, Out, SharedArray, ptx


def _ldmatrix(count: int, *, transposed: bool) -> Callable[..., None]:
    def ldmatrix(registers: Out[uint32, count], first: Index, rows: SharedArray, element: Index) -> None:
        """Load 8 x 8 blocks of 16-bit elements from shared memory: block i into ``registers[first + i]``.

        ``rows[element]`` is where a row of 8 elements (16 bytes, aligned) starts: lane ``8 i + r`` names row r of
        block i; what lanes past the last block name is not used. Lane ``4 g + t`` gets elements 2t and 2t + 1 of row g;
        with ``_trans``, elements g of rows 2t and 2t + 1.

        PTX: ``ldmatrix.sync.aligned.m8n8.xN{.trans}.shared.b16``.
        """

    suffix = "_trans" if transposed else ""
    ldmatrix.__name__ = ldmatrix.__qualname__ = f"ldmatrix_x{count}{suffix}"
    text = f"ldmatrix.sync.aligned.m8n8.x{count}{suffix.replace('_', '.')}.shared.b16 {{$registers}}, [$rows];"
    return ptx(text, touches_memory=True, by_warp=True)(ldmatrix)


ldmatrix_x1 = _ldmatrix(1, transposed=False)
ldmatrix_x2 = _ldmatrix(2, transposed=False)
ldmatrix_x4 = _ldmatrix(4, transposed=False)
ldmatrix_x1_trans = _ldmatrix(1, transposed=True)
ldmatrix_x2_trans = _ldmatrix(2, transposed=True)
ldmatrix_x4_trans = _ldmatrix(4, transposed=True)


def _stmatrix(count: int, *, transposed: bool) -> Callable[..., None]:
    def stmatrix(rows: SharedArray, element: Index, registers: In[uint32, count], first: Index) -> None:
        """Store 8 x 8 blocks of 16-bit elements to shared memory: block i from ``registers[first + i]``.

        The inverse of ``ldmatrix``: lane ``8 i + r`` names where row r of block i starts, ``rows[element]``. sm_90.

        PTX: ``stmatrix.sync.aligned.m8n8.xN{.trans}.shared.b16``.
        """

    suffix = "_trans" if transposed else ""
    stmatrix.__name__ = stmatrix.__qualname__ = f"stmatrix_x{count}{suffix}"
    text = f"stmatrix.sync.aligned.m8n8.x{count}{suffix.replace('_', '.')}.shared.b16 [$rows], {{$registers}};"
    return ptx(text, touches_memory=True, by_warp=True)(stmatrix)


stmatrix_x1 = _stmatrix(1, transposed=False)
stmatrix_x2 = _stmatrix(2, transposed=False)
stmatrix_x4 = _stmatrix(4, transposed=False)
stmatrix_x1_trans = _stmatrix(1, transposed=True)
stmatrix_x2_trans = _stmatrix(2, transposed=True)
stmatrix_x4_trans = _stmatrix(4, transposed=True)


def _mma_m16n8k16(kind: str) -> Callable[..., None]:
    def mma(
        c: InOut[float32, 4], first_c: Index, a: In[uint32, 4], first_a: Index, b: In[uint32, 2], first_b: Index
    ) -> None:
        """C += A B with tensor cores: A 16 x 16, B 16 x 8, C 16 x 8 in float32, each from its ``first`` register on.

        =========  =====================================
        register   row, column
        =========  =====================================
        a[0]       g,           2t and 2t + 1
        a[1]       g + 8,       2t and 2t + 1
        a[2]       g,           2t + 8 and 2t + 9
        a[3]       g + 8,       2t + 8 and 2t + 9
        b[0]       2t, 2t + 1;  g
        b[1]       2t + 8, 2t + 9;  g
        c[0..1]    g,           2t and 2t + 1
        c[2..3]    g + 8,       2t and 2t + 1
        =========  =====================================

        PTX: ``mma.sync.aligned.m16n8k16.row.col.f32.{bf16|f16}.{bf16|f16}.f32``.
        """

    mma.__name__ = mma.__qualname__ = f"mma_m16n8k16_{kind}"
    text = f"mma.sync.aligned.m16n8k16.row.col.f32.{kind}.{kind}.f32 {{$c}}, {{$a}}, {{$b}}, {{$c}};"
    return ptx(text, by_warp=True)(mma)


mma_m16n8k16_bf16 = _mma_m16n8k16("bf16")
mma_m16n8k16_f16 = _mma_m16n8k16("f16")


def _cp_async(size: int) -> Callable[..., None]:
    def cp_async(target: SharedArray, to: Index, source: GlobalSource, at: Index, nbytes: int32) -> None:
        """Start copying 4, 8 or 16 bytes from global to shared memory, both aligned to as many.

        Only the first ``nbytes`` are read; zeros take the place of the others. Wait with ``cp_async_wait_group``, then
        synchronise: other threads do not see the bytes before.

        PTX: ``cp.async.{ca|cg}.shared.global [target], [source], size, nbytes``; 16 bytes pass by the L1 cache.
        """

    cp_async.__name__ = cp_async.__qualname__ = f"cp_async_{size}"
    cache = "cg" if size == 16 else "ca"
    return ptx(f"cp.async.{cache}.shared.global [$target], [$source], {size}, $nbytes;", touches_memory=True)(cp_async)


cp_async_4 = _cp_async(4)
cp_async_8 = _cp_async(8)
cp_async_16 = _cp_async(16)


@ptx("cp.async.commit_group;", touches_memory=True)
def cp_async_commit_group() -> None:
    """Make one group of the copies that this thread has started since the last one."""


@functools.cache
def cp_async_wait_group(n_pending: int) -> Callable[[], None]:
    """A function that waits until at most ``n_pending`` of this thread's latest groups of copies are under way."""

    def wait() -> None:
        """Wait for groups of copies."""

    wait.__name__ = wait.__qualname__ = f"cp_async_wait_group_{n_pending}"
    made: Any = ptx(f"cp.async.wait_group {n_pending};", touches_memory=True)(wait)
    return made  # type: ignore[no-any-return]
