"""Token files: llm.c's format byte by byte, and every way in which a file can be broken."""

import hashlib
import os
import struct
from pathlib import Path

import numpy as np
import pytest

from numstack.data import TokenFile, write_tokens
from numstack.errors import DataError
from tests.disk import file_size_limit


def llmc_bytes(tokens: list[int], *, magic: int = 20240520, version: int = 1, count: int | None = None) -> bytes:
    """The bytes that llm.c's dev/data/data_common.py writes: 256 int32, then uint16."""
    header = struct.pack("<256i", magic, version, len(tokens) if count is None else count, *[0] * 253)
    return header + struct.pack(f"<{len(tokens)}H", *tokens)


def test_reads_what_llmc_writes(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    path.write_bytes(llmc_bytes([50256, 464, 0, 65535]))
    file = TokenFile(path)
    assert file.n_tokens == 4
    assert file.tokens.tolist() == [50256, 464, 0, 65535]
    assert file.largest_id() == 65535
    assert file.sha256() == hashlib.sha256(path.read_bytes()).hexdigest()


def test_writes_what_llmc_reads(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tokens.bin"
    write_tokens(path, np.array([50256, 464, 0, 65535], dtype=np.int64))
    assert path.read_bytes() == llmc_bytes([50256, 464, 0, 65535])
    assert os.listdir(path.parent) == ["tokens.bin"]


def test_is_mapped_and_read_only(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.bin", np.arange(10))
    tokens = TokenFile(tmp_path / "tokens.bin").tokens
    assert isinstance(tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        tokens[0] = 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the file is empty"),
        (llmc_bytes([1, 2])[:100], "truncated: the header takes 1024 bytes but the file has 100"),
        (llmc_bytes([1, 2, 3])[:-2], r"truncated: its header says 3 tokens \(1030 bytes\) but the file has 1028"),
        (llmc_bytes([1, 2, 3]) + b"x", "too long: its header says 3 tokens"),
        (b"once upon a time" * 100, "not a token file"),
        (llmc_bytes([1], magic=20240801), "not a token file: it starts with 20240801, not with 20240520"),
        (llmc_bytes([1], version=2), "version 2 of the token format; this numstack reads version 1"),
        (llmc_bytes([]), "holds 0 tokens"),
        (llmc_bytes([1], count=-1), "holds -1 tokens"),
    ],
)
def test_broken_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.bin"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        TokenFile(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_file_and_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no such file"):
        TokenFile(tmp_path / "none.bin")
    with pytest.raises(DataError, match=r"cannot be read \(Is a directory\)"):
        TokenFile(tmp_path)


def test_token_beyond_vocabulary(tmp_path: Path) -> None:
    write_tokens(tmp_path / "tokens.bin", np.array([0, 83, 84, 90]))
    file = TokenFile(tmp_path / "tokens.bin")
    file.check_vocabulary(91)
    with pytest.raises(DataError, match="token 2 is 84, beyond the vocabulary of 84"):
        file.check_vocabulary(84)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (np.array([0, 65536]), "ids from 0 to 65535; got 65536"),
        (np.array([-1, 3]), "ids from 0 to 65535; got -1"),
        (np.array([], np.int32), "1 to 2147483647 tokens; got 0"),
        (np.zeros((2, 2), np.int32), r"a vector of integers; got shape \(2, 2\)"),
        (np.array([1.0]), "a vector of integers; got shape .* of float64"),
    ],
)
def test_tokens_that_do_not_fit(tmp_path: Path, tokens: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        write_tokens(tmp_path / "tokens.bin", tokens)
    assert not (tmp_path / "tokens.bin").exists()


def test_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    write_tokens(path, np.arange(5))
    before = path.read_bytes()
    with file_size_limit(4096), pytest.raises(DataError, match=r"cannot be written .* is unchanged"):
        write_tokens(path, np.zeros(5000, np.int32))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["tokens.bin"]
