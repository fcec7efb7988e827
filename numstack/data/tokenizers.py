"""Text to token ids and back: one id a character, or GPT-2's byte pairs."""

from __future__ import annotations

import base64
import functools
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import tiktoken
from numpy.typing import NDArray
from tiktoken_ext.openai_public import r50k_pat_str

from numstack.data import shipped
from numstack.errors import DataError


class Tokenizer(Protocol):
    """What turns text into token ids. ``description()`` is JSON from which ``from_description`` makes it again."""

    @property
    def vocabulary_size(self) -> int: ...

    def encode(self, text: str) -> NDArray[np.uint16]: ...

    def decode(self, ids: NDArray[Any]) -> str: ...

    def description(self) -> dict[str, Any]: ...


class CharacterTokenizer:
    """Each character of an alphabet is a token; ids count the alphabet in order.

    Parameters
    ----------
    alphabet : str
        The characters, all different, at most 65536.

    Examples
    --------
    >>> tokenizer = CharacterTokenizer.of("banana")
    >>> tokenizer.encode("nab")
    array([2, 0, 1], dtype=uint16)
    >>> tokenizer.decode([2, 0, 1])
    'nab'
    """

    def __init__(self, alphabet: str) -> None:
        if not alphabet or len(set(alphabet)) != len(alphabet) or len(alphabet) > 65536:
            raise DataError(
                f"an alphabet is 1 to 65536 different characters; got {len(alphabet)} characters, "
                f"{len(set(alphabet))} of them different"
            )
        self.alphabet = alphabet
        codes = _codes(alphabet)
        self._id_of_code = np.full(int(codes.max()) + 1, -1, np.int32)
        self._id_of_code[codes] = np.arange(len(alphabet))

    @classmethod
    def of(cls, text: str) -> CharacterTokenizer:
        """The tokenizer whose alphabet is the characters of ``text``, sorted."""
        return cls("".join(sorted(set(text))))

    @property
    def vocabulary_size(self) -> int:
        return len(self.alphabet)

    def encode(self, text: str) -> NDArray[np.uint16]:
        """Ids (N,) of the N characters.

        Raises
        ------
        DataError
            If a character is not in the alphabet.
        """
        codes = _codes(text)
        ids = np.where(
            codes < self._id_of_code.size, self._id_of_code[np.minimum(codes, self._id_of_code.size - 1)], -1
        )
        unknown = np.flatnonzero(ids < 0)
        if unknown.size:
            position = int(unknown[0])
            raise DataError(
                f"character {position} of the text is {text[position]!r}, which is not in the alphabet of "
                f"{self.vocabulary_size} characters; remove it or prepare the data again with a text that has it"
            )
        return ids.astype(np.uint16)

    def decode(self, ids: NDArray[Any]) -> str:
        """The text of ids (N,)."""
        return "".join(self.alphabet[i] for i in ids)

    def description(self) -> dict[str, Any]:
        return {"name": "characters", "alphabet": self.alphabet}


class Gpt2Tokenizer:
    """The byte-pair encoding of GPT-2: 50,257 tokens, the last one ``<|endoftext|>``.

    The vocabulary ships with numstack, so that neither the network nor tiktoken's cache is needed; tests hold it
    against ``tiktoken.get_encoding``.
    """

    vocabulary_size = 50257

    def __init__(self) -> None:
        self._encoding = _gpt2_encoding()

    def encode(self, text: str) -> NDArray[np.uint16]:
        """Ids (N,) of the text; ``<|endoftext|>`` in it is taken as plain text."""
        return np.array(self._encoding.encode_ordinary(text), dtype=np.uint16)

    def decode(self, ids: NDArray[Any]) -> str:
        """The text of ids (N,); a character cut in two at an end becomes U+FFFD."""
        return self._encoding.decode(np.asarray(ids).tolist())

    def description(self) -> dict[str, Any]:
        return {"name": "gpt2"}


TOKENIZERS: dict[str, Callable[[str], Tokenizer]] = {
    "characters": CharacterTokenizer.of,
    "gpt2": lambda text: Gpt2Tokenizer(),
}
"""How to make each tokenizer for a text, by name."""


def from_description(description: dict[str, Any]) -> Tokenizer:
    """The tokenizer that ``description()`` described.

    Raises
    ------
    DataError
        If it describes none.
    """
    match description:
        case {"name": "characters", "alphabet": str(alphabet)}:
            return CharacterTokenizer(alphabet)
        case {"name": "gpt2"}:
            return Gpt2Tokenizer()
    raise DataError(f"no tokenizer is described by {description!r:.80}; the names are {', '.join(TOKENIZERS)}")


def _codes(text: str) -> NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")


@functools.cache
def _gpt2_encoding() -> tiktoken.Encoding:
    lines = shipped.read("gpt2.tiktoken").split(b"\n")
    ranks = {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}
    return tiktoken.Encoding(
        name="gpt2",
        explicit_n_vocab=Gpt2Tokenizer.vocabulary_size,
        pat_str=r50k_pat_str,
        mergeable_ranks=ranks,
        special_tokens={"<|endoftext|>": Gpt2Tokenizer.vocabulary_size - 1},
    )
