"""Host cost of operations: what Python spends on each one and on each work, in a training step of GPT.

usage: python -m benchmarks.ops [--json PATH]

The works of the step are bound and pass through the door, but nothing runs them: what is timed is the host alone, from
shape checks, memory and the tape down to packing the arguments of kernels. Least of many steps, since anything else on
the machine only adds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np

from benchmarks import harness
from numstack.autograd import backward, no_grad
from numstack.device import Event, Stream, Work, current_device
from numstack.nn import GPT, GPTConfig
from numstack.optim import AdamW
from numstack.tensor import tensor

T = TypeVar("T")

N_STEPS = 30
CONFIG = GPTConfig(n_layer=12, n_head=2, n_embd=32, block_size=16, vocab_size=64)
N_OPERATIONS = 7 * CONFIG.n_layer + 4  # embedding, last norm, head and loss beside those of the blocks


class Nowhere(Stream):
    """A stream that counts works and drops them."""

    def __init__(self) -> None:
        self.device = current_device()
        self.n_works = 0
        self._event = self.device.default_stream.record()

    def execute(self, work: Work) -> None:
        self.n_works += 1

    def record(self) -> Event:
        return self._event

    def wait(self, event: Event) -> None:
        pass

    def synchronize(self) -> None:
        pass


def main() -> None:
    options = harness.parse_options(__doc__)
    model = GPT(CONFIG)
    optimizer = AdamW(model.parameters)
    tokens, targets = (tensor(np.zeros((2, 16), np.int32)) for _ in range(2))
    stream = Nowhere()
    current_device().default_stream = stream
    least: dict[str, tuple[float, int]] = {}

    def timed(name: str, part: Callable[[], T]) -> T:
        before, start = stream.n_works, time.perf_counter()
        result = part()
        seconds = time.perf_counter() - start
        least[name] = min(least.get(name, (seconds, 0)), (seconds, stream.n_works - before))
        return result

    for _ in range(N_STEPS):
        with no_grad():
            timed("forward, not recorded", lambda: model(tokens, targets, n_targets=32))
        timed("zero_gradients", model.parameters.zero_gradients)
        loss = timed("forward", lambda: model(tokens, targets, n_targets=32))
        timed("backward", lambda loss=loss: backward(loss))  # type: ignore[misc]
        timed("optimizer.step with clipping", lambda: optimizer.step(max_norm=1.0))
    rows = []
    for name, (seconds, n_works) in least.items():
        n_operations = N_OPERATIONS if "ward" in name else 1
        us = seconds * 1e6
        rows.append((name, n_operations, n_works, us, us / n_operations, us / n_works))
    columns = ("part of a step", "operations", "works", "us", "us an operation", "us a work")
    harness.report("ops", columns, rows, options)


if __name__ == "__main__":
    main()
