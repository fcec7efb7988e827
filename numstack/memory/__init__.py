"""Device memory: every byte of it comes from here.

>>> from numstack import memory
>>> x = memory.empty((2, 3), "float32", scope="forward")
>>> row = x[1]          # a view: the memory stays until both are gone
>>> print(memory.statistics())

A request names its scope, what it is for: ``persistent`` (weights, optimiser state), ``forward`` (activations),
``backward`` (gradients), ``workspace`` (dies with the operation), ``comm`` (buckets). A scope owns regions, multiples
of 2 MiB that the device handed out, and cuts them into blocks of 512 bytes and more; the best-fitting free one serves a
request, and neighbours are joined when they are free. Regions go back to the device when somebody asks
(``release_unused``) or the device is full.

``block`` block and free list; ``region`` where regions come from, and the limit; ``scope`` which stream may use a free
block when; ``manager`` requests and returns; ``staging`` data on its way between host and device; ``report`` what
``OutOfMemory`` says.
"""

from numstack.errors import OutOfMemory
from numstack.memory.arrays import (
    empty,
    fetch,
    from_host,
    manager,
    record_use,
    release_unused,
    reset_peak,
    scope,
    send,
    set_limit,
    statistics,
    to_host,
    zeros,
)
from numstack.memory.manager import MemoryManager
from numstack.memory.region import RegionSource
from numstack.memory.scope import SCOPES
from numstack.memory.statistics import ScopeStatistics, Statistics

__all__ = [
    "SCOPES",
    "MemoryManager",
    "OutOfMemory",
    "RegionSource",
    "ScopeStatistics",
    "Statistics",
    "empty",
    "fetch",
    "from_host",
    "manager",
    "record_use",
    "release_unused",
    "reset_peak",
    "scope",
    "send",
    "set_limit",
    "statistics",
    "to_host",
    "zeros",
]
