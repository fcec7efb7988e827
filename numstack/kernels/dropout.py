"""Dropout: each element set to 0 with probability p, the others divided by 1 - p.

    y_i = x_i keep_i / (1 - p),    dx_i = dy_i keep_i / (1 - p)

keep_i is not stored: word i % 4 of Philox4x32-10 with key ``seed`` and counter ``offset + i // 4`` (see philox.py),
compared with p 2^32. Forward and backward with the same seed and offset therefore make the same mask, on any device and
for any launch shape. A call uses ceil(n / 4) counters: masks whose ranges of counters do not overlap are independent.

One variant: each thread makes one counter's four words for four neighbouring elements.
"""

import numpy as np
from numba import cuda, float32, uint32, uint64

from numstack.device import Array, Stream, kernel, narrow, widen
from numstack.errors import ConfigError
from numstack.kernels.launch import ceil_div, check_contiguous, check_floats, check_shape
from numstack.kernels.philox import philox4x32, reference_words

BLOCK = 128


def reference_mask(n: int, *, p: float, seed: int, offset: int) -> np.ndarray:
    """Which of n elements are kept: bool, shape (n,)."""
    counters = np.uint64(offset) + np.arange(ceil_div(n, 4), dtype=np.uint64)
    keep: np.ndarray = reference_words(counters, seed).reshape(-1)[:n] >= _threshold(p)
    return keep


def reference(x: np.ndarray, *, p: float, seed: int, offset: int) -> np.ndarray:
    """y in float64; of dy it is the gradient."""
    keep = reference_mask(x.size, p=p, seed=seed, offset=offset).reshape(x.shape)
    y: np.ndarray = np.asarray(x, np.float64) * keep / (1 - p)
    return y


@kernel
def _dropout(x_N, y_N, threshold, scale, seed, offset):
    n = x_N.size
    quad = cuda.grid(1)
    counter = uint64(offset) + uint64(quad)
    r0, r1, r2, r3 = philox4x32(
        uint32(counter),
        uint32(counter >> uint64(32)),
        uint32(0),
        uint32(0),
        uint32(seed),
        uint32(seed >> uint64(32)),
    )
    i = 4 * quad
    if i < n:
        y_N[i] = narrow(widen(x_N[i]) * scale if r0 >= threshold else float32(0), y_N.dtype)
    if i + 1 < n:
        y_N[i + 1] = narrow(widen(x_N[i + 1]) * scale if r1 >= threshold else float32(0), y_N.dtype)
    if i + 2 < n:
        y_N[i + 2] = narrow(widen(x_N[i + 2]) * scale if r2 >= threshold else float32(0), y_N.dtype)
    if i + 3 < n:
        y_N[i + 3] = narrow(widen(x_N[i + 3]) * scale if r3 >= threshold else float32(0), y_N.dtype)


def _threshold(p: float) -> np.uint32:
    """A word below this drops its element."""
    return np.uint32(min(round(p * 2**32), 2**32 - 1))


def counters_used(n: int) -> int:
    """By how much ``offset`` must grow after a call over n elements, for the next mask to be independent."""
    return ceil_div(n, 4)


def forward(
    x: Array, y: Array, *, p: float, seed: int, offset: int, variant: str | None = None, stream: Stream | None = None
) -> None:
    """Drop elements of x with probability p and scale the others.

    Parameters
    ----------
    x, y : array, any shape, floating, C-contiguous
        y may be x.
    p : float
        Probability of dropping, 0 <= p < 1.
    seed, offset : int
        Key and first counter, 0 <= each < 2^64.

    Raises
    ------
    ConfigError
        If p, seed or offset is out of range.
    ShapeError, DTypeError
        If y does not fit x.

    Notes
    -----
    Workspace: none. Deterministic: yes, a function of (p, seed, offset, element).
    """
    if not 0 <= p < 1:
        raise ConfigError(f"dropout: p={p}; choose a probability from 0 up to but not including 1")
    for name, value in (("seed", seed), ("offset", offset)):
        if not 0 <= value < 2**64:
            raise ConfigError(f"dropout: {name}={value}; choose an integer from 0 to 2**64 - 1")
    check_shape("dropout", x.shape, y=y)
    check_floats("dropout", x=x, y=y)
    check_contiguous("dropout", x=x, y=y)
    _dropout[ceil_div(x.size, 4 * BLOCK), BLOCK, stream](
        x.reshape(-1),
        y.reshape(-1),
        _threshold(p),
        1 / (1 - p),
        np.uint64(seed),
        np.uint64(offset),
        flops=x.size,
    )


def backward(dy: Array, dx: Array, *, p: float, seed: int, offset: int, stream: Stream | None = None) -> None:
    """Gradient of :func:`forward`: the same mask and scale applied to dy; dx may be dy. Arguments as there."""
    forward(dy, dx, p=p, seed=seed, offset=offset, stream=stream)
