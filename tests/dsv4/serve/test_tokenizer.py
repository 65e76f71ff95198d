"""Text round trips, and no piece of it ends within a character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from dsv4.errors import RequestError
from dsv4.serve.errors import TokenizerError
from dsv4.serve.folder_tokenizer import FolderTokenizer, tokenizer_of
from dsv4.serve.tokenizer import ByteTokenizer, Tokenizer, single


def pieces(tokenizer: Tokenizer, tokens: list[int], size: int = 1) -> list[str]:
    text = tokenizer.text()
    return [*(text.add(tokens[i : i + size]) for i in range(0, len(tokens), size)), text.end()]


@settings(max_examples=40, deadline=None)
@given(some.text(), some.integers(1, 5))
def test_a_text_comes_back_in_whole_characters(text: str, size: int) -> None:
    """Fed one or more bytes at a time: each piece is a part of the text itself, in order."""
    tokenizer = ByteTokenizer()
    found = pieces(tokenizer, tokenizer.encode(text), size)
    assert "".join(found) == text
    assert found[-1] == ""


def test_a_character_waits_for_its_last_byte() -> None:
    assert pieces(ByteTokenizer(), ByteTokenizer().encode("a€b")) == ["a", "", "", "€", "b", ""]


def test_bytes_that_are_no_text_become_replacement_characters() -> None:
    """A lone continuation byte, a character cut off by another, one cut off by the end, an id behind the bytes."""
    euro = ByteTokenizer().encode("€")
    assert pieces(ByteTokenizer(), [0x80 + 2]) == ["\ufffd", ""]
    assert "".join(pieces(ByteTokenizer(), [*euro[:2], *euro])) == "\ufffd€"
    assert pieces(ByteTokenizer(), euro[:2]) == ["", "", "\ufffd"]
    assert pieces(ByteTokenizer(), [300]) == ["\ufffd", ""]


def test_special_tokens_have_no_text() -> None:
    """Also between the bytes of a character."""
    euro = ByteTokenizer().encode("€")
    assert "".join(pieces(ByteTokenizer(), [0, euro[0], 1, *euro[1:], 1])) == "€"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint folder with a byte-level BPE tokenizer that knows no merge, and one special token."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({letter: place for place, letter in enumerate(alphabet)}, [])
    made = tokenizers.Tokenizer(model)
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<end>", "<begin>"])
    made.post_processor = tokenizers.processors.TemplateProcessing("<begin> $A", special_tokens=[("<begin>", 257)])
    made.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_folders_tokenizer_is_used(folder: Path) -> None:
    """Its text, too, comes in whole characters; its special token has none."""
    tokenizer, message = tokenizer_of(folder)
    assert isinstance(tokenizer, FolderTokenizer) and message == ""
    begin, *tokens = tokenizer.encode("a€ ü")
    assert begin == 257 and len(tokens) == 7
    found = pieces(tokenizer, [*tokens, 256])
    assert "".join(found) == "a€ ü" and not any("\ufffd" in piece for piece in found)
    assert pieces(tokenizer, tokens[:2]) == ["a", "", "\ufffd"]


def test_a_stop_text_is_one_token_without_what_begins_a_prompt(folder: Path) -> None:
    """Also of a tokenizer that begins prompts with a token of its own; several tokens are refused."""
    for tokenizer in (ByteTokenizer(), tokenizer_of(folder)[0]):
        assert [single(tokenizer, "a")] == tokenizer.encode("a")[-1:]
        with pytest.raises(RequestError, match="is 3 tokens"):
            single(tokenizer, "€")


def test_a_text_that_is_no_unicode_is_refused_by_value(folder: Path) -> None:
    """A byte of a shell that is no UTF-8 arrives as a lone surrogate; its neighbours alone are taken."""
    for tokenizer in (ByteTokenizer(), tokenizer_of(folder)[0]):
        for refuse in (tokenizer.encode, lambda text, own=tokenizer: single(own, text)):
            with pytest.raises(RequestError, match=r"'a\\udcffb' is no Unicode") as refused:
                refuse("a\udcffb")
            assert refused.value.fields["text"] == "a\udcffb"
        assert tokenizer.encode("ab")


def test_a_folder_without_a_tokenizer_says_that_bytes_are_used(tmp_path: Path) -> None:
    tokenizer, message = tokenizer_of(tmp_path)
    assert isinstance(tokenizer, ByteTokenizer)
    assert "has no tokenizer.json" in message


def test_a_broken_tokenizer_is_refused_by_file(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": "1.0", "mod')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        tokenizer_of(folder)
