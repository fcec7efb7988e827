"""NCCL's settings, and which NCCL is loaded."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

from numstack.comm import nccl_library, nccl_settings
from numstack.comm.nccl_settings import SETTINGS
from numstack.errors import CommError
from tests.comm.fake_nccl import Bindings

ALWAYS = [setting.variable for setting in SETTINGS if not setting.shared_gpu]
SHARED = [setting.variable for setting in SETTINGS if setting.shared_gpu]


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """An environment without NCCL's variables, put back afterwards."""
    for setting in SETTINGS:
        monkeypatch.setenv(setting.variable, "")  # so that what the test leaves is undone
        monkeypatch.delenv(setting.variable)
    for variable in ("NUMSTACK_RANKS_PER_GPU", "NUMSTACK_NCCL_LIBRARY"):
        monkeypatch.delenv(variable, raising=False)
    return monkeypatch


def states() -> dict[str, str]:
    return {state.setting.variable: state.state for state in nccl_settings.report()}


def test_settings_of_one_rank_a_gpu(clean: pytest.MonkeyPatch) -> None:
    nccl_settings.apply()
    assert {name: os.environ.get(name) for name in ALWAYS} == {"NCCL_NVLS_ENABLE": "0", "NCCL_RUNTIME_CONNECT": "0"}
    assert not any(name in os.environ for name in SHARED)
    assert states() == dict.fromkeys(ALWAYS, "in force") | dict.fromkeys(SHARED, "only when ranks share a GPU")


def test_settings_of_ranks_that_share_a_gpu(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("NUMSTACK_RANKS_PER_GPU", "4")
    nccl_settings.apply()
    assert (os.environ["NCCL_MULTI_RANK_GPU_ENABLE"], os.environ["NCCL_MAX_CTAS"]) == ("1", "8")
    assert set(states().values()) == {"in force"}


def test_what_the_user_has_set_stays(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("NCCL_NVLS_ENABLE", "1")
    nccl_settings.apply()
    assert os.environ["NCCL_NVLS_ENABLE"] == "1"
    assert states()["NCCL_NVLS_ENABLE"] == "set to 1 by you"
    assert [state.obeyed for state in nccl_settings.report()] == [False, True, True, True]


def test_the_version_that_sharing_needs(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(nccl_library, "_bindings", lambda: Bindings(None, 22803))
    assert nccl_library.load().get_version() == 22803
    clean.setenv("NUMSTACK_RANKS_PER_GPU", "4")
    with pytest.raises(CommError, match=r"NUMSTACK_RANKS_PER_GPU=4 needs NCCL 2\.30 or newer, but /fake/\S+ is NCCL 2"):
        nccl_library.load()
    clean.setattr(nccl_library, "_bindings", lambda: Bindings(None, 23000))
    assert nccl_library.load().get_version() == 23000


def test_a_library_that_is_not_there(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("NUMSTACK_NCCL_LIBRARY", "/nowhere/libnccl.so.2")
    with pytest.raises(CommError, match=r"NUMSTACK_NCCL_LIBRARY=/nowhere/libnccl\.so\.2 cannot be loaded"):
        nccl_library.load()


def missing(name: str) -> Any:
    raise ModuleNotFoundError(f"No module named {name!r}")


def test_without_nccl4py(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(importlib, "import_module", missing)
    with pytest.raises(CommError, match=r"NCCL cannot be used \(No module named 'nccl.*install nccl4py"):
        nccl_library.version()


class WithoutLibrary:
    """nccl4py where there is no libnccl."""

    def get_version(self) -> int:
        raise RuntimeError('Failure finding "libnccl.so"')


def test_without_libnccl(clean: pytest.MonkeyPatch) -> None:
    clean.setattr(importlib, "import_module", lambda name: WithoutLibrary())
    with pytest.raises(CommError, match=r"libnccl cannot be loaded \(Failure finding .*install nvidia-nccl-cu13"):
        nccl_library.load()


def test_how_nccl_numbers_itself() -> None:
    assert nccl_library.dotted(23203) == "2.32.3"
    assert nccl_library.dotted(22809) == "2.28.9"
