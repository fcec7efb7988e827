"""Loading NCCL: nccl4py's bindings, and which libnccl they use.

nccl4py finds libnccl among the installed wheels. ``NUMSTACK_NCCL_LIBRARY=/path/libnccl.so.2`` names another one: it is
loaded first, and nccl4py takes a libnccl that the process has loaded (as it does one of ``LD_PRELOAD``).

Of nccl4py the plain bindings are used, ``nccl.bindings.nccl``: they take addresses as integers, where ``nccl.core``
would look at every array anew. They may change between versions, so nccl4py is pinned exactly.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
from typing import Any

from numstack.comm import nccl_settings
from numstack.device.ranks import ranks_per_gpu
from numstack.errors import CommError

LIBRARY_VARIABLE = "NUMSTACK_NCCL_LIBRARY"
# As NCCL numbers itself: 2.30.0.
FIRST_WITH_SHARED_GPU = 23000


def available() -> bool:
    """Whether nccl4py is installed."""
    try:
        return importlib.util.find_spec("nccl.bindings") is not None
    except ModuleNotFoundError:
        return False


def load() -> Any:
    """nccl4py's bindings with a libnccl that fits this run, settings applied.

    Raises
    ------
    CommError
        If nccl4py or libnccl is missing, or libnccl is too old for ranks that share a GPU.
    """
    nccl_settings.apply()
    library = _bindings()
    version = library.get_version()
    if ranks_per_gpu() > 1 and version < FIRST_WITH_SHARED_GPU:
        raise CommError(
            f"NUMSTACK_RANKS_PER_GPU={ranks_per_gpu()} needs NCCL 2.30 or newer, but {library.get_library_path()} is "
            f"NCCL {dotted(version)}; give a newer one ({LIBRARY_VARIABLE}), or take the ring (--communicator ring)"
        )
    return library


def version() -> str:
    """Version of the libnccl that loads, such as ``2.32.3``.

    Raises
    ------
    CommError
        If none does.
    """
    return dotted(_bindings().get_version())


def dotted(version: int) -> str:
    """``2.32.3`` of 23203."""
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


def _bindings() -> Any:
    path = os.environ.get(LIBRARY_VARIABLE)
    try:
        if path:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        library = importlib.import_module("nccl.bindings.nccl")
        library.get_version()  # loads libnccl
    except ModuleNotFoundError as error:
        raise CommError(
            f"NCCL cannot be used ({error}); install nccl4py: pip install -e '.[cuda]', or take the ring"
        ) from error
    except (ImportError, OSError, RuntimeError) as error:
        where = f"{LIBRARY_VARIABLE}={path}" if path else "libnccl"
        raise CommError(
            f"{where} cannot be loaded ({error}); install nvidia-nccl-cu13, or name the file in {LIBRARY_VARIABLE}"
        ) from error
    return library
