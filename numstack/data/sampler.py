"""Which windows of a token file make up the batch of a step.

Every pass over the file (an epoch) cuts it into windows of ``context`` tokens, from a start that differs from epoch to
epoch, and visits them in a random order. Sequence i of step s is the window number ``s * batch + i`` of that endless
list, so a batch depends on the seed and the step and on nothing else: any rank can compute it, a run that is resumed
needs only its step, and one rank sees the same global batch as eight.

The random numbers are raw draws of Philox, which NumPy keeps the same in all versions (NEP 19), unlike ``shuffle``.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from numstack.data.tokens import TokenFile
from numstack.errors import ConfigError, DataError

Tokens = NDArray[np.int32]


class Sampler:
    """Batches for one rank.

    Parameters
    ----------
    tokens : TokenFile
    batch : int
        Sequences in a global batch, over all ranks and micro-batches.
    context : int
        Tokens in a sequence.
    seed : int
        Non-negative.
    rank, n_ranks : int
        This rank takes the ``rank``-th of ``n_ranks`` equal slices of each global batch.
    n_micro_batches : int
        Parts into which the rank's slice is cut, so that their activations need not fit in memory together.

    Raises
    ------
    ConfigError
        If ``batch`` is no multiple of ``n_ranks * n_micro_batches``.
    DataError
        If the file is too short for a window at every start: it needs ``2 * context`` tokens.

    Examples
    --------
    >>> sampler = Sampler(TokenFile("train.bin"), batch=12, context=64, seed=1, rank=0, n_ranks=2)  # doctest: +SKIP
    >>> [(inputs_BT, targets_BT)] = sampler.micro_batches(step=0)  # both (6, 64), int32  # doctest: +SKIP
    """

    def __init__(
        self,
        tokens: TokenFile,
        *,
        batch: int,
        context: int,
        seed: int,
        rank: int = 0,
        n_ranks: int = 1,
        n_micro_batches: int = 1,
    ) -> None:
        if batch < 1 or batch % (n_ranks * n_micro_batches) != 0:
            parts = f"{n_ranks} ranks" + (f" x {n_micro_batches} micro-batches" if n_micro_batches > 1 else "")
            raise ConfigError(
                f"a global batch of {batch} sequences cannot be shared equally by {parts}; "
                f"give a multiple of {n_ranks * n_micro_batches}"
            )
        if tokens.n_tokens < 2 * context:
            raise DataError(
                f"{tokens.path}: too short: {tokens.n_tokens} tokens, but training with a context of {context} needs "
                f"at least {2 * context}; give a longer text or a shorter context"
            )
        self.batch = batch
        self.context = context
        self.seed = seed
        self.n_windows = (tokens.n_tokens - context) // context  # fits whatever the start, which is below context
        self._tokens = tokens.tokens
        self._rank = rank
        self._n_ranks = n_ranks
        self._n_micro_batches = n_micro_batches
        self._epochs: dict[int, NDArray[np.int64]] = {}

    def micro_batches(self, step: int) -> Iterator[tuple[Tokens, Tokens]]:
        """This rank's share of the batch of ``step``, as pairs of inputs and targets, both (B, T) int32.

        Targets are the inputs one token later.
        """
        share = self.batch // self._n_ranks
        size = share // self._n_micro_batches
        for start in range(self._rank * share, (self._rank + 1) * share, size):
            positions = range(step * self.batch + start, step * self.batch + start + size)
            yield cut_windows(self._tokens, np.array([self._window(position) for position in positions]), self.context)

    def _window(self, position: int) -> int:
        """Where in the file the window number ``position`` of the endless list of windows starts."""
        epoch, index = divmod(position, self.n_windows)
        if epoch not in self._epochs:
            self._epochs = {e: starts for e, starts in self._epochs.items() if e == epoch - 1}  # a batch spans two
            self._epochs[epoch] = self._shuffled_starts(epoch)
        return int(self._epochs[epoch][index])

    def _shuffled_starts(self, epoch: int) -> NDArray[np.int64]:
        draws = np.random.Philox(key=[self.seed, epoch]).random_raw(1 + self.n_windows)
        order = np.argsort(draws[1:], kind="stable")
        return order * self.context + int(draws[0] % np.uint64(self.context))


def evenly_spaced_windows(tokens: TokenFile, *, n_windows: int, context: int) -> NDArray[np.int64]:
    """Starts of ``n_windows`` windows spread evenly over a file, the same at every call: what validation looks at.

    All windows that do not overlap, if there are fewer.

    Raises
    ------
    DataError
        If not even one window fits: it needs ``context + 1`` tokens.
    """
    n_available = (tokens.n_tokens - 1) // context
    if n_available < 1:
        raise DataError(
            f"{tokens.path}: too short: {tokens.n_tokens} tokens, but validation with a context of {context} needs at "
            f"least {context + 1}; give a longer text, a larger validation share or a shorter context"
        )
    n_windows = min(n_windows, n_available)
    return np.arange(n_windows) * n_available // n_windows * context


def cut_windows(tokens: NDArray[np.uint16], starts: NDArray[np.int64], context: int) -> tuple[Tokens, Tokens]:
    """Inputs and targets (B, T) int32 of the windows that start at ``starts`` (B,)."""
    windows = tokens[starts[:, None] + np.arange(context + 1)].astype(np.int32)
    return np.ascontiguousarray(windows[:, :-1]), np.ascontiguousarray(windows[:, 1:])
