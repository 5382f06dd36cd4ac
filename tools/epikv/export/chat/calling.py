"""How formats write the tools offered, calls of them, and their results."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from epikv.export.chat.conversation import Message, Tool, calls_of, canonical, offered
from epikv.export.chat.text import STRIPS, Pieces, Refusal, Text, filled

# What becomes of contents that are not blank: written, even if nothing is left of them by what is
# stripped or cut off; or then not; or never.
CONTENTS = ("kept", "kept_unless_empty", "dropped")


@dataclass(frozen=True)
class Calls:
    """Fields of a call are `name`, `arguments` and `id`; of a result, `content`, `id` and `name`."""

    call: Pieces  # from the first field to the last
    result: Pieces
    result_strip: str  # one of STRIPS; or "json": as a JSON string
    result_generation: Text  # from the last result to where the answer begins
    content: str  # of a message that calls, one of CONTENTS
    several: bool  # whether a message may have several calls
    arguments: str = "object"  # what the template is given; "string": the JSON text
    id_length: int | None = None  # ids must be so many letters and digits
    syntax: str = "hermes"  # what calls look like, one of SYNTAXES
    system: str = "kept"  # "dropped": in conversations that end with a result

    def check(self, message: Message) -> None:
        """Raises Refusal of a message that has too many calls, or ids of another length."""
        calls = calls_of(message)
        if len(calls) > 1 and not self.several:
            raise Refusal("the template takes one call a message")
        ids = [call["id"] for call in calls]
        ids += [message["tool_call_id"]] if message["role"] == "tool" else []
        if self.id_length is not None and any(
            len(id) != self.id_length or not (id.isascii() and id.isalnum()) for id in ids
        ):
            raise Refusal(f"ids of calls must be {self.id_length} letters and digits")

    def given(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """A call as the template takes it."""
        function = call["function"]
        arguments = function["arguments"]
        text = canonical(arguments) if self.arguments == "string" else arguments
        return {**call, "function": {**function, "arguments": text}}

    def written(self, call: Mapping[str, Any]) -> str:
        function = call["function"]
        fields = {
            "name": function["name"],
            "arguments": canonical(function["arguments"]),
            "id": call["id"],
        }
        return filled(self.call, fields)

    def written_result(self, message: Message) -> str:
        content = message["content"]
        strip = canonical if self.result_strip == "json" else STRIPS[self.result_strip]
        fields = {
            "content": strip(content),
            "id": message["tool_call_id"],
            "name": message["name"],
        }
        return filled(self.result, fields)


@dataclass(frozen=True)
class Tools:
    """Each is written as JSON, in the form that transformers has for tools."""

    place: str  # "first", but behind a system message there; or before the "last_user" message
    between: str
    indent: int | None = None
    raw_descriptions: bool = False  # not escaped
    equal_users: str | None = None  # "repeated": also before messages that equal the last user's

    def written(self, tools: Sequence[Tool]) -> str:
        return self.between.join(self._written(tool) for tool in tools)

    def _written(self, tool: Tool) -> str:
        text = canonical(offered(tool), self.indent)
        if self.raw_descriptions and "description" in tool:
            description = tool["description"]
            text = text.replace(canonical(description), f'"{description}"', 1)
        return text


@dataclass(frozen=True)
class Reasoning:
    """The reasoning of the assistant's messages behind the last user message."""

    strip: str = "none"
    content_strip: str = "none"  # of the content that it stands before
