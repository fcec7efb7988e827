"""The cache directory: where it is, compiled kernels in it, and how several processes write to it at once."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import llvmlite
import numba
import numpy as np
from numba.core.registry import cpu_target

from numstack.simt.codegen import Code


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


@dataclass(frozen=True)
class Entry:
    """A compiled kernel as it is kept.

    Attributes
    ----------
    source : str
        The generated Python.
    has_global_atomics, uses_dynamic_shared : bool
    not_negative : tuple of int
        Integer arguments that the code takes to be zero or more.
    code : Code
    """

    source: str
    has_global_atomics: bool
    uses_dynamic_shared: bool
    not_negative: tuple[int, ...]
    code: Code

    def to_bytes(self) -> bytes:
        """One line of JSON with the hash of the rest, then the object code."""
        fields = asdict(self)
        object_code = fields["code"].pop("object_code")
        fields["sha256"] = hashlib.sha256(object_code).hexdigest()
        return json.dumps(fields).encode() + b"\n" + object_code  # type: ignore[no-any-return]

    @classmethod
    def from_bytes(cls, data: bytes) -> Entry:
        """What `to_bytes` wrote.

        Raises
        ------
        ValueError
            If it is damaged.
        """
        header, _, object_code = data.partition(b"\n")
        try:
            fields = json.loads(header)
            if fields.pop("sha256") != hashlib.sha256(object_code).hexdigest():
                raise ValueError("damaged")
            code = Code(object_code=object_code, **fields.pop("code"))
            return cls(code=code, not_negative=tuple(fields.pop("not_negative")), **fields)
        except (KeyError, TypeError, AttributeError, UnicodeDecodeError) as error:
            raise ValueError("damaged") from error


def entry_path(name: str, *depends_on: str) -> Path:
    """Where the code of a kernel is kept that depends on these texts, this CPU and this compiler."""
    digest = hashlib.sha256("\0".join([*depends_on, _compiler()]).encode()).hexdigest()
    return cache_directory() / "cpu" / f"{name.lstrip('_')}-{digest[:40]}.kernel"


def load(path: Path) -> Entry | None:
    """The entry in a file; None if there is none, or it is damaged."""
    try:
        return Entry.from_bytes(path.read_bytes())
    except (OSError, ValueError):
        return None


@functools.cache
def _compiler() -> str:
    """Everything but the kernel that machine code depends on: this room, the tools below it, and the CPU."""
    digest = hashlib.sha256()
    for file in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(file.read_bytes())
    cpu = cpu_target.target_context.codegen().magic_tuple()
    versions = (sys.version_info[:2], numba.__version__, llvmlite.__version__, np.__version__)
    return f"{digest.hexdigest()} {cpu} {versions}"
