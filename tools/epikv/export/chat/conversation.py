"""Conversations as transformers takes them, and which of them a format may be asked about."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from epikv.export.chat.text import Refusal

# Role and content; of the assistant's, perhaps `tool_calls` and `reasoning_content`; of a tool's,
# `tool_call_id` and `name`.
Message = Mapping[str, Any]
Tool = Mapping[str, Any]  # name; perhaps description and parameters

ROLES = ("system", "user", "assistant")


def canonical(value: object, indent: int | None = None) -> str:
    """The JSON text of arguments and tools."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def offered(tool: Tool) -> dict[str, Any]:
    """As templates are given it."""
    return {"type": "function", "function": dict(tool)}


def calls_of(message: Message) -> Sequence[Mapping[str, Any]]:
    calls: Sequence[Mapping[str, Any]] = message.get("tool_calls") or ()
    return calls


def last_user(messages: Sequence[Message]) -> int:
    """The index of the last message of the user's."""
    return max(i for i, message in enumerate(messages) if message["role"] == "user")


def check_turns(messages: Sequence[Message]) -> None:
    """Raises Refusal, unless it is an optional system message, then user and assistant in turns.

    An assistant message that calls is followed by a result for each call, and these by the
    assistant or the user; or, without results, by the user.
    """
    before, due = "system", 0  # due: results
    for message in messages[1:] if messages[:1] and messages[0]["role"] == "system" else messages:
        role = message["role"]
        if role not in (("tool",) if before == "tool" and due else _FOLLOWERS[before]):
            raise _OUT_OF_TURN
        calls = len(calls_of(message))
        due = due - 1 if role == "tool" else calls
        before = "call" if calls else "result" if role == "tool" and not due else role
    if before not in ("user", "assistant", "result"):
        raise _OUT_OF_TURN


_FOLLOWERS = {
    "system": ("user",),
    "user": ("assistant",),
    "assistant": ("user",),
    "call": ("tool", "user"),
    "result": ("assistant", "user"),  # the last of those due
}
_OUT_OF_TURN = Refusal(
    "messages must be user and assistant in turns, after an optional system message, with a result"
    " for each call"
)


def conversation(kinds: Sequence[str], value: Callable[[int, str], Any]) -> list[dict[str, Any]]:
    """Of parts of these kinds: `value` of a part's index and a field is what it holds there.

    Fields are `content`, and of calls `name`, `arguments` and `id`, the latter of results, too.
    """
    messages: list[dict[str, Any]] = []
    for i, kind in enumerate(kinds):
        before = kinds[i - 1] if i > 0 else ""
        if kind in ("system", "user"):
            messages.append({"role": kind, "content": value(i, "content")})
        elif kind == "result":
            fields = {"tool_call_id": value(i, "id"), "name": value(i, "name")}
            messages.append({"role": "tool", "content": value(i, "content"), **fields})
        elif before not in _SAME_MESSAGE[kind]:
            messages.append({"role": "assistant", "content": ""})
        if kind == "call":
            function = {name: value(i, name) for name in ("name", "arguments")}
            call = {"id": value(i, "id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind in ("assistant", "reasoning"):
            field = "content" if kind == "assistant" else "reasoning_content"
            messages[-1][field] = value(i, "content")
    return messages


# What stands before a part in its message.
_SAME_MESSAGE = {
    "reasoning": (),
    "assistant": ("reasoning",),
    "call": ("reasoning", "assistant", "call"),
}
