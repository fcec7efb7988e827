"""Dynamic loss scaling, decided on the device: whether a step counts, and what the next scale is.

Backward starts from ``scale`` instead of 1, so that gradients stored in float16 do not vanish. Once all gradients are
there, summed over the ranks, their norm tells whether one of them overflowed, since a sum of squares with an infinity
or a NaN in it is not finite. With norm' = norm / scale, the norm of the gradients themselves::

    finite      grad_scale = min(1, max_norm / norm') / scale     what AdamW multiplies gradients by
                taken += 1, good += 1
                good = window: scale = scale growth, good = 0
    not finite  grad_scale = NaN                                  at which AdamW changes nothing
                skipped += 1, good = 0, scale = scale backoff

All of it is one launch of one thread. Ranks see the same sums and so decide alike, and the host waits for none of it.
The count of steps taken is AdamW's t: a skipped step must not advance the bias correction.

Source: Micikevicius et al. 2018, "Mixed Precision Training", section 3.2.
"""

import math

import numpy as np
from numba import float32, int32

from numstack.device import Array, Stream, kernel
from numstack.errors import ConfigError
from numstack.kernels.launch import check_contiguous, check_dtype, check_shape

GOOD, TAKEN, SKIPPED = 0, 1, 2
"""Places in counts_3: steps since the scale changed, steps taken, steps skipped."""


def reference(
    norm: float,
    scale: float,
    counts: tuple[int, int, int],
    *,
    max_norm: float,
    growth: float,
    backoff: float,
    window: int,
) -> tuple[float, float, float, tuple[int, int, int]]:
    """``(norm', scale, grad_scale, counts)`` after a step, in float64; the scale without its limits."""
    good, taken, skipped = counts
    if not math.isfinite(norm):
        return norm, scale * backoff, math.nan, (0, taken, skipped + 1)
    norm /= scale
    grad_scale = min(1.0, max_norm / norm if norm else math.inf) / scale
    if good + 1 == window:
        return norm, scale * growth, grad_scale, (0, taken + 1, skipped)
    return norm, scale, grad_scale, (good + 1, taken + 1, skipped)


@kernel
def _update(norm_1, scale_1, counts_3, grad_scale_1, max_norm, growth, backoff, window, smallest, largest):
    scale = scale_1[0]
    norm = norm_1[0] / scale
    norm_1[0] = norm
    good = int32(0)
    if math.isfinite(norm):
        clip = float32(1)
        if norm > max_norm:
            clip = max_norm / norm
        grad_scale_1[0] = clip / scale
        counts_3[TAKEN] += int32(1)
        good = counts_3[GOOD] + int32(1)
        if good >= window:
            good = int32(0)
            scale = min(scale * growth, largest)
    else:
        grad_scale_1[0] = float32(math.nan)
        counts_3[SKIPPED] += int32(1)
        scale = max(scale * backoff, smallest)
    counts_3[GOOD] = good
    scale_1[0] = scale


def update(
    norm_1: Array,
    scale_1: Array,
    counts_3: Array,
    grad_scale_1: Array,
    *,
    max_norm: float,
    growth: float,
    backoff: float,
    window: int,
    smallest: float,
    largest: float,
    stream: Stream | None = None,
) -> None:
    """Decide about the step whose gradients have this norm, and about the next scale.

    Parameters
    ----------
    norm_1 : array, shape (1,), float32
        Norm of the gradients, which are scaled; gets divided by the scale.
    scale_1 : array, shape (1,), float32
        The scale that backward started from; gets that of the next step.
    counts_3 : array, shape (3,), int32
        Steps since the scale changed, steps taken, steps skipped.
    grad_scale_1 : array, shape (1,), float32
        Gets what gradients are to be multiplied by; NaN: skip the step.
    max_norm : float
        Largest norm of the gradients after that; infinite: no limit.
    growth, backoff : float
        Factors on the scale after ``window`` good steps, and after an overflow.
    window : int
    smallest, largest : float
        The scale stays between them.

    Raises
    ------
    ShapeError, DTypeError, ConfigError
        If an argument is not as said.
    """
    if not (0 < smallest <= largest < math.inf and 0 < backoff < 1 < growth and window >= 1):
        raise ConfigError(
            f"loss_scale: smallest={smallest}, largest={largest}, backoff={backoff}, growth={growth}, window={window}; "
            "expected 0 < smallest <= largest < inf, 0 < backoff < 1 < growth, window >= 1"
        )
    ones = {"norm_1": norm_1, "scale_1": scale_1, "grad_scale_1": grad_scale_1}
    check_shape("loss_scale", (1,), **ones)
    check_shape("loss_scale", (3,), counts_3=counts_3)
    check_dtype("loss_scale", np.float32, **ones)
    check_dtype("loss_scale", np.int32, counts_3=counts_3)
    check_contiguous("loss_scale", counts_3=counts_3, **ones)
    _update[1, 1, stream](
        norm_1,
        scale_1,
        counts_3,
        grad_scale_1,
        float(max_norm),
        float(growth),
        float(backoff),
        int(window),
        float(smallest),
        float(largest),
    )
