"""The tuner: the fastest Config is kept on disk and found again; damage and two writers do no harm."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from numstack.device import current_device
from numstack.errors import KernelError
from numstack.kernels.gemm import Problem, Spec, tune
from numstack.kernels.gemm.wgmma.config import Config

FAST, SLOW, BROKEN = Config(stages=3), Config(stages=4), Config(tile_n=8)
SPEC = Spec(*[False] * len(Spec._fields))


class Table(tune.Tuned):
    """As a process that starts now would read it."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("NUMSTACK_CACHE", str(tmp_path))
    current_device()._state.pop(tune.Tuned, None)
    yield tmp_path
    current_device()._state.pop(tune.Tuned, None)


def problem(m: int = 64, n: int = 128, k: int = 32, dtype: type = np.uint16) -> Problem:
    a, b, c = np.empty((m, k), dtype), np.empty((k, n), dtype), np.empty((m, n), dtype)
    fields: dict[str, Any] = {"spec": SPEC, "m": m, "n": n, "k": k, "a": a, "b": b, "c": c, "alpha": 1.0}
    return Problem(**{**dict.fromkeys(Problem._fields), **fields})


def run(_: Problem, config: Config) -> None:
    if config == BROKEN:
        raise KernelError("a tile of 8 columns does not compile\nmore lines")


def pretended(seconds: dict[Config, float]) -> Callable[..., dict[Config, float]]:
    def time_s(calls: dict[Config, Callable[[], None]]) -> dict[Config, float]:
        for call in calls.values():
            call()
        return {config: seconds[config] for config in calls}

    return time_s


def tuned(of: Problem, seconds: dict[Config, float] | None = None) -> list[tune.Timing]:
    return tune.tune(of, [SLOW, BROKEN, FAST, FAST], run, pretended(seconds or {FAST: 1e-3, SLOW: 2e-3}))


def test_nothing_is_found_before(cache: Path) -> None:
    assert tune.find(problem()) is None
    assert not list(cache.iterdir())


def test_the_fastest_is_found_here_and_by_the_next_process() -> None:
    assert [timing.config for timing in tuned(problem())] == [FAST, SLOW]
    assert tune.find(problem()) == FAST
    assert Table(current_device()).configs == {tune.key_of(problem()): FAST}


def test_each_product_has_its_own() -> None:
    tuned(problem())
    tuned(problem(k=64), {FAST: 3e-3, SLOW: 2e-3})
    assert (tune.find(problem()), tune.find(problem(k=64))) == (FAST, SLOW)
    others = [problem(m=65), problem(dtype=np.float16), problem()._replace(spec=SPEC._replace(has_bias=True))]
    others += [problem()._replace(nonfinite=np.zeros(1)), problem()._replace(column_sums=np.zeros(128))]
    same = problem()
    others.append(same._replace(residual=same.c))
    assert [tune.find(other) for other in others] == [None] * len(others)
    assert len(Table(current_device()).configs) == 2


def test_tuning_again_replaces(cache: Path) -> None:
    tuned(problem())
    tuned(problem(), {FAST: 3e-3, SLOW: 2e-3})
    assert tune.find(problem()) == SLOW
    (file,) = cache.rglob("*.json")
    assert json.loads(file.read_text())["microseconds"] == 2000


def test_another_card_and_another_source_start_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned(problem())
    assert not Table(SimpleNamespace(name="another card")).configs  # type: ignore[arg-type]
    monkeypatch.setattr(tune, "source_hash", lambda: "changed")
    assert not Table(current_device()).configs


def test_the_source_is_that_of_kernel_and_instructions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tune.source_hash() == tune.source_hash()
    before = tune.source_hash()
    (tmp_path / "new.py").write_text("x = 1")
    monkeypatch.setattr(tune, "PTX", tmp_path)
    assert tune.source_hash() != before


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"spec": {}}', '{"spec": 1, "dtypes": [], "flags": [], "shape": [], "k": 1, "config": {}}']
)
def test_a_damaged_file_is_as_if_it_were_not_there(cache: Path, text: str) -> None:
    tuned(problem())
    tuned(problem(k=64))
    next(iter(sorted(cache.rglob("*.json")))).write_text(text)
    assert len(Table(current_device()).configs) == 1


def test_if_nothing_can_be_launched_the_reason_is_told() -> None:
    with pytest.raises(
        KernelError, match=r"gemm: no Config .* M=64 N=128 K=32.*: a tile of 8 columns does not compile$"
    ):
        tune.tune(problem(), [BROKEN], run, pretended({}))
    with pytest.raises(KernelError, match="none was given"):
        tune.tune(problem(), [], run, pretended({}))
    assert tune.find(problem()) is None


def test_a_cache_that_cannot_be_written_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMSTACK_CACHE", "/proc/nowhere")
    tuned(problem())
    assert tune.find(problem()) == FAST


def _write_many(first: int) -> None:
    for k in range(first, 400, 2):
        tuned(problem(k=k % 40 + 1))


def test_two_ranks_at_once() -> None:
    """Half of their products are the same; every file is whole at every moment."""
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_write_many, args=(first,)) for first in (0, 1)]
    for rank in ranks:
        rank.start()
    while any(rank.is_alive() for rank in ranks):
        for file in tune.Tuned(current_device())._card.rglob("*.json"):
            json.loads(file.read_text())
    for rank in ranks:
        rank.join()
        assert rank.exitcode == 0
    assert set(Table(current_device()).configs) == {tune.key_of(problem(k=k + 1)) for k in range(40)}
