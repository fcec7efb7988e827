"""Modules with parameters of their own."""

from __future__ import annotations

import numpy as np

from numstack import ops
from numstack.nn import init
from numstack.nn.module import Module, Parameter
from numstack.tensor import Tensor


class Linear(Module):
    """x W + b, with W stored ``[n_in, n_out]`` as GPT-2's checkpoints have it.

    Parameters
    ----------
    n_in, n_out : int
    std : float
        Of the weight's first values; the bias starts at 0.
    """

    def __init__(self, n_in: int, n_out: int, *, std: float = 0.02) -> None:
        self.weight = Parameter((n_in, n_out), init.normal(std))
        self.bias = Parameter((n_out,), init.zeros)

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(x, self.weight, self.bias)

    def gelu(self, x: Tensor) -> Tensor:
        """gelu(x W + b) in one kernel."""
        return ops.linear_gelu(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor, dropout: ops.Dropout | None = None) -> Tensor:
        """residual + dropout(x W + b)."""
        return ops.linear_residual(x, self.weight, self.bias, residual, dropout=dropout)


class LayerNorm(Module):
    """Normalised rows, scaled and shifted.

    Parameters
    ----------
    n_channels : int
    eps : float
        Added to the variance.
    """

    def __init__(self, n_channels: int, *, eps: float = 1e-5) -> None:
        self.eps = eps
        self.weight = Parameter((n_channels,), init.ones)
        self.bias = Parameter((n_channels,), init.zeros)

    def __call__(self, x: Tensor) -> Tensor:
        return ops.layernorm(x, self.weight, self.bias, eps=self.eps)


class Embedding(Module):
    """A table of vectors, looked up by id.

    Parameters
    ----------
    n_ids, n_channels : int
    std : float
        Of the table's first values.
    """

    def __init__(self, n_ids: int, n_channels: int, *, std: float = 0.02) -> None:
        self.weight = Parameter((n_ids, n_channels), init.normal(std))

    def __call__(self, ids: np.ndarray | Tensor) -> Tensor:
        return ops.embedding(ids, self.weight)
