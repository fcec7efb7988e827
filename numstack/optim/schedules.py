"""Learning rates as functions of the step, 0 being the first.

All rise linearly over the first ``n_warmup`` steps, from ``peak / n_warmup`` to ``peak``:

=================== =========================================================================
constant            stays at ``peak``
linear              falls to ``final`` in a straight line, reached in the last step
cosine              falls to ``final`` along half a cosine (Loshchilov and Hutter 2017)
warmup_stable_decay stays at ``peak``, then falls to ``final`` in a straight line over ``n_decay`` steps
=================== =========================================================================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from numstack.errors import ConfigError

NAMES = ("constant", "linear", "cosine", "warmup_stable_decay")


def constant(step: int, *, peak: float, n_warmup: int = 0) -> float:
    """``peak`` once warm."""
    return peak if step >= n_warmup else peak * (step + 1) / n_warmup


def linear(step: int, *, peak: float, n_steps: int, n_warmup: int = 0, final: float = 0.0) -> float:
    """A straight line from ``peak`` to ``final``."""
    if step < n_warmup:
        return constant(step, peak=peak, n_warmup=n_warmup)
    return peak + (final - peak) * _progress(step, n_warmup, n_steps)


def cosine(step: int, *, peak: float, n_steps: int, n_warmup: int = 0, final: float = 0.0) -> float:
    """Half a cosine from ``peak`` to ``final``."""
    if step < n_warmup:
        return constant(step, peak=peak, n_warmup=n_warmup)
    return final + (peak - final) * 0.5 * (1 + math.cos(math.pi * _progress(step, n_warmup, n_steps)))


def warmup_stable_decay(
    step: int, *, peak: float, n_steps: int, n_decay: int, n_warmup: int = 0, final: float = 0.0
) -> float:
    """``peak``, and a straight line to ``final`` over the last ``n_decay`` steps."""
    first_of_decay = n_steps - n_decay
    if step < max(n_warmup, first_of_decay):
        return constant(step, peak=peak, n_warmup=n_warmup)
    return peak + (final - peak) * _progress(step, first_of_decay - 1, n_steps)


def create(
    name: str, *, peak: float, n_steps: int, n_warmup: int = 0, n_decay: int = 0, final: float = 0.0
) -> Callable[[int], float]:
    """The schedule called ``name`` as a function of the step alone.

    Parameters
    ----------
    name : str
        One of ``NAMES``.
    peak, final : float
        Highest learning rate, and the last one.
    n_steps, n_warmup, n_decay : int
        Steps in all, of the rise, and of the fall (``warmup_stable_decay`` only).

    Raises
    ------
    ConfigError
        If there is no such schedule, or its parts do not fit into ``n_steps``.
    """
    if n_steps < 1 or min(n_warmup, n_decay) < 0 or n_warmup + n_decay > n_steps:
        raise ConfigError(
            f"schedule {name}: {n_warmup} steps of warm-up and {n_decay} of decay do not fit into {n_steps} steps"
        )
    if name == "constant":
        return partial(constant, peak=peak, n_warmup=n_warmup)
    if name == "linear":
        return partial(linear, peak=peak, n_steps=n_steps, n_warmup=n_warmup, final=final)
    if name == "cosine":
        return partial(cosine, peak=peak, n_steps=n_steps, n_warmup=n_warmup, final=final)
    if name == "warmup_stable_decay":
        return partial(warmup_stable_decay, peak=peak, n_steps=n_steps, n_decay=n_decay, n_warmup=n_warmup, final=final)
    raise ConfigError(f"there is no schedule {name!r}; choose one of {', '.join(NAMES)}")


def _progress(step: int, first: int, n_steps: int) -> float:
    """0 in step ``first``, 1 in the last of ``n_steps`` and after it."""
    return min(1.0, (step - first) / max(1, n_steps - 1 - first))
