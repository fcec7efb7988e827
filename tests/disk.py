"""A full disk, near enough: no file may grow beyond a size. Needs no privileges and no mount."""

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def file_size_limit(nbytes: int) -> Iterator[None]:
    """Writes beyond ``nbytes`` fail with an OSError, as on a full disk (EFBIG instead of ENOSPC)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
