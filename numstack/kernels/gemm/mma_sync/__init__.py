"""The rung for tensor cores from sm_80 on: ``mma.sync`` on tiles that ``cp.async`` brings in ahead of time.

======================  ===============================================================================================
file                    what is in it
======================  ===============================================================================================
``cut``                 which tiles, and how many parts along k, a product is cut into
``copies``              how tiles lie in shared memory, and how they get there
``steps``               in which order a warp multiplies, loads fragments and starts copies
``kernel``              the kernel: from tile to tile, from stage to stage
``epilogue``            bias, GELU, residual..., and c's way out of registers
``gather``              the second kernel, which adds the parts of a product that was cut along k
======================  ===============================================================================================

A block computes tiles of c, one after another. Their operands come through a ring of stages in shared memory: while the
warps multiply one stage, the copies of the following ones are under way, also those of the next tile, and fragments are
loaded into registers just as those before them are used up::

    global --cp.async--> stage 0 | stage 1 | stage 2 | stage 3 --ldmatrix--> fragments --mma.sync--> accumulators

Sources: NVIDIA CUTLASS, "Efficient GEMM in CUDA" and its multistage pipeline.
"""

from typing import Any

import numpy as np

from numstack.device import Array, Stream, current_device
from numstack.kernels.gemm.mma_sync import cut
from numstack.kernels.gemm.mma_sync.cut import Tiles
from numstack.kernels.gemm.mma_sync.gather import BLOCK, make_gather
from numstack.kernels.gemm.mma_sync.kernel import Form, make_kernel
from numstack.kernels.gemm.problem import Problem, Spec
from numstack.kernels.launch import are_aligned, ceil_div, flat
from numstack.kernels.variants import Variant

__all__ = ["VARIANT", "Tiles", "launch", "most_workspace", "supports"]

KINDS = {np.dtype(np.uint16): "bf16", np.dtype(np.float16): "f16", np.dtype(np.float32): "f32"}
CHUNK = 8  # elements of 16 bits in 16 bytes


def launch(problem: Problem, stream: Stream | None, tiles: Tiles, parts: int = 1) -> None:
    """Run a problem that :func:`supports` says yes to, cut into ``tiles``, and along k into ``parts``."""
    m, n, k, a, b, c = problem.m, problem.n, problem.k, problem.a, problem.b, problem.c
    spec, alpha = problem.spec, problem.alpha
    target, extras = c, (problem.bias, problem.residual, problem.preactivation)
    if parts > 1:
        assert problem.workspace is not None
        target, extras = problem.workspace[: parts * m * n], (None, None, None)
        spec, alpha = Spec(spec.a_is_KM, spec.b_is_NK, False, False, False, False), 1.0
    widths = _width(a), _width(b)
    device = current_device()
    form = Form(
        spec=spec,
        is_float16=a.dtype == np.float16,
        kinds=(KINDS[target.dtype], _kind(extras[1], target), _kind(extras[2], target)),
        widths=widths,
        is_wide=n % CHUNK == 0 and are_aligned(target, *(x for x in extras if x is not None)),
        tiles=tiles,
        has_barriers=_has_barriers() and min(widths) > 1,
    )
    # c stands in for what is not given; the kernel does not touch it.
    bias, residual, preactivation = (target if x is None else x for x in extras)
    arrays = (_bits(a), _bits(b), _bits(target), flat(bias), _bits(residual), _bits(preactivation))
    n_tiles = ceil_div(m, tiles.m) * ceil_div(n, tiles.n) * parts
    grid = max(1, min(n_tiles, device.properties.multiprocessors))
    part_steps = ceil_div(ceil_div(k, tiles.k), parts)
    make_kernel(form)[grid, tiles.threads, stream, tiles.shared_bytes](
        *arrays, alpha, m, n, k, parts, part_steps, flops=problem.flops
    )
    if parts > 1:
        is_wide = n % 4 == 0 and are_aligned(target, c)
        gather = make_gather(spec.name("mma_sync") + " gather", problem.spec.has_residual, is_wide)
        gather[ceil_div(m * n, 4 * BLOCK), BLOCK, stream](target, flat(c), parts, m * n, problem.alpha)


def _launch_as_chosen(problem: Problem, stream: Stream | None) -> None:
    m, n, k = problem.m, problem.n, problem.k
    if not m * n:
        return
    if current_device().kind == "cpu":
        launch(problem, stream, cut.ON_CPU)
    elif not _has_barriers() or min(_width(problem.a), _width(problem.b)) < CHUNK:
        launch(problem, stream, cut.IN_PIECES)
    else:
        room = 0 if problem.workspace is None or not _can_be_parted(problem) else problem.workspace.size
        is_plain = problem.bias is None and problem.residual is None and problem.preactivation is None
        launch(problem, stream, *cut.choose(m, n, k, max(1, room // max(1, m * n)), is_plain))


def _has_barriers() -> bool:
    """Whether warps can wait on mbarriers as the kernel does, for which sm_90 has an instruction."""
    device = current_device()
    return device.kind == "cuda" and device.properties.compute_capability >= (9, 0)


def _can_be_parted(problem: Problem) -> bool:
    """Whether nothing but adding to c is left to do once the parts are added."""
    spec = problem.spec
    others = spec.has_bias or spec.has_gelu or spec.has_gelu_backward
    return not others and (not spec.has_residual or problem.residual is problem.c)


def most_workspace(m: int, n: int, k: int) -> int:
    """Elements (float32) of workspace that a mere product can use; 0 if none."""
    if current_device().kind == "cpu":
        return 0
    parts = cut.choose(m, n, k, cut.MOST_PARTS, True)[1]
    return parts * m * n if parts > 1 else 0


def _kind(x: Array | None, instead: Array) -> str:
    return KINDS[(instead if x is None else x).dtype]


def _bits(x: Array) -> Array:
    """One axis; 16-bit floats as their bits."""
    return flat(x if x.dtype != np.float16 else x.view(np.uint16))


def _width(x: Any) -> int:
    """How many elements of a row cp.async can copy at once, by the address and the length of rows."""
    together = current_device().address(x) // x.itemsize | x.shape[1]
    return next(width for width in (8, 4, 2, 1) if together % width == 0)


def supports(problem: Problem) -> bool:
    """Whether both operands are of one 16-bit format."""
    return problem.a.dtype == problem.b.dtype and problem.a.dtype.itemsize == 2


VARIANT = Variant(
    "mma_sync",
    _launch_as_chosen,
    "Multiplies on tensor cores, a warp 64 x 96 x 16 at a time, on operands copied in while it multiplies.",
    supports,
    made_for="sm_80",
    by_default=False,  # its tests have not run on a GPU as it stands; what differs in small things was right there
)
