"""Modules with parameters of their own.

``dtype`` is what a module reads its parameters in; 16 bits need a ParameterStore that keeps such copies.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from numstack import ops
from numstack.dtypes import float32
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
    dtype : dtype
    """

    def __init__(self, n_in: int, n_out: int, *, std: float = 0.02, dtype: np.dtype[Any] = float32) -> None:
        self.weight = Parameter((n_in, n_out), init.normal(std))
        self.bias = Parameter((n_out,), init.zeros)
        self._dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        return ops.linear(x, *self.stored())

    def add_to(self, residual: Tensor, x: Tensor, dropout: ops.Dropout | None = None) -> Tensor:
        """residual + dropout(x W + b), in the format of the residual."""
        return ops.linear_residual(x, *self.stored(), residual, dropout=dropout)

    def stored(self) -> tuple[Tensor, Tensor]:
        """Weight and bias as operations read them."""
        return self.weight.stored_as(self._dtype), self.bias.stored_as(self._dtype)


class LayerNorm(Module):
    """Normalised rows, scaled and shifted.

    Parameters
    ----------
    n_channels : int
    eps : float
        Added to the variance.
    dtype : dtype
    out : dtype, optional
        Of the result: what comes next stores its input so. That of the input by default.
    """

    def __init__(
        self,
        n_channels: int,
        *,
        eps: float = 1e-5,
        dtype: np.dtype[Any] = float32,
        out: np.dtype[Any] | None = None,
    ) -> None:
        self.eps = eps
        self.weight = Parameter((n_channels,), init.ones)
        self.bias = Parameter((n_channels,), init.zeros)
        self._dtype = dtype
        self._out = out

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.weight.stored_as(self._dtype), self.bias.stored_as(self._dtype)
        return ops.layernorm(x, weight, bias, eps=self.eps, out=self._out)


class Embedding(Module):
    """A table of vectors, looked up by id.

    Parameters
    ----------
    n_ids, n_channels : int
    std : float
        Of the table's first values.
    dtype : dtype
        Also of the result.
    n_rows : int, optional
        Rows of the table in memory, if more than ``n_ids``.
    """

    def __init__(
        self,
        n_ids: int,
        n_channels: int,
        *,
        std: float = 0.02,
        dtype: np.dtype[Any] = float32,
        n_rows: int | None = None,
    ) -> None:
        self.n_ids = n_ids
        self.weight = Parameter((n_ids, n_channels), init.normal(std), n_rows=n_rows)
        self.dtype = dtype

    def __call__(self, ids: np.ndarray | Tensor) -> Tensor:
        return ops.embedding(ids, self.weight.stored_as(self.dtype), n_ids=self.n_ids)
