"""Checkpoints: what is saved comes back bit for bit, what is broken is named, and a failure to save loses nothing."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from numstack.errors import CheckpointError
from numstack.train import checkpoint
from tests.disk import file_size_limit

MODEL = {
    "h.0.weight": np.arange(6, dtype=np.float32).reshape(2, 3),
    "bias": np.array([np.nan, -0.0, 1e-45], np.float32),
}
OPTIMIZER = {"n_steps": np.array([7]), "m.bias": np.zeros(0, np.float32)}


def save(folder: Path, step: int, keep: int = 3, **more: Any) -> Path:
    arrays = {"model": MODEL, "optimizer": OPTIMIZER} | more.pop("arrays", {})
    configuration = {"width": 8, "learning_rate": 1e-3}
    return checkpoint.save(
        folder, step=step, arrays=arrays, configuration=configuration, state={"elapsed_s": 1.25}, keep=keep
    )


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_there_and_back(tmp_path: Path) -> None:
    path = save(tmp_path / "new" / "checkpoints", 7)
    assert path.name == "step_00000007"
    loaded = checkpoint.load(path)
    assert (loaded.path, loaded.step, loaded.state) == (path, 7, {"elapsed_s": 1.25})
    assert loaded.configuration == {"width": 8, "learning_rate": 1e-3} == checkpoint.read_configuration(path)
    for file, arrays in (("model", MODEL), ("optimizer", OPTIMIZER)):
        assert loaded.arrays[file].keys() == arrays.keys()
        for name, array in arrays.items():
            assert loaded.arrays[file][name].dtype == array.dtype
            assert loaded.arrays[file][name].shape == array.shape
            assert loaded.arrays[file][name].tobytes() == array.tobytes()


def test_a_view_is_saved_as_it_looks(tmp_path: Path) -> None:
    view = np.arange(12, dtype=np.float32).reshape(3, 4).T[::2]
    loaded = checkpoint.load(save(tmp_path, 1, arrays={"model": {"view": view}}))
    np.testing.assert_array_equal(loaded.arrays["model"]["view"], view)


def test_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 100, 20):
        save(tmp_path, step, keep=2)
    assert names(tmp_path) == ["step_00000020", "step_00000100"]  # 20 came last and must not delete itself
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000100"
    save(tmp_path, 200, keep=1)
    assert names(tmp_path) == ["step_00000200"]


def test_same_step_again(tmp_path: Path) -> None:
    save(tmp_path, 5)
    path = save(tmp_path, 5, arrays={"model": {"x": np.ones(1, np.float32)}})
    assert checkpoint.load(path).arrays["model"].keys() == {"x"}
    assert names(tmp_path) == ["step_00000005"]


def test_no_checkpoint_yet(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path) is None
    assert checkpoint.latest(tmp_path / "none") is None
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(CheckpointError, match=r"no checkpoint: there is no manifest\.json"):
            checkpoint.load(path)


def test_leftovers_of_a_crash_are_no_checkpoints(tmp_path: Path) -> None:
    (tmp_path / ".unfinished-abc").mkdir()
    (tmp_path / ".unfinished-abc" / "model.safetensors").write_bytes(b"half")
    assert checkpoint.latest(tmp_path) is None
    save(tmp_path, 1)
    assert names(tmp_path) == ["step_00000001"]


def damage_manifest(path: Path, **changes: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | changes))


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors"])
def test_truncated_altered_or_missing_file(tmp_path: Path, file: str) -> None:
    path = save(tmp_path, 1)
    content = (path / file).read_bytes()
    (path / file).write_bytes(content[:-1])
    with pytest.raises(
        CheckpointError, match=rf"{file}: truncated: {len(content) - 1} bytes instead of {len(content)}"
    ):
        checkpoint.load(path)
    (path / file).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=rf"{file}: altered: its SHA-256 is not the one in the manifest"):
        checkpoint.load(path)
    (path / file).unlink()
    with pytest.raises(CheckpointError, match=rf"{file}: missing"):
        checkpoint.load(path)


def test_damaged_manifest(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    damage_manifest(path, step=2)
    with pytest.raises(CheckpointError, match="altered: its SHA-256 is not the one it records"):
        checkpoint.load(path)
    damage_manifest(path, version=2)
    with pytest.raises(CheckpointError, match="of format version 2; this numstack reads version 1"):
        checkpoint.load(path)
    damage_manifest(path, format="something else")
    with pytest.raises(CheckpointError, match="not the manifest of a numstack checkpoint"):
        checkpoint.load(path)
    (path / "manifest.json").write_text('{"format": "numstack')
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(path)


def test_pickle_is_not_read(tmp_path: Path) -> None:
    """A file that is a pickle, with a manifest that vouches for it, is refused by safetensors."""
    path = save(tmp_path, 1)
    (path / "model.safetensors").write_bytes(b"\x80\x04cos\nsystem\n(S'echo unpickled'\ntR.")
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    entry = manifest["files"]["model.safetensors"]
    entry["nbytes"] = (path / "model.safetensors").stat().st_size
    entry["sha256"] = checkpoint._sha256(path / "model.safetensors")
    checkpoint._write_manifest(path / "manifest.json", manifest)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        checkpoint.load(path)


def test_full_disk(tmp_path: Path) -> None:
    """The second checkpoint is larger than the disk: the first stays whole, and nothing half-written is left."""
    first = save(tmp_path, 1)
    with (
        file_size_limit(4096),
        pytest.raises(CheckpointError, match=r"step 2 cannot be written .*make room there; .*step_00000001 is whole"),
    ):
        save(tmp_path, 2, arrays={"model": {"big": np.zeros(10_000, np.float32)}})
    assert names(tmp_path) == ["step_00000001"]
    assert checkpoint.latest(tmp_path) == first
    assert checkpoint.load(first).step == 1


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_disk_that_fails_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """The content fits, but flushing it to disk or renaming fails."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    save(tmp_path, 1)
    monkeypatch.setattr(os, call, fail)
    with pytest.raises(CheckpointError, match=r"No space left on device.*step_00000001 is whole"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert names(tmp_path) == ["step_00000001"]
    checkpoint.load(tmp_path / "step_00000001")


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot be written to .*there is no earlier one"):
        save(tmp_path / "file" / "checkpoints", 1)
