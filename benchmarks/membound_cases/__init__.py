"""The operations that ``benchmarks.membound`` measures: ours, PyTorch's, and the bytes that they cannot avoid."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.membound_cases.case import FULL, SMALL, Case, Sizes
from benchmarks.membound_cases.elements import of_dropout, of_elementwise, of_gelu
from benchmarks.membound_cases.losses import of_cross_entropy
from benchmarks.membound_cases.norms import (
    of_layernorm,
    of_layernorm_of_float32_stream,
    of_residual,
    of_rmsnorm,
    of_softmax,
)
from benchmarks.membound_cases.parameters import of_adamw, of_reduce
from benchmarks.membound_cases.tokens import of_embedding
from numstack.kernels import (
    adamw,
    cross_entropy,
    dropout,
    elementwise,
    embedding,
    gelu,
    layernorm,
    layernorm_residual,
    reduce,
    rmsnorm,
    softmax,
)

__all__ = ["FAMILIES", "FULL", "LADDERS", "SMALL", "Case", "Sizes"]


FAMILIES: dict[str, Callable[[Any, Sizes, str], Iterator[Case]]] = {
    "gelu": of_gelu,
    "elementwise": of_elementwise,
    "dropout": of_dropout,
    "layernorm": of_layernorm,
    "layernorm of float32": of_layernorm_of_float32_stream,
    "residual": of_residual,
    "rmsnorm": of_rmsnorm,
    "softmax": of_softmax,
    "cross_entropy": of_cross_entropy,
    "adamw": of_adamw,
    "reduce": of_reduce,
    "embedding": of_embedding,
}

LADDERS = {
    gelu.forward: gelu.VARIANTS,
    gelu.backward: gelu.VARIANTS,
    gelu.forward_backward: gelu.VARIANTS,
    elementwise.add: elementwise.VARIANTS,
    elementwise.scale: elementwise.VARIANTS,
    elementwise.cast: elementwise.VARIANTS,
    elementwise.fill: elementwise.VARIANTS,
    elementwise.transpose: elementwise.TRANSPOSE_VARIANTS,
    dropout.forward: dropout.VARIANTS,
    layernorm.forward: layernorm.FORWARD,
    layernorm.backward: layernorm.BACKWARD,
    layernorm_residual.forward: layernorm_residual.FORWARD,
    rmsnorm.forward: rmsnorm.FORWARD,
    rmsnorm.backward: rmsnorm.BACKWARD,
    softmax.forward: softmax.FORWARD,
    softmax.backward: softmax.BACKWARD,
    cross_entropy.forward: cross_entropy.FORWARD,
    cross_entropy.backward: cross_entropy.BACKWARD,
    cross_entropy.forward_backward: cross_entropy.FORWARD_BACKWARD,
    adamw.step: adamw.VARIANTS,
    reduce.norm: reduce.VARIANTS,
    reduce.count_nonfinite: reduce.VARIANTS,
    reduce.sum_rows: reduce.SUM_ROWS_VARIANTS,
    embedding.forward: embedding.FORWARD,
    embedding.backward: embedding.BACKWARD,
}
"""The variants of each operation."""
