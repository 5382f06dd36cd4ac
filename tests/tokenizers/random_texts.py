"""Random text that tokenizers treat differently, as bytes: some of it is no UTF-8."""

import random
from collections.abc import Iterator

# Of Unicode 9 and before: the tables of the `tokenizers` library disagree about newer characters
# among themselves.
_RANGES = (
    (0x20, 0x7E), (0x00, 0x1F), (0x7F, 0xFF), (0x100, 0x24F), (0x250, 0x2FF), (0x300, 0x36F),
    (0x370, 0x3FF), (0x400, 0x4FF), (0x591, 0x5F4), (0x600, 0x6FF), (0x901, 0x963),
    (0xE01, 0xE5B), (0x10A0, 0x10FF), (0x1100, 0x11FF), (0x1E00, 0x1EFF), (0x1F00, 0x1FFE),
    (0x2000, 0x206F), (0x2070, 0x209C), (0x20D0, 0x20F0), (0x2100, 0x218B), (0x2190, 0x23FA),
    (0x2460, 0x24FF), (0x2580, 0x25FF), (0x2600, 0x27BF), (0x3000, 0x303F), (0x3041, 0x30FF),
    (0x3220, 0x32CF), (0x4E00, 0x9FA5), (0xAC00, 0xD7A3), (0xE000, 0xE0FF), (0xF900, 0xFA6D),
    (0xFB00, 0xFB4F), (0xFB50, 0xFDFB), (0xFE00, 0xFE0F), (0xFE30, 0xFE6B), (0xFF01, 0xFFEE),
    (0xFFF9, 0xFFFD), (0x1D400, 0x1D7FF), (0x1F110, 0x1F12E), (0x1F130, 0x1F16B), (0x1F1E6, 0x1F1FF),
    (0x1F300, 0x1F5FF), (0x1F600, 0x1F64F), (0x1F680, 0x1F6C5), (0x20000, 0x200FF),
    (0x10FFF0, 0x10FFFD),
)  # fmt: skip
_PARTS = (
    " ", " ", " ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", " \n ", "\u3000", "\u00a0", "\u2028",
    "the", "The", "tokens", "cache", " of", "DON'T", "it's", "we'LL", "'s", "''", "snake_case",
    "CamelCase", "x1y2", "0", "42", "345", "2024", "1234567", "3.14", "\u0663\u0664", "\u00bd\u2162",
    "!", "...", "?!", " -- ", "()", "{}", "[i]", "!=", "=>", "//", "\\n", "$a", "#", "@", "``", "«»",
    "Größe", "naïve", "e\u0301", "a\u0308\u0323", "s\u0323\u0307", "\u0130", "ß", "ſ", "ﬁ", "Å", "Ω",
    "Ελληνικά", "Русский", "текст", "עברית", "العربية", "हिन्दी", "ไทย", "日本語", "らーめん", "中文", "한국어",
    "\u1112\u1161\u11ab", "😀", "🚀", "👍🏽", "👨\u200d👩\u200d👧", "🇩🇪", "❤\ufe0f", "\u200b", "\ufeff", "\ufffd",
    "▁", "▁▁", "▁the", "Ġ", "Ċ", "<0x41>", "<0xE2>", "<0x0A>", "<unk>", "<s>", "</s>", "<|bos|>",
    "<|eot|>", "<|eot", "|>", "<|im_start|>", "<think>", "</think>", "<think", "<tool_call>",
    "<|fim|>", "|||EMAIL|||", "<|assistant|>", "tool use", "def f(x):\n\treturn x\n", "\x00", "\x85",
    "http://a.b/c?d=1&e=%20", "user@example.org",
)  # fmt: skip
_RUNS = (
    " ",
    "\n",
    "a",
    "A",
    "1",
    "-",
    "ab",
    "\u0301",
    "\u0327\u0301",
    "字",
    "😀",
    "▁",
    "'",
    "<",
    "\t ",
)


def random_texts(seed: str, count: int) -> Iterator[bytes]:
    rng = random.Random(seed)
    for _ in range(count):
        text = "".join(
            _part(rng) for _ in range(rng.choice((0, 1, 2, 3, 5, 8, 13, 21, 34)))
        ).encode()
        yield _damaged(rng, text) if rng.random() < 0.03 else text


def _part(rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.6:
        return rng.choice(_PARTS)
    if kind < 0.98:  # of one script
        low, high = rng.choice(_RANGES)
        return "".join(chr(rng.randint(low, high)) for _ in range(rng.randint(1, 6)))
    return rng.choice(_RUNS) * rng.choice((2, 7, 30, 200))


def _damaged(rng: random.Random, text: bytes) -> bytes:
    at = rng.randint(0, len(text))
    bad = rng.choice(
        (b"\xff", b"\xc0\x80", b"\xe2\x82", b"\xed\xa0\x80", b"\xf5\x80\x80\x80", b"\x80")
    )
    return text[:at] + bad + text[at:] if rng.random() < 0.8 else text[:at]
