"""One optimiser step, and one look at the validation text: what a training loop repeats."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from numstack import memory
from numstack.autograd import backward, no_grad
from numstack.comm import GradientBuckets
from numstack.data import Dataset, evenly_spaced_windows
from numstack.data.sampler import Tokens, cut_windows
from numstack.nn import GPT, Parameter
from numstack.optim import AdamW


def train_step(
    model: GPT,
    optimizer: AdamW,
    micro_batches: Iterable[tuple[Tokens, Tokens]],
    *,
    learning_rate: float,
    max_norm: float | None = None,
    buckets: GradientBuckets | None = None,
) -> float:
    """Forward, backward, mean of gradients over the ranks, update. Collective: all ranks must call.

    Parameters
    ----------
    model : GPT
    optimizer : AdamW
    micro_batches : pairs of inputs and targets, (B, T) each
        All of one size, on all ranks, so that the mean of their means is the mean over the global batch.
    learning_rate : float
    max_norm : float, optional
        Largest global norm of the gradient.
    buckets : GradientBuckets, optional
        Of ``model.parameters.gradients`` and ``.ranges``; needed if there are several ranks.

    Returns
    -------
    float
        Mean loss of this rank's micro-batches, in nats per token. Waits for the last forward pass, while the rest of
        the step goes on: so the device has work to do until the host has submitted the next step.
    """
    micro_batches = list(micro_batches)
    losses = []
    model.parameters.zero_gradients()
    for number, (inputs_BT, targets_BT) in enumerate(micro_batches, start=1):
        loss = model(inputs_BT, targets_BT, gradient=optimizer.loss_gradient(1 / len(micro_batches)))
        losses.append(memory.fetch(loss.array))
        last = number == len(micro_batches)
        on_final = _sender(model, buckets) if buckets is not None and last else None
        backward(loss, on_final=on_final)
    if buckets is not None:
        buckets.finish()
    optimizer.step(lr=learning_rate, max_norm=max_norm)
    return float(sum(loss.wait().item() for loss in losses) / len(losses))


def _sender(model: GPT, buckets: GradientBuckets) -> Callable[[Parameter], None]:
    """What tells the buckets that backward is done with a parameter."""
    index_of = {parameter_range: index for index, parameter_range in enumerate(model.parameters.ranges)}
    return lambda parameter: buckets.ready(index_of[parameter.range])


class Interrupted(Exception):
    """An evaluation was broken off."""


def evaluate(
    model: GPT,
    dataset: Dataset,
    *,
    n_windows: int,
    batch: int,
    rank: int = 0,
    n_ranks: int = 1,
    interrupted: Callable[[], bool] = lambda: False,
) -> np.ndarray:
    """Sums over this rank's share of evenly spaced windows of the validation text.

    Every token of a window is predicted from those before it in the window, the first from one. Ranks take turns batch
    by batch, and all do the same number of batches.

    Parameters
    ----------
    n_windows : int
        Over all ranks.
    batch : int
        Windows at a time on each rank.
    interrupted : callable
        Asked before each batch, on all ranks alike; True breaks off.

    Returns
    -------
    array of float64, shape (3,)
        Nats, tokens and characters; add those of all ranks.

    Raises
    ------
    Interrupted
    """
    context = model.config.block_size
    starts = evenly_spaced_windows(dataset.validation, n_windows=n_windows, context=context)
    totals = np.zeros(3)
    model.eval()
    try:
        with no_grad():
            for first in range(0, len(starts), batch * n_ranks):
                if interrupted():
                    raise Interrupted
                mine = starts[first + rank * batch : first + (rank + 1) * batch]
                if len(mine):
                    inputs_BT, targets_BT = cut_windows(dataset.validation.tokens, mine, context)
                    nats = model(inputs_BT, targets_BT).item() * targets_BT.size
                    n_characters = sum(len(dataset.tokenizer.decode(row_T)) for row_T in targets_BT)
                    totals += nats, targets_BT.size, n_characters
    finally:
        model.train()
    return totals
