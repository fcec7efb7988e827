"""Files in the cache directory: where it is, and how several processes write to it at once."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path


def cache_directory() -> Path:
    """``$NUMSTACK_CACHE``, by default ``~/.cache/numstack``."""
    return Path(os.environ.get("NUMSTACK_CACHE") or Path.home() / ".cache" / "numstack")


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that readers see all of it or nothing, whoever else writes it at the same time.

    A cache that cannot be written (a full disk, a read-only home) is no reason to stop: the file is just not kept.
    """
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except OSError:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
