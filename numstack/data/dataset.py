"""A folder of token files: ``train.bin``, ``validation.bin`` and ``tokenizer.json``.

The split is by position: the first nine tenths of the characters are for training, the last tenth for validation
(``validation_share``), as they stand in the text. Of the shipped works, in alphabetical order, that keeps the last
plays apart (the end of Troilus and Cressida, Twelfth Night, The Two Gentlemen of Verona and The Winter's Tale), which
training never sees: an honest and somewhat harder measure than sentences drawn from all of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from numstack.data import shipped
from numstack.data.tokenizers import TOKENIZERS, Gpt2Tokenizer, Tokenizer, from_description
from numstack.data.tokens import TokenFile, write_tokens
from numstack.errors import DataError
from numstack.files import write_atomically


@dataclass(frozen=True)
class Dataset:
    """Two token files and the tokenizer that wrote them."""

    train: TokenFile
    validation: TokenFile
    tokenizer: Tokenizer


def open_dataset(folder: str | os.PathLike[str]) -> Dataset:
    """Open a folder that ``prepare`` wrote, and check every token id against the vocabulary.

    Without a ``tokenizer.json`` the tokens are taken for GPT-2's: rename llm.c's two files to ``train.bin`` and
    ``validation.bin`` and they open.

    Raises
    ------
    DataError
        If a file is missing or damaged, or a token id is beyond the vocabulary.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise DataError(f"{folder}: there is no such folder; `numstack data prepare --out {folder}` makes it")
    dataset = Dataset(TokenFile(folder / "train.bin"), TokenFile(folder / "validation.bin"), _read_tokenizer(folder))
    for tokens in (dataset.train, dataset.validation):
        tokens.check_vocabulary(dataset.tokenizer.vocabulary_size)
    return dataset


def prepare(
    folder: str | os.PathLike[str],
    texts: Sequence[str | os.PathLike[str]] = (),
    *,
    tokenizer: str = "characters",
    validation_share: float = 0.1,
) -> Dataset:
    """Turn text files, read as UTF-8 and joined in the order given, into a folder of token files.

    Parameters
    ----------
    folder : where to; created if missing
    texts : paths of text files; the shipped works of Shakespeare if there are none
    tokenizer : "characters" or "gpt2"
    validation_share : float, 0 < share < 1
        This much of the characters, at the end, is for validation.

    Raises
    ------
    DataError
        If a text is missing, empty or not UTF-8, or the disk is full.
    """
    if tokenizer not in TOKENIZERS:
        raise DataError(f"there is no tokenizer {tokenizer!r}; the names are {', '.join(TOKENIZERS)}")
    if not 0 < validation_share < 1:
        raise DataError(f"the share for validation is {validation_share}; it must lie between 0 and 1")
    folder = Path(folder)
    text = "".join(_read_text(Path(path)) for path in texts) if texts else shipped.read("shakespeare.txt").decode()
    n_train = round(len(text) * (1 - validation_share))
    if not 0 < n_train < len(text):
        raise DataError(f"a text of {len(text)} characters is too short to be split; give a longer one")
    made = TOKENIZERS[tokenizer](text)
    write_tokens(folder / "train.bin", made.encode(text[:n_train]))
    write_tokens(folder / "validation.bin", made.encode(text[n_train:]))
    description = json.dumps(made.description(), indent=1) + "\n"
    try:
        write_atomically(folder / "tokenizer.json", description.encode())  # last: it says that the folder is complete
    except OSError as error:
        raise DataError(f"{folder / 'tokenizer.json'}: cannot be written ({error.strerror})") from error
    return open_dataset(folder)


def shakespeare(tokenizer: str = "characters") -> Dataset:
    """The shipped works of Shakespeare, prepared at the first call and kept in numstack's cache.

    Any rank may make it: files appear whole (an atomic rename) and are the same whoever writes them.
    """
    cache = os.environ.get("NUMSTACK_CACHE") or Path.home() / ".cache" / "numstack"
    folder = Path(cache) / "data" / f"shakespeare-{tokenizer}"
    return open_dataset(folder) if (folder / "tokenizer.json").exists() else prepare(folder, tokenizer=tokenizer)


def _read_tokenizer(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    try:
        description = json.loads(path.read_bytes())
    except FileNotFoundError:
        return Gpt2Tokenizer()
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as JSON ({error}); prepare the data again") from error
    return from_description(description)


def _read_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode()
    except FileNotFoundError:
        raise DataError(f"{path}: there is no such file; give a text file") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: byte {error.start} is not UTF-8; convert the text to UTF-8 first") from None
    if not text:
        raise DataError(f"{path}: the file is empty; give a text file with some text")
    return text
