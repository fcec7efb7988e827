"""Memory-mapped files of token ids, in the ``.bin`` format of llm.c.

A file is 256 little-endian int32 (the magic number 20240520, the version 1, the number of tokens, zeros), then one
uint16 for each token. A file that llm.c's ``dev/data`` scripts wrote for GPT-2 opens here, and the other way round.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from numstack.errors import DataError
from numstack.files import write_atomically

MAGIC = 20240520
VERSION = 1
HEADER_BYTES = 1024
LARGEST_ID = np.iinfo(np.uint16).max
_CHUNK = 1 << 24  # tokens looked at together when a whole file is read: 32 MiB


class TokenFile:
    """A file of token ids, open for reading; only the pages that are touched are read from disk.

    Parameters
    ----------
    path : path of a ``.bin`` file

    Attributes
    ----------
    tokens : np.memmap, shape (n_tokens,), uint16, read-only
    n_tokens : int

    Raises
    ------
    DataError
        If the file is missing, empty, truncated, or no token file of this version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                header_bytes = file.read(HEADER_BYTES)
                nbytes = os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            raise DataError(
                f"{self.path}: there is no such file; `numstack data prepare --out DIR` writes token files"
            ) from None
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read ({error.strerror})") from error
        self.n_tokens = self._check_header(header_bytes, nbytes)
        self.tokens = np.memmap(self.path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(self.n_tokens,))

    def _check_header(self, header_bytes: bytes, nbytes: int) -> int:
        if nbytes == 0:
            raise DataError(f"{self.path}: the file is empty; write it again with `numstack data prepare`")
        if len(header_bytes) < HEADER_BYTES:
            raise DataError(
                f"{self.path}: truncated: the header takes {HEADER_BYTES} bytes but the file has {nbytes}; "
                f"write it again"
            )
        magic, version, n_tokens = (int(field) for field in np.frombuffer(header_bytes, "<i4", count=3))
        if magic != MAGIC:
            raise DataError(
                f"{self.path}: not a token file: it starts with {magic}, not with {MAGIC}; "
                f"`numstack data prepare` turns text into token files"
            )
        if version != VERSION:
            raise DataError(
                f"{self.path}: version {version} of the token format; this numstack reads version {VERSION}"
            )
        if n_tokens < 1:
            raise DataError(f"{self.path}: holds {n_tokens} tokens; at least one is needed")
        expected = HEADER_BYTES + 2 * n_tokens
        if nbytes != expected:
            what = "truncated" if nbytes < expected else "too long"
            raise DataError(
                f"{self.path}: {what}: its header says {n_tokens} tokens ({expected} bytes) but the file has {nbytes} "
                f"bytes; copy or write it again"
            )
        return n_tokens

    def largest_id(self) -> int:
        """The largest token id of the file. Reads all of it (a second per gigabyte, once it is in memory)."""
        return max(int(self.tokens[start : start + _CHUNK].max()) for start in range(0, self.n_tokens, _CHUNK))

    def check_vocabulary(self, vocabulary_size: int) -> None:
        """Make sure that every id is below ``vocabulary_size``. Reads the whole file.

        Raises
        ------
        DataError
            With the first offending id and its position.
        """
        for start in range(0, self.n_tokens, _CHUNK):
            chunk = self.tokens[start : start + _CHUNK]
            if int(chunk.max()) >= vocabulary_size:
                position = start + int(np.argmax(chunk >= vocabulary_size))
                raise DataError(
                    f"{self.path}: token {position} is {self.tokens[position]}, beyond the vocabulary of "
                    f"{vocabulary_size}; the file was written with another tokenizer"
                )

    def sha256(self) -> str:
        """The SHA-256 of the whole file, in hexadecimal: what a checkpoint remembers of its data."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def write_tokens(path: str | os.PathLike[str], tokens: np.ndarray) -> None:
    """Write token ids to a ``.bin`` file, atomically: other processes see the old file or the new one, whole.

    Parameters
    ----------
    path : where to
    tokens : array, shape (N,), any integer dtype, 0 <= id <= 65535, 1 <= N < 2**31

    Raises
    ------
    DataError
        If an id or the number of tokens does not fit the format, or the disk is full.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise DataError(f"{path}: tokens must be a vector of integers; got shape {tokens.shape} of {tokens.dtype}")
    if not 1 <= tokens.size < 2**31:
        raise DataError(f"{path}: a token file holds 1 to {2**31 - 1} tokens; got {tokens.size}")
    smallest, largest = int(tokens.min()), int(tokens.max())
    if smallest < 0 or largest > LARGEST_ID:
        raise DataError(
            f"{path}: the format stores ids from 0 to {LARGEST_ID}; got {smallest if smallest < 0 else largest}"
        )
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    header[:3] = MAGIC, VERSION, tokens.size
    try:
        write_atomically(Path(path), header.tobytes(), tokens.astype("<u2", copy=False).tobytes())
    except OSError as error:
        raise DataError(f"{path}: cannot be written ({error.strerror}); what was there before is unchanged") from error
