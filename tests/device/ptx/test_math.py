"""numstack.device.ptx.math: approximations within the errors that their table states, on the device under test."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numba import cuda

from numstack.device import kernel
from numstack.device.ptx import math
from tests.support import poisoned, to_device, to_host


@kernel
def _functions(x_N, y_RN):
    i = cuda.grid(1)
    if i < x_N.shape[0]:
        y_RN[0, i] = math.exp2(x_N[i])
        y_RN[1, i] = math.reciprocal(x_N[i])
        y_RN[2, i] = math.rsqrt(abs(x_N[i]))
        y_RN[3, i] = math.tanh(x_N[i])
        y_RN[4, i] = math.log2(abs(x_N[i]))
        y_RN[5, i] = math.maximum(x_N[i], -x_N[i])


# Row of the kernel's output, the function in float64, and the largest relative error: PTX ISA's and a rounding.
FUNCTIONS: list[tuple[int, Callable[[np.ndarray], np.ndarray], float]] = [
    (0, np.exp2, 2**-22),
    (1, lambda x: 1 / x, 2**-22.5),
    (2, lambda x: 1 / np.sqrt(np.abs(x)), 2**-22),
    (3, np.tanh, 2**-10.9),
    (4, lambda x: np.log2(np.abs(x)), 2**-20),
    (5, np.abs, 0),
]


@pytest.mark.parametrize(
    ("row", "exact", "error"), FUNCTIONS, ids=["exp2", "reciprocal", "rsqrt", "tanh", "log2", "maximum"]
)
def test_within_the_stated_error(row: int, exact: Callable[[np.ndarray], np.ndarray], error: float) -> None:
    magnitude = np.geomspace(1e-4, 100, 2000, dtype=np.float32)
    x = np.concatenate([-magnitude, magnitude])
    y = to_device(poisoned((6, x.size)))
    _functions[-(-x.size // 128), 128](to_device(x), y)
    expected = exact(x.astype(np.float64))
    np.testing.assert_allclose(to_host(y)[row], expected, rtol=error, atol=2**-21 if row == 4 else 0)


def test_at_the_ends() -> None:
    x = np.array([-np.inf, -200, 0, np.inf], np.float32)
    y = to_device(poisoned((6, x.size)))
    with np.errstate(divide="ignore"):
        _functions[1, 128](to_device(x), y)
    found = to_host(y)
    np.testing.assert_array_equal(found[0], [0, 0, 1, np.inf])
    np.testing.assert_array_equal(found[3], [-1, -1, 0, 1])
    assert found[1, 2] == found[2, 2] == np.inf
    assert found[1, 3] == found[2, 3] == 0


def test_log2_e() -> None:
    assert abs(float(math.LOG2_E) - np.log2(np.e)) < 2**-24
