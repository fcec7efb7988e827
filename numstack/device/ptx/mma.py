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

``store_words``, ``store_pair`` and their inverses move what lanes hold of fragments, once neighbours are together.

Source: PTX ISA 9.0, "Matrix multiply-accumulate instructions" and "cp.async".
"""

import functools
from collections.abc import Callable

from numba import cuda, float32, int32, uint16, uint32

from numstack.device.ptx.assembly import GlobalSource, GlobalTarget, In, Index, InOut, Out, Several, SharedArray, ptx
from numstack.device.ptx.packing import high_bf16, high_f16, low_bf16, low_f16
from numstack.simt import collective

# What the instructions do on a CPU: a lane reads or writes its own row of shared memory, and registers change lanes in
# a collective function. ``rows_LW[8 i + r]`` are the four words of row r of block i, ``blocks_LN[l, i]`` is block i's
# register of lane l.


@collective(reads=(1,), writes=(0,))
def _spread(blocks_LN, rows_LW):  # type: ignore[no-untyped-def]  # compiled by numba, as kernels are
    for lane in range(32):
        for i in range(blocks_LN.shape[1]):
            blocks_LN[lane, i] = rows_LW[8 * i + lane // 4, lane % 4]


@collective(reads=(1,), writes=(0,))
def _spread_transposed(blocks_LN, rows_LW):  # type: ignore[no-untyped-def]
    for lane in range(32):
        column = lane // 4
        shift = uint32(16 * (column % 2))
        for i in range(blocks_LN.shape[1]):
            row = 8 * i + lane % 4 * 2
            low = (rows_LW[row, column // 2] >> shift) & uint32(0xFFFF)
            high = (rows_LW[row + 1, column // 2] >> shift) & uint32(0xFFFF)
            blocks_LN[lane, i] = low | (high << uint32(16))


@collective(reads=(1,), writes=(0,))
def _gather(rows_LW, blocks_LN):  # type: ignore[no-untyped-def]
    for lane in range(8 * blocks_LN.shape[1]):
        for word in range(4):
            rows_LW[lane, word] = blocks_LN[lane % 8 * 4 + word, lane // 8]


@collective(reads=(1,), writes=(0,))
def _gather_transposed(rows_LW, blocks_LN):  # type: ignore[no-untyped-def]
    for lane in range(8 * blocks_LN.shape[1]):
        block, row = lane // 8, lane % 8
        shift = uint32(16 * (row % 2))
        for word in range(4):
            low = (blocks_LN[8 * word + row // 2, block] >> shift) & uint32(0xFFFF)
            high = (blocks_LN[8 * word + 4 + row // 2, block] >> shift) & uint32(0xFFFF)
            rows_LW[lane, word] = low | (high << uint32(16))


@collective(reads=(0, 1, 2), writes=(0,))
def _multiply_bf16(c_LN, a_LN, b_LN):  # type: ignore[no-untyped-def]
    for lane in range(32):
        for i in range(4):
            row, column = lane // 4, lane % 4 * 2 + i % 2
            total = c_LN[lane, i]
            for k in range(8):
                a = a_LN[4 * row + k % 4, i // 2 + k // 4 * 2]
                b = b_LN[4 * column + k % 4, k // 4]
                total += low_bf16(a) * low_bf16(b) + high_bf16(a) * high_bf16(b)
            c_LN[lane, i] = total


@collective(reads=(0, 1, 2), writes=(0,))
def _multiply_f16(c_LN, a_LN, b_LN):  # type: ignore[no-untyped-def]
    for lane in range(32):
        for i in range(4):
            row, column = lane // 4, lane % 4 * 2 + i % 2
            total = c_LN[lane, i]
            for k in range(8):
                a = a_LN[4 * row + k % 4, i // 2 + k // 4 * 2]
                b = b_LN[4 * column + k % 4, k // 4]
                total += low_f16(a) * low_f16(b) + high_f16(a) * high_f16(b)
            c_LN[lane, i] = total


def _ldmatrix(count: int, *, transposed: bool) -> Callable[..., None]:
    spread = _spread_transposed if transposed else _spread

    def ldmatrix(registers: Out[uint32, count], first: Index, rows: SharedArray, element: Index) -> None:
        """Load 8 x 8 blocks of 16-bit elements from shared memory: block i into ``registers[first + i]``.

        ``rows[element]`` is where a row of 8 elements (16 bytes, aligned) starts: lane ``8 i + r`` names row r of
        block i; what lanes past the last block name is not used. Lane ``4 g + t`` gets elements 2t and 2t + 1 of row g;
        with ``_trans``, elements g of rows 2t and 2t + 1.

        PTX: ``ldmatrix.sync.aligned.m8n8.xN{.trans}.shared.b16``.
        """
        row = cuda.local.array(4, uint32)
        for i in range(4):
            row[i] = uint32(0)
            if cuda.laneid < 8 * count:
                at = element + 2 * i
                row[i] = uint32(rows[at]) | (uint32(rows[at + 1]) << uint32(16))
        spread(registers, first, count, row, 0, 4)

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
    gather = _gather_transposed if transposed else _gather

    def stmatrix(rows: SharedArray, element: Index, registers: In[uint32, count], first: Index) -> None:
        """Store 8 x 8 blocks of 16-bit elements to shared memory: block i from ``registers[first + i]``.

        The inverse of ``ldmatrix``: lane ``8 i + r`` names where row r of block i starts, ``rows[element]``. sm_90.

        PTX: ``stmatrix.sync.aligned.m8n8.xN{.trans}.shared.b16``.
        """
        row = cuda.local.array(4, uint32)
        gather(row, 0, 4, registers, first, count)
        if cuda.laneid < 8 * count:
            for i in range(4):
                rows[element + 2 * i] = row[i] & uint32(0xFFFF)
                rows[element + 2 * i + 1] = row[i] >> uint32(16)

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
    multiply = _multiply_bf16 if kind == "bf16" else _multiply_f16

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
        multiply(c, first_c, 4, a, first_a, 4, b, first_b, 2)

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
        for i in range(size // source.itemsize):
            if i * source.itemsize < nbytes:
                target[to + i] = source[at + i]
            else:
                target[to + i] = 0

    cp_async.__name__ = cp_async.__qualname__ = f"cp_async_{size}"
    cache = "cg" if size == 16 else "ca"
    return ptx(f"cp.async.{cache}.shared.global [$target], [$source], {size}, $nbytes;", touches_memory=True)(cp_async)


cp_async_4 = _cp_async(4)
cp_async_8 = _cp_async(8)
cp_async_16 = _cp_async(16)


@ptx("cp.async.commit_group;", touches_memory=True, is_nothing_on_cpu=True)
def cp_async_commit_group() -> None:
    """Make one group of the copies that this thread has started since the last one."""


@functools.cache
def cp_async_wait_group(n_pending: int) -> Callable[[], None]:
    """A function that waits until at most ``n_pending`` of this thread's latest groups of copies are under way."""

    def wait() -> None:
        """Wait for groups of copies."""

    wait.__name__ = wait.__qualname__ = f"cp_async_wait_group_{n_pending}"
    return ptx(f"cp.async.wait_group {n_pending};", touches_memory=True, is_nothing_on_cpu=True)(wait)


@ptx("st.global.v4.b32 [$target], {$words};", touches_memory=True)
def store_words(target: GlobalTarget, at: Index, words: In[uint32, 4], first: Index) -> None:
    """Store four registers of two 16-bit elements, 16 bytes (aligned), to an array of 16-bit integers."""
    for i in range(4):
        target[at + 2 * i] = uint16(words[first + i] & uint32(0xFFFF))
        target[at + 2 * i + 1] = uint16(words[first + i] >> uint32(16))


@ptx("ld.global.v4.b32 {$words}, [$source];", touches_memory=True)
def load_words(words: Out[uint32, 4], first: Index, source: GlobalSource, at: Index) -> None:
    """Load them: the inverse of ``store_words``."""
    for i in range(4):
        words[first + i] = uint32(source[at + 2 * i]) | (uint32(source[at + 2 * i + 1]) << uint32(16))


@ptx("st.global.v2.f32 [$target], {$x, $y};", touches_memory=True)
def store_pair(target: GlobalTarget, at: Index, x: float32, y: float32) -> None:
    """Store two float32, 8 bytes (aligned)."""
    target[at] = x
    target[at + 1] = y


@ptx("ld.global.v2.f32 {$result}, [$source];", touches_memory=True)
def load_pair(source: GlobalSource, at: Index) -> Several[float32, 2]:
    """Load them."""
    return source[at], source[at + 1]
