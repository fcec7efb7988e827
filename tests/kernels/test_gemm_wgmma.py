"""Hopper's GEMM: how work is shared out, which cuts fit, what is supported; on a Hopper GPU every way to cut."""

from __future__ import annotations

import ast
import inspect

import ml_dtypes
import numpy as np
import pytest

from numstack import memory
from numstack.device import current_device, offline
from numstack.errors import ConfigError
from numstack.kernels.gemm import problem as problems
from numstack.kernels.gemm import reference, wgmma
from numstack.kernels.gemm.wgmma import Config, choice
from numstack.kernels.gemm.wgmma.config import SHARED_MOST
from numstack.kernels.gemm.wgmma.schedule import Plan, make_plan
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

IS_HOPPER = current_device().kind == "cuda" and current_device().properties.compute_capability == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU: NUMSTACK_DEVICE=cuda runs it there")

PLAIN = choice.plain(4096, 4096, 4096, "NT", itemsize=2)


def parts_of_workers(plan: Plan, k_steps: int, workers: int) -> dict[int, tuple[int, int, int]]:
    """Tile, first and last step of every part, by its place: as the kernel shares them out."""
    parts: dict[int, tuple[int, int, int]] = {}

    def add(place: int, tile: int, begin: int, end: int) -> None:
        assert place not in parts and 0 <= place < plan.parts and begin < end
        parts[place] = tile, begin, end

    n_heads = plan.heads * plan.rest
    tail_begin = plan.heads * plan.head
    tail = k_steps - tail_begin
    for worker in range(workers):
        if worker < n_heads:
            part, tile = divmod(worker, plan.rest)
            last = plan.tails == 0 and part == plan.heads - 1
            add(worker, tile, part * plan.head, k_steps if last else (part + 1) * plan.head)
            continue
        mine = worker - n_heads
        place = n_heads + mine * plan.slots
        add(place, mine, tail_begin, k_steps)
        units = (plan.rest - plan.tails) * tail
        unit, end = mine * units // plan.tails, (mine + 1) * units // plan.tails
        while unit < end:
            tile, offset = divmod(unit, tail)
            n = min(tail - offset, end - unit)
            place += 1
            assert place < n_heads + (mine + 1) * plan.slots
            add(place, plan.tails + tile, tail_begin + offset, tail_begin + offset + n)
            unit += n
    return parts


@pytest.mark.parametrize("workers", [132, 66, 7])
def test_cut_tiles_are_whole_again(workers: int) -> None:
    rng = np.random.default_rng(0)
    n_cut = 0
    for tiles, k_steps in rng.integers(1, 400, (300, 2)).tolist():
        plan = make_plan(tiles, k_steps, workers, spread=True)
        assert (plan.whole + plan.rest == tiles and plan.whole % workers == 0) or not plan.rest
        if plan.rest:
            n_cut += 1
            parts = sorted(parts_of_workers(plan, k_steps, workers).values())
            ends = dict.fromkeys(range(plan.rest), 0)
            for tile, begin, end in parts:
                assert begin == ends[tile]
                ends[tile] = end
            assert set(ends.values()) == {k_steps}
    assert n_cut > 20
    assert make_plan(100, 1000, workers, spread=False) == Plan(100, 0, 0, 0, 0, 0)


def test_workers_have_as_many_steps_each() -> None:
    plan = make_plan(72, 1024, 132, spread=True)
    steps = [0] * 132
    n_heads = plan.heads * plan.rest
    for place, (_, begin, end) in parts_of_workers(plan, 1024, 132).items():
        steps[place if place < n_heads else n_heads + (place - n_heads) // plan.slots] += end - begin
    assert max(steps) - min(steps) <= 2


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("extra", [{}, {"has_bias": True}, {"reads_extra": True}, {"keeps_preactivation": True}])
def test_what_is_chosen_fits(itemsize: int, extra: dict[str, bool]) -> None:
    with offline.device("sm_90a"):
        for m, n, k in [(1, 8, 1), (65536, 768, 768), (768, 3072, 65536), (16384, 1600, 4800), (300, 50304, 64)]:
            needs = PLAIN._replace(m=m, n=n, k=k, itemsize=itemsize, can_spread=not extra, **extra)
            config = choice.choose(needs)
            assert config.stages >= 3 and choice.shared_bytes(config, needs) <= SHARED_MOST
            if needs.reads_extra:
                chunks = config.tile_n * itemsize // config.row_bytes(itemsize) * (config.rows // 64)
                assert chunks % config.buffers == 0


def test_few_tiles_with_large_k_are_cut_where_there_is_room() -> None:
    with offline.device("sm_90a"):
        gradient = choice.plain(768, 768, 65536, "TN", itemsize=4)
        assert choice.choose(gradient, may_spread=True).spread
        assert not choice.choose(gradient._replace(can_spread=False), may_spread=True).spread
        assert choice.choose(PLAIN._replace(m=16384, n=1600, k=1600)).tile_n == 160, "which divides 1600"


def test_short_k_takes_turns_unless_registers_are_short() -> None:
    with offline.device("sm_90a"):
        short, long = PLAIN._replace(m=65536, n=3072, k=768), PLAIN._replace(m=8192, n=8192, k=8192)
        assert choice.choose(short).ping_pong and not choice.choose(long).ping_pong
        assert choice.choose(short._replace(reads_extra=True, sums_columns=True)).ping_pong
        assert not choice.choose(short._replace(sums_columns=True)).ping_pong
        assert not choice.choose(short._replace(has_bias=True, flags_nonfinite=True)).ping_pong
        config = choice.choose(short)
        assert not choice.is_edge_narrow(config, short) and config.tile_n == 192
        assert choice.is_edge_narrow(config, short._replace(n=3136))
        assert not choice.is_edge_narrow(config, short._replace(n=64)), "the only column"


def test_what_the_copy_engine_cannot_move_is_not_supported() -> None:
    with offline.device("sm_90a") as device:

        def supports(m: int, n: int, k: int, a: type = np.uint16, c: type = np.uint16, **like_c: type) -> bool:
            more = {name: device.array((m, n), dtype) for name, dtype in like_c.items()}
            arrays = device.array((m, k), a), device.array((k, n), np.uint16), device.array((m, n), c)
            return wgmma.supports(problems.make(*arrays, **more))  # type: ignore[arg-type]

        assert supports(1, 64, 64) and supports(77, 8, 8, c=np.float32)
        assert supports(64, 64, 64, residual=np.uint16)
        assert not supports(64, 63, 64), "rows of 126 bytes"
        assert not supports(64, 64, 60), "rows of 120 bytes"
        assert not supports(0, 64, 64) and not supports(64, 64, 0)
        assert not supports(64, 64, 64, a=np.float32)
        assert not supports(64, 64, 64, residual=np.float32)
        shifted = device.array((65, 64), np.uint16).reshape(-1)[1:4097].reshape(64, 64)
        assert not wgmma.supports(problems.make(shifted, shifted, device.array((64, 64), np.uint16)))


def test_a_small_workspace_is_named() -> None:
    with offline.device("sm_90a") as device:
        a, b, c = device.array((4096, 768), np.uint16), device.array((4096, 768), np.uint16), device.array((768, 768))
        problem = problems.make(a, b, c, layout="TN")
        with pytest.raises(ConfigError, match=r"gemm: the workspace has 100 elements; Config\(.*\) needs \d+"):
            wgmma.launch(problem, None, Config(spread=True), device.array((100,)))


def test_no_parameter_of_a_kernel_is_assigned_to() -> None:
    """A local variable once had the name of a parameter: parts began at its address in shared memory, far beyond K,
    where the copy engine reads zeros. Sums were right all the same, at half the speed.
    """
    for module in (wgmma.kernel, wgmma.ping_pong, wgmma.gather):
        tree = ast.parse(inspect.getsource(module))
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            parameters = {argument.arg for argument in function.args.args}
            assigned = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            assert not parameters & assigned, f"{function.name} assigns to {parameters & assigned}"


def test_cutting_along_k_compiles_for_hopper() -> None:
    with offline.device("sm_90a") as device:
        x, y, dw = (device.array(shape, np.uint16) for shape in ((8192, 768), (8192, 768), (768, 768)))
        problem = problems.make(x, y, dw, layout="TN")
        workspace = device.array((wgmma.workspace_size(problem, Config(spread=True)),))
        wgmma.launch(problem, None, Config(spread=True), workspace)
        assert {build.kernel: build.faults() for build in device.builds.values()} == {
            "gemm.wgmma TN": [],
            "gemm.wgmma TN gather": [],
        }


WAYS = [
    Config(),
    Config(cluster=2),
    Config(tile_n=160, stages=5),
    Config(tile_n=192, stages=4, buffers=3),
    Config(tile_m=256, tile_n=128),
    Config(tile_m=256, tile_n=160, stages=3, buffers=5, cluster=2),
    Config(tile_n=64, stages=6),
    Config(tile_n=192, ping_pong=True),
    Config(tile_n=160, stages=5, ping_pong=True),
    Config(spread=True),
    Config(tile_m=256, tile_n=192, stages=3, cluster=2, spread=True),
]


@needs_hopper
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize("config", WAYS, ids=str)
def test_every_way_to_cut(config: Config, layout: str) -> None:
    for m, n, k in [(8, 8, 8), (200, 328, 136), (1544, 776, 4104), (4104, 1600, 200)]:
        rng = np.random.default_rng(m)
        a = rng.standard_normal((k, m) if layout[0] == "T" else (m, k)).astype(BFLOAT16)
        b = rng.standard_normal((n, k) if layout[1] == "T" else (k, n)).astype(BFLOAT16)
        c = to_device(poisoned((m, n), np.uint16))
        problem = problems.make(to_device(a), to_device(b), c, layout=layout)
        workspace = memory.empty((wgmma.workspace_size(problem, config),), np.float32, scope="workspace")
        results = []
        for _ in range(2):
            wgmma.launch(problem, None, config, workspace)
            results.append(to_host(c, BFLOAT16))
        eps = float(ml_dtypes.finfo(BFLOAT16).eps)
        assert_close(results[0], reference(a, b, layout=layout)[0], rtol=eps, atol=eps / 8 + 2e-6 * k**0.5)
        np.testing.assert_array_equal(results[0].view(np.uint16), results[1].view(np.uint16))
