"""`chat.json`: how a model's conversations become prompts (read by the daemon).

A format is what its template writes around the contents of messages: one text for the beginning,
one for each pair of neighbours, one for the end. It says of the contents themselves what the
template takes off them, and which it treats in a way of its own, so that they are refused.
"""

import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Message = Mapping[str, str]  # role and content
Now = Callable[[str], str]  # a strftime format to what it is now

ROLES = ("system", "user", "assistant")

# White space is what str.isspace() says, beyond ASCII, too.
STRIPS: dict[str, Callable[[str], str]] = {
    "none": lambda text: text,
    "both": str.strip,
    "left": str.lstrip,
    "right": str.rstrip,
    "newlines": lambda text: text.strip("\n"),
    "left_newlines": lambda text: text.lstrip("\n"),
}


class Refusal(ValueError):
    """Why there is no format, or why a format does not take a conversation."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Refusal) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


@dataclass(frozen=True)
class Date:
    """Today, as strftime writes it."""

    format: str


Text = tuple[str | Date, ...]


def literal(text: str) -> Text:
    return (text,) if text else ()


@dataclass(frozen=True)
class History:
    """Of assistant messages that another follows: of one that holds `after`, only what is behind
    the last of it stays, stripped."""

    after: str | None = None
    strip: str = "none"


@dataclass(frozen=True)
class Format:
    """Keys of `begin`, `strip` and `refuse` are roles; of `between`, two with a space."""

    begin: dict[str, Text]
    between: dict[str, Text]
    generation: Text  # from the last user message's content to where the answer begins
    end: Text | None  # after a last assistant message; None: such conversations are refused
    system: str | Refusal  # its content stands "first", or before that of the "last_user"
    strip: dict[str, str]  # one of STRIPS
    history: History
    # Contents that hold the texts of one of these, one behind the other, are refused; where it has
    # no texts, those of which nothing is left.
    refuse: dict[str, tuple[tuple[str, ...], ...]]

    def render(self, messages: Sequence[Message], now: Now) -> str:
        """The prompt of an optional system message, then user and assistant in turns.

        Ends with `generation` after a last user message. Raises Refusal.
        """
        self._check(messages)
        contents = [
            (message["role"], self.shown(message, last=i == len(messages) - 1))
            for i, message in enumerate(messages)
        ]
        if contents[0][0] == "system" and self.system == "last_user":
            system = contents.pop(0)
            contents.insert(
                max(i for i, (role, _) in enumerate(contents) if role == "user"), system
            )
        parts = [_written(self.begin[contents[0][0]], now), contents[0][1]]
        for (before, _), (role, content) in itertools.pairwise(contents):
            parts += [_written(self.between[f"{before} {role}"], now), content]
        ends = self.end if contents[-1][0] == "assistant" else self.generation
        return "".join([*parts, _written(ends or (), now)])

    def shown(self, message: Message, last: bool) -> str:
        """What of a message's content is written. Raises Refusal."""
        role = message["role"]
        given = message["content"]
        content = STRIPS[self.strip[role]](given)
        after = self.history.after
        if role == "assistant" and not last and after is not None and after in content:
            content = STRIPS[self.history.strip](content.rpartition(after)[2])
        for texts in self.refuse[role]:
            if _holds(given, texts) if texts else not content:
                raise Refusal(
                    f"the template treats {role} messages that {_told(texts)} in a special way"
                )
        return content

    def _check(self, messages: Sequence[Message]) -> None:
        roles = [message["role"] for message in messages]
        turns = roles[1:] if roles[:1] == ["system"] else roles
        if not turns or turns != (["user", "assistant"] * len(turns))[: len(turns)]:
            raise Refusal("messages must be user and assistant in turns, after an optional system")
        if len(turns) < len(roles) and isinstance(self.system, Refusal):
            raise self.system
        if turns[-1] == "assistant" and self.end is None:
            raise Refusal("the template is not known for conversations that end with an answer")


@dataclass(frozen=True)
class ChatFormats:
    """With thinking asked for, and asked not to; None where the template does not heed that."""

    default: Format
    thinking: Format | None = None
    no_thinking: Format | None = None

    def __str__(self) -> str:
        """What is known, in one line."""
        format = self.default
        system = "system"
        if isinstance(format.system, Refusal):
            system = f"no system ({format.system})"
        elif format.system == "last_user":
            system = "system (in the last user message)"
        parts = [system, "several turns"]
        parts += ["ends with an answer"] if format.end is not None else []
        parts += ["thinking"] if self.thinking is not None else []
        parts += [f"history behind {format.history.after}"] if format.history.after else []
        parts += [
            f"refuses {role} messages that {' or '.join(map(_told, refused))}"
            for role, refused in format.refuse.items()
            if refused
        ]
        return ", ".join(parts)


def told(chat: ChatFormats | Refusal) -> str:
    """In one line."""
    return f"none, because {chat}" if isinstance(chat, Refusal) else str(chat)


def to_json(chat: ChatFormats | Refusal) -> str:
    if isinstance(chat, Refusal):
        return json.dumps({"refusal": str(chat)}, ensure_ascii=False)
    formats = {
        name: _fields(format)
        for name in ("default", "thinking", "no_thinking")
        if (format := getattr(chat, name)) is not None
    }
    return json.dumps(formats, ensure_ascii=False)


def from_json(text: str) -> ChatFormats | Refusal:
    """The inverse of `to_json`, for files that this package wrote."""
    raw = json.loads(text)
    if "refusal" in raw:
        return Refusal(raw["refusal"])
    return ChatFormats(**{name: _format(fields) for name, fields in raw.items()})


def _holds(content: str, texts: Sequence[str]) -> bool:
    """Whether they follow each other in it."""
    begin = 0
    for text in texts:
        found = content.find(text, begin)
        if found < 0:
            return False
        begin = found + len(text)
    return True


def _told(refused: Sequence[str]) -> str:
    return f"hold {' and then '.join(map(repr, refused))}" if refused else "are empty"


def _written(text: Text, now: Now) -> str:
    return "".join(now(part.format) if isinstance(part, Date) else part for part in text)


def _fields(format: Format) -> dict[str, Any]:
    def plain(text: Text) -> list[Any]:
        return [{"date": part.format} if isinstance(part, Date) else part for part in text]

    system = format.system
    return {
        "begin": {role: plain(text) for role, text in format.begin.items()},
        "between": {roles: plain(text) for roles, text in format.between.items()},
        "generation": plain(format.generation),
        "end": None if format.end is None else plain(format.end),
        "system": {"refusal": str(system)} if isinstance(system, Refusal) else system,
        "strip": format.strip,
        "history": asdict(format.history),
        "refuse": format.refuse,
    }


def _format(raw: dict[str, Any]) -> Format:
    def text(parts: list[Any]) -> Text:
        return tuple(part if isinstance(part, str) else Date(part["date"]) for part in parts)

    system = raw["system"]
    return Format(
        begin={role: text(parts) for role, parts in raw["begin"].items()},
        between={roles: text(parts) for roles, parts in raw["between"].items()},
        generation=text(raw["generation"]),
        end=None if raw["end"] is None else text(raw["end"]),
        system=Refusal(system["refusal"]) if isinstance(system, dict) else system,
        strip=raw["strip"],
        history=History(**raw["history"]),
        refuse={role: tuple(map(tuple, refused)) for role, refused in raw["refuse"].items()},
    )
