"""Evaluation: the sums of all ranks are those of one, and characters are counted for any tokenizer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from numstack.data import Dataset, open_dataset, prepare
from numstack.nn import GPT, GPTConfig
from numstack.train import evaluate
from numstack.train.step import Interrupted


def tiny_gpt(dataset: Dataset) -> GPT:
    return GPT(GPTConfig(1, 2, 16, 8, dataset.tokenizer.vocabulary_size, dropout=0.5), seed=1)


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_ranks_share_the_windows(text: Path, n_ranks: int) -> None:
    dataset = open_dataset(text)
    model = tiny_gpt(dataset)
    alone = evaluate(model, dataset, n_windows=13, batch=4)
    n_batches = 0

    def count() -> bool:
        nonlocal n_batches
        n_batches += 1
        return False

    shares, calls = [], []
    for rank in range(n_ranks):
        n_batches = 0
        shares.append(evaluate(model, dataset, n_windows=13, batch=2, rank=rank, n_ranks=n_ranks, interrupted=count))
        calls.append(n_batches)
    together = np.sum(shares, axis=0)
    assert together[1:].tolist() == alone[1:].tolist() == [13 * 8, 13 * 8]
    assert together[0] == pytest.approx(alone[0], rel=1e-5)
    assert len(set(calls)) == 1, "all ranks must ask equally often, or they would wait for one another"
    assert model.training


def test_untrained_model_knows_nothing(text: Path) -> None:
    """About log(vocabulary) nats a token, and no dropout: the same each time."""
    dataset = open_dataset(text)
    model = tiny_gpt(dataset)
    nats, n_tokens, _ = evaluate(model, dataset, n_windows=50, batch=25)
    assert nats / n_tokens == pytest.approx(np.log(dataset.tokenizer.vocabulary_size), rel=0.02)
    assert evaluate(model, dataset, n_windows=50, batch=25)[0] == nats


def test_characters_of_longer_tokens(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("to be, or not to be: that is the question " * 20)
    dataset = prepare(tmp_path / "tokens", [tmp_path / "text.txt"], tokenizer="gpt2", validation_share=0.5)
    _, n_tokens, n_characters = evaluate(tiny_gpt(dataset), dataset, n_windows=2, batch=2)
    starts = [0, (dataset.validation.n_tokens - 1) // 8 // 2 * 8]
    targets = [dataset.tokenizer.decode(dataset.validation.tokens[start + 1 : start + 9]) for start in starts]
    assert n_tokens == 16
    assert n_characters == sum(len(target) for target in targets) > 32


def test_breaking_off(text: Path) -> None:
    dataset = open_dataset(text)
    model = tiny_gpt(dataset)
    with pytest.raises(Interrupted):
        evaluate(model, dataset, n_windows=13, batch=4, interrupted=lambda: True)
    assert model.training
