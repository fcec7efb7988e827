"""What the checks of the ranks share: contributions that every rank can compute, and assertions over all ranks."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from numstack.comm.protocol import Communicator
from numstack.comm.world import World
from numstack.device import Array, Event
from numstack.dtypes import bfloat16
from numstack.errors import CommError
from tests.support import to_device, to_host

Check = Callable[[World, Communicator], None]
ALL = ("ring", "mpi", "nccl", "fake-nccl")
_checks: dict[str, tuple[Check, tuple[str, ...]]] = {}

# Largest relative rounding of one addition.
EPSILON = {"float32": 2**-24, "float64": 2**-53, "float16": 2**-11, "bfloat16": 2**-8}
DTYPES = [np.dtype(d) for d in (np.float32, np.float64, np.float16, bfloat16, np.int32, np.int64, np.uint8)]


def check(function: Check) -> Check:
    """Run ``function`` for every back end."""
    return check_on(*ALL)(function)


def check_on(*backends: str) -> Callable[[Check], Check]:
    """Run the function below for some back ends."""

    def keep(function: Check) -> Check:
        _checks[function.__name__] = (function, backends)
        return function

    return keep


def checks(backend: str) -> dict[str, Check]:
    """All checks of a back end, in the order in which they are written."""
    return {name: function for name, (function, backends) in _checks.items() if backend in backends}


def contribution(rank: int, n: int, dtype: np.dtype[Any]) -> np.ndarray:
    """What ``rank`` brings: every rank can compute that of every other."""
    rng = np.random.default_rng([rank, n])
    if np.issubdtype(dtype, np.integer):
        return rng.integers(0, 50, n).astype(dtype)
    return rng.standard_normal(n).astype(dtype)


def contributions(size: int, n: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Those of all ranks in float64, one row each."""
    return np.stack([contribution(rank, n, dtype).astype(np.float64) for rank in range(size)])


def reduced(rows: np.ndarray, op: str) -> np.ndarray:
    """The float64 reference."""
    return {"sum": rows.sum, "mean": rows.mean, "max": rows.max, "min": rows.min}[op](axis=0)  # type: ignore[operator, no-any-return]


def assert_reduced(got: np.ndarray, rows: np.ndarray, op: str, what: str) -> None:
    """Exact for integers and for max and min; else within one rounding for each step and one for the mean."""
    expected = reduced(rows, op)
    allowed = np.zeros(expected.shape)
    if op in ("sum", "mean") and got.dtype.name in EPSILON:
        allowed = EPSILON[got.dtype.name] * len(rows) * np.abs(rows).sum(axis=0)
        if op == "mean":
            allowed = allowed / len(rows) + EPSILON[got.dtype.name] * np.abs(expected)
    error = np.abs(got.astype(np.float64) - expected)
    assert got.shape == expected.shape and (error <= allowed).all(), f"{what}: off by {error.max()} of {got.dtype}"


def assert_same_bits(world: World, array: np.ndarray, what: str) -> None:
    """Collective."""
    digest = np.frombuffer(hashlib.sha256(array.tobytes()).digest(), np.uint8)
    digests = np.empty((world.size, digest.size), np.uint8)
    assert world.mpi is not None
    world.mpi.Allgather(digest, digests)
    assert (digests == digests[0]).all(), f"{what}: bits differ between ranks"


def device_array(host: np.ndarray) -> tuple[Array, Callable[[], np.ndarray]]:
    """An array on the device with the contents of ``host``, and what reads it back in ``host``'s dtype."""
    array = to_device(host)
    return array, lambda: to_host(array, host.dtype)


def error_of(call: Callable[[], Event], communicator: Communicator) -> str:
    """The message of the CommError that ``call``, or waiting for its event, raises; then the stream works again."""
    try:
        call().synchronize()
    except CommError as error:
        with contextlib.suppress(CommError):
            communicator.synchronize()
        return str(error)
    raise AssertionError("no CommError")


def sizes(world: World) -> Iterable[int]:
    """Empty, one element, fewer than ranks, not divisible, and one that takes several chunks on few ranks."""
    return (0, 1, 2, world.size, world.size + 1, 7, 1000, 65537, 300_001)


def fresh(world: World, communicator: Communicator, timeout_s: float) -> Communicator:
    """Collective."""
    assert world.mpi is not None
    created = type(communicator)(world, timeout_s=timeout_s)
    world.mpi.Barrier()
    return created


def settle(communicator: Communicator) -> None:
    """Let a failure that comes to this rank later, through a watchdog, be raised here and not in the next check."""
    watchdog = getattr(communicator._peers, "watchdog", None)
    deadline = time.monotonic() + 5
    while watchdog is not None and watchdog.error is None and time.monotonic() < deadline:
        time.sleep(0.01)
    with contextlib.suppress(CommError):
        communicator.synchronize()
