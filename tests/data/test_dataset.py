"""Folders of token files: what ``prepare`` writes, how it is split, and what is said when something is missing."""

from pathlib import Path

import numpy as np
import pytest

from numstack.data import Gpt2Tokenizer, open_dataset, prepare, shakespeare, write_tokens
from numstack.errors import DataError


def test_split_is_by_position(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh")
    (tmp_path / "b.txt").write_text("ij")
    dataset = prepare(tmp_path / "out", [tmp_path / "a.txt", tmp_path / "b.txt"], validation_share=0.2)
    assert dataset.tokenizer.decode(dataset.train.tokens) == "abcdefgh"
    assert dataset.tokenizer.decode(dataset.validation.tokens) == "ij"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "tokenizer.json",
        "train.bin",
        "validation.bin",
    ]


def test_shakespeare_is_prepared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMSTACK_CACHE", str(tmp_path))
    first = shakespeare()
    assert (first.train.n_tokens, first.validation.n_tokens) == (4_547_847, 505_316)
    assert first.tokenizer.vocabulary_size == 84
    written = first.train.path.stat().st_mtime_ns
    assert shakespeare().train.path.stat().st_mtime_ns == written


def test_gpt2_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("To be, or not to be, that is the question. " * 10)
    dataset = prepare(tmp_path / "out", [tmp_path / "a.txt"], tokenizer="gpt2")
    assert isinstance(dataset.tokenizer, Gpt2Tokenizer)
    assert dataset.tokenizer.decode(dataset.train.tokens).startswith("To be, or not")


def test_llmc_folder_is_taken_for_gpt2(tmp_path: Path) -> None:
    write_tokens(tmp_path / "train.bin", np.array([15496, 995, 50256]))
    write_tokens(tmp_path / "validation.bin", np.array([15496, 995]))
    dataset = open_dataset(tmp_path)
    assert dataset.tokenizer.decode(dataset.validation.tokens) == "Hello world"


def test_token_beyond_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc" * 100)
    prepare(tmp_path / "out", [tmp_path / "a.txt"])
    write_tokens(tmp_path / "out" / "validation.bin", np.array([0, 3]))
    with pytest.raises(DataError, match=r"validation.bin: token 1 is 3, beyond the vocabulary of 3"):
        open_dataset(tmp_path / "out")


def test_what_can_be_missing_or_damaged(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no such folder; `numstack data prepare --out"):
        open_dataset(tmp_path / "none")
    with pytest.raises(DataError, match=r"train.bin: there is no such file"):
        open_dataset(tmp_path)
    (tmp_path / "a.txt").write_text("abc" * 100)
    out = tmp_path / "out"
    prepare(out, [tmp_path / "a.txt"])
    (out / "tokenizer.json").write_text("{")
    with pytest.raises(DataError, match=r"tokenizer.json: cannot be read as JSON"):
        open_dataset(out)
    (out / "tokenizer.json").write_text('{"name": "words"}')
    with pytest.raises(DataError, match="no tokenizer is described"):
        open_dataset(out)


def test_texts_that_cannot_be_prepared(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(DataError, match=r"none.txt: there is no such file"):
        prepare(out, [tmp_path / "none.txt"])
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match=r"empty.txt: the file is empty"):
        prepare(out, [tmp_path / "empty.txt"])
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match=r"latin.txt: byte 3 is not UTF-8"):
        prepare(out, [tmp_path / "latin.txt"])
    (tmp_path / "one.txt").write_text("a")
    with pytest.raises(DataError, match="1 characters is too short to be split"):
        prepare(out, [tmp_path / "one.txt"])
    with pytest.raises(DataError, match="must lie between 0 and 1"):
        prepare(out, [tmp_path / "one.txt"], validation_share=1.0)
    with pytest.raises(DataError, match="no tokenizer 'words'; the names are characters, gpt2"):
        prepare(out, [tmp_path / "one.txt"], tokenizer="words")
    assert not out.exists()
