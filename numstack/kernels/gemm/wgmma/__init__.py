"""Hopper's rung: the copy engine brings tiles, one warpgroup asking; two others multiply them by ``wgmma``.

======================  ===============================================================================================
file                    what is in it
======================  ===============================================================================================
``config``              what may be chosen: tile, stages, order of tiles, tiles cut along k
``choice``              what is chosen
``schedule``            which block works on which tile
``kernel``              the kernel: from tile to tile, or part of one
``ping_pong``           the kernel for short k: two tiles at a time, one multiplied while the other is stored; in pairs
``mainloop``            what both do along k: the ring of stages, loading, multiplying
``epilogue``, ``boxes`` bias, GELU, residual..., and c's way out through shared memory
``gather``              the second kernel, which adds the parts of tiles that were cut along k
======================  ===============================================================================================

Measured on an H200, bf16, in turns with the faster of two calls of cuBLAS: the products of GPT-2 124M and 1.5B and
squares 1.03 of it together, 0.96 to 1.16 each. Bias and GELU in the product, the pre-activation kept: 1.42 and 1.29
times as fast as cuBLAS followed by a compiled bias and GELU. Errors are at most cuBLAS's, where gradients are float32
as well: cuBLAS adds more parts, here long sums are added up in stretches (1.42 times its error without).

Storing a tile of 128 x 256, which is multiplied in 12,288 cycles if k is 768, takes 1,900 cycles more; 8,400 with GELU
and the pre-activation, of which the units of exponentials alone need 4,096. ``ping_pong`` hides both: 1.04 to 1.19
times as fast where k is 768 or 1600, 1.04 where it is 3072; beyond, what its narrower tiles read from shared memory
outweighs that. Packing a finished tile and storing it while the next is multiplied, a piece with each step of k, hid a
plain tile as well, but a GELU only by rounding what goes into it, or with tiles of 192 columns and little gain. The
turns of warpgroups must be kept by barriers: the ring alone does not, as parities say nothing of rounds further apart.

A gradient of 1600 x 1600 is 130 tiles of 128 x 160, one for each multiprocessor. Alone they came to 0.85 to 0.89 of
cuBLAS and waited for loads whichever way they were made; what counted is who is whose neighbour. The multiprocessors of
a GPC get at once what they ask for at about the same time. In ``pairs`` that share a, with the pairs that share b in
the same GPC (``device.places``), it is 0.97 to 0.99; with the same pairs wherever clusters happen to run, 0.80 to 0.89.
Stages beyond four let them drift apart. A product of 16384 x 1600 x 1600 gains 3%; elsewhere pairs gained nothing that
other tiles do not. Boxes that promote what they load to 256 bytes in the L2 cache cost pairs 2%, others nothing.

Where tiles are cut along k, letting all workers end together with what their parts cost counted gains 2 to 3% of the
gradients of 1600 x 4800 and 1600 x 6400; gathering four parts at once, in a kernel that starts early, 0.2 to 1.2%.

What did not help: pairs of blocks that halve k and send each other half of their sums through distributed shared
memory, by plain stores or ``st.async``: 1% for a gradient of 1600 x 1600 in tiles of 128 x 320, 2 to 10% slower for all
others. Those tiles elsewhere: 9% slower where b is loaded 32 columns at a time, as fast as 256 x 160 where it is loaded
along k. Clusters of two that share b, without places: 2% slower on average, up to 23% for gradients. Groups of 8
instead of 16 rows of tiles; a lag of one warpgroup behind the other (nothing, in 64 comparisons); parts cut evenly and
in any order (stream-K as published), which are far apart in k and share nothing in the L2 cache: half the rate; each
warp storing its own rows without barriers (0.97), more buffers for c instead of a stage (1.00), evicting c first from
the L2 cache (0.99). What the compiled code shows: behind ``elect``, and not behind ``thread == 0``, TMA instructions
need no loop over lanes; an arrival at another block's barrier that releases fences the whole GPU, a relaxed one
nothing.

Sources: the design of CUTLASS's "warp-specialised persistent cooperative" and "ping-pong" kernels and of
pranjalssh/fast.cu (2024); stream-K after Osama et al. 2023, with parts that are worked on at the same time at the same
k.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from numstack.device import Array, Kernel, Stream, current_device
from numstack.device.places import PAIR, Places
from numstack.errors import ConfigError
from numstack.kernels import reduce
from numstack.kernels.gemm import separate, tune
from numstack.kernels.gemm.problem import Problem, Spec
from numstack.kernels.gemm.wgmma import choice
from numstack.kernels.gemm.wgmma.choice import candidates, supports
from numstack.kernels.gemm.wgmma.config import CHUNK_ROWS, THREADS, TILE_K, Config
from numstack.kernels.gemm.wgmma.epilogue import Outputs
from numstack.kernels.gemm.wgmma.gather import BLOCK, FOURS, Gathered, make_gather
from numstack.kernels.gemm.wgmma.kernel import make_kernel
from numstack.kernels.gemm.wgmma.mainloop import Form
from numstack.kernels.gemm.wgmma.ping_pong import make_ping_pong_kernel
from numstack.kernels.gemm.wgmma.schedule import Plan
from numstack.kernels.launch import ceil_div
from numstack.kernels.variants import Variant

__all__ = ["VARIANT", "Config", "candidates", "default_config", "launch", "supports", "workspace_size"]

DTYPES = {np.dtype(np.uint16): "bf16", np.dtype(np.float16): "f16", np.dtype(np.float32): "f32"}


def default_config(problem: Problem) -> Config:
    """How a problem is cut that nobody has tuned, with all the workspace it can use."""
    return choice.choose(choice.Needs.of(problem))


def workspace_size(problem: Problem, config: Config) -> int:
    """Elements (float32) of workspace; at least 1."""
    needs = choice.Needs.of(problem)
    parts = choice.plan_of(config, needs).parts * config.tile_m * config.tile_n
    return max(parts, _sums_size(problem.m, problem.n) if problem.column_sums is not None else 1)


def most_workspace(m: int, n: int, k: int, layout: str, sums_columns: bool) -> int:
    """Elements of workspace that a product of 16-bit operands can use, tuned or not; 0 if none."""
    if sums_columns:
        return _sums_size(m, n)
    size = 0
    for itemsize in (2, 4):
        needs = choice.plain(m, n, k, layout, itemsize)
        config = choice.choose(needs, may_spread=True)
        if config.spread:
            size = max(size, choice.plan_of(config, needs).parts * config.tile_m * config.tile_n)
    return size


def _sums_size(m: int, n: int) -> int:
    rows = ceil_div(m, CHUNK_ROWS)
    return max(rows * n + reduce.sum_rows_workspace_size(rows, n), reduce.sum_rows_workspace_size(m, n))


def launch(problem: Problem, stream: Stream | None, config: Config, workspace: Array | None = None) -> None:
    """Run a problem that :func:`supports` says yes to, cut as ``config`` says.

    Raises
    ------
    ConfigError
        If the workspace is too small.
    """
    device = current_device()
    operands: tuple[Any, ...] = problem[4:10]
    a, b, c, bias, residual, preactivation = operands
    needs = choice.Needs.of(problem)
    ready = _prepare(problem.spec, a.dtype, c.dtype, needs, config, problem.alpha != 1)
    plan = ready.plan
    if plan.rest or needs.sums_columns:
        given, wanted = 0 if workspace is None else workspace.size, workspace_size(problem, config)
        if given < wanted:
            raise ConfigError(f"gemm: the workspace has {given} elements; {config} needs {wanted}")
    partials = sums = c
    if workspace is not None:
        partials = workspace
        if needs.sums_columns:
            rows = ceil_div(problem.m, CHUNK_ROWS)
            sums = workspace[: rows * problem.n].reshape(rows, problem.n)
    a_map = device.tensor_map(a, ready.a_box)
    b_map = device.tensor_map(b, ready.b_box, swizzle_bytes=ready.b_swizzle_bytes)
    c_map = kept_map = extra_map = device.tensor_map(c, ready.c_box, swizzle_bytes=ready.c_swizzle_bytes)
    if needs.keeps_preactivation:
        kept_map = device.tensor_map(preactivation, ready.c_box, swizzle_bytes=ready.c_swizzle_bytes)
    if needs.reads_extra:
        extra = residual if preactivation is None else preactivation
        extra_map = device.tensor_map(extra, ready.c_box, swizzle_bytes=ready.c_swizzle_bytes)
    flag = c if problem.nonfinite is None else problem.nonfinite
    start = ready.kernel[ready.grid, THREADS, stream, ready.shared_bytes]
    arrays = a_map, b_map, c_map, kept_map, extra_map, c if bias is None else bias
    if config.ping_pong:
        places = device.state(Places).of_pairs_W if config.pairs else c
        start(*arrays, sums, flag, places, problem.n, *ready.cut, problem.alpha, flops=problem.flops)
    else:
        start(
            *arrays, partials, sums, flag, problem.m, problem.n, *ready.cut, problem.alpha, flops=problem.flops
        )  # fmt: skip
    if plan.rest:
        ready.gather[ready.gather_grid, BLOCK, stream](partials, c, *ready.cut, problem.alpha)
    if needs.sums_columns:
        assert workspace is not None and problem.column_sums is not None
        rest = workspace[sums.size :]
        reduce.sum_rows(sums, problem.column_sums, rest, accumulate=problem.accumulates_sums, stream=stream)
    else:
        separate.sum_columns(problem, stream)


class _Ready(NamedTuple):
    """All of a launch that does not depend on where the arrays are."""

    kernel: Kernel
    grid: int
    shared_bytes: int
    a_box: tuple[int, ...]
    b_box: tuple[int, ...]
    c_box: tuple[int, ...]
    b_swizzle_bytes: int
    c_swizzle_bytes: int
    plan: Plan
    cut: tuple[int, ...]
    gather: Kernel
    gather_grid: tuple[int, int, int]


@lru_cache(maxsize=4096)
def _prepare(
    spec: Spec, a_dtype: np.dtype, c_dtype: np.dtype, needs: choice.Needs, config: Config, is_scaled: bool
) -> _Ready:
    outputs = Outputs(
        dtype=DTYPES[c_dtype],
        has_bias=spec.has_bias,
        has_gelu=spec.has_gelu,
        has_residual=spec.has_residual and not needs.adds_to_c,
        has_gelu_backward=spec.has_gelu_backward,
        keeps_preactivation=spec.keeps_preactivation,
        adds_to_c=needs.adds_to_c,
        is_scaled=is_scaled,
        sums_columns=needs.sums_columns,
        flags_nonfinite=needs.flags_nonfinite,
        is_batch=needs.is_batch,
    )
    form = Form(spec.name("wgmma"), spec.a_is_KM, spec.b_is_NK, DTYPES[a_dtype], outputs)
    plan = choice.plan_of(config, needs)
    tiles_m, tiles_n = ceil_div(needs.m, config.tile_m), ceil_div(needs.n, config.tile_n)
    matrix = (1,) if outputs.is_batch else ()
    cut: tuple[int, ...] = (tiles_m, tiles_n, *plan)
    if config.ping_pong:
        blocks = PAIR if config.pairs else 1
        columns = ceil_div(tiles_n - choice.is_edge_narrow(config, needs), blocks)
        cut = (tiles_m, columns, tiles_m * columns * needs.n_matrices, plan.whole // blocks, plan.steps)
    return _Ready(
        kernel=make_ping_pong_kernel(form, config) if config.ping_pong else make_kernel(form, config),
        grid=_grid(config, plan),
        shared_bytes=choice.shared_bytes(config, needs),
        a_box=(*matrix, *((TILE_K, 64) if spec.a_is_KM else (64 if config.pairs else config.tile_m, TILE_K))),
        b_box=(
            *matrix,
            *((config.tile_n, TILE_K) if spec.b_is_NK else (TILE_K, config.b_box_columns)),
        ),
        c_box=(*matrix, CHUNK_ROWS, outputs.chunk_columns(config)),
        b_swizzle_bytes=128 if spec.b_is_NK else 2 * config.b_box_columns,
        c_swizzle_bytes=config.row_bytes(c_dtype.itemsize),
        plan=plan,
        cut=cut,
        gather=make_gather(Gathered(form.name + " gather", spec.has_residual), config),
        gather_grid=(plan.rest, config.tile_m // CHUNK_ROWS, config.tile_n // 8 // FOURS),
    )


def _grid(config: Config, plan: Plan) -> int:
    """How many blocks: of pairs all, as their places say which of them work."""
    workers = current_device().properties.multiprocessors
    if config.pairs:
        return workers // PAIR * PAIR
    return workers if plan.rest else min(workers, plan.whole)


def _launch_as_chosen(problem: Problem, stream: Stream | None) -> None:
    """Cut as it was tuned, or by default; without being cut along k where there is no workspace for it."""
    config = tune.find(problem)
    if config is None:
        config = default_config(problem)
    if config.spread:
        workspace = problem.workspace
        if workspace is None or workspace.size < workspace_size(problem, config):
            config = choice.choose(choice.Needs.of(problem), may_spread=False)
    launch(problem, stream, config, problem.workspace)


VARIANT = Variant(
    "wgmma",
    _launch_as_chosen,
    "Multiplies 128 x 256 x 16 at a time from shared memory, which the copy engine fills and empties on the side.",
    supports,
    made_for="sm_90a",
)
