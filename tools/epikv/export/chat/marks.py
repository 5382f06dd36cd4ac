"""Conversations whose contents are marks, and what a template's rendering of one shows.

What it writes between the marks is the format's text.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from epikv.export.chat.conversation import Tool, canonical, conversation, offered
from epikv.export.chat.text import Date, Field, Pieces, Refusal, Text, literal

_INDENTS = (None, 1, 2, 3, 4, 8)  # of tools' JSON
_NEEDED = {"call": {"name", "arguments"}, "tools": {"0", "1"}}  # of others, the content


@dataclass(frozen=True)
class Manner:
    """How calls are given to a template, and how it may write them."""

    arguments: str = "object"
    id_length: int | None = None
    json_results: bool = False


PLAIN = Manner()


@dataclass(frozen=True)
class Written:
    """The parts of a conversation in the order in which they are written."""

    kinds: list[str]
    pieces: list[Pieces]  # of each part, from its first field to its last
    around: list[Text]  # before, between and behind the parts
    indent: int | None = None  # of tools

    def piece(self, kind: str) -> Pieces:
        return self.pieces[self.kinds.index(kind)]


@dataclass(frozen=True)
class _Mark:
    part: int
    field: str
    forms: tuple[str, ...]  # as it may be written


class Marked:
    """A conversation of parts of these kinds, separated by spaces."""

    def __init__(self, kinds: str, manner: Manner, offers: bool) -> None:
        self.kinds = kinds.split()
        self._manner = manner
        self._marks: list[_Mark] = []
        self.messages = conversation(self.kinds, self._value)
        self.tools = [self._tool(str(i)) for i in range(2)] if offers else []
        self.kinds += ["tools"] if offers else []

    def read(self, rendered: str) -> Written:
        """Raises Refusal, where the parts are not all there, once and in their order."""
        indent = None
        for number, mark in enumerate(self._marks):
            form = next((form for form in mark.forms if form in rendered), mark.forms[0])
            if self.kinds[mark.part] == "tools":
                indent = _INDENTS[mark.forms.index(form)]
            rendered = rendered.replace(form, f"\ue002{number}\ue003")
        if left := re.search(r"zq(\d{5})qz", rendered):
            mark = self._marks[int(left[1])]
            raise Refusal(f"the template writes {self._told(mark)} in a way of its own")
        texts = re.split("\ue002(\\d+)\ue003", rendered)
        marks = [self._marks[int(number)] for number in texts[1::2]]
        self._check(marks)
        return _grouped(self.kinds, marks, texts[::2], indent)

    def _value(self, part: int, field: str) -> Any:
        """A new mark, as the field of a part."""
        mark = f"zq{len(self._marks):05}qz"  # nine letters and digits, as Mistral's ids
        value: Any = mark
        written = mark
        if field == "id" and self._manner.id_length is None:
            value = written = f"call_{mark}"
        elif field == "arguments":
            value = {"zq": mark}
            written = canonical(value)
            value = written if self._manner.arguments == "string" else value
        elif self.kinds[part] == "result" and field == "content" and self._manner.json_results:
            written = canonical(mark)
        self._marks.append(_Mark(part, field, (written,)))
        return value

    def _tool(self, field: str) -> Tool:
        parameters = {"type": "object", "properties": {"a": {"type": "string"}}}
        name = f"zq{len(self._marks):05}qz"
        tool = {"name": name, "description": "Does so.", "parameters": parameters}
        forms = tuple(canonical(offered(tool), indent) for indent in _INDENTS)
        self._marks.append(_Mark(len(self.kinds), field, forms))
        return tool

    def _check(self, found: Sequence[_Mark]) -> None:
        for mark in self._marks:
            needed = _NEEDED.get(self.kinds[mark.part], {"content"})
            if found.count(mark) > 1 or (mark.field in needed and mark not in found):
                does = "repeats" if mark in found else "leaves out"
                raise Refusal(f"the template {does} {self._told(mark)}")
        turns = [mark.part for mark in found if self.kinds[mark.part] not in ("system", "tools")]
        if turns != sorted(turns):
            raise Refusal("the template changes the order of the turns")

    def _told(self, mark: _Mark) -> str:
        kind = self.kinds[mark.part]
        if kind == "tools":
            return "tools"
        if mark.field == "content" and kind in ("system", "user", "assistant"):
            return f"a message of the {kind}'s"
        return f"a {kind}'s {mark.field}"


def _grouped(
    kinds: Sequence[str], marks: Sequence[_Mark], texts: Sequence[str], indent: int | None
) -> Written:
    """Marks of one part that stand together are its pieces; `texts` stand around marks."""
    written = Written([], [], [], indent)
    part = None
    for mark, ahead in zip(marks, texts, strict=False):
        if mark.part != part:
            written.kinds.append(kinds[mark.part])
            written.pieces.append((Field(mark.field),))
            written.around.append(read_text(ahead))
        elif "\ue000" in ahead:
            raise Refusal("the template dates calls")
        else:
            written.pieces[-1] += (*literal(ahead), Field(mark.field))
        part = mark.part
    written.around.append(read_text(texts[-1]))
    return written


def marked_date(format: str) -> str:
    return f"\ue000{format}\ue001"


def read_text(rendered: str) -> Text:
    """Dates taken out of what `marked_date` left."""
    parts = re.split("\ue000(.*?)\ue001", rendered, flags=re.DOTALL)
    texts = [Date(part) if i % 2 else literal(part) for i, part in enumerate(parts)]
    return tuple(p for text in texts for p in ((text,) if isinstance(text, Date) else text))
