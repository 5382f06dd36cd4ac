"""A template, asked one question at a time."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

from epikv.export.chat.conversation import Message, Tool
from epikv.export.chat.format import Format
from epikv.export.chat.marks import PLAIN, Manner, Marked, Written, marked_date
from epikv.export.chat.template import Template
from epikv.export.chat.text import Refusal

PADDED = ("\n \t{} \t\n", "{}\n\n", "\n\n{}", " {}", "{} ")  # tell all of STRIPS apart
TOOL: Tool = {
    "name": "zq",
    "description": "Zq.",
    "parameters": {"type": "object", "properties": {}},
}


class Probe:
    def __init__(self, template: Template, thinking: bool | None, offers: bool) -> None:
        """`offers`: tools are."""
        self.template = template
        self.offers = offers
        self._thinking = thinking

    def written(self, kinds: str, manner: Manner = PLAIN) -> Written:
        """A conversation of parts of these kinds. Raises Refusal, also where parts are not written
        once and in order."""
        marked = Marked(kinds, manner, self.offers)
        return marked.read(self.render(marked.messages, marked.tools))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] | None = None) -> str:
        """Dates show their formats."""
        if tools is None:
            tools = (TOOL,) if self.offers else ()
        return self.template.render(messages, marked_date, self._thinking, tools)

    def alike(
        self, format: Format, messages: Sequence[Message], tools: Sequence[Tool] = (TOOL,)
    ) -> bool:
        """Or refused by the format."""
        try:
            ours = format.render(messages, marked_date, tools)
        except Refusal:
            return True
        try:
            return ours == self.render(format.given(messages), tools if self.offers else ())
        except Refusal:
            return False

    def first_alike(
        self,
        formats: Sequence[Format],
        conversations: Sequence[Sequence[Message]],
        tools: Sequence[Tool] = (TOOL,),
    ) -> Format:
        """The first that renders them as the template does; else the first."""
        for format in formats:
            if all(self.alike(format, messages, tools) for messages in conversations):
                return format
        return formats[0]


def with_texts(format: Format, written: Written) -> Format:
    """The format, with what it did not know yet of beginnings and neighbours."""
    kinds, texts = written.kinds, written.around
    pairs = [f"{before} {kind}" for before, kind in itertools.pairwise(kinds)]
    return replace(
        format,
        begin={kinds[0]: texts[0], **format.begin},
        between={**dict(zip(pairs, texts[1:], strict=False)), **format.between},
    )
