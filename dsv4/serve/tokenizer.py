"""Text to tokens and back, byte by byte."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from dsv4.errors import RequestError


class Text(Protocol):
    """Text that grows with its tokens. A piece never ends within a character, and none is taken back."""

    def add(self, tokens: Sequence[int]) -> str:
        """The whole characters that these tokens complete."""

    def end(self) -> str:
        """What is left when no more tokens come: a character cut off is U+FFFD."""


class Tokenizer(Protocol):
    """What turns prompts into tokens, and tokens into text."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids of a text, with those that begin every prompt of the model unless `special` is False.

        Raises `RequestError` when the text has a lone surrogate.
        """

    def text(self) -> Text:
        """A new text, empty."""


def utf8(text: str) -> bytes:
    """A text's bytes. Raises `RequestError` for a lone surrogate, as a shell's bytes that are no UTF-8 become."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        near = text[max(0, error.start - 20) : error.start + 20]
        raise RequestError(
            f"the text {near!r} is no Unicode: {text[error.start]!r} is not a character",
            "pass a text in UTF-8",
            text=text,
        ) from error


def single(tokenizer: Tokenizer, text: str) -> int:
    """The token that a text is. Raises `RequestError` when it is none, or several."""
    tokens = tokenizer.encode(text, special=False)
    if len(tokens) != 1:
        raise RequestError(f"the stop text {text!r} is {len(tokens)} tokens", "stop at a text of one token")
    return tokens[0]


SPECIAL = 2
"""Ids 0 and 1 begin and end a text, as in the family's configs; they have no bytes."""


class ByteTokenizer:
    """UTF-8, a token a byte: byte b is id b + 2. Ids behind the bytes stand for U+FFFD. Nothing begins a prompt."""

    vocabulary = SPECIAL + 256

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [byte + SPECIAL for byte in utf8(text)]

    def text(self) -> Text:
        return ByteText()


class ByteText:
    """The text of a `ByteTokenizer`'s tokens; what is no UTF-8 becomes U+FFFD."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, tokens: Sequence[int]) -> str:
        # An id behind the bytes is given as a byte that UTF-8 never holds: it ends a character that is cut off.
        return self._utf8.decode(bytes(min(token - SPECIAL, 0xFF) for token in tokens if token >= SPECIAL))

    def end(self) -> str:
        return self._utf8.decode(b"", final=True)
