"""numstack tune: which products a layer has, what is refused, what is printed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from numstack import tune
from numstack.device import current_device, offline
from numstack.errors import ConfigError, DeviceError
from numstack.kernels import gemm
from numstack.kernels.gemm import tune as tuner
from numstack.kernels.gemm import wgmma
from numstack.kernels.gemm.wgmma.config import Config
from tests.support import to_host

ON_CPU = pytest.mark.skipif(current_device().kind != "cpu", reason="runs with NUMSTACK_DEVICE=cpu")


@pytest.mark.parametrize("text", ["", "64x32", "64x32x0", "64x32x16x8", "axbxc", "64X32x16"])
def test_what_is_no_product_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"is no product; give TOKENSxINxOUT, such as 65536x768x3072"):
        tune.Layer.parse(text, "NN")


@ON_CPU
def test_without_a_hopper_gpu_it_says_so() -> None:
    with pytest.raises(DeviceError, match="the kernel that is tuned runs on Hopper GPUs"):
        tune.main(["64x32x16"])


@pytest.mark.parametrize("layout", ["NN", "NT"])
def test_a_layer_has_the_products_of_a_training_step(layout: str) -> None:
    products = dict(tune.Layer.parse("64x32x16", layout).products(np.dtype(np.uint16)))
    sizes = {what: (p.m, p.n, p.k) for what, p in products.items()}
    assert {sizes[what] for what in sizes if what.startswith("forward")} == {(64, 16, 32)}
    assert sizes["gradient of x"] == (64, 32, 16)
    assert sizes["gradient of w"] == ((32, 16, 64) if layout == "NN" else (16, 32, 64))
    assert len({p.spec for p in products.values()}) == len(products)
    assert {p.c.dtype for what, p in products.items() if "of w" in what} == {np.dtype(np.float32)}
    for problem in products.values():  # their shapes fit one another: gemm, which checks, takes them
        of_layout = "TN" if problem.spec.a_is_KM else "NT" if problem.spec.b_is_NK else "NN"
        gemm.gemm(problem.a, problem.b, problem.c, layout=of_layout)


@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float32])
def test_random_numbers_fill_an_array(dtype: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "N_RANDOM", 100)
    values = to_host(tune.random((7, 33), np.dtype(dtype)))
    if dtype == np.uint16:
        values = (values.astype(np.uint32) << 16).view(np.float32)
    assert 0.7 < values.astype(np.float64).std() < 1.3
    np.testing.assert_array_equal(values.reshape(-1)[:100], values.reshape(-1)[100:200])


def pretended(calls: dict[Config, Callable[[], None]]) -> dict[Config, float]:
    """Tiles of 128 x 192 are the fastest, row after row."""
    return {c: 1e-3 * (1 + (c.tile_n != 192) + (c.tile_m != 128) + 0.5 * (c.group > 1) + c.spread) for c in calls}


def test_the_best_of_the_best_tiles_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Config] = []
    monkeypatch.setenv("NUMSTACK_CACHE", str(tmp_path))
    monkeypatch.setattr(tune, "run", lambda problem, config: tried.append(config))
    monkeypatch.setattr(tune, "time_on_gpu", pretended)
    with offline.device("sm_90a"):
        products = dict(tune.Layer(8192, 768, 768, "NN").products(np.dtype(np.uint16)))
        for what, problem in products.items():
            timings = tune.tuned(problem)
            best = timings[0].config
            assert (best.tile_m, best.tile_n, best.group, best.spread) == (128, 192, 1, False), what
            assert tuner.find(problem) == best
            line = tune.describe(what, problem, timings)
            assert line.startswith(f"{what} {problem.m}x{problem.n}x{problem.k}: ") and "tile_n=192" in line
        problem = products["forward"]
    assert len(set(tried)) < len(products) * len(list(wgmma.candidates(problem)))  # not all are compiled


def test_what_the_copy_engine_cannot_move_is_refused() -> None:
    with offline.device("sm_90a"):
        products = dict(tune.Layer(64, 31, 16, "NN").products(np.dtype(np.uint16)))
        with pytest.raises(ConfigError, match=r"does not support M=64 N=16 K=31.*; give multiples of 8"):
            tune.tuned(products["forward"])
