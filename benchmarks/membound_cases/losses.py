"""Cross-entropy and its gradient, of rows of logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from benchmarks.membound_cases.case import FLOAT32_ERROR, Case, PeerFunction, Sizes, case, ours, random, size
from numstack.kernels import cross_entropy


class Logits:
    """Logits, their targets, and what ours and PyTorch's make of them."""

    def __init__(self, torch: Any, rows: int, classes: int, place: str) -> None:
        self.logits = random(torch, place, rows, classes)
        self.targets = torch.randint(0, classes, (rows,), device=place)
        self.loss, self.lse = (torch.empty(rows, device=place) for _ in range(2))
        self.gradient = torch.empty_like(self.logits)
        scale = torch.ones(1, device=place)
        arrays = (self.logits, self.targets.to(torch.int32), self.loss, self.lse, self.gradient, scale)
        self.ours = list(map(ours, arrays))
        self.shape = f"{rows} x {classes}"
        self.nbytes = size(self.logits, self.gradient)
        self._torch = torch
        self._compiled_loss = torch.compile(self._loss)

    def _loss(self, logits: Any, targets: Any) -> Any:
        return self._torch.nn.functional.cross_entropy(logits.float(), targets, reduction="sum")

    def both(self, logits: Any, targets: Any) -> Any:
        """Losses and gradient through autograd."""
        logits = logits.detach().requires_grad_()
        loss = self._torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
        return loss.detach(), *self._torch.autograd.grad(loss.sum(), logits)

    def through_compiled_loss(self, logits: Any, targets: Any) -> Any:
        logits = logits.detach().requires_grad_()
        return self._torch.autograd.grad(self._compiled_loss(logits, targets), logits)

    def formula(self, logits: Any, targets: Any) -> Any:
        """Both without autograd."""
        p = self._torch.softmax(logits.float(), -1)
        hot = self._torch.arange(logits.shape[1], device=logits.device)[None] == targets[:, None]
        return -self._torch.log(p.gather(1, targets[:, None])), (p - hot.float()).to(logits.dtype)

    def case(self, name: str, run: partial[Any], poisoned: Sequence[Any]) -> Case:
        """Of loss and gradient at once."""
        inputs = [self.logits, self.targets]
        peers: list[PeerFunction] = [("eager", self.both, inputs)]
        if self.logits.is_cuda:
            peers.append(("compiled loss", self.through_compiled_loss, inputs))
            peers.append(("compiled formula", self._torch.compile(self.formula, dynamic=False), inputs))
        outputs, expected = [self.loss, self.gradient], partial(self.both, *inputs)
        return Case(
            name, self.shape, self.nbytes, run, outputs, expected, peers, poisoned=poisoned, compiles=False
        )  # fmt: skip


def of_cross_entropy(torch: Any, s: Sizes, place: str) -> Iterator[Case]:
    x = Logits(torch, s.rows_of_logits, s.V, place)
    logits, targets, loss, lse, gradient, scale = x.ours

    def forward(logits: Any, targets: Any) -> Any:
        return torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")

    run = partial(cross_entropy.forward, logits, targets, loss, lse)
    options: dict[str, Any] = {"tolerance": FLOAT32_ERROR}
    yield case("cross-entropy", size(x.logits), run, [x.loss], forward, x.logits, x.targets, **options)
    run = partial(cross_entropy.forward_backward, logits, targets, loss, gradient, scale)
    yield x.case("cross-entropy and gradient", run, [x.loss, x.gradient])
    cross_entropy.forward(logits, targets, loss, lse)
    run = partial(cross_entropy.backward, logits, targets, lse, gradient, scale)

    def backward(logits: Any, targets: Any, lse: Any) -> Any:
        hot = torch.arange(logits.shape[1], device=logits.device)[None] == targets[:, None]
        return (torch.exp(logits.float() - lse[:, None]) - hot.float()).to(logits.dtype)

    yield case("cross-entropy backward", x.nbytes, run, [x.gradient], backward, x.logits, x.targets, x.lse)
    x.gradient.copy_(x.logits)
    run = partial(cross_entropy.forward_backward, gradient, targets, loss, gradient, scale)
    yield x.case("cross-entropy and gradient in place", run, [])
    del x, logits, gradient, run
    x = Logits(torch, -(-s.rows_of_logits // 4), s.V_long, place)
    logits, targets, loss, _, gradient, scale = x.ours
    run = partial(cross_entropy.forward_backward, logits, targets, loss, gradient, scale)
    yield x.case("cross-entropy and gradient", run, [x.loss, x.gradient])
