"""Texts to tokens and back, by a ``tokenizer.json`` of the package ``tokenizers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from graphpar.runtime.errors import RuntimeProgramError

FILE = "tokenizer.json"


class Texts:
    """Encodes and decodes with the tokenizer of a file."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the tokenizer puts around it."""
        return list(self._tokenizer.encode(text).ids)

    def decode(self, tokens: list[int]) -> str:
        """Return the text of tokens, without special ones."""
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


def text_file(path: Path | None) -> Texts:
    """Read a tokenizer.

    Args:
        path: its ``tokenizer.json``, or the folder that has it.

    Raises:
        RuntimeProgramError: there is none, it can't be read, or the package is not installed.
    """
    if path is None:
        raise RuntimeProgramError(
            f"a prompt of text needs a tokenizer: --tokenizer takes a {FILE}, or the folder that has one; --tokens takes ids"
        )
    file = path / FILE if path.is_dir() else path
    if not file.is_file():
        raise RuntimeProgramError(f"there is no {file}, the tokenizer of the prompts")
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise RuntimeProgramError("a prompt of text needs the package tokenizers: pip install tokenizers") from None
    try:
        return Texts(Tokenizer.from_file(str(file)))
    except Exception as error:
        raise RuntimeProgramError(f"{file} is no tokenizer: {error}") from None
