"""The Hopper GEMM's own source, run in Python with its instructions replaced: what each thread loads, sums and stores.

The second kernel, which adds the parts of tiles that were cut along k, runs as it is. So c comes out whole only if
loads, parts, their places in the workspace and the way they are gathered agree; the arithmetic of wgmma is NumPy's.
"""

from __future__ import annotations

from types import CellType, FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from numstack.device import current_device
from numstack.kernels.gemm.wgmma import Config
from numstack.kernels.gemm.wgmma.config import TILE_K
from numstack.kernels.gemm.wgmma.epilogue import Outputs
from numstack.kernels.gemm.wgmma.gather import BLOCK, FOURS, Gathered, make_gather
from numstack.kernels.gemm.wgmma.kernel import make_kernel
from numstack.kernels.gemm.wgmma.mainloop import Form
from numstack.kernels.gemm.wgmma.schedule import make_plan
from numstack.kernels.launch import ceil_div


class Nothing:
    """Instructions that only order others: any name, called with anything."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: 0


class Block:
    """One block of the kernel, thread after thread: first what its producer loads, then its consumers' threads."""

    def __init__(self, a_KM: np.ndarray, b_KN: np.ndarray, c_MN: np.ndarray, partials: np.ndarray) -> None:
        self.a_KM, self.b_KN, self.c_MN, self.partials = a_KM, b_KN, c_MN, partials
        self.loads: list[tuple[int, int, int]] = []  # row and column of the tile, and k, of each step
        self.steps: list[int] = []  # of the sum that a thread is at
        self.n_summed = 0
        self.upper: Any = None  # the accumulators of a thread's first 64 rows
        self.sums: dict[tuple[int, int, int, int], np.ndarray] = {}

    def add_up(
        self, acc: Any, below: Any, ring: Any, stage: int, phase: int, steps: int, *rest: Any
    ) -> tuple[int, int]:
        self.upper = acc
        self.steps = list(range(self.n_summed, self.n_summed + steps))
        self.n_summed += steps
        return stage, phase

    def elements(self, thread: int, first_row: int, registers: range) -> tuple[Any, Any, Any]:
        """Rows and columns of c that registers of a thread are, as the documentation of wgmma says, and their sums."""
        row, column, first = self.loads[self.steps[0]]
        assert [self.loads[step] for step in self.steps] == [
            (row, column, first + i * TILE_K) for i in range(len(self.steps))
        ]
        i = np.array(registers)
        warp, lane = divmod(thread, 32)
        rows = row + first_row + 16 * warp + lane // 4 + 8 * (i // 2 % 2)
        columns = column + 8 * (i // 4) + 2 * (lane % 4) + i % 2
        tile = self.sums_of(row, column, first, first + TILE_K * len(self.steps))
        return rows, columns, tile[rows - row, columns - column]

    def sums_of(self, row: int, column: int, begin: int, end: int) -> np.ndarray:
        """A tile's sums over a stretch of k; beyond the edges the copy engine reads zeros."""
        key = row, column, begin, end
        if key not in self.sums:
            part = self.a_KM[begin:end, row : row + 256].T @ self.b_KN[begin:end, column : column + 256]
            self.sums[key] = np.pad(part, [(0, 256 - size) for size in part.shape])
        return self.sums[key]

    def run(self, function: Any, config: Config, numbers: tuple[int, ...], number: int, n_blocks: int) -> None:
        rows_of_consumer = config.tile_m // 2

        def fill(a: Any, b: Any, ring: Any, stage: int, phase: int, corner: tuple[int, ...], k: int, *_: Any) -> None:
            self.loads.append((corner[0], corner[1], k * TILE_K))

        def store(acc: Any, c: Any, kept: Any, extra: Any, sums: Any, corner: tuple[int, ...], *rest: Any) -> None:
            _, _, thread, consumer, *_ = rest
            first_row = rows_of_consumer * consumer + (0 if acc is self.upper else 64)
            rows, columns, sums = self.elements(thread, first_row, range(config.tile_n // 2))
            row, column, _ = self.loads[self.steps[0]]
            assert corner == (row + rows_of_consumer * consumer, column, 0)
            inside = (rows < self.c_MN.shape[0]) & (columns < self.c_MN.shape[1])
            assert np.isnan(self.c_MN[rows[inside], columns[inside]]).all(), "stored twice"
            self.c_MN[rows[inside], columns[inside]] = sums[inside]

        def store4(partials: np.ndarray, index: int, acc: Any, first: int) -> None:
            thread = cuda.threadIdx.x
            first_row = rows_of_consumer * (thread // 128 - 1) + (0 if acc is self.upper else 64)
            _, _, sums = self.elements(thread % 128, first_row, range(first, first + 4))
            assert np.isnan(partials[index : index + 4]).all(), "two parts in one place"
            partials[index : index + 4] = sums

        cuda = SimpleNamespace(
            threadIdx=SimpleNamespace(x=0),
            blockIdx=SimpleNamespace(x=number),
            gridDim=SimpleNamespace(x=n_blocks),
            shared=Nothing(),
            local=SimpleNamespace(array=lambda size, dtype: [0] * size),
            syncthreads=lambda: None,
        )
        arithmetic = SimpleNamespace(
            add=lambda a, b: a + b,
            subtract=lambda a, b: a - b,
            multiply=lambda a, b: a * b,
            divide=lambda a, b: a // b,
            shared_address=lambda array: 1024,
        )
        names = {
            "cuda": cuda,
            "integers": arithmetic,
            "tma": Nothing(),
            **dict.fromkeys(("give_registers", "take_registers"), lambda: None),
            "vectors": SimpleNamespace(store4=store4),
            "sync": SimpleNamespace(uniform=lambda x: x, elect=lambda: 1, let_next_kernel_start=lambda: None),
            "share_begin": lambda worker, workers, units: worker * units // workers,
            **dict.fromkeys(("int32", "uint32", "uint64"), int),
            "float32": float,
        }
        replaced: dict[str, Any] = {
            "lay_out": lambda base: ((base,) * 4, base, base),
            "fill": fill,
            "advance": lambda stage, phase: (stage, phase),
            **dict.fromkeys(("add_up", "add_up_narrow", "add_up_nothing"), self.add_up),
            "store": store,
            "store_below": store,
        }
        cells = []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
            value = cell.cell_contents
            if name == "tile_position":
                value = value.py_func
            elif name in ("piece", "store_part"):
                inner = value.py_func
                value = FunctionType(inner.__code__, {**inner.__globals__, **names}, name, None, inner.__closure__)
            elif callable(value) or value is None:
                value = replaced.get(name, lambda *args: 0)
            cells.append(CellType(value))
        kernel = FunctionType(function.__code__, {**function.__globals__, **names}, "product", None, tuple(cells))
        for thread in (0, *range(128, 384)):
            cuda.threadIdx.x = thread
            self.n_summed, self.upper = 0, None
            kernel(*[None] * 6, self.partials, None, None, *self.c_MN.shape, *numbers, 1.0)


@pytest.mark.skipif(current_device().kind != "cpu", reason="runs kernels in Python: NUMSTACK_DEVICE=cpu runs it")
@pytest.mark.parametrize(
    ("m", "n", "k", "blocks", "config"),
    [
        pytest.param(300, 100, 2500, 10, Config(tile_n=64, spread=True), id="heads, tails of one's own and shared"),
        pytest.param(300, 64, 2560, 6, Config(tile_n=64, spread=True), id="heads alone"),
        pytest.param(640, 128, 1500, 7, Config(tile_n=64, spread=True), id="whole tiles first"),
        pytest.param(1000, 64, 2500, 5, Config(256, 64, spread=True), id="128 rows a warpgroup"),
    ],
)
def test_c_is_whole(m: int, n: int, k: int, blocks: int, config: Config) -> None:
    rng = np.random.default_rng(0)
    a_KM, b_KN = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((k, m), (k, n)))
    tiles_m, tiles_n = ceil_div(m, config.tile_m), ceil_div(n, config.tile_n)
    plan = make_plan(tiles_m * tiles_n, ceil_div(k, TILE_K), blocks, config.spread)
    assert plan.rest
    outputs = Outputs("f32", *[False] * (len(Outputs._fields) - 1))
    product = make_kernel(Form("product", True, False, "bf16", outputs), config)
    c_MN = np.full((m, n), np.nan, np.float32)
    partials = np.full(plan.parts * config.tile_m * config.tile_n, np.nan, np.float32)
    cut = (tiles_m, tiles_n, *plan)
    for number in range(blocks):
        Block(a_KM, b_KN, c_MN, partials).run(product.py_func, config, cut, number, blocks)
    gather = make_gather(Gathered("gather", False), config)
    gather[(plan.rest, config.tile_m // 64, config.tile_n // 8 // FOURS), BLOCK](partials, c_MN, *cut, 1.0)
    np.testing.assert_array_equal(c_MN, a_KM.T @ b_KN)
