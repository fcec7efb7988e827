"""Both tokenizers, against themselves and against tiktoken's own loading of the vocabulary."""

import hashlib
import lzma
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from tiktoken_ext.openai_public import r50k_base

from numstack.data import CharacterTokenizer, Gpt2Tokenizer, shipped
from numstack.data.tokenizers import from_description
from numstack.errors import DataError

TEXTS = ["", "Hello world!", "  two  spaces\n\n\ttab", "Ünïcödé 漢字 🙂", "don't we'll 1234567 <|endoftext|>"]


def test_shipped_corpus_is_what_its_attribution_says() -> None:
    text = shipped.read("shakespeare.txt").decode("ascii")
    assert len(text) == 5_053_163
    assert len(set(text)) == 84
    assert text.count("by William Shakespeare\n") == 42


def test_damaged_installation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus").mkdir()
    monkeypatch.setattr("importlib.resources.files", lambda package: tmp_path)
    with pytest.raises(DataError, match="cannot be read"):
        shipped.read("shakespeare.txt")
    (tmp_path / "corpus" / "shakespeare.txt.xz").write_bytes(lzma.compress(b"to be or not to be"))
    with pytest.raises(DataError, match="another SHA-256"):
        shipped.read("shakespeare.txt")


@pytest.mark.parametrize("text", TEXTS)
def test_characters_there_and_back(text: str) -> None:
    tokenizer = CharacterTokenizer.of("".join(TEXTS))
    ids = tokenizer.encode(text)
    assert ids.dtype == np.uint16 and ids.shape == (len(text),)
    assert tokenizer.decode(ids) == text
    assert from_description(tokenizer.description()).encode(text).tolist() == ids.tolist()


@pytest.mark.parametrize("foreign", ["!", "漢", "A"])
def test_character_outside_the_alphabet(foreign: str) -> None:
    with pytest.raises(DataError, match=f"character 3 of the text is '{foreign}'.* alphabet of 3 characters"):
        CharacterTokenizer("abn").encode("nab" + foreign + "na")


@pytest.mark.parametrize("alphabet", ["", "aba"])
def test_bad_alphabet(alphabet: str) -> None:
    with pytest.raises(DataError, match="1 to 65536 different characters"):
        CharacterTokenizer(alphabet)


@pytest.mark.parametrize("description", [{}, {"name": "bert"}, {"name": "characters"}, [], None])
def test_unknown_description(description: object) -> None:
    with pytest.raises(DataError, match="no tokenizer is described by"):
        from_description(description)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", TEXTS)
def test_gpt2_there_and_back(text: str) -> None:
    tokenizer = from_description({"name": "gpt2"})
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_gpt2_known_ids() -> None:
    """Published in many places: the ids of this sentence by OpenAI's encoder."""
    assert Gpt2Tokenizer().encode("Hello world").tolist() == [15496, 995]
    assert Gpt2Tokenizer().decode(np.array([50256])) == "<|endoftext|>"


def test_gpt2_equals_tiktoken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tiktoken loads the same vocabulary from its own cache, with its own check of the hash, and without a network.

    Its "r50k_base" is GPT-2's encoding, in a format of one file instead of two.
    """
    url = "https://openaipublic.blob.core.windows.net/encodings/r50k_base.tiktoken"
    (tmp_path / hashlib.sha1(url.encode()).hexdigest()).write_bytes(shipped.read("gpt2.tiktoken"))
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    theirs = tiktoken.Encoding(**r50k_base())
    ours = Gpt2Tokenizer()
    assert theirs.n_vocab == ours.vocabulary_size
    for text in [*TEXTS, shipped.read("shakespeare.txt").decode()[:50_000]]:
        assert ours.encode(text).tolist() == theirs.encode_ordinary(text)
