"""Which products the Hopper kernel can do, and how each is cut if nobody has tuned it.

An H200 at full load is held back by its power: with a fifth of its multiprocessors idle the others run faster, and
nothing is lost. So the work done at all, what hangs over the edges of c included, counts first; the longest path only
where too few multiprocessors are busy.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from numstack.device import Array, current_device
from numstack.device.tensor_map import PITCH_BYTES, pitches_fit
from numstack.kernels.gemm.problem import Problem
from numstack.kernels.gemm.wgmma.config import CHUNK_ROWS, SHARED_MOST, TILE_K, Config
from numstack.kernels.gemm.wgmma.schedule import Plan, make_plan
from numstack.kernels.launch import ceil_div

OPERANDS = (np.dtype(np.uint16), np.dtype(np.float16))

# Tiles, with the rate that they reach where they divide the product, relative to the best: measured on an H200.
TILES = {
    (128, 256): 1.0,
    (128, 192): 1.0,
    (256, 128): 0.99,
    (256, 192): 0.98,
    (256, 160): 0.98,
    (128, 160): 0.97,
    (128, 128): 0.96,
    (128, 64): 0.75,
}
BUSY_ENOUGH = 0.8  # of the multiprocessors, for the whole card to be at its limit
STORE_STEPS = 1.5  # what storing a tile costs, in steps of k
PART_STEPS = 8  # what storing a part of a cut tile and gathering it costs


def supports(problem: Problem) -> bool:
    """Whether the operands have 16 bits, and the copy engine can move all matrices."""
    a, b, c = problem.a, problem.b, problem.c
    if a.dtype not in OPERANDS or b.dtype != a.dtype or 0 in c.shape or not problem.k:
        return False
    like_c = [x for x in (problem.residual, problem.preactivation) if x is not None]
    return all(x.dtype == c.dtype for x in like_c) and all(_fits(x) for x in (a, b, c, *like_c))


def _fits(array: Array) -> bool:
    return current_device().address(array) % PITCH_BYTES == 0 and pitches_fit(array)


class Needs(NamedTuple):
    """What of a problem its Config depends on."""

    m: int
    n: int
    k: int
    n_matrices: int
    b_is_NK: bool
    itemsize: int  # of c
    has_bias: bool
    reads_extra: bool
    keeps_preactivation: bool
    sums_columns: bool
    can_spread: bool

    @staticmethod
    def of(problem: Problem) -> "Needs":
        """Those of a problem that has all the workspace it could use."""
        spec, c = problem.spec, problem.c
        plain = not (spec.has_bias or spec.has_gelu or spec.has_gelu_backward or c.ndim == 3)
        return Needs(
            m=problem.m,
            n=problem.n,
            k=problem.k,
            n_matrices=c.shape[0] if c.ndim == 3 else 1,
            b_is_NK=spec.b_is_NK,
            itemsize=c.itemsize,
            has_bias=spec.has_bias,
            reads_extra=spec.has_gelu_backward or (spec.has_residual and not adds_to_c(problem)),
            keeps_preactivation=spec.keeps_preactivation,
            sums_columns=sums_on_the_way(problem),
            can_spread=plain
            and (problem.residual is None or problem.residual is c)
            and problem.column_sums is None
            and problem.nonfinite is None,
        )


def adds_to_c(problem: Problem) -> bool:
    """Whether the copy engine adds into c, which rounds once more than it need if c has 16 bits."""
    return problem.residual is problem.c and problem.c.dtype == np.float32


def sums_on_the_way(problem: Problem) -> bool:
    """Whether columns are summed before c is stored; not with a bias, which rows beyond c's edge would have too."""
    return problem.column_sums is not None and not problem.spec.has_bias


def plan_of(config: Config, needs: Needs) -> Plan:
    """Which tiles are cut along k."""
    tiles = ceil_div(needs.m, config.tile_m * config.cluster) * ceil_div(needs.n, config.tile_n) * needs.n_matrices
    workers = current_device().properties.multiprocessors // config.cluster
    return make_plan(tiles, ceil_div(needs.k, TILE_K), workers, config.spread)


def fitted(tile_m: int, tile_n: int, needs: Needs) -> Config | None:
    """As many stages and buffers as there is room for; None if there is none for three stages."""
    config = Config(tile_m, tile_n, stages=8)
    row_bytes = config.row_bytes(needs.itemsize)
    if needs.sums_columns and row_bytes != 128:
        return None
    chunks = tile_n * needs.itemsize // row_bytes * (tile_m // (2 * CHUNK_ROWS))
    if needs.reads_extra:  # each buffer takes as many chunks, and all that can be are loaded early
        choices = [n for n in range(chunks, 0, -1) if chunks % n == 0]
    else:
        choices = [4, 2] if needs.keeps_preactivation else [2]
    for buffers in choices:
        config = config._replace(buffers=buffers, stages=8)
        while config.stages > 2 and shared_bytes(config, needs) > SHARED_MOST:
            config = config._replace(stages=config.stages - 1)
        if config.stages > 2:
            return config
    return None


def shared_bytes(config: Config, needs: Needs) -> int:
    """Dynamic shared memory of a block."""
    return config.shared_bytes(needs.b_is_NK, needs.itemsize, needs.has_bias, needs.sums_columns)


def candidates(problem: Problem) -> Iterator[Config]:
    """What a tuner tries."""
    needs = Needs.of(problem)
    for tile_m, tile_n in TILES:
        fitting = fitted(tile_m, tile_n, needs)
        for cluster in (1, 2):
            for lag in (0, 2):
                if fitting is not None:
                    config = fitting._replace(cluster=cluster, lag=min(lag, fitting.stages - 1))
                    yield config
                    spread = config._replace(spread=True)
                    if needs.can_spread and plan_of(spread, needs).rest:
                        yield spread


@lru_cache(maxsize=4096)
def choose(needs: Needs) -> Config:
    """What should be fastest, by the work and the longest path that each tile leads to."""
    best, least = Config(), float("inf")
    for (tile_m, tile_n), rate in TILES.items():
        fitting = fitted(tile_m, tile_n, needs)
        if fitting is None:
            continue
        fitting = fitting._replace(lag=min(2, fitting.stages - 2))
        for spread in (False, True) if needs.can_spread else (False,):
            config = fitting._replace(spread=spread)
            plan = plan_of(config, needs)
            if spread and not plan.rest:
                continue
            cost = _cost(config, plan, needs) / rate
            if cost < least:
                best, least = config, cost
    return best


def _cost(config: Config, plan: Plan, needs: Needs) -> float:
    """Steps of k, times the area of a tile."""
    workers = current_device().properties.multiprocessors
    steps = ceil_div(needs.k, TILE_K) + STORE_STEPS
    work = (plan.whole + plan.rest) * steps + plan.parts * PART_STEPS
    if plan.rest:
        longest = work / workers
    else:
        longest = ceil_div(plan.whole, workers) * steps
    return config.tile_m * config.tile_n * max(work, BUSY_ENOUGH * longest * workers)
