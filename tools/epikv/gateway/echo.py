"""A prompt that stands before its answers."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence

# The text of token ids, without special tokens.
Decode = Callable[[Sequence[int]], Awaitable[str]]

_PART_OF_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class Echo:
    """One prompt.

    The daemon decodes an answer by itself. Behind its prompt it reads as a tokenizer has it: with the space
    that is dropped where a text begins, and with the rest of a character that the prompt's last token begins.
    """

    def __init__(self, prompt: str, ids: Sequence[int], decode: Decode) -> None:
        """prompt: as a client is told it. ids: its tokens."""
        self.prompt = prompt
        self.ids = ids
        self._decode = decode

    @property
    def begin(self) -> str:
        """What is certain before there is an answer."""
        return self.prompt.rstrip(_PART_OF_A_CHARACTER)

    async def behind(self, text: str, ids: Sequence[int]) -> str:
        """What follows `begin`. text: an answer, or how it begins, by itself; ids: all tokens of it."""
        before, alone, both = await asyncio.gather(
            self._decode(self.ids), self._decode(ids), self._decode([*self.ids, *ids])
        )
        before = before.rstrip(_PART_OF_A_CHARACTER)
        alone = alone.lstrip(_PART_OF_A_CHARACTER)
        if not (both.startswith(before) and both.endswith(alone)):
            return self.prompt.removeprefix(self.begin) + text
        seam = both[len(before) : len(both) - len(alone)]
        return seam + text.lstrip(_PART_OF_A_CHARACTER)


class Behind:
    """One answer behind its prompt, as its parts come."""

    def __init__(self, echo: Echo) -> None:
        self._echo = echo
        self._ids: list[int] | None = []  # until there is a text

    async def part(self, text: str, ids: Iterable[int]) -> str:
        if self._ids is None:
            return text
        self._ids += ids
        if not text:
            return text
        first, self._ids = self._ids, None
        return await self._echo.behind(text, first)
