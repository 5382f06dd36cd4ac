"""What single tokens are as text: log-probabilities name their tokens by it."""

import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class TokenTexts:
    """Of one model's tokens, each as it reads behind others."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._skip = len(tokenizer.decode(self._before, skip_special_tokens=False))
        self._texts: dict[int, str] = {}

    @classmethod
    def from_json(cls, tokenizer: bytes) -> "TokenTexts":
        from tokenizers import Tokenizer

        return cls(Tokenizer.from_str(tokenizer.decode()))

    def name(self, token: int) -> str | None:
        """In the vocabulary."""
        return self._tokenizer.id_to_token(token)

    def text(self, token: int) -> str:
        """As OpenAI's API has it: bytes that are no whole character are "bytes:\\xf0\\x9f"."""
        text = self._texts.get(token)
        if text is None:
            text = self._decoded(token)
            if _PART_OF_A_CHARACTER in text:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in self.data(token))
            self._texts[token] = text
        return text

    def data(self, token: int) -> bytes:
        text = self._decoded(token)
        if _PART_OF_A_CHARACTER not in text:
            return text.encode()
        name = self._tokenizer.id_to_token(token) or ""
        if byte := _BYTE.fullmatch(name):
            return bytes([int(byte[1], 16)])
        names = _bytes_by_name()
        if all(char in names for char in name):
            return bytes(names[char] for char in name)
        return text.encode()  # it is the character that stands for others

    def _decoded(self, token: int) -> str:
        """A tokenizer may drop a space that begins a text: so it stands behind another token."""
        text: str = self._tokenizer.decode([*self._before, token], skip_special_tokens=False)
        return text[self._skip :]


@cache
def _bytes_by_name() -> Mapping[str, int]:
    """Characters by which byte-level BPE names bytes: printable ones by themselves, others in their
    order from U+0100 (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + place): byte for place, byte in enumerate(others)
    }
