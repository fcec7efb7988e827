"""GPT-2, as published: Radford et al. 2019, with the parameter names and shapes of Hugging Face's ``transformers``.

::

    tokens -> wte[token] + wpe[position] -> dropout -> L blocks -> ln_f -> logits = x wteᵀ
    block:  x = x + dropout(attention(ln_1(x)))        x = x + dropout(mlp(ln_2(x)))

The residual stream x and its gradient are stored as the embedding part of the precision says, float32 unless it is
changed; each branch as its own part says.

Weights start normally distributed with standard deviation 0.02, those that end a branch with 0.02 / sqrt(2 L), so that
the residual stream keeps its variance; biases start at 0.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import ArrayLike

from numstack import ops
from numstack.autograd import no_grad
from numstack.errors import ConfigError, DataError
from numstack.nn.layers import Embedding, LayerNorm, Linear
from numstack.nn.module import Module
from numstack.nn.parameters import ParameterStore
from numstack.precision import Policy, Precision
from numstack.tensor import Tensor

INITIAL_STD = 0.02
PADDED_TO = 128
"""Rows of a large table of tokens, and so columns of the logits, are a multiple of this."""


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes of a GPT; the defaults are GPT-2 small, 124M parameters.

    Attributes
    ----------
    n_layer, n_head, n_embd : int
        Blocks, attention heads in each, channels of the residual stream.
    block_size : int
        Most tokens in a sequence.
    vocab_size : int
        How many ids there are.
    dropout : float
        Fraction of the embeddings and of each branch's result that is dropped in training. Attention probabilities are
        never dropped.
    layer_norm_eps : float
        Added to variances.

    Raises
    ------
    ConfigError
        If a value cannot work.
    """

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    block_size: int = 1024
    vocab_size: int = 50257
    dropout: float = 0.0
    layer_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"GPTConfig: {field.name}={value!r}; expected an integer of at least 1")
        if self.n_embd % self.n_head:
            raise ConfigError(
                f"GPTConfig: n_embd={self.n_embd} is not a multiple of n_head={self.n_head}; "
                "every head has n_embd / n_head channels"
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"GPTConfig: dropout={self.dropout}; choose at least 0 and below 1")
        if not 0 < self.layer_norm_eps < 1:
            raise ConfigError(f"GPTConfig: layer_norm_eps={self.layer_norm_eps}; choose above 0 and below 1")

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the token table in memory: 50304 for 50257 ids.

        Rows of logits then start at multiples of 256 bytes, as vector loads and TMA want them, and the tiles of the
        head's matrix product are full. A small vocabulary is left as it is: padding could cost more than a row in 64.
        """
        padded = -(-self.vocab_size // PADDED_TO) * PADDED_TO
        return padded if self.vocab_size >= 64 * PADDED_TO else self.vocab_size


class _Masks:
    """The dropout masks of one forward pass, one after the other, each with a key of its own.

    Keys are a hash of where training stands, so that the mask of a step depends on no other step.
    """

    def __init__(self, p: float, *position: int) -> None:
        self._p = p
        self._position = position
        self._n_given = 0

    def next(self) -> ops.Dropout | None:
        """The mask for the next place that drops; None if nothing is dropped."""
        if self._p == 0:
            return None
        self._n_given += 1
        key = struct.pack(f"<{len(self._position) + 1}q", *self._position, self._n_given)
        return ops.Dropout(self._p, int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little"))


class Attention(Module):
    """Causal self-attention."""

    def __init__(self, config: GPTConfig, precision: Policy) -> None:
        dtype = precision.attention.storage
        self._n_heads = config.n_head
        self.c_attn = Linear(config.n_embd, 3 * config.n_embd, std=INITIAL_STD, dtype=dtype)
        self.c_proj = Linear(config.n_embd, config.n_embd, std=_branch_end_std(config), dtype=dtype)

    def add_to(self, residual: Tensor, x: Tensor, dropout: ops.Dropout | None) -> Tensor:
        """residual + dropout(attention(x))."""
        return self.c_proj.add_to(residual, ops.attention(self.c_attn(x), n_heads=self._n_heads), dropout)


class MLP(Module):
    """Two matrices with a GeLU between them."""

    def __init__(self, config: GPTConfig, precision: Policy) -> None:
        dtype = precision.mlp.storage
        self.c_fc = Linear(config.n_embd, 4 * config.n_embd, std=INITIAL_STD, dtype=dtype)
        self.c_proj = Linear(4 * config.n_embd, config.n_embd, std=_branch_end_std(config), dtype=dtype)

    def add_to(self, residual: Tensor, x: Tensor, dropout: ops.Dropout | None) -> Tensor:
        """residual + dropout(mlp(x))."""
        return ops.mlp(x, *self.c_fc.stored(), *self.c_proj.stored(), residual, dropout=dropout)


class Block(Module):
    """Attention and MLP, each on normalised input and added to the residual stream."""

    def __init__(self, config: GPTConfig, precision: Policy) -> None:
        self.ln_1 = _norm(config, precision, precision.attention)
        self.attn = Attention(config, precision)
        self.ln_2 = _norm(config, precision, precision.mlp)
        self.mlp = MLP(config, precision)

    def __call__(self, x: Tensor, masks: _Masks) -> Tensor:
        x = self.attn.add_to(x, self.ln_1(x), masks.next())
        return self.mlp.add_to(x, self.ln_2(x), masks.next())


class Transformer(Module):
    """From tokens to the normalised last state of the residual stream."""

    def __init__(self, config: GPTConfig, precision: Policy) -> None:
        dtype = precision.embedding.storage
        n_rows = config.padded_vocab_size
        self.wte = Embedding(config.vocab_size, config.n_embd, std=INITIAL_STD, dtype=dtype, n_rows=n_rows)
        self.wpe = Embedding(config.block_size, config.n_embd, std=INITIAL_STD, dtype=dtype)
        self.h = [Block(config, precision) for _ in range(config.n_layer)]
        self.ln_f = _norm(config, precision, precision.head)

    def __call__(self, tokens: np.ndarray | Tensor, masks: _Masks) -> Tensor:
        wte, wpe = (table.weight.stored_as(table.dtype) for table in (self.wte, self.wpe))
        x = ops.embedding(tokens, wte, wpe, n_ids=self.wte.n_ids, dropout=masks.next())
        for block in self.h:
            x = block(x, masks)
        return self.ln_f(x)


class GPT(Module):
    """GPT-2 with its tied head.

    Parameters
    ----------
    config : GPTConfig
    seed : int
        Of the first weights and of dropout. The same on every rank.
    precision : str or Policy
        Number formats of its parts: ``"fp32"``, ``"bf16"``, ``"fp16"``, or a policy.

    Attributes
    ----------
    config : GPTConfig
    parameters : ParameterStore
        Float32, whatever the precision.
    precision : Policy
    """

    def __init__(self, config: GPTConfig, *, seed: int = 0, precision: str | Policy = "fp32") -> None:
        self.config = config
        self.precision = Policy.named(precision) if isinstance(precision, str) else precision
        self.transformer = Transformer(config, self.precision)
        self.parameters = ParameterStore(self, seed=seed, low=self.precision.low)
        self._seed = seed
        self._dropout_step = (0, 0)
        self._micro_batch = 0

    def __call__(
        self,
        tokens: np.ndarray | Tensor,
        targets: np.ndarray | Tensor | None = None,
        *,
        n_targets: int | None = None,
        gradient: float | Tensor | None = None,
    ) -> Tensor:
        """The loss of predicting ``targets``, or the logits if there are none.

        Parameters
        ----------
        tokens, targets : integer array or int32 Tensor, shape (B, T)
            ``targets[b, t]`` is what follows ``tokens[b, : t + 1]``; -1 does not count. Arrays on the host are checked
            and copied to the device; tensors are taken as checked.
        n_targets : int, optional
            See :func:`numstack.ops.cross_entropy`; give it where targets are on the device.
        gradient : float or Tensor, optional
            What ``backward`` would start from at the loss: known now, it saves passes over the logits.

        Returns
        -------
        Tensor, shape (1,), float32, or (B, T, vocab_size)

        Raises
        ------
        ShapeError
            If shapes differ, or T exceeds ``block_size``.
        DataError
            If an id on the host is out of range.
        """
        masks = _Masks(
            self.config.dropout if self.training else 0.0, self._seed, *self._dropout_step, self._micro_batch
        )
        self._micro_batch += self.training
        x = self.transformer(tokens, masks)
        if targets is None:
            return self._logits(x)
        return ops.cross_entropy(
            self._head(x), targets, n_targets=n_targets, n_classes=self.config.vocab_size, gradient=gradient
        )

    def _head(self, x: Tensor) -> Tensor:
        """Logits (..., padded_vocab_size)."""
        table = self.transformer.wte.weight.stored_as(self.precision.head.storage)
        return ops.linear(x, table, layout="NT")

    def _logits(self, x: Tensor) -> Tensor:
        """Logits (..., vocab_size)."""
        n_ids, padded = self.config.vocab_size, self._head(x)
        return padded if padded.shape[-1] == n_ids else ops.leading(padded, n_ids)

    def set_dropout_step(self, step: int, *, rank: int = 0) -> None:
        """Say where training stands: the masks that follow depend on the model's seed and on this, on nothing before.

        Call it at the start of each optimiser step. The forward passes after it, in training mode, are its
        micro-batches 0, 1, ...
        """
        self._dropout_step = (step, rank)
        self._micro_batch = 0

    @property
    def n_parameters(self) -> int:
        """Numbers that training changes; the tied head counts once."""
        return self.parameters.n_parameters

    def state_dict(self) -> dict[str, np.ndarray]:
        """Copies of all parameters on the host, by Hugging Face's names; without ``lm_head``, which is ``wte``."""
        return self.parameters.state_dict()

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Set all parameters.

        Raises
        ------
        CheckpointError
            If names or shapes are not those of the model; then nothing has changed.
        """
        self.parameters.load_state_dict(state)

    def generate(
        self,
        tokens: ArrayLike,
        n_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 0,
    ) -> np.ndarray:
        """Continue sequences, one token at a time, without dropout.

        Parameters
        ----------
        tokens : integers, shape (T,) or (B, T)
            At least one token each; only the last ``block_size`` are seen.
        n_tokens : int
            How many to add.
        temperature : float
            Logits are divided by it: below 1 is more predictable, 0 takes the likeliest.
        top_k : int, optional
            Choose among the k likeliest only.
        seed : int
            Of the choices.

        Returns
        -------
        array of int32, shape (B, T + n_tokens)

        Raises
        ------
        ConfigError, DataError
            If an option or a token cannot work.
        """
        sequences = np.atleast_2d(np.asarray(tokens))
        if temperature < 0 or (top_k is not None and top_k < 1):
            raise ConfigError(
                f"generate: temperature={temperature}, top_k={top_k}; expected a temperature of at least 0 and a top_k "
                "of at least 1"
            )
        if sequences.ndim != 2 or sequences.shape[1] == 0:
            raise DataError(f"generate: tokens have shape {sequences.shape}; start with at least one token")
        generator = np.random.default_rng(seed)
        with no_grad():
            for _ in range(n_tokens):
                window = sequences[:, -self.config.block_size :]
                x = self.transformer(window, _Masks(0.0))
                last = np.ascontiguousarray(self._last_logits(x), np.float32)
                chosen = _choose(last, temperature, top_k, generator)
                sequences = np.concatenate([sequences, chosen[:, None]], axis=1)
        return sequences.astype(np.int32)

    def _last_logits(self, x: Tensor) -> np.ndarray:
        """Logits (B, V) on the host, after the last position only."""
        n_batch, n_time, n_channels = x.shape
        if n_batch == 1:
            return self._logits(x[:, n_time - 1 :].reshape(1, n_channels)).numpy()
        return self._logits(x).numpy()[:, -1]


def _choose(logits_BV: np.ndarray, temperature: float, top_k: int | None, generator: np.random.Generator) -> np.ndarray:
    """One id for each row."""
    if temperature > 0:
        logits_BV = logits_BV.astype(np.float64) / temperature
        if top_k is not None and top_k < logits_BV.shape[1]:
            least = np.partition(logits_BV, -top_k, axis=1)[:, -top_k, None]
            logits_BV = np.where(logits_BV < least, -np.inf, logits_BV)
        # The largest of logits plus Gumbel noise is distributed as softmax of the logits.
        logits_BV = logits_BV + generator.gumbel(size=logits_BV.shape)
    chosen: np.ndarray = np.argmax(logits_BV, axis=1)
    return chosen.astype(np.int32)


def _norm(config: GPTConfig, precision: Policy, follows: Precision) -> LayerNorm:
    """The norm in front of the part with the formats ``follows``, which stores its input in its own."""
    return LayerNorm(config.n_embd, eps=config.layer_norm_eps, dtype=precision.norms.storage, out=follows.storage)


def _branch_end_std(config: GPTConfig) -> float:
    """Two branches of each block add to the residual stream: each with 1 / (2 L) of the variance."""
    return INITIAL_STD / math.sqrt(2 * config.n_layer)
