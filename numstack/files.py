"""Writing files so that a crash, a kill or a full disk leaves the old content or the new one, never a part.

The order is what makes it safe: write beside the target, flush to disk, rename over the target, flush the folder.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_atomically(path: Path, *parts: bytes) -> None:
    """Write ``parts`` one after the other to ``path``, which appears only once they are on disk.

    Parents are created. On any error ``path`` is unchanged and nothing is left behind.

    Raises
    ------
    OSError
        If the disk is full or the folder cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    flush(path.parent)


def flush(path: Path) -> None:
    """Wait until a file's content, or a folder's list of names, is on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
