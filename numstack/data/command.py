"""``numstack data``: prepare token files from text, and look into them."""

from __future__ import annotations

import argparse
from pathlib import Path

from numstack.data.dataset import Dataset, open_dataset, prepare
from numstack.data.tokenizers import TOKENIZERS
from numstack.data.tokens import TokenFile

_SHOWN_CHARACTERS = 200


def main(arguments: list[str]) -> None:
    """Run ``numstack data ARGUMENTS``."""
    parser = argparse.ArgumentParser(prog="numstack data", description=__doc__.split(":", 1)[1].strip())
    actions = parser.add_subparsers(dest="action", required=True, metavar="prepare|info")

    action = actions.add_parser(
        "prepare",
        help="text files to a folder that training reads",
        description="Write train.bin, validation.bin (llm.c's format) and tokenizer.json from text files, joined in "
        "the order given. The first part of the characters is for training, the last for validation.",
    )
    action.add_argument("texts", nargs="*", type=Path, metavar="TEXT", help="UTF-8 files; none: Shakespeare's works")
    action.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to write")
    action.add_argument(
        "--tokenizer", choices=tuple(TOKENIZERS), default="characters", help="how text is cut into tokens"
    )
    action.add_argument(
        "--validation-share", type=float, default=0.1, metavar="X", help="of the characters, at the end"
    )

    action = actions.add_parser(
        "info", help="what a folder or a .bin file holds", description="Say what a folder or a .bin file holds."
    )
    action.add_argument("path", type=Path, metavar="PATH", help="folder of `numstack data prepare`, or a .bin file")

    given = parser.parse_args(arguments)
    if given.action == "prepare":
        dataset = prepare(given.out, given.texts, tokenizer=given.tokenizer, validation_share=given.validation_share)
        print(_about_dataset(dataset))
        print(f"train with: --data {given.out}")
    elif given.path.is_dir():
        print(_about_dataset(open_dataset(given.path)))
    else:
        print(_about_file(TokenFile(given.path)))


def _about_dataset(dataset: Dataset) -> str:
    start = dataset.tokenizer.decode(dataset.validation.tokens[:_SHOWN_CHARACTERS])[:_SHOWN_CHARACTERS]
    return "\n".join(
        [
            _about_file(dataset.train),
            _about_file(dataset.validation),
            f"tokenizer: {dataset.tokenizer.description()['name']}, vocabulary {dataset.tokenizer.vocabulary_size}",
            f"validation starts with: {start!r}",
        ]
    )


def _about_file(file: TokenFile) -> str:
    return f"{file.path}: {file.n_tokens:,} tokens, largest id {file.largest_id()}, SHA-256 {file.sha256()}"
