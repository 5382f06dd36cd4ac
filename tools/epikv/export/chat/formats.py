"""`chat.json`: all formats of a template (read by the daemon)."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from typing import Any

from epikv.export.chat.calling import Calls, Reasoning, Tools
from epikv.export.chat.format import Format, History, refused
from epikv.export.chat.text import Date, Field, Pieces, Refusal, Text

_UNKNOWN = Refusal("the template does not know tools")


@dataclass(frozen=True)
class Ways:
    """With thinking asked for, and asked not to; None where the template does not heed that."""

    default: Format
    thinking: Format | None = None
    no_thinking: Format | None = None


@dataclass(frozen=True)
class ChatFormats(Ways):
    """Without tools offered, and with."""

    tools: Ways | Refusal = _UNKNOWN
    thinking_tags: tuple[str, str] | None = None  # around thinking, as far as the template tells

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
            f"refuses {role} messages that {' or '.join(map(refused, texts))}"
            for role, texts in format.refuse.items()
            if texts
        ]
        return ", ".join([*parts, _told_tools(self.tools)])


def told(chat: ChatFormats | Refusal) -> str:
    """In one line."""
    return f"none, because {chat}" if isinstance(chat, Refusal) else str(chat)


def to_json(chat: ChatFormats | Refusal) -> str:
    if isinstance(chat, Refusal):
        return json.dumps({"refusal": str(chat)}, ensure_ascii=False)
    tools = chat.tools
    formats = {
        **_ways_json(chat),
        "tools": {"refusal": str(tools)} if isinstance(tools, Refusal) else _ways_json(tools),
        **({"thinking_tags": chat.thinking_tags} if chat.thinking_tags else {}),
    }
    return json.dumps(formats, ensure_ascii=False)


def from_json(text: str) -> ChatFormats | Refusal:
    """The inverse of `to_json`, for files that this package wrote."""
    raw = json.loads(text)
    if "refusal" in raw:
        return Refusal(raw["refusal"])
    tools = raw.pop("tools", {"refusal": "the model file is from before tools; export it again"})
    tags = raw.pop("thinking_tags", None)
    return ChatFormats(
        **_ways(raw),
        tools=Refusal(tools["refusal"]) if "refusal" in tools else Ways(**_ways(tools)),
        thinking_tags=(tags[0], tags[1]) if tags else None,
    )


def _told_tools(tools: Ways | Refusal) -> str:
    if isinstance(tools, Refusal):
        return f"no tools ({tools})"
    calls = tools.default.known_calls()
    told = [calls.syntax, "several calls" if calls.several else "one call a message"]
    told += ["no system"] if isinstance(tools.default.system, Refusal) else []
    told += ["reasoning"] if tools.default.reasoning is not None else []
    return f"tools ({', '.join(told)})"


def _ways_json(ways: Ways) -> dict[str, Any]:
    return {
        name: _format_json(format)
        for name in ("default", "thinking", "no_thinking")
        if (format := getattr(ways, name)) is not None
    }


def _ways(raw: dict[str, Any]) -> dict[str, Format]:
    return {name: _format(fields) for name, fields in raw.items()}


def _format_json(format: Format) -> dict[str, Any]:
    system, calls = format.system, format.calls
    json = {
        "begin": {kind: _plain(text) for kind, text in format.begin.items()},
        "between": {kinds: _plain(text) for kinds, text in format.between.items()},
        "generation": _plain(format.generation),
        "end": None if format.end is None else _plain(format.end),
        "system": {"refusal": str(system)} if isinstance(system, Refusal) else system,
        "strip": format.strip,
        "history": asdict(format.history),
        "refuse": format.refuse,
    }
    if calls is not None:
        json["calls"] = (
            {"refusal": str(calls)} if isinstance(calls, Refusal) else _calls_json(calls)
        )
    if format.tools is not None:
        json["tools"] = _said(format.tools, optional=("raw_descriptions", "equal_users"))
    if format.reasoning is not None:
        json["reasoning"] = asdict(format.reasoning)
    return json


def _format(raw: dict[str, Any]) -> Format:
    system, calls, tools = raw["system"], raw.get("calls"), raw.get("tools")
    return Format(
        begin={kind: _text(parts) for kind, parts in raw["begin"].items()},
        between={kinds: _text(parts) for kinds, parts in raw["between"].items()},
        generation=_text(raw["generation"]),
        end=None if raw["end"] is None else _text(raw["end"]),
        system=Refusal(system["refusal"]) if isinstance(system, dict) else system,
        strip=raw["strip"],
        history=History(**raw["history"]),
        refuse={role: tuple(map(tuple, refused)) for role, refused in raw["refuse"].items()},
        calls=None if calls is None else _calls(calls),
        tools=None if tools is None else Tools(**tools),
        reasoning=Reasoning(**raw["reasoning"]) if "reasoning" in raw else None,
    )


def _calls_json(calls: Calls) -> dict[str, Any]:
    return {
        **_said(calls, optional=("system",)),
        "call": _plain(calls.call),
        "result": _plain(calls.result),
        "result_generation": _plain(calls.result_generation),
    }


def _calls(raw: dict[str, Any]) -> Calls | Refusal:
    if "refusal" in raw:
        return Refusal(raw["refusal"])
    pieces = {name: _pieces(raw[name]) for name in ("call", "result")}
    return Calls(**{**raw, **pieces, "result_generation": _text(raw["result_generation"])})


def _said(value: Calls | Tools, optional: Iterable[str]) -> dict[str, Any]:
    """Fields by name; of those that are optional, only what is not the default."""
    return {
        field.name: getattr(value, field.name)
        for field in fields(value)
        if field.name not in optional or getattr(value, field.name) != field.default
    }


def _plain(parts: Text | Pieces) -> list[Any]:
    def plain(part: str | Date | Field) -> Any:
        if isinstance(part, str):
            return part
        return {"date": part.format} if isinstance(part, Date) else {"field": part.name}

    return [plain(part) for part in parts]


def _text(parts: list[Any]) -> Text:
    return tuple(part if isinstance(part, str) else Date(part["date"]) for part in parts)


def _pieces(parts: list[Any]) -> Pieces:
    return tuple(part if isinstance(part, str) else Field(part["field"]) for part in parts)
