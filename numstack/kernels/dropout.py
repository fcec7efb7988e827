"""Dropout: each element set to 0 with probability p, the others divided by 1 - p.

    y_i = x_i keep_i / (1 - p),    dx_i = dy_i keep_i / (1 - p)

keep_i is not stored: word i % 4 of Philox4x32-10 with key ``seed`` and counter ``offset + i // 4`` (see philox.py),
compared with p 2^32. Forward and backward with the same seed and offset therefore make the same mask, on any device and
for any launch shape. A call uses ceil(n / 4) counters: masks whose ranges of counters do not overlap are independent.

Ladder: in ``counter_per_thread`` a thread makes one counter's four words, for four neighbouring elements. ``vectors``
asks for its vectors of eight elements first, and makes the words of two counters for each while they are on their way;
the keys of the rounds come with the launch. 65536 x 3072 bfloat16 on an H200: 4.11 TB/s, 3.50 with keys added up.
"""

import functools

import numpy as np
from numba import cuda, float32, uint32, uint64

from numstack.device import Array, Kernel, Stream, kernel, narrow, widen
from numstack.device.ptx import load8, store8
from numstack.errors import ConfigError
from numstack.kernels.launch import are_aligned, ceil_div, check_contiguous, check_floats, check_shape, flat
from numstack.kernels.philox import ROUNDS, philox4x32, philox4x32_of_round_keys, reference_words, round_keys
from numstack.kernels.variants import Variant, Variants

BLOCK = 128
VECTOR = 8  # elements that a thread loads or stores side by side: two counters'
PER_THREAD = 2  # vectors of a thread that are under way at once
N_KEYS = 2 * ROUNDS


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


@cuda.jit(device=True)
def _words(counter, seed):
    """Four random words of a 64-bit counter and a 64-bit key."""
    return philox4x32(
        uint32(counter),
        uint32(counter >> uint64(32)),
        uint32(0),
        uint32(0),
        uint32(seed),
        uint32(seed >> uint64(32)),
    )


@cuda.jit(device=True)
def _words_of_keys(counter, keys):
    """The same from the keys of the rounds."""
    return philox4x32_of_round_keys(uint32(counter), uint32(counter >> uint64(32)), keys)


@kernel
def _dropout(x_N, y_N, threshold, scale, seed, offset):
    n = x_N.size
    quad = cuda.grid(1)
    r0, r1, r2, r3 = _words(uint64(offset) + uint64(quad), seed)
    i = 4 * quad
    if i < n:
        y_N[i] = narrow(widen(x_N[i]) * scale if r0 >= threshold else float32(0), y_N.dtype)
    if i + 1 < n:
        y_N[i + 1] = narrow(widen(x_N[i + 1]) * scale if r1 >= threshold else float32(0), y_N.dtype)
    if i + 2 < n:
        y_N[i + 2] = narrow(widen(x_N[i + 2]) * scale if r2 >= threshold else float32(0), y_N.dtype)
    if i + 3 < n:
        y_N[i + 3] = narrow(widen(x_N[i + 3]) * scale if r3 >= threshold else float32(0), y_N.dtype)


@cuda.jit(device=True)
def _drop(x, first, words, threshold, scale):
    """x[first : first + 4] with those whose word is below the threshold dropped."""
    r0, r1, r2, r3 = words
    x[first] = x[first] * scale if r0 >= threshold else float32(0)
    x[first + 1] = x[first + 1] * scale if r1 >= threshold else float32(0)
    x[first + 2] = x[first + 2] * scale if r2 >= threshold else float32(0)
    x[first + 3] = x[first + 3] * scale if r3 >= threshold else float32(0)


@functools.cache
def vector_kernel(block: int = BLOCK, per_thread: int = PER_THREAD) -> Kernel:
    """The kernel of the variant ``vectors``, for blocks and threads of this size."""
    n_values, stride, span = VECTOR * per_thread, VECTOR * block, VECTOR * block * per_thread

    @kernel(name="dropout.dropout vectors", starts_early=True)
    def dropout_vectors(
        x_N, y_N, threshold, scale, offset,
        k0, k1, k2, k3, k4, k5, k6, k7, k8, k9, k10, k11, k12, k13, k14, k15, k16, k17, k18, k19
    ):  # fmt: skip
        x = cuda.local.array(n_values, float32)
        keys = cuda.local.array(N_KEYS, uint32)
        keys[0], keys[1], keys[2], keys[3], keys[4] = k0, k1, k2, k3, k4
        keys[5], keys[6], keys[7], keys[8], keys[9] = k5, k6, k7, k8, k9
        keys[10], keys[11], keys[12], keys[13], keys[14] = k10, k11, k12, k13, k14
        keys[15], keys[16], keys[17], keys[18], keys[19] = k15, k16, k17, k18, k19
        n = x_N.size
        start = cuda.blockIdx.x * span + cuda.threadIdx.x * VECTOR
        counter = uint64(offset) + uint64(start // 4)
        if (cuda.blockIdx.x + 1) * span <= n:
            for k in range(per_thread):
                load8(x_N, start + k * stride, x, k * VECTOR)
            for k in range(per_thread):
                counter_k = counter + uint64(k * stride // 4)
                _drop(x, k * VECTOR, _words_of_keys(counter_k, keys), threshold, scale)
                _drop(x, k * VECTOR + 4, _words_of_keys(counter_k + uint64(1), keys), threshold, scale)
                store8(y_N, start + k * stride, x, k * VECTOR)
        else:
            for k in range(per_thread):
                i0 = start + k * stride
                for e in range(VECTOR):
                    x[e] = float32(0)
                    if i0 + e < n:
                        x[e] = widen(x_N[i0 + e])
                counter_k = counter + uint64(k * stride // 4)
                _drop(x, 0, _words_of_keys(counter_k, keys), threshold, scale)
                _drop(x, 4, _words_of_keys(counter_k + uint64(1), keys), threshold, scale)
                for e in range(VECTOR):
                    if i0 + e < n:
                        y_N[i0 + e] = narrow(x[e], y_N.dtype)

    return dropout_vectors


def _launch_counters(x: Array, y: Array, p: float, seed: int, offset: int, stream: Stream | None) -> None:
    _dropout[ceil_div(x.size, 4 * BLOCK), BLOCK, stream](
        x, y, _threshold(p), 1 / (1 - p), np.uint64(seed), np.uint64(offset), flops=x.size
    )


def _launch_vectors(x: Array, y: Array, p: float, seed: int, offset: int, stream: Stream | None) -> None:
    vector_kernel()[ceil_div(x.size, BLOCK * VECTOR * PER_THREAD), BLOCK, stream](
        x, y, _threshold(p), 1 / (1 - p), np.uint64(offset), *round_keys(seed), flops=x.size
    )


VARIANTS = Variants(
    "dropout",
    [
        Variant("counter_per_thread", _launch_counters, "Four elements a thread: what one counter gives."),
        Variant("vectors", _launch_vectors, "16 bytes a thread, before the words are made.", are_aligned, "gpu"),
    ],
)


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
    variant : str, optional
        A name in ``VARIANTS``.

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
    VARIANTS.pick(variant, x, y).launch(flat(x), flat(y), p, seed, offset, stream)


def backward(
    dy: Array, dx: Array, *, p: float, seed: int, offset: int, variant: str | None = None, stream: Stream | None = None
) -> None:
    """Gradient of :func:`forward`: the same mask and scale applied to dy; dx may be dy. Arguments as there."""
    forward(dy, dx, p=p, seed=seed, offset=offset, variant=variant, stream=stream)
