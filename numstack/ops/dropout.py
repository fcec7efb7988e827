"""Dropout, whose masks are a function of a key and are computed again in the backward pass instead of kept."""

from __future__ import annotations

from dataclasses import dataclass

from numstack import memory
from numstack.autograd import Node, record
from numstack.errors import ConfigError
from numstack.kernels import dropout as kernels
from numstack.tensor import Tensor


@dataclass(frozen=True, slots=True)
class Dropout:
    """Which elements to drop.

    Attributes
    ----------
    p : float
        The fraction dropped, at least 0 and below 1; the rest is scaled by ``1 / (1 - p)``.
    seed : int
        Key of the random numbers. Uses that must differ have different keys.
    """

    p: float
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.p < 1:
            raise ConfigError(f"dropout: p={self.p}; choose at least 0 and below 1")


def dropout(x: Tensor, mask: Dropout) -> Tensor:
    """x with a fraction ``mask.p`` of its elements set to zero and the others scaled by ``1 / (1 - mask.p)``."""
    out = memory.empty(x.shape, x.array.dtype, scope="forward")
    kernels.forward(x.array, out, p=mask.p, seed=mask.seed, offset=0)

    def backward(node: Node) -> None:
        kernels.backward(node.gradient, node.gradient, p=mask.p, seed=mask.seed, offset=0)
        node.give(0, node.gradient)

    return record("dropout", out, (x,), backward)
