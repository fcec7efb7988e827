"""The rung for tensor cores from sm_80 on: ``mma.sync`` on tiles that are brought in ahead of time.

======================  ===============================================================================================
file                    what is in it
======================  ===============================================================================================
``cut``                 which tiles, and how many parts along k, a product is cut into
``copies``              how tiles lie in shared memory, and how ``cp.async`` gets them there
``steps``               in which order a warp multiplies, loads fragments and starts copies
``kernel``              the kernel of sm_80: from tile to tile, from stage to stage
``engine``              the kernel of Hopper: the same, on tiles that the copy engine brings
``epilogue``            bias, GELU, residual..., and c's way out of registers
``gather``              the second kernel, which adds the parts of a product that was cut along k
======================  ===============================================================================================

A block computes tiles of c, one after another. Their operands come through a ring of stages in shared memory: while the
warps multiply one stage, the copies of the following ones are under way, also those of the next tile, and fragments are
loaded into registers just as those before them are used up::

    global --copies--> stage 0 | stage 1 | stage 2 | stage 3 --ldmatrix--> fragments --mma.sync--> accumulators

Who copies makes the difference between the kernels. On sm_80 the warps that multiply do, by ``cp.async``, and meet at
every stage. On Hopper one thread asks the copy engine for whole tiles, and warps wait only for their bytes; operands
whose rows are not whole 16 bytes, which the engine does not take, go the way of sm_80.

Measured on an H200, bf16, in turns with the faster of two calls of cuBLAS: the products of GPT-2 124M and 1.5B and
squares 0.66 of it together, 0.61 to 0.73 each; with tiles brought by ``cp.async`` under the same barriers 0.57. What
it waits for is power, of which the card draws all it may: of 502 TFLOP/s at 8192^3, leaving out ``ldmatrix`` makes 524,
stores too 531. Stores cost 13% where k is 768, 3% where it is 3072.

What did not help: two blocks a multiprocessor, tiles of 128 x 128 (0.8 of the rate); a warp that multiplies asking the
engine on the side (0.9, and 0.6 where registers spilled); one half of the warps one or two stages behind the other;
every other row multiplied backwards, so that a fragment of b stays. Parts of 64 x 96 a warp take eight registers more
than those of 96 x 64, and then spill.

compute-sanitizer's racecheck finds nothing in either kernel, though of the engine's writes it knows no thread. An
earlier form, ``cp.async`` under mbarriers, it called a hazard: reads by ``ldmatrix`` before an arrival (release),
writes by ``cp.async`` behind a wait for it (acquire), which PTX orders.

Sources: NVIDIA CUTLASS, "Efficient GEMM in CUDA" and its multistage pipeline.
"""

from typing import Any

import numpy as np

from numstack.device import Array, Stream, current_device
from numstack.kernels.gemm.mma_sync import cut
from numstack.kernels.gemm.mma_sync.copies import Operand
from numstack.kernels.gemm.mma_sync.cut import Tiles
from numstack.kernels.gemm.mma_sync.engine import PRODUCERS, box_of, make_engine_kernel
from numstack.kernels.gemm.mma_sync.gather import BLOCK, make_gather
from numstack.kernels.gemm.mma_sync.kernel import Form, make_kernel
from numstack.kernels.gemm.problem import Problem, Spec
from numstack.kernels.launch import are_aligned, ceil_div, flat
from numstack.kernels.variants import Variant

__all__ = ["VARIANT", "Tiles", "launch", "most_workspace", "supports"]

KINDS = {np.dtype(np.uint16): "bf16", np.dtype(np.float16): "f16", np.dtype(np.float32): "f32"}
CHUNK = 8  # elements of 16 bits in 16 bytes


def launch(problem: Problem, stream: Stream | None, tiles: Tiles, parts: int = 1, *, by_engine: bool = False) -> None:
    """Run a problem that :func:`supports` says yes to, cut into ``tiles``, and along k into ``parts``.

    ``by_engine``: on tiles that the copy engine brings, of a problem that :func:`_has_engine` says yes to.
    """
    m, n, k, a, b, c = problem.m, problem.n, problem.k, problem.a, problem.b, problem.c
    spec, alpha = problem.spec, problem.alpha
    target, extras = c, (problem.bias, problem.residual, problem.preactivation)
    if parts > 1:
        assert problem.workspace is not None
        target, extras = problem.workspace[: parts * m * n], (None, None, None)
        spec, alpha = Spec(spec.a_is_KM, spec.b_is_NK, False, False, False, False), 1.0
    device = current_device()
    form = Form(
        spec=spec,
        is_float16=a.dtype == np.float16,
        kinds=(KINDS[target.dtype], _kind(extras[1], target), _kind(extras[2], target)),
        widths=None if by_engine else (_width(a), _width(b)),
        is_wide=n % CHUNK == 0 and are_aligned(target, *(x for x in extras if x is not None)),
        tiles=tiles,
    )
    operands: tuple[Any, Any]
    if by_engine:
        operands = (_tensor_map(a, form.a_tile), _tensor_map(b, form.b_tile))
        kernel, threads = make_engine_kernel(form), tiles.threads + PRODUCERS
    else:
        operands = (_bits(a), _bits(b))
        kernel, threads = make_kernel(form), tiles.threads
    # c stands in for what is not given; the kernel does not touch it.
    bias, residual, preactivation = (target if x is None else x for x in extras)
    arrays = (*operands, _bits(target), flat(bias), _bits(residual), _bits(preactivation))
    n_tiles = ceil_div(m, tiles.m) * ceil_div(n, tiles.n) * parts
    grid = max(1, min(n_tiles, device.properties.multiprocessors))
    part_steps = ceil_div(ceil_div(k, tiles.k), parts)
    kernel[grid, threads, stream, tiles.shared_bytes](*arrays, alpha, m, n, k, parts, part_steps, flops=problem.flops)
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
    elif not _has_engine(problem):
        launch(problem, stream, cut.IN_PIECES)
    else:
        room = 0 if problem.workspace is None or not _can_be_parted(problem) else problem.workspace.size
        is_plain = problem.bias is None and problem.residual is None and problem.preactivation is None
        tiles, parts = cut.choose(m, n, k, max(1, room // max(1, m * n)), is_plain)
        launch(problem, stream, tiles, parts, by_engine=True)


def _has_engine(problem: Problem) -> bool:
    """Whether there is a copy engine, as from sm_90 on, and the operands are such that it can bring them."""
    device = current_device()
    is_there = device.kind == "cuda" and device.properties.compute_capability >= (9, 0)
    return is_there and problem.k > 0 and min(_width(problem.a), _width(problem.b)) == CHUNK


def _tensor_map(x: Array, tile: Operand) -> Any:
    return current_device().tensor_map(x, box_of(tile), swizzle_bytes=x.itemsize * tile.columns)


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
    """How many elements of a row can be copied at once, by the address and the length of rows."""
    together = current_device().address(x) // x.itemsize | x.shape[1]
    return next(width for width in (8, 4, 2, 1) if together % width == 0)


def supports(problem: Problem) -> bool:
    """Whether both operands are of one 16-bit format."""
    return problem.a.dtype == problem.b.dtype and problem.a.dtype.itemsize == 2


VARIANT = Variant(
    "mma_sync",
    _launch_as_chosen,
    "Multiplies on tensor cores, a warp 96 x 64 x 16 at a time, on operands that are copied in meanwhile.",
    supports,
    made_for="sm_80",
    by_default=False,  # its tests have not run on a GPU as it stands; what differs in small things was right there
)
