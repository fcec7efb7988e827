"""Which part of a model is stored and computed in which number format, and how a loss is scaled for float16.

=========== ============================================================= ==========================================
part        what it stores                                                what it computes
=========== ============================================================= ==========================================
embedding   both tables as it reads them, the residual stream             sums of two rows; sums of branches
attention   weights, normalised input, queries, keys, values, result      products of what is stored
softmax     log-sum-exp of each row of attention and of the loss          exponentials and their sums
norms       gains and biases as they are read                             mean and deviation, the normalised row
mlp         weights, normalised input, pre-activation, activation         products of what is stored, GeLU
head        the last normalised input, the table as it reads it, logits   products of what is stored
reductions  loss, norms, gradients summed over tokens                     sums
optimiser   the weights it changes, their gradients, both moments         AdamW's update
=========== ============================================================= ==========================================

Gradients of activations are stored like the activations. A layer norm from one format to another, as from the residual
stream into a branch, keeps its input for backward in the second. **Sums are float32 in every part**: a product of two
16-bit numbers is exact in float32, so what 16 bits cost is one rounding when a result is stored.

The optimiser's float32 weights are what a checkpoint holds. A part that stores 16 bits reads copies of them, rounded in
the launch that updates them; a part that stores float32 reads the weights themselves.

>>> Policy.named("bf16", head="float32").head.storage
dtype('float32')
>>> print(Policy.named("bf16"))
float32 in embedding, softmax, norms, reductions, optimiser; bfloat16 in attention, mlp, head
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from numstack.dtypes import FLOATING, bfloat16, float16, float32
from numstack.errors import ConfigError

NAMES = ("fp32", "bf16", "fp16")
"""Policies that :meth:`Policy.named` knows."""

_FORMATS = {dtype.name: dtype for dtype in FLOATING}
_LOW = {"fp32": float32, "bf16": bfloat16, "fp16": float16}
# Parts whose storage follows the policy's name. Gains of norms are few and close to 1: float32 costs nothing there.
# The residual stream stays float32, as in PyTorch's autocast: in 16 bits each branch would round all those before it.
_LOWERED = ("attention", "mlp", "head")
# Parts whose operands are multiplied as they are stored, which is what tensor cores do. All others compute in float32.
_PRODUCTS = ("attention", "mlp", "head")
_SUMS = "a sum of 16 bits stops growing after some hundred terms"
_ALWAYS_FLOAT32 = {
    "softmax": f"it adds exponentials, and {_SUMS}",
    "reductions": _SUMS,
    "optimiser": "updates are thousands of times smaller than weights, so 16 bits would round them away",
}

# Loss scales outside these are of no use: float16 ends at 65504 and has nothing below 2^-24.
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-24, 2.0**60


@dataclass(frozen=True, slots=True)
class Precision:
    """Number formats of one part.

    Attributes
    ----------
    storage : dtype
        Of its activations, their gradients, and its weights as it reads them.
    computation : dtype
        Of the operands of its arithmetic.
    """

    storage: np.dtype[Any]
    computation: np.dtype[Any]


@dataclass(frozen=True, slots=True)
class LossScaling:
    """How the scale of a loss follows the range of float16.

    Backward starts from the scale instead of 1, which moves gradients up to where float16 is precise; the optimiser
    divides it out. A step whose gradients overflow is skipped and lowers the scale; enough good steps raise it.

    Attributes
    ----------
    initial : float
        The first scale.
    growth : float
        Factor after ``window`` good steps in a row; above 1.
    backoff : float
        Factor after an overflow; between 0 and 1.
    window : int
        Good steps in a row before the scale grows.

    Raises
    ------
    ConfigError
        If a value cannot work.
    """

    initial: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    window: int = 2000

    def __post_init__(self) -> None:
        for name, valid, expected in (
            ("initial", SMALLEST_SCALE <= self.initial <= LARGEST_SCALE, "a number from 2^-24 to 2^60"),
            ("growth", 1 < self.growth < math.inf, "a number above 1"),
            ("backoff", 0 < self.backoff < 1, "a number between 0 and 1"),
            ("window", isinstance(self.window, int) and 1 <= self.window < 2**31, "an integer of at least 1"),
        ):
            if not valid:
                raise ConfigError(f"LossScaling: {name}={getattr(self, name)!r}; expected {expected}")


@dataclass(frozen=True, slots=True)
class Policy:
    """The number formats of all parts of a model; the module's docstring says what belongs to which part.

    Attributes
    ----------
    embedding, attention, softmax, norms, mlp, head, reductions, optimiser : Precision
    loss_scaling : LossScaling or None
        None: the loss is not scaled.

    Raises
    ------
    ConfigError
        If a part cannot work in its formats; names the part and the format.
    """

    embedding: Precision
    attention: Precision
    softmax: Precision
    norms: Precision
    mlp: Precision
    head: Precision
    reductions: Precision
    optimiser: Precision
    loss_scaling: LossScaling | None = None

    def __post_init__(self) -> None:
        lowest = ""
        for part, precision in self:
            for dtype in (precision.storage, precision.computation):
                if dtype not in FLOATING:
                    raise ConfigError(f"precision: {part}={dtype}; choose one of {', '.join(_FORMATS)}")
                if dtype != float32 and part in _ALWAYS_FLOAT32:
                    raise ConfigError(f"precision: {part}={dtype}; it is always float32: {_ALWAYS_FLOAT32[part]}")
            expected = _computation(part, precision.storage)
            if precision.computation != expected:
                why = "products take their operands as they are stored" if part in _PRODUCTS else f"otherwise {_SUMS}"
                raise ConfigError(
                    f"precision: {part} is to compute in {precision.computation} what it stores in "
                    f"{precision.storage}; it computes in {expected}: {why}"
                )
            if precision.storage == float32:
                continue
            if lowest and precision.storage != self.low:
                raise ConfigError(
                    f"precision: {part}={precision.storage} beside {lowest}={self.low}; "
                    "there is one 16-bit copy of the weights: choose one 16-bit format for all parts"
                )
            lowest = lowest or part

    def __iter__(self) -> Iterator[tuple[str, Precision]]:
        """Each part's name and its formats."""
        return ((field.name, getattr(self, field.name)) for field in fields(self) if field.name != "loss_scaling")

    def __str__(self) -> str:
        by_format: dict[str, list[str]] = {}
        for part, precision in self:
            by_format.setdefault(precision.storage.name, []).append(part)
        words = [f"{name} in {', '.join(parts)}" for name, parts in by_format.items()]
        if len(words) == 1:
            words = [f"{self.embedding.storage.name} in all parts"]
        if self.loss_scaling is not None:
            words.append(f"loss scale from {self.loss_scaling.initial:g}")
        return "; ".join(words)

    @property
    def low(self) -> np.dtype[Any] | None:
        """The 16-bit format of the parts that store one; None if all store float32."""
        return next((precision.storage for _, precision in self if precision.storage != float32), None)

    @classmethod
    def named(cls, name: str, *, loss_scaling: LossScaling | None = None, **parts: str | Precision) -> Policy:
        """A policy by name, with some parts changed.

        Parameters
        ----------
        name : {"fp32", "bf16", "fp16"}
            What attention, mlp and head store; everything else is float32.
        loss_scaling : LossScaling, optional
            By default ``LossScaling()`` if any part stores float16, else none.
        **parts : str or Precision
            By part: what it stores (``"float32"``, ``"bfloat16"``, ``"float16"``), or both its formats.

        Raises
        ------
        ConfigError
            If there is no such name, part or format, or a part cannot work in it.

        Examples
        --------
        >>> policy = Policy.named("fp16", head="float32", loss_scaling=LossScaling(initial=1024.0))
        >>> policy.head.storage, policy.mlp.storage
        (dtype('float32'), dtype('float16'))
        """
        if name not in _LOW:
            raise ConfigError(f"precision: there is no policy {name!r}; choose one of {', '.join(NAMES)}")
        known = [field.name for field in fields(cls) if field.name != "loss_scaling"]
        unknown = [part for part in parts if part not in known]
        if unknown:
            raise ConfigError(f"precision: there is no part {unknown[0]!r}; parts are {', '.join(known)}")
        chosen = {part: _LOW[name].name if part in _LOWERED else "float32" for part in known} | parts
        precisions = {part: _precision(part, value) for part, value in chosen.items()}
        if loss_scaling is None and any(precision.storage == float16 for precision in precisions.values()):
            loss_scaling = LossScaling()
        return cls(**precisions, loss_scaling=loss_scaling)

    def table(self) -> dict[str, dict[str, str]]:
        """Names of the formats by part, for a manifest: ``{"mlp": {"storage": "bfloat16", ...}, ...}``."""
        return {
            part: {"storage": precision.storage.name, "computation": precision.computation.name}
            for part, precision in self
        }


def _precision(part: str, value: str | Precision) -> Precision:
    if isinstance(value, Precision):
        return value
    if value not in _FORMATS:
        raise ConfigError(f"precision: {part}={value!r}; choose one of {', '.join(_FORMATS)}")
    return Precision(_FORMATS[value], _computation(part, _FORMATS[value]))


def _computation(part: str, storage: np.dtype[Any]) -> np.dtype[Any]:
    return storage if part in _PRODUCTS else float32
