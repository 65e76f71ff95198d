"""The tokenizer that a checkpoint folder carries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dsv4.serve.errors import TokenizerError
from dsv4.serve.tokenizer import ByteTokenizer, Text, Tokenizer, utf8

FILE = "tokenizer.json"


def tokenizer_of(folder: Path) -> tuple[Tokenizer, str]:
    """The folder's tokenizer, or that of bytes with the reason why.

    Raises
    ------
    TokenizerError
        The folder's tokenizer cannot be read.
    """
    file = folder / FILE
    if not file.exists():
        return ByteTokenizer(), f"{folder} has no {FILE}: a token is a byte of UTF-8"
    try:
        import tokenizers
    except ImportError:
        return ByteTokenizer(), "the package `tokenizers` is not installed: a token is a byte of UTF-8"
    try:
        return FolderTokenizer(tokenizers.Tokenizer.from_file(str(file))), ""
    except Exception as error:  # the package raises bare Exceptions
        raise TokenizerError(f"{file}: {error}", "restore the file, or remove it for a token a byte") from error


class FolderTokenizer:
    """A tokenizer of the package `tokenizers`; its special tokens have no text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        utf8(text)  # the package's own error names neither the text nor the character
        return list(self._tokenizer.encode(text, add_special_tokens=special).ids)

    def text(self) -> Text:
        return FolderText(self._tokenizer)


class FolderText:
    """The text of a `FolderTokenizer`'s tokens."""

    def __init__(self, tokenizer: Any) -> None:
        from tokenizers.decoders import DecodeStream

        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._tokens: list[int] = []
        self._shown = ""

    def add(self, tokens: Sequence[int]) -> str:
        self._tokens += tokens
        pieces = (self._stream.step(self._tokenizer, token) for token in tokens)
        piece = "".join(piece for piece in pieces if piece)
        self._shown += piece
        return piece

    def end(self) -> str:
        """What the stream held back, waiting for the rest of a character."""
        whole: str = self._tokenizer.decode(self._tokens, skip_special_tokens=True)
        return whole.removeprefix(self._shown) if whole.startswith(self._shown) else ""
