"""Text and tokens of the models that are served."""

import re
from codecs import getincrementaldecoder
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING

from epikv.gateway.reading import fitting
from epikv.gateway.upstream import Caller, Upstream
from epikv.messages import Model
from epikv.v1 import generation_pb2, model_pb2, tokenization_pb2

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MOST_TOKENIZERS = 8  # kept in memory
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class Tokenizers:
    """Of all models: the daemons encode and decode; what single tokens are is known here."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self._texts: dict[str, TokenTexts] = {}  # by the digest of a model's weights

    async def encode(self, text: str, model: str, caller: Caller, special: bool) -> list[int]:
        reply = await self._upstream.ask(
            lambda of: of.tokenization.Tokenize,
            fitting(
                lambda: tokenization_pb2.TokenizeRequest(
                    model=model, text=text, add_special_tokens=special
                )
            ),
            caller,
        )
        return list(reply.tokens.ids)

    async def decode(
        self, ids: Sequence[int], model: str, caller: Caller, *, special: bool = True
    ) -> str:
        """special: with special tokens."""
        reply = await self._upstream.ask(
            lambda of: of.tokenization.Detokenize,
            tokenization_pb2.DetokenizeRequest(
                model=model,
                tokens=generation_pb2.TokenIds(ids=ids),
                skip_special_tokens=not special,
            ),
            caller,
        )
        return str(reply.text)

    async def texts_of(self, model: Model, caller: Caller) -> "TokenTexts":
        found = self._texts.get(model.weights)
        if found is None:
            request = model_pb2.GetTokenizerRequest(model=model.name)
            found = TokenTexts.from_json(await self._upstream.tokenizer(request, caller))
            await self._upstream.models(caller)
            now = await self._upstream.model(model.name, caller)
            if not model.weights or now.weights != model.weights:
                return found  # another model may have come by the name meanwhile
            if len(self._texts) >= _MOST_TOKENIZERS:
                del self._texts[next(iter(self._texts))]
            self._texts[model.weights] = found
        return found


class TokenTexts:
    """Of one model's tokens, each as it reads behind others: log-probabilities name their tokens so."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._before = tokenizer.encode("a", add_special_tokens=False).ids[-1:]
        self._skip = len(tokenizer.decode(self._before, skip_special_tokens=False))
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token for token, each in added.items() if each.special}
        self._texts: dict[int, str] = {}
        self._data: dict[int, bytes] = {}

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
        data = self._data.get(token)
        if data is None:
            data = self._data[token] = self._bytes_of(token)
        return data

    def _bytes_of(self, token: int) -> bytes:
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

    def offsets(self, ids: Iterable[int], text: str, before: int = 0) -> list[int]:
        """In which place of a text each begins; who ends a character: where that begins. text: what they
        are, behind so many characters. Special tokens may be left out of it, and the space that it would begin
        with."""
        characters = getincrementaldecoder("utf-8")("replace")
        begun = before > 0
        at = 0
        offsets = []
        for token in ids:
            offsets.append(before + at)
            piece = characters.decode(self.data(token))
            if not begun and self._loses_a_space(token):
                piece = piece[1:]
            if token in self._special and not text.startswith(piece, at):
                continue
            begun = True
            at = min(at + len(piece), len(text))
        return offsets

    def _loses_a_space(self, token: int) -> bool:
        """Where a text begins with it."""
        alone = self._tokenizer.decode([token], skip_special_tokens=False)
        return self._decoded(token) == f" {alone}"

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
