"""The records of GPU runs: a change of code makes a kernel stale, a comment does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import gpu_records


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two operations, one of which imports the other and what both share."""
    folder = tmp_path / "numstack" / "kernels"
    folder.mkdir(parents=True)
    (tmp_path / "numstack" / "device").mkdir()
    (tmp_path / "numstack" / "device" / "conversions.py").write_text("x = 1\n")
    (folder / "warp.py").write_text("def total(x): return x\n")
    (folder / "gelu.py").write_text('"""Docs."""\nfrom numstack.kernels.warp import total\n')
    (folder / "gemm.py").write_text("from numstack.kernels import gelu\nfrom numstack.device.ptx import mma\n")
    instructions = tmp_path / "numstack" / "device" / "ptx"
    instructions.mkdir()
    (instructions / "__init__.py").write_text("from numstack.device.ptx.tma import load\n")
    (instructions / "mma.py").write_text("TEXT = 'mma'\n")
    (instructions / "tma.py").write_text("TEXT = 'tma'\n")
    tests = tmp_path / "tests" / "kernels"
    tests.mkdir(parents=True)
    for name in ("gelu", "gemm", "gemm_large", "sass"):
        (tests / f"test_{name}.py").write_text("")
    monkeypatch.setattr(gpu_records, "KERNELS", folder)
    monkeypatch.setattr(gpu_records, "PTX", instructions)
    monkeypatch.setattr(gpu_records, "TESTS", tests)
    monkeypatch.setattr(gpu_records, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_records, "RECORDS", tmp_path / "records.json")
    forget()
    yield folder
    forget()


def forget() -> None:
    gpu_records.digest.cache_clear()
    gpu_records._homes.cache_clear()


def record(**failed: int) -> None:
    forget()
    records = {name: {"digest": gpu_records.digest(name), "failed": n} for name, n in failed.items()}
    gpu_records.RECORDS.write_text(json.dumps(records))


def changed() -> list[str]:
    forget()
    return gpu_records.changed()


def test_what_never_ran_or_failed_is_stale(kernels: Path) -> None:
    assert changed() == ["gelu", "gemm"]
    record(gelu=0, gemm=1)
    assert changed() == ["gemm"]


def test_a_comment_changes_nothing_and_code_does(kernels: Path) -> None:
    record(gelu=0, gemm=0)
    (kernels / "gelu.py").write_text('"""Other docs."""\n# why\nfrom numstack.kernels.warp import total\n')
    assert changed() == []
    (kernels / "gemm.py").write_text("from numstack.kernels import gelu\nTILE = 2\n")
    assert changed() == ["gemm"]


def test_a_change_of_what_is_shared_reaches_every_user(kernels: Path) -> None:
    record(gelu=0, gemm=0)
    (kernels / "warp.py").write_text("def total(x): return -x\n")
    assert changed() == ["gelu", "gemm"]


def test_a_change_of_an_instruction_reaches_who_imports_it(kernels: Path) -> None:
    record(gelu=0, gemm=0)
    (kernels.parent / "device" / "ptx" / "tma.py").write_text("TEXT = 'other'\n")
    assert changed() == []
    (kernels.parent / "device" / "ptx" / "mma.py").write_text("TEXT = 'other'\n")
    assert changed() == ["gemm"]


@pytest.mark.parametrize(
    "use", ["from numstack.device import ptx\nptx.load()\n", "from numstack.device.ptx import load\nload()\n"]
)
def test_an_instruction_that_the_package_hands_on_is_looked_for_where_it_is(kernels: Path, use: str) -> None:
    (kernels / "gelu.py").write_text(use)
    record(gelu=0, gemm=0)
    instructions = kernels.parent / "device" / "ptx"
    (instructions / "wgmma.py").write_text("TEXT = 'no one imports it'\n")
    assert changed() == []
    (instructions / "tma.py").write_text("TEXT = 'other'\n")
    assert changed() == ["gelu", "gemm"]


def test_a_change_of_what_an_instruction_builds_on_reaches_who_imports_it(kernels: Path) -> None:
    instructions = kernels.parent / "device" / "ptx"
    (instructions / "words.py").write_text(
        "from numstack.device.ptx import mma\nfrom numstack.device.ptx.tma import load\n"
    )
    (kernels / "gelu.py").write_text("from numstack.device.ptx.words import words\n")
    record(gelu=0, gemm=0)
    (instructions / "tma.py").write_text("TEXT = 'other'\n")
    assert changed() == ["gelu", "gemm"]


def test_several_files_may_test_an_operation(kernels: Path) -> None:
    assert gpu_records.operations() == ["gelu", "gemm"]
    names = [gpu_records.operation_of(f"test_{name}") for name in ("gemm", "gemm_large", "gemmish", "sass")]
    assert names == ["gemm", "gemm", None, None]


def test_real_operations_have_digests() -> None:
    names = gpu_records.operations()
    assert {"gemm", "attention", "layernorm"} <= set(names)
    assert len({gpu_records.digest(name) for name in names}) == len(names)
