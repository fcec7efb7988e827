"""The files that come with numstack: Shakespeare's works and GPT-2's vocabulary (see corpus/ATTRIBUTION.txt)."""

from __future__ import annotations

import hashlib
import lzma
from importlib import resources

from numstack.errors import DataError

SHA256 = {
    "shakespeare.txt": "f9a9c3bba5a0c7cbcd26b1cab32c7ff101e0a13133ab8db6a7cd3b07f436e253",
    "gpt2.tiktoken": "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930",
}


def read(name: str) -> bytes:
    """The content of a shipped file, decompressed and checked.

    Parameters
    ----------
    name : "shakespeare.txt" or "gpt2.tiktoken"

    Raises
    ------
    DataError
        If the installation is damaged.
    """
    file = resources.files("numstack.data") / "corpus" / f"{name}.xz"
    try:
        content = lzma.decompress(file.read_bytes())
    except (OSError, lzma.LZMAError) as error:
        raise DataError(f"{file}: cannot be read ({error}); install numstack again") from error
    if hashlib.sha256(content).hexdigest() != SHA256[name]:
        raise DataError(f"{file}: the content has another SHA-256 than it was shipped with; install numstack again")
    return content
