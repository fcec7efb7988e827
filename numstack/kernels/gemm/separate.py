"""What a variant that multiplies two matrices, and no more, leaves to others: batches, sums of columns, the flag.

``separately(variant)`` is the variant with all of these, as launches of their own.
"""

import dataclasses

from numba import cuda

from numstack.device import Stream, current_device, kernel, widen
from numstack.kernels import reduce
from numstack.kernels.gemm.problem import Problem
from numstack.kernels.launch import ceil_div, flat
from numstack.kernels.variants import Variant

BLOCK = 256
WAVES = 8  # blocks a multiprocessor


@kernel(name="gemm.flag_nonfinite")
def _flag_nonfinite(c_N, flag_1):
    found = False
    for i in range(cuda.grid(1), c_N.size, cuda.gridsize(1)):
        value = widen(c_N[i])
        if value - value != value - value:  # infinity minus itself is NaN, which differs from itself
            found = True
    if found:
        cuda.atomic.or_(flag_1, 0, 1)


def separately(variant: Variant) -> Variant:
    """The variant, followed by what it leaves out."""

    def launch(problem: Problem, stream: Stream | None) -> None:
        for matrices in problem.matrices():
            variant.launch(matrices, stream)
        sum_columns(problem, stream)
        if problem.nonfinite is not None and problem.c.size:
            blocks = min(ceil_div(problem.c.size, BLOCK), WAVES * current_device().properties.multiprocessors)
            _flag_nonfinite[blocks, BLOCK, stream](flat(problem.c), problem.nonfinite)

    return dataclasses.replace(variant, launch=launch)


def sum_columns(problem: Problem, stream: Stream | None) -> None:
    """Sum the columns of c, if they are wanted, once it is there."""
    if problem.column_sums is not None:
        assert problem.workspace is not None
        workspace = problem.workspace[: reduce.sum_rows_workspace_size(problem.m, problem.n)]
        reduce.sum_rows(problem.c, problem.column_sums, workspace, accumulate=problem.accumulates_sums, stream=stream)


def workspace_size(m: int, n: int) -> int:
    """Elements (float32) that :func:`sum_columns` needs."""
    return reduce.sum_rows_workspace_size(m, n)
