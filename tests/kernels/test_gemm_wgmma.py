"""Hopper's GEMM: how work is shared out, which cuts fit, what is supported; on a Hopper GPU every way to cut."""

from __future__ import annotations

import ast
import inspect
from operator import add, floordiv, mul, sub
from types import FunctionType, SimpleNamespace

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
from numstack.kernels.gemm.wgmma.schedule import PART_STEPS, Plan, make_piece, make_plan
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

IS_HOPPER = current_device().kind == "cuda" and current_device().properties.compute_capability == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU: NUMSTACK_DEVICE=cuda runs it there")

PLAIN = choice.plain(4096, 4096, 4096, "NT", itemsize=2)


def pieces_of_worker(plan: Plan, worker: int, workers: int) -> list[tuple[int, int, int, int]]:
    """Tile, first and last step, and place in the workspace of each piece of a worker's work: the kernel's."""
    compiled = make_piece(plan.rest > 0).py_func
    names = {
        "integers": SimpleNamespace(add=add, subtract=sub, multiply=mul, divide=floordiv),
        "int32": int,
        "share_begin": lambda worker, workers, units: worker * units // workers,
    }
    piece = FunctionType(compiled.__code__, {**compiled.__globals__, **names}, "piece", None, compiled.__closure__)
    pieces: list[tuple[int, int, int, int]] = []
    while (found := piece(len(pieces), worker, workers, *plan))[0] >= 0:
        pieces.append(found)
    return pieces


@pytest.mark.parametrize("spread", [False, True])
@pytest.mark.parametrize("workers", [132, 66, 7])
def test_each_tile_is_worked_on_once(workers: int, spread: bool) -> None:
    rng = np.random.default_rng(0)
    n_cut = 0
    for tiles, steps in rng.integers(1, 400, (100, 2)).tolist():
        plan = make_plan(tiles, steps, workers, spread)
        assert (plan.whole + plan.rest == tiles and plan.whole % workers == 0) or not plan.rest
        n_cut += plan.rest > 0
        stretches: dict[int, list[tuple[int, int]]] = {tile: [] for tile in range(tiles)}
        places = set()
        for worker in range(workers):
            for tile, begin, end, place in pieces_of_worker(plan, worker, workers):
                assert begin < end
                stretches[tile].append((begin, end))
                assert (place >= 0) == (tile >= plan.whole) and place < max(plan.parts, 1)
                assert place < 0 or place not in places
                places.add(place)
        for parts in stretches.values():
            ends = [0, *(end for _, end in sorted(parts))]
            assert [begin for begin, _ in sorted(parts)] == ends[:-1] and ends[-1] == steps
    assert (n_cut > 5) == spread
    assert make_plan(100, 1000, 132, spread=False) == Plan(100, 1000, 0, 0, 0, 0, 0)


@pytest.mark.parametrize("tiles", [18, 24, 54, 72, 91, 117])
def test_workers_have_as_much_to_do_each(tiles: int) -> None:
    plan = make_plan(tiles, 1024, 132, spread=True)
    pieces = [pieces_of_worker(plan, worker, 132) for worker in range(132)]
    work = [sum(end - begin + PART_STEPS for _, begin, end, _ in mine) for mine in pieces]
    assert abs(max(work) - plan.longest) <= PART_STEPS and max(work) < 1.05 * sum(work) / 132


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


def test_ten_tiles_of_160_columns_are_five_pairs_and_an_odd_one_has_a_partner() -> None:
    with offline.device("sm_90a"):
        gradient = choice.plain(1600, 1600, 16384, "TN", itemsize=2)
        config = choice.choose(gradient)
        assert config.pairs and (config.tile_m, config.tile_n, config.stages) == (128, 160, choice.PAIR_STAGES)
        assert choice.plan_of(config, gradient).whole == 13 * 10
        assert choice.plan_of(config, gradient._replace(n=1440)).whole == 13 * 10
        assert not choice.is_edge_narrow(config, gradient._replace(n=1608))


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
    for module in (wgmma.kernel, wgmma.ping_pong, wgmma.mainloop, wgmma.epilogue, wgmma.gather):
        tree = ast.parse(inspect.getsource(module))
        for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
            parameters = {argument.arg for argument in function.args.args}
            assigned = {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            assert not parameters & assigned, f"{function.name} assigns to {parameters & assigned}"


@pytest.mark.parametrize("config", [Config(spread=True), Config(tile_n=192, spread=True, stretch=16)], ids=str)
def test_cutting_along_k_compiles_for_hopper(config: Config) -> None:
    with offline.device("sm_90a") as device:
        x, y, dw = (device.array(shape, np.uint16) for shape in ((8192, 768), (8192, 768), (768, 768)))
        problem = problems.make(x, y, dw, layout="TN")
        wgmma.launch(problem, None, config, device.array((wgmma.workspace_size(problem, config),)))
        assert {build.kernel: build.faults() for build in device.builds.values()} == {
            "gemm.wgmma TN": [],
            "gemm.wgmma TN gather": [],
        }


WAYS = [
    Config(),
    Config(tile_n=160, stages=5),
    Config(tile_n=192, stages=4, buffers=3, group=1),
    Config(tile_m=256, tile_n=128),
    Config(tile_m=256, tile_n=160, stages=3, buffers=5),
    Config(tile_n=64, stages=6),
    Config(tile_n=192, ping_pong=True),
    Config(tile_n=160, stages=4, ping_pong=True),
    Config(tile_n=160, stages=4, ping_pong=True, pairs=True),
    Config(tile_n=192, stages=4, ping_pong=True, pairs=True),
    Config(spread=True),
    Config(tile_m=256, tile_n=192, stages=3, spread=True),
    Config(tile_n=192, spread=True, stretch=16),
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


EPILOGUES: dict[str, set[str]] = {
    "bias": {"bias"},
    "bias, GELU": {"bias", "has_gelu", "preactivation"},
    "residual": {"residual"},
    "GELU backward, flag": {"preactivation", "nonfinite"},
    "flag": {"nonfinite"},
    "float32": set(),
    "float32, added": {"residual"},
    "batch": set(),
}


@needs_hopper
@pytest.mark.parametrize("layout", ["NN", "NT", "TN"])
@pytest.mark.parametrize("epilogue", EPILOGUES)
def test_pairs_give_the_bits_of_single_blocks(epilogue: str, layout: str) -> None:
    has, batch = EPILOGUES[epilogue], (3,) if epilogue == "batch" else ()
    dtype = np.dtype(np.float32 if "float32" in epilogue else np.uint16)
    for m, n, k in [(136, 1000, 520), (2056, 488, 72)]:  # columns of tiles: seven, four
        rng = np.random.default_rng(m)

        def normal(*shape: int, of: type = np.uint16, rng: np.random.Generator = rng) -> np.ndarray:
            values = rng.standard_normal(shape, np.float32)
            return values if of == np.float32 else values.astype(BFLOAT16)

        a = to_device(normal(*batch, *((k, m) if layout[0] == "T" else (m, k))))
        b = to_device(normal(*batch, *((n, k) if layout[1] == "T" else (k, n))))
        bias, before, other = normal(n), normal(*batch, m, n, of=dtype.type), normal(m, n)
        found = []
        for pairs in (False, True):
            c = to_device(before if epilogue == "float32, added" else poisoned((*batch, m, n), dtype.type))
            arrays = {
                "bias": to_device(bias),
                "residual": c if epilogue == "float32, added" else to_device(before),
                "preactivation": to_device(poisoned((m, n), np.uint16) if "has_gelu" in has else other),
                "nonfinite": to_device(np.zeros(1, np.int32)),
            }
            options = {name: arrays[name] for name in has if name != "has_gelu"}
            problem = problems.make(a, b, c, layout=layout, has_gelu="has_gelu" in has, **options)
            config = choice.fitted(128, 160, choice.Needs.of(problem), ping_pong=True, pairs=pairs)
            assert config is not None
            wgmma.launch(problem, None, config)
            found.append([to_host(c), *(to_host(arrays[name]) for name in sorted(has & arrays.keys()))])
        assert not np.isnan(found[0][0].astype(np.float32)).any()
        for one, other_one in zip(*found, strict=True):
            np.testing.assert_array_equal(one.view(np.uint8), other_one.view(np.uint8))
