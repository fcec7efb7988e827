"""Which products the Hopper kernel can do, and how each is cut if nobody has tuned it.

What counts is the longest path: the tiles that one multiprocessor computes in turn, or its share of the work where
tiles are cut along k. The numbers below were fitted to 32 products (GPT-2 124M and 1.5B, forward and both gradients,
squares) with each tile, cut and not, in three runs on an H200, in turns with cuBLAS: two with the card at its limit of
power, as in training, one with pauses between the calls. What they choose took 0.4% more than the fastest on average,
6% at most. Tiles of 128 x 128 are as fast as the largest at the limit of power, and 15 to 20% slower without it.
The numbers of PING_PONG come from two more runs, of the same products beside those tiles. ``numstack tune`` measures
instead.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from numstack.device import current_device
from numstack.device.places import PAIR
from numstack.device.tensor_map import PITCH_BYTES
from numstack.kernels.gemm.problem import Problem, Spec
from numstack.kernels.gemm.wgmma.config import CHUNK_ROWS, NARROW, SHARED_MOST, TILE_K, Config
from numstack.kernels.gemm.wgmma.schedule import Plan, make_plan
from numstack.kernels.launch import ceil_div

OPERANDS = (np.dtype(np.uint16), np.dtype(np.float16))

# Tiles, with the rate that they reach relative to the best, fitted to what an H200 took.
TILES = {
    (128, 256): 1.0,
    (128, 192): 0.99,
    (256, 128): 0.95,
    (256, 192): 0.73,
    (256, 160): 0.975,
    (128, 160): 0.71,
    (128, 128): 0.73,
    (128, 64): 0.5,
}
# Tiles of which each warpgroup has its own, alone or in pairs: rate, and what of storing is not hidden, in steps of k;
# for b in rows of k, and in rows of n.
PING_PONG = {
    False: {(128, 192, False): (0.94, 4.25), (128, 160, True): (0.95, 5.5)},
    True: {(128, 192, False): (0.91, 2.5), (128, 160, False): (0.95, 4.5)},
}
PAIR_STAGES = 4  # with more, the pairs of a GPC drift apart and share less: 1% slower, without pairs 10%
WIDE = 192  # columns of a tile that stores two matrices: narrower ones took 2% more
STRETCH = 128  # steps, of sums in float32: at 187 they were 1.4 times as far from float64 as cuBLAS's, now 0.85 times
STRETCH_COLUMNS = 192  # of the widest tile that leaves registers for a second sum
GROUPS = (16, 1)  # rows of tiles that are worked through together: what a tuner tries
STORE_STEPS = 7.75  # what storing a tile costs, in steps of k
CUT_STEPS = 26  # what cutting costs once: a second kernel, and loads that start anew; in steps of a tile of 128 x 256


def supports(problem: Problem) -> bool:
    """Whether the operands have 16 bits, and the copy engine can move all matrices: rows of a multiple of 16 bytes."""
    a, b, c = problem.a, problem.b, problem.c
    if a.dtype not in OPERANDS or b.dtype != a.dtype or not c.size or not problem.k:
        return False
    address = current_device().address
    for array in (a, b, c):
        if address(array) % PITCH_BYTES or array.shape[-1] * array.itemsize % PITCH_BYTES:
            return False
    for like_c in (problem.residual, problem.preactivation):
        if like_c is not None and (like_c.dtype != c.dtype or address(like_c) % PITCH_BYTES):
            return False
    return True


class Needs(NamedTuple):
    """What of a problem its Config depends on."""

    m: int
    n: int
    k: int
    n_matrices: int
    is_batch: bool
    b_is_NK: bool
    itemsize: int  # of c
    has_bias: bool
    adds_to_c: bool
    reads_extra: bool
    keeps_preactivation: bool
    sums_columns: bool
    flags_nonfinite: bool
    can_spread: bool

    @staticmethod
    def of(problem: Problem) -> "Needs":
        """Those of a problem that has all the workspace it could use."""
        c, is_c = problem.c, problem.residual is problem.c
        return _needs(
            problem.spec, c.dtype, c.shape, problem.k, is_c, problem.column_sums is not None,
            problem.nonfinite is not None,
        )  # fmt: skip


@lru_cache(maxsize=4096)
def _needs(
    spec: Spec,
    c_dtype: np.dtype,
    c_shape: tuple[int, ...],
    k: int,
    residual_is_c: bool,
    sums_columns: bool,
    flags_nonfinite: bool,
) -> Needs:
    is_batch = len(c_shape) == 3
    # The copy engine adds float32 into c; with 16 bits it would round once more than it need.
    adds_to_c = residual_is_c and c_dtype == np.float32
    only_adds = not spec.has_residual or residual_is_c
    has_more = spec.has_bias or spec.has_gelu or spec.has_gelu_backward or sums_columns or flags_nonfinite
    return Needs(
        m=c_shape[-2],
        n=c_shape[-1],
        k=k,
        n_matrices=c_shape[0] if is_batch else 1,
        is_batch=is_batch,
        b_is_NK=spec.b_is_NK,
        itemsize=c_dtype.itemsize,
        has_bias=spec.has_bias,
        adds_to_c=adds_to_c,
        reads_extra=spec.has_gelu_backward or (spec.has_residual and not adds_to_c),
        keeps_preactivation=spec.keeps_preactivation,
        # Not with a bias, which rows beyond c's edge would have too: they are summed afterwards then.
        sums_columns=sums_columns and not spec.has_bias,
        flags_nonfinite=flags_nonfinite,
        can_spread=only_adds and not has_more and not is_batch,
    )


def plain(m: int, n: int, k: int, layout: str, itemsize: int) -> Needs:
    """Those of a mere product."""
    b_is_NK = layout[1] == "T"
    return Needs(m, n, k, 1, False, b_is_NK, itemsize, False, False, False, False, False, False, can_spread=True)


@lru_cache(maxsize=4096)
def plan_of(config: Config, needs: Needs) -> Plan:
    """Which tiles are cut along k."""
    columns = ceil_div(needs.n, config.tile_n)
    if config.pairs:
        columns = PAIR * ceil_div(columns, PAIR)
    tiles = ceil_div(needs.m, config.tile_m) * columns * needs.n_matrices
    workers = current_device().properties.multiprocessors
    return make_plan(tiles, ceil_div(needs.k, TILE_K), workers, config.spread)


def fitted(tile_m: int, tile_n: int, needs: Needs, ping_pong: bool = False, pairs: bool = False) -> Config | None:
    """As many stages and buffers as there is room for; None if there is none for three stages, or no registers."""
    most_stages = PAIR_STAGES if pairs else 8
    config = Config(tile_m, tile_n, ping_pong=ping_pong, pairs=pairs)
    row_bytes = config.row_bytes(needs.itemsize)
    if (needs.sums_columns and row_bytes != 128) or (ping_pong and _spills_in_ping_pong(needs)):
        return None
    chunks = tile_n * needs.itemsize // row_bytes * (config.rows // CHUNK_ROWS)
    if needs.reads_extra:  # each buffer takes as many chunks, and all that can be are loaded early
        choices = [n for n in range(chunks, 0, -1) if chunks % n == 0]
    else:
        choices = [4, 2] if needs.keeps_preactivation else [2]
    for buffers in choices:
        config = config._replace(buffers=buffers, stages=most_stages)
        while config.stages > 2 and shared_bytes(config, needs) > SHARED_MOST:
            config = config._replace(stages=config.stages - 1)
        if config.stages > 2:
            return config
    return None


def _spills_in_ping_pong(needs: Needs) -> bool:
    """Whether ptxas finds no registers for all that the epilogue does beside 192 accumulators."""
    if needs.sums_columns and (not needs.reads_extra or needs.itemsize == 4):
        return True
    return needs.flags_nonfinite and needs.has_bias and not needs.keeps_preactivation


def shared_bytes(config: Config, needs: Needs) -> int:
    """Dynamic shared memory of a block."""
    return config.shared_bytes(needs.itemsize, needs.has_bias, needs.sums_columns, needs.b_is_NK)


def candidates(problem: Problem) -> Iterator[Config]:
    """What a tuner tries."""
    for config, _ in _ways(Needs.of(problem), may_spread=True):
        for group in GROUPS:
            yield config._replace(group=group)


def _ways(needs: Needs, may_spread: bool) -> Iterator[tuple[Config, Plan]]:
    """Each tile that fits, whole and cut along k where that changes anything."""
    for tile_m, tile_n in TILES:
        fitting = fitted(tile_m, tile_n, needs)
        if fitting is None:
            continue
        yield fitting, plan_of(fitting, needs)
        has_room = needs.itemsize == 4 and tile_m == 128 and tile_n <= STRETCH_COLUMNS
        spread = fitting._replace(spread=True, stretch=STRETCH if has_room else 0)
        plan = plan_of(spread, needs)
        if may_spread and needs.can_spread and plan.rest:
            yield spread, plan
    for tile_m, tile_n, pairs in PING_PONG[needs.b_is_NK]:
        fitting = fitted(tile_m, tile_n, needs, True, pairs)
        if fitting is not None:
            yield fitting, plan_of(fitting, needs)


@lru_cache(maxsize=4096)
def choose(needs: Needs, may_spread: bool = True) -> Config:
    """What should be fastest, by the longest path that each tile leads to."""
    ways = [
        (_cost(config, plan, needs), config)
        for config, plan in _ways(needs, may_spread)
        if config.ping_pong or not needs.keeps_preactivation or config.tile_n >= WIDE
    ]
    return min(ways, key=lambda way: way[0])[1] if ways else Config()


def is_edge_narrow(config: Config, needs: Needs) -> bool:
    """Whether the last column of tiles is so narrow that it is kept for the end: whole tiles come first."""
    if not config.ping_pong or config.pairs or needs.is_batch:
        return False
    return needs.n > config.tile_n and 0 < needs.n % config.tile_n <= NARROW


def _cost(config: Config, plan: Plan, needs: Needs) -> float:
    """Elements of c, times steps of k, of the longest path through the multiprocessors."""
    if config.ping_pong:
        rate, store_steps = PING_PONG[needs.b_is_NK][config.tile_m, config.tile_n, config.pairs]
    else:
        rate, store_steps = TILES[config.tile_m, config.tile_n], STORE_STEPS
    rounds = ceil_div(plan.whole, current_device().properties.multiprocessors)
    steps = rounds * (plan.steps + store_steps) + plan.longest
    return config.tile_m * config.tile_n * steps / rate + (128 * 256 * CUT_STEPS if plan.rest else 0)
