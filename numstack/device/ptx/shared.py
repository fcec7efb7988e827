"""Accesses to shared memory by 32-bit address: several words at once, and matrices from registers.

Kernels that lay out dynamic shared memory themselves have addresses (``integers.shared_address``), not indices.

Source: PTX ISA 9.7.9.8 (ld), 9.7.9.11 (st), 9.7.14.5.16 (stmatrix).
"""

from numba import float32, uint32

from numstack.device.ptx.assembly import In, Index, Out, Several, ptx


@ptx("ld.shared.b32 $result, [$address];", touches_memory=True)
def load(address: uint32) -> uint32:
    """One word; the address is a multiple of 4."""


@ptx("st.shared.f32 [$address], $x;", touches_memory=True)
def store(address: uint32, x: float32) -> None:
    """One float; the address is a multiple of 4."""


@ptx("ld.shared.v2.f32 {$result}, [$address];", touches_memory=True)
def load2(address: uint32) -> Several[float32, 2]:
    """Two neighbours; the address is a multiple of 8."""


@ptx("st.shared.v4.f32 [$address], {$values};", touches_memory=True)
def store4(address: uint32, values: In[float32, 4], first: Index) -> None:
    """``values[first : first + 4]``; the address is a multiple of 16."""


@ptx("stmatrix.sync.aligned.m8n8.x4.shared.b16 [$row], {$registers};", touches_memory=True, by_warp=True)
def store_matrices(row: uint32, registers: In[uint32, 4], first: Index) -> None:
    """Four 8 x 8 matrices of 16-bit elements: lane 8 i + r says where row r of matrix i starts, 16 bytes aligned."""


@ptx("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {$registers}, [$row];", touches_memory=True, by_warp=True)
def load_matrices(row: uint32, registers: Out[uint32, 4], first: Index) -> None:
    """The inverse of ``store_matrices``: lane 4 g + t gets elements 2t and 2t + 1 of row g of each."""


@ptx("st.shared.v2.f32 [$address], {$x, $y};", touches_memory=True)
def store2(address: uint32, x: float32, y: float32) -> None:
    """Two neighbours; the address is a multiple of 8."""
