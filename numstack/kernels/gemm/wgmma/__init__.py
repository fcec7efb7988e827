"""wgmma"""

import numpy as np

from numstack.device import Array, Stream, current_device
from numstack.kernels.gemm.problem import Problem
from numstack.kernels.gemm.wgmma.config import CHUNK_ROWS, THREADS, TILE_K, Config
from numstack.kernels.gemm.wgmma.epilogue import Outputs
from numstack.kernels.gemm.wgmma.gather import BLOCK, FOURS, Gathered, make_gather
from numstack.kernels.gemm.wgmma.kernel import Form, make_kernel
from numstack.kernels.gemm.wgmma.schedule import make_plan
from numstack.kernels.launch import ceil_div

DTYPES = {np.dtype(np.uint16): "bf16", np.dtype(np.float16): "f16", np.dtype(np.float32): "f32"}


def launch(problem: Problem, stream: Stream | None, config: Config, workspace: Array | None = None) -> None:
    """Run the product, cut as ``config`` says."""
    device = current_device()
    spec, m, n, k, a, b, c, bias, residual, preactivation, alpha, _, column_sums, nonfinite = problem
    adds_to_c = residual is c and c.dtype == np.float32
    outputs = Outputs(
        dtype=DTYPES[c.dtype],
        has_bias=spec.has_bias,
        has_gelu=spec.has_gelu,
        has_residual=spec.has_residual and not adds_to_c,
        has_gelu_backward=spec.has_gelu_backward,
        keeps_preactivation=spec.keeps_preactivation,
        adds_to_c=adds_to_c,
        is_scaled=alpha != 1,
        sums_columns=column_sums is not None,
        flags_nonfinite=nonfinite is not None,
        is_batch=c.ndim == 3,
    )
    form = Form(spec.name("wgmma"), spec.a_is_KM, spec.b_is_NK, DTYPES[a.dtype], outputs)
    box_of_c, swizzle = (CHUNK_ROWS, outputs.chunk_columns(config)), config.row_bytes(c.itemsize)
    a_map = device.tensor_map(a, (TILE_K, 64) if spec.a_is_KM else (config.tile_m, TILE_K))
    b_box = (config.tile_n // config.cluster, TILE_K) if spec.b_is_NK else (TILE_K // config.cluster, 64)
    b_map = device.tensor_map(b, b_box)
    c_map = device.tensor_map(c, box_of_c, swizzle_bytes=swizzle)
    kept_map = c_map
    if preactivation is not None and spec.keeps_preactivation:
        kept_map = device.tensor_map(preactivation, box_of_c, swizzle_bytes=swizzle)
    extra = preactivation if spec.has_gelu_backward else residual
    extra_map = c_map if extra is None else device.tensor_map(extra, box_of_c, swizzle_bytes=swizzle)
    tiles_m = ceil_div(m, config.tile_m * config.cluster)
    tiles_n = ceil_div(n, config.tile_n)
    tiles = tiles_m * tiles_n * (c.shape[0] if c.ndim == 3 else 1)
    k_steps = ceil_div(k, TILE_K)
    workers = device.properties.multiprocessors // config.cluster
    plan = make_plan(tiles, k_steps, workers, config.spread)
    cut = (plan.rest, plan.heads, plan.head, plan.tails, plan.slots)
    partials = c if workspace is None else workspace
    sums = c if column_sums is None else column_sums
    flag = c if nonfinite is None else nonfinite
    shared_bytes = config.shared_bytes(spec.b_is_NK, c.itemsize, spec.has_bias, column_sums is not None)
    grid = (workers if plan.rest else min(workers, tiles)) * config.cluster
    make_kernel(form, config)[grid, THREADS, stream, shared_bytes](
        a_map, b_map, c_map, kept_map, extra_map, c if bias is None else bias, partials, sums, flag,
        tiles_m, tiles_n, plan.whole, k_steps, *cut, alpha, flops=problem.flops,
    )  # fmt: skip
    if plan.rest:
        gather_grid = (plan.rest, config.cluster * config.tile_m // 64, config.tile_n // 8 // FOURS)
        gathered = Gathered(form.name + " gather", spec.has_residual)
        make_gather(gathered, config)[gather_grid, BLOCK, stream](
            partials, c, tiles_m, tiles_n, plan.whole, k_steps, *cut, alpha
        )
