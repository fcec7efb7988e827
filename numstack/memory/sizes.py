"""Sizes in bytes: the granules that memory comes in, and how people write and read sizes."""

from __future__ import annotations

import re

from numstack.errors import ConfigError

KIB, MIB, GIB, TIB = 1 << 10, 1 << 20, 1 << 30, 1 << 40

# What an array's memory is a multiple of: the alignment that a GPU's widest loads and its texture units want.
BLOCK_NBYTES = 512
# What a region is a multiple of: the granule of physical memory in the CUDA driver's virtual-memory interface.
REGION_NBYTES = 2 * MIB
# A scope's regions double up to this size; a request of half of it or more gets a region of its own.
LARGE_REGION_NBYTES = 64 * MIB

_UNITS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def round_up(nbytes: int, granule: int) -> int:
    """The least multiple of ``granule`` that holds ``nbytes``."""
    return -(-nbytes // granule) * granule


def region_nbytes(need: int, reserved: int) -> int:
    """How large the next region of a scope should be.

    Parameters
    ----------
    need : int
        Bytes of the request that no free block can serve.
    reserved : int
        Bytes that the scope has already: it doubles, so that the number of regions grows with the logarithm.
    """
    if need < LARGE_REGION_NBYTES // 2:
        need = max(need, min(reserved, LARGE_REGION_NBYTES))
    return round_up(need, REGION_NBYTES)


def format_size(nbytes: int) -> str:
    """``format_size(1536)`` is ``"1.5 KiB"``."""
    for unit, name in ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.1f} {name}"
    return f"{nbytes} B"


def parse_size(text: str, name: str) -> int:
    """Bytes of a size as people write it: ``"512MiB"``, ``"1.5 GiB"``, ``"1000000"``.

    Parameters
    ----------
    text : str
    name : str
        What the size is for, such as the name of an environment variable; the error starts with it.

    Raises
    ------
    ConfigError
        If ``text`` is no size.
    """
    match = _SIZE.fullmatch(text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(
            f"{name}={text!r} is not a size; write a number of bytes, or one with KiB, MiB, GiB or TiB, such as 512MiB"
        )
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit
