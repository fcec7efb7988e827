"""gemm's mma_sync: which tiles a product is cut into, which of two kernels computes it; on Hopper every way to cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from numstack.device import Kernel, current_device, offline
from numstack.device.cuda.compiler import Architecture
from numstack.device.current import using
from numstack.device.tensor_map import TensorMap
from numstack.kernels.gemm import LAYOUTS, gemm, mma_sync, reference
from numstack.kernels.gemm import problem as problems
from numstack.kernels.gemm.mma_sync import cut
from tests.support import BFLOAT16, assert_close, poisoned, to_device, to_host

IS_HOPPER = current_device().kind == "cuda" and current_device().properties.compute_capability == (9, 0)
needs_hopper = pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU: NUMSTACK_DEVICE=cuda runs it there")

# Edges of tiles of every shape; the last is deep enough to be cut along k.
SIZES = [(8, 8, 8), (200, 328, 136), (520, 776, 72), (264, 200, 2056)]


class Launches(offline.OfflineDevice):
    """Compiles nothing, and notes the block and the arguments of each launch."""

    def __init__(self, architecture: str) -> None:
        super().__init__(Architecture.parse(architecture), compiles=False)
        self.noted: list[tuple[int, tuple[Any, ...]]] = []

    def bind(self, kernel: Kernel, grid: Any, block: tuple[int, int, int], shared_bytes: int, args: Any) -> Any:
        self.noted.append((block[0], args))
        return super().bind(kernel, grid, block, shared_bytes, args)


def operands(m: int, n: int, k: int, layout: str) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    a = rng.standard_normal((k, m) if layout[0] == "T" else (m, k)).astype(BFLOAT16)
    b = rng.standard_normal((n, k) if layout[1] == "T" else (k, n)).astype(BFLOAT16)
    return a, b


def is_by_engine(architecture: str, m: int, n: int, k: int, layout: str) -> bool:
    with using(Launches(architecture)) as device:
        assert isinstance(device, Launches)
        a = device.array((k, m) if layout[0] == "T" else (m, k), np.uint16)
        b = device.array((n, k) if layout[1] == "T" else (k, n), np.uint16)
        gemm(a, b, device.array((m, n), np.uint16), layout=layout, variant="mma_sync")
        ((threads, args),) = device.noted
    maps = [isinstance(operand, TensorMap) for operand in args[:2]]
    assert all(maps) or not any(maps)
    assert (threads == 384) == maps[0]
    return maps[0]


def test_the_copy_engine_brings_what_it_can() -> None:
    assert all(is_by_engine("sm_90a", 100, 96, 72, layout) for layout in ("NN", "NT"))
    assert is_by_engine("sm_90a", 104, 96, 70, "TN")
    assert not is_by_engine("sm_90a", 100, 96, 70, "NT"), "rows of 140 bytes"
    assert not is_by_engine("sm_90a", 100, 96, 72, "TN"), "rows of 200 bytes"
    assert not is_by_engine("sm_90a", 104, 97, 72, "NN"), "rows of 194 bytes"
    assert not is_by_engine("sm_90a", 64, 64, 0, "NN"), "no rows"
    assert not is_by_engine("sm_80", 128, 128, 128, "NN"), "no copy engine"


@pytest.mark.parametrize("is_plain", [True, False])
def test_tiles_fit(is_plain: bool) -> None:
    with offline.device("sm_90a", compiles=False) as device:
        for m, n, k in [(65536, 2304, 768), (768, 768, 65536), (1600, 1600, 1600), (8, 50304, 768), (1, 1, 8)]:
            tiles, parts = cut.choose(m, n, k, cut.MOST_PARTS, is_plain)
            assert tiles.shared_bytes <= device.properties.shared_bytes_per_block
            assert sum(tiles.registers) <= (216 if is_plain else 190)
            assert 1 <= parts <= max(1, k // tiles.k)
            assert cut.choose(m, n, k, 1, is_plain)[1] == 1, "without a workspace nothing is cut along k"


@pytest.mark.parametrize("layout", ["NN", "TN"])
def test_several_strips_a_warp(layout: str, under_checks: None) -> None:
    """Parts of 96 x 32 elements, which lie in three panels of an operand."""
    m, n, k = 184, 56, 40
    a, b = operands(m, n, k, layout)
    c = to_device(poisoned((m, n), np.dtype(np.float32)))
    problem = problems.make(to_device(a), to_device(b), c, layout=layout)
    mma_sync.launch(problem, None, cut.Tiles(192, 64, 32, 2, 2, 3))
    assert_close(to_host(c), reference(a, b, layout=layout)[0], rtol=2e-5, atol=1e-4)


@needs_hopper
@pytest.mark.parametrize("shape", list(cut.SHAPES), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_tile(shape: tuple[int, int, int, int], layout: str) -> None:
    """In one part and in several, again and again to the same bits."""
    tiles = cut.fitted(*shape)
    assert tiles is not None
    for m, n, k in SIZES:
        a, b = operands(m, n, k, layout)
        given = to_device(a), to_device(b)
        expected = reference(a, b, layout=layout)[0]
        for parts in (1, 3) if k > 3 * tiles.k else (1,):
            workspace = to_device(poisoned((parts * m * n,), np.dtype(np.float32)))
            found: list[np.ndarray] = []
            for _ in range(20):
                c = to_device(poisoned((m, n), BFLOAT16))
                problem = problems.make(*given, c, layout=layout, workspace=workspace)
                mma_sync.launch(problem, None, tiles, parts, by_engine=True)
                found.append(to_host(c, BFLOAT16))
            assert_close(found[0], expected, rtol=8e-3, atol=2e-3 * k**0.5, what=f"c of {(m, n, k)} in {parts} parts")
            for again in found[1:]:
                np.testing.assert_array_equal(again.view(np.uint16), found[0].view(np.uint16))
