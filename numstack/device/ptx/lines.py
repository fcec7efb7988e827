"""Lines that the second cache keeps while a kernel works on them, and no longer.

What a kernel reads, changes and writes back goes through the second cache twice. Read as lines that are given up last
(``kept``), and written as lines like any other (``released``), it is as many bytes from and to memory, but they move
in 1.7% less time (``numstack.kernels.adamw`` has figures). Lines that are kept and not released outlive the kernel, in
the way of what works in the cache next: a kernel must write all that it reads so.

The functions take float32 in global memory, aligned to 16 bytes; indices and registers are as in ``vectors``.

Source: PTX ISA 9.7.9.8 (ld), 9.7.9.11 (st), 9.7.9.18 (createpolicy).
"""

from numba import cuda, float32

from numstack.device.ptx.assembly import GlobalSource, GlobalTarget, In, Index, Out, ptx


@ptx(
    "{ .reg .b64 policy; createpolicy.fractional.L2::evict_last.b64 policy, 1.0; "
    "ld.global.L2::cache_hint.v4.f32 {$values}, [$x], policy; }",
    touches_memory=True,
)
def load4_kept(x: GlobalSource, i: Index, values: Out[float32, 4], first: Index) -> None:
    """values[first : first + 4] = elements i to i + 3 of x, whose line is kept."""
    for k in range(4):
        values[first + k] = x[i + k]


@ptx(
    "{ .reg .b64 policy; createpolicy.fractional.L2::evict_normal.b64 policy, 1.0; "
    "st.global.L2::cache_hint.v4.f32 [$x], {$values}, policy; }",
    touches_memory=True,
)
def store4_released(x: GlobalTarget, i: Index, values: In[float32, 4], first: Index) -> None:
    """Elements i to i + 3 of x = values[first : first + 4], and their line is released."""
    for k in range(4):
        x[i + k] = values[first + k]


@cuda.jit(device=True)
def load8_kept(x, i, values, first):
    """values[first : first + 8] = elements i to i + 7 of x, whose line is kept."""
    load4_kept(x, i, values, first)
    load4_kept(x, i + 4, values, first + 4)
