"""The text of tokens, alone and behind others, of each kind of tokenizer."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from epikv.export.synthetic import byte_tokenizer, word_tokenizer
from epikv.gateway.echo import Echo
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


TOKENIZERS = {
    "metaspace": (metaspace(), [[7, 3], [2, 3], [7, 5], [0, 3]], [[3, 4], [2], [6, 7]]),
    "bytes": (
        byte_tokenizer(511),
        [[0x20, 0x61], [0x61, 0xC3], [0x61, 0xE2, 0x82], [0xFF]],
        [[0x62], [0xA9, 0x61], [0xAC, 0x20], [0xC3], [0xFF, 0xA9], [0xF0, 0x9F, 0x98]],
    ),
    "words": (word_tokenizer(9), [[1], [2, 3]], [[4], [5, 6]]),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_an_answer_behind_its_prompt_is_what_the_tokenizer_makes_of_both(name: str) -> None:
    tokenizer, prompts, answers = TOKENIZERS[name]

    async def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    async def joined(prompt: list[int], answer: list[int]) -> str:
        echo = Echo(await decode(prompt), prompt, decode)
        return echo.begin + await echo.behind(await decode(answer), answer)

    for prompt in prompts:
        for answer in answers:
            text = asyncio.run(joined(prompt, answer))
            assert text == tokenizer.decode([*prompt, *answer], skip_special_tokens=True)


def test_what_of_an_answer_has_been_cut_stays_so() -> None:
    async def decode(ids: Sequence[int]) -> str:
        return metaspace().decode(ids)

    echo = Echo("hello", [3], decode)
    assert asyncio.run(echo.behind("hel", [3, 4])) == " hel"


@pytest.mark.parametrize("name", TOKENIZERS)
def test_where_tokens_begin(name: str) -> None:
    tokenizer, prompts, answers = TOKENIZERS[name]
    texts = TokenTexts(tokenizer)
    for ids in ([*prompt, *answer] for prompt in prompts for answer in answers):
        text = tokenizer.decode(ids, skip_special_tokens=False)
        offsets = texts.offsets(ids, text)
        assert offsets[0] == 0
        spans = [text[begin:end] for begin, end in pairwise([*offsets, len(text)])]
        assert "".join(spans) == text
        for token, span in zip(ids, spans, strict=True):
            piece = texts.text(token)
            assert span.endswith(piece) or span == piece[1:] or piece.startswith("bytes:")


def test_where_tokens_begin_that_are_not_in_the_text_or_are_cut() -> None:
    tokenizer = byte_tokenizer(511)
    tokenizer.add_special_tokens(["<s>"])
    texts, special = TokenTexts(tokenizer), tokenizer.token_to_id("<s>")
    assert texts.offsets([special, 0x61, 0xC3, 0xA9, 0x62], "aéb") == [0, 0, 1, 1, 2]
    assert texts.offsets([special, 0x61], "<s>a") == [0, 3]
    assert texts.offsets([0x61, 0x62, 0x63, special], "a") == [0, 1, 1, 1]


def test_where_tokens_begin_of_a_part_of_a_stream() -> None:
    texts = TokenTexts(metaspace())
    assert texts.offsets([3, 4, 3], " hellohello hello", 9) == [9, 15, 20]
    assert texts.offsets([3, 4], "", 9) == [9, 9], "the text may lag behind"
