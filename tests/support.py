"""What the tests share: poisoned outputs, arrays on the device under test, a comparison that explains itself."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from numstack.device import current_device

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

# Relative and absolute tolerance by the dtype that a kernel stores, a few of its roundings at magnitude 1:
# float32 leaves room for sums in another order, bfloat16 has 8 bits of mantissa, float16 has 11.
TOLERANCES: dict[str, tuple[float, float]] = {
    "float32": (2e-5, 2e-6),
    "bfloat16": (2**-7, 2**-8),
    "float16": (2**-10, 2**-11),
}


def assert_close(
    got: Any,
    expected: Any,
    rtol: float | None = None,
    atol: float | None = None,
    *,
    dtype: str = "float32",
    what: str = "output",
) -> None:
    """Fail unless ``|got - expected| <= atol + rtol |expected|`` everywhere, naming the worst element.

    Tolerances default to the row of ``dtype`` in ``TOLERANCES``. NaN equals only NaN; shapes must be equal.
    """
    default_rtol, default_atol = TOLERANCES[dtype]
    rtol = default_rtol if rtol is None else rtol
    atol = default_atol if atol is None else atol
    got, expected = np.asarray(got), np.asarray(expected)
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    if got.size == 0:
        return
    got64, expected64 = got.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        excess = np.abs(got64 - expected64) - (atol + rtol * np.abs(expected64))
    same = (got64 == expected64) | (np.isnan(got64) & np.isnan(expected64))
    wrong = ~(same | (excess <= 0))
    if not wrong.any():
        return
    badness = np.where(wrong, np.where(np.isnan(excess), np.inf, excess), -np.inf)
    worst = tuple(int(i) for i in np.unravel_index(np.argmax(badness), got.shape))
    raise AssertionError(
        f"{what}: {int(wrong.sum())} of {got.size} elements differ; worst at {worst}: "
        f"got {got64[worst]:.9g}, expected {expected64[worst]:.9g} (rtol {rtol:g}, atol {atol:g})"
    )


def poisoned(shape: int | tuple[int, ...], dtype: Any = np.float32) -> np.ndarray:
    """A host array that no kernel could have left: NaN (also in bfloat16 bits), or bytes of 0x5A for integers."""
    dtype = np.dtype(dtype)
    if dtype == np.uint16:  # bfloat16 bits of a NaN
        return np.full(shape, 0x7FC0, dtype)
    if np.issubdtype(dtype, np.floating) or dtype == BFLOAT16:
        return np.full(shape, np.nan, dtype)
    array = np.empty(shape, dtype)
    array.view(np.uint8).fill(0x5A)
    return array


def to_device(host: np.ndarray) -> Any:
    """``host``, in the memory of the device under test, with its strides' order; bfloat16 becomes its uint16 bits."""
    from numstack import memory

    if host.dtype == BFLOAT16:
        host = host.view(np.uint16)
    return memory.from_host(host)


def to_host(array: Any, dtype: Any = None) -> np.ndarray:
    """A host copy of a device array; ``dtype=BFLOAT16`` reads uint16 bits as bfloat16."""
    host = current_device().to_host(array)
    return host if dtype is None else host.view(dtype)
