"""Checkpoints: a folder for each saved step, complete and checked, or not there at all.

::

    run/checkpoints/step_00001000/
        model.safetensors       weights, with Hugging Face's GPT-2 names
        optimizer.safetensors   AdamW's moments and its count of steps
        manifest.json           format version, step, configuration, state, and SHA-256 and size of each file

A checkpoint is written into a temporary folder beside the others, flushed to disk and renamed: a crash, a kill or a
full disk leaves the earlier ones as they were. Nothing here is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy
from numpy.typing import NDArray

from numstack.errors import CheckpointError
from numstack.files import flush

FORMAT = "numstack checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
_NAME = re.compile(r"step_(\d{8,})")
_UNFINISHED = ".unfinished-"

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Checkpoint:
    """What ``load`` returns.

    Attributes
    ----------
    path : the folder it came from
    step : int, steps done
    configuration : what the run was started with
    state : small values beside the arrays
    arrays : the arrays of each file, by its name without ``.safetensors``
    """

    path: Path
    step: int
    configuration: dict[str, Any]
    state: dict[str, Any]
    arrays: dict[str, Arrays]


def save(
    folder: Path,
    *,
    step: int,
    arrays: Mapping[str, Arrays],
    configuration: Mapping[str, Any],
    state: Mapping[str, Any],
    keep: int,
) -> Path:
    """Write one checkpoint, then delete the oldest, so that ``keep`` remain. Called by one rank only.

    Parameters
    ----------
    folder : where the checkpoints of a run live; created if missing
    step : int
        Steps done; a checkpoint of the same step is replaced.
    arrays : arrays by name, for each file
    configuration, state : JSON
    keep : int, at least 1

    Returns
    -------
    Path
        The folder of the new checkpoint.

    Raises
    ------
    CheckpointError
        If the disk is full or the folder cannot be written; the earlier checkpoints are untouched.
    """
    target = folder / f"step_{step:08d}"
    temporary: Path | None = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.glob(f"{_UNFINISHED}*"):
            shutil.rmtree(leftover, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(dir=folder, prefix=_UNFINISHED))
        temporary.chmod(0o755)
        files = {
            f"{name}.safetensors": _write_arrays(temporary / f"{name}.safetensors", arrays[name]) for name in arrays
        }
        manifest = {
            "format": FORMAT,
            "version": VERSION,
            "step": step,
            "configuration": dict(configuration),
            "state": dict(state),
            "files": files,
        }
        _write_manifest(temporary / MANIFEST, manifest)
        flush(temporary)
        if target.exists():
            shutil.rmtree(target)
        temporary.rename(target)
        flush(folder)
    except (OSError, safetensors.SafetensorError) as error:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        newest = latest(folder)
        whole = f"{newest} is whole, resume from it" if newest else "there is no earlier one"
        raise CheckpointError(
            f"the checkpoint of step {step} cannot be written to {folder} ({_reason(error)}); make room there; {whole}"
        ) from error
    others = [path for _, path in _all(folder) if path != target]
    for old in others[: max(0, len(others) - keep + 1)]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def latest(folder: Path) -> Path | None:
    """The newest checkpoint in ``folder``, or None. Folders that a crash left unfinished are not checkpoints."""
    found = _all(folder)
    return found[-1][1] if found else None


def load(path: Path) -> Checkpoint:
    """Read a checkpoint after checking its version and the SHA-256 of every file.

    Raises
    ------
    CheckpointError
        If it is missing, truncated, altered or of another version.
    """
    manifest = _read_manifest(path)
    arrays: dict[str, Arrays] = {}
    for name, expected in manifest["files"].items():
        _check_file(path / name, expected)
        try:
            arrays[name.removesuffix(".safetensors")] = safetensors.numpy.load_file(path / name)
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(
                f"{path / name}: cannot be read ({_reason(error)}); resume from another one"
            ) from error
    return Checkpoint(path, manifest["step"], manifest["configuration"], manifest["state"], arrays)


def read_configuration(path: Path) -> dict[str, Any]:
    """The configuration of a checkpoint, without reading its arrays; same errors as ``load``."""
    configuration: dict[str, Any] = _read_manifest(path)["configuration"]
    return configuration


def _all(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints by step. A folder without manifest is listed too: that it is broken must be said, not passed over."""
    if not folder.is_dir():
        return []
    matches = ((_NAME.fullmatch(entry.name), entry) for entry in folder.iterdir())
    return sorted((int(match[1]), entry) for match, entry in matches if match)


def _write_arrays(path: Path, arrays: Arrays) -> dict[str, Any]:
    safetensors.numpy.save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, path)
    flush(path)
    return {"nbytes": path.stat().st_size, "sha256": _sha256(path)}


def _write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    with path.open("w") as file:
        json.dump(manifest | {"sha256": _digest(manifest)}, file, indent=1)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path}: no checkpoint: there is no {MANIFEST} in it; give another one") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST}: damaged ({error}); resume from another checkpoint") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path / MANIFEST}: not the manifest of a numstack checkpoint; give another path")
    if manifest.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: a checkpoint of format version {manifest.get('version')}; this numstack reads version {VERSION}: "
            f"use the numstack that wrote it"
        )
    digest = manifest.pop("sha256", None)
    if digest != _digest(manifest):
        raise CheckpointError(f"{path / MANIFEST}: altered: its SHA-256 is not the one it records; resume from another")
    return manifest


def _check_file(path: Path, expected: dict[str, Any]) -> None:
    try:
        nbytes = path.stat().st_size
        if nbytes != expected["nbytes"]:
            raise CheckpointError(
                f"{path}: truncated: {nbytes} bytes instead of {expected['nbytes']}; resume from another checkpoint"
            )
        if _sha256(path) != expected["sha256"]:
            raise CheckpointError(
                f"{path}: altered: its SHA-256 is not the one in the manifest; resume from another checkpoint"
            )
    except FileNotFoundError:
        raise CheckpointError(f"{path}: missing; resume from another checkpoint") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
