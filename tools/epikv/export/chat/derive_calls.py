"""How a template writes calls, their results, and reasoning among them."""

import itertools
import re
from contextlib import suppress
from dataclasses import replace

from epikv.export.chat.calling import CONTENTS, Calls, Reasoning
from epikv.export.chat.conversation import Message
from epikv.export.chat.format import Format
from epikv.export.chat.marks import Manner
from epikv.export.chat.probe import PADDED, Probe, with_texts
from epikv.export.chat.text import STRIPS, Field, Refusal

_MANNERS = [
    Manner(arguments, id_length, json_results)
    for json_results in (False, True)
    for arguments in ("object", "string")
    for id_length in (None, 9)
]
# What stands ahead of a call's name, where ^ is where the answer begins, and behind the name.
SYNTAXES = {
    "hermes": (r'<tool_call>\s*\{"name": "$', '", "arguments": '),
    "llama3": (r'^\s*\{"name": "$', '", "parameters": '),
    "mistral": (r'\[TOOL_CALLS\]\s*\[\{"name": "$', '", "arguments": '),
}


def with_calls(probe: Probe, format: Format) -> Format:
    """With calls, or why there are none."""
    reasons = []
    for manner in _MANNERS:
        try:
            found = _calls(probe, format, manner)
            break
        except Refusal as reason:
            reasons.append(reason)
    else:
        own = [reason for reason in reasons if "the template says" not in str(reason)]
        return replace(format, calls=[*own, *reasons][0])
    try:
        found = replace(found, calls=replace(found.known_calls(), syntax=_syntax(found)))
    except Refusal as reason:
        return replace(format, calls=reason)
    return _reasoning(probe, found, manner)


def _calls(probe: Probe, format: Format, manner: Manner) -> Format:
    loop = probe.written("user call result call result assistant user call result", manner)
    calls = Calls(
        call=loop.piece("call"),
        result=loop.piece("result"),
        result_strip="json" if manner.json_results else "none",
        result_generation=loop.around[-1],
        content="dropped",
        several=False,
        arguments=manner.arguments,
        id_length=manner.id_length,
    )
    format = replace(with_texts(format, loop), calls=calls)
    if not probe.alike(format, _loop(result='zq"\n\\\u00e9')):
        raise Refusal("the template writes results in a way of its own")
    format = _more(probe, format, calls, manner)
    if manner.json_results:
        return format
    return probe.first_alike(
        [
            replace(format, calls=replace(format.known_calls(), result_strip=strip))
            for strip in STRIPS
        ],
        [_loop(result=padded.format("zq")) for padded in PADDED],
    )


def _more(probe: Probe, format: Format, calls: Calls, manner: Manner) -> Format:
    """What not every template can, or not in the same way."""
    with suppress(Refusal):
        format = with_texts(format, probe.written("user call call result result", manner))
        calls = replace(calls, several=True)
    with suppress(Refusal):
        format = with_texts(format, probe.written("user assistant call result", manner))
        calls = replace(calls, content=_emptied(probe, replace(format, calls=calls)))
    for kinds in ("user call user", "user call result user"):
        with suppress(Refusal):
            format = with_texts(format, probe.written(kinds, manner))
    if format.system == "last_user":
        try:
            format = with_texts(format, probe.written("system user call result", manner))
        except Refusal:
            calls = replace(calls, system="dropped")
    return replace(format, calls=calls)


def _emptied(probe: Probe, format: Format) -> str:
    """Which of CONTENTS but "dropped"."""
    question = {"role": "user", "content": "zq6"}
    thought = _loop(content=f"zq5{format.history.after}")
    modes = [replace(format.known_calls(), content=content) for content in CONTENTS[:2]]
    found = probe.first_alike(
        [replace(format, calls=calls) for calls in modes],
        [[*thought, {"role": "assistant", "content": "zq7"}, question]],
    )
    return found.known_calls().content


def _syntax(format: Format) -> str:
    whole, generation = (
        "".join(part for part in text if isinstance(part, str))
        for text in (format.between["user call"], format.generation)
    )
    answer = whole.removeprefix(generation)
    match format.known_calls().call:
        case (Field("name"), str(between), Field("arguments"), *_):
            for syntax, (ahead, expected) in SYNTAXES.items():
                if between == expected and any(re.search(ahead, text) for text in (whole, answer)):
                    return syntax
    raise Refusal("the template writes calls in a syntax that is not known")


def _reasoning(probe: Probe, format: Format, manner: Manner) -> Format:
    """With the reasoning of messages, where the template writes it."""
    try:
        loops = (
            "user reasoning call result reasoning assistant call result",
            "user reasoning call result call result reasoning call result",
        )
        for kinds in loops:
            format = with_texts(format, probe.written(kinds, manner))
    except Refusal:
        return format
    strips = itertools.product(STRIPS, STRIPS)
    return probe.first_alike(
        [replace(format, reasoning=Reasoning(*pair)) for pair in strips],
        [
            _loop(**{name: padded.format("zq") for name in names})
            for padded in PADDED
            for names in (["reasoning"], ["reasoning", "content"])
        ],
    )


def _loop(result: str = "zq1", content: str = "", reasoning: str | None = None) -> list[Message]:
    call = {
        "id": "zq5678901",
        "type": "function",
        "function": {"name": "zq3", "arguments": {"zq": 4}},
    }
    said = {"role": "assistant", "content": content, "tool_calls": [call]}
    return [
        {"role": "user", "content": "zq0"},
        said if reasoning is None else {**said, "reasoning_content": reasoning},
        {"role": "tool", "content": result, "tool_call_id": call["id"], "name": "zq3"},
    ]
