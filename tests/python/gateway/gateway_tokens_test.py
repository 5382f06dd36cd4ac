"""The text of single tokens, of each kind of tokenizer."""

from collections.abc import Callable

import pytest
from epikv.export.synthetic import byte_tokenizer
from epikv.gateway.tokens import TokenTexts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def metaspace() -> Tokenizer:
    """As Llama's: a space is a part of the word that it precedes, and bytes have names."""
    words = ["<unk>", "a", "\u2581", "\u2581hello", "hello", "<0xC3>", "<0xA9>", "\u2581a"]
    tokenizer = Tokenizer(
        models.BPE({word: place for place, word in enumerate(words)}, [], byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def test_a_space_that_begins_a_word_is_a_part_of_it() -> None:
    texts = TokenTexts(metaspace())
    assert [texts.text(token) for token in (3, 4)] == [" hello", "hello"]
    assert texts.data(3) == b" hello"


@pytest.mark.parametrize(
    ("make", "first", "second"),
    [(metaspace, 5, 6), (lambda: byte_tokenizer(511), 0xC3, 0xA9)],
    ids=["byte fallback", "byte level"],
)
def test_half_a_character(make: Callable[[], Tokenizer], first: int, second: int) -> None:
    texts = TokenTexts(make())
    assert texts.text(first) == "bytes:\\xc3"
    assert texts.data(first) + texts.data(second) == "é".encode()


def test_every_byte_is_itself() -> None:
    texts = TokenTexts(byte_tokenizer(511))
    for byte in range(256):
        assert texts.data(byte) == bytes([byte])
        if byte < 0x80:
            assert texts.text(byte) == chr(byte)
