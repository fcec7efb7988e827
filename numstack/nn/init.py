"""How parameters start: functions of a random generator and a shape."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Initializer = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def zeros(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """All 0."""
    return np.zeros(shape, np.float32)


def ones(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """All 1."""
    return np.ones(shape, np.float32)


def normal(std: float) -> Initializer:
    """Normally distributed around 0 with this standard deviation."""

    def draw(generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
        values = generator.standard_normal(shape, np.float32)
        values *= np.float32(std)
        return values

    return draw
