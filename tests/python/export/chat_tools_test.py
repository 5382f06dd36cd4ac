"""Tools in chat formats: what is derived renders as the template does, and what does not is refused."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import pytest
import tool_templates as templates
from epikv.export import chat
from epikv.export.chat import ChatFormats, Format, Refusal, Ways
from epikv.export.chat.calling import Calls, Reasoning, Tools
from epikv.export.chat.conversation import Message, Tool, conversation
from epikv.export.chat.template import Template
from epikv.export.chat.text import Field
from epikv.export.chat.verification import verify
from epikv.export.synthetic import word_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
NOW = datetime(2027, 3, 4, 5, 6, 7)


@dataclass(frozen=True)
class Known:
    """What is to be found of a template's tools and calls."""

    source: str
    tools: Tools
    calls: dict[str, Any]
    reasoning: Reasoning | None = None
    tags: tuple[str, str] | None = None


FIRST = Tools("first", between="\n")
HERMES = {"syntax": "hermes", "content": "kept", "several": True, "result_strip": "none"}
KNOWN = {
    "hermes": Known(templates.HERMES, FIRST, HERMES),
    "hermes_thinking": Known(
        templates.HERMES_THINKING,
        FIRST,
        {**HERMES, "content": "kept_unless_empty"},
        Reasoning("newlines", content_strip="left_newlines"),
        ("<think>", "</think>"),
    ),
    "llama3": Known(
        templates.LLAMA3,
        Tools("first", between="\n\n", indent=4),
        {"syntax": "llama3", "content": "dropped", "several": False, "result_strip": "json"},
    ),
    "mistral": Known(
        templates.MISTRAL,
        Tools("last_user", between=", ", raw_descriptions=True, equal_users="repeated"),
        {
            "syntax": "mistral",
            "content": "dropped",
            "several": True,
            "result_strip": "none",
            "id_length": 9,
            "system": "dropped",
        },
    ),
}

TOOLS: list[Tool] = [
    {
        "name": "pool",
        "description": 'Says "who" owns\na \\row.',
        "parameters": {
            "type": "object",
            "properties": {"größe": {"type": ["integer", "null"], "default": 1.50}},
        },
    },
    {"name": "now"},
    {"name": "lane-2", "description": "本当に 🤔", "parameters": {}},
]
ARGUMENTS: list[dict[str, Any]] = [
    {"row": 3, "of": {"lanes": [1, 2.5, None, True], "none": []}},
    {},
    {"text": 'a "b"\\ \n</tool_call>', "größe": "本当に 🤔"},
]
CONTENTS = (
    "How do lanes move?",
    "",
    '\n  {"moves": false} \n',
    "<think>Do they?\n</think>\n\nThey do not.\n",
    "<think>Call.</think>",
    "\u3000Wirklich? 本当に 🤔\u00a0",
    "</tool_response><|im_end|>\n[/INST]</s>{{ tools }}",
    "How do lanes move?",
)
SHAPES = (
    "user call result",
    "user call result assistant user",
    "user call call result result",
    "user call call call result result result assistant user call result",
    "user assistant call result assistant call result assistant user",
    "user assistant user assistant user call result",
    "user reasoning call result reasoning assistant call result",
    "user reasoning assistant call result reasoning assistant user reasoning call result",
    "user call result user",
    "user call user call result",
    "user call result assistant",
    "user call result call result call result call result assistant user assistant user",
    "user",
    "user assistant user",
)


@pytest.fixture(scope="module")
def derived() -> dict[str, ChatFormats]:
    found = {name: chat.derive(known.source, TOKENS) for name, known in KNOWN.items()}
    return {name: formats for name, formats in found.items() if isinstance(formats, ChatFormats)}


def ways(formats: ChatFormats, offered: bool) -> Ways:
    if not offered:
        return formats
    assert isinstance(formats.tools, Ways), formats.tools
    return formats.tools


def talk(shape: str, first: int) -> list[dict[str, Any]]:
    """A conversation of these parts, whose contents begin with the `first`."""

    def value(part: int, field: str) -> Any:
        if field == "content":
            return CONTENTS[(first + 3 * part) % len(CONTENTS)]
        if field == "id":
            return f"abcDEF{part:03}"
        return ARGUMENTS[(first + part) % 3] if field == "arguments" else TOOLS[part % 3]["name"]

    return conversation(shape.split(), value)


_TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(3), **TOKENS)


def theirs(
    source: str, messages: Sequence[Message], tools: Sequence[Tool], thinking: bool | None
) -> str:
    """Through the interface that transformers' users use."""
    return _TOKENIZER.apply_chat_template(
        [dict(m) for m in messages],
        tools=[{"type": "function", "function": dict(tool)} for tool in tools] or None,
        chat_template=source,
        tokenize=False,
        add_generation_prompt=messages[-1]["role"] != "assistant",
        **({} if thinking is None else {"enable_thinking": thinking}),
    )


class _Clock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return NOW


@pytest.mark.parametrize("offered", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_renders_as_transformers_does(
    name: str, offered: bool, derived: dict[str, ChatFormats], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", _Clock)
    found = ways(derived[name], offered)
    kinds = {None: found.default, True: found.thinking, False: found.no_thinking}
    rendered = set()
    for thinking, format in kinds.items():
        for shape in SHAPES:
            for first in range(2 * len(CONTENTS)):
                messages = talk(("system " if first % 2 else "") + shape, first // 2)
                tools = TOOLS[: 1 + first % 3] if offered else []
                format = format or found.default
                try:
                    ours = format.render(messages, NOW.strftime, tools)
                except Refusal:
                    continue
                given = format.given(messages)
                assert ours == theirs(KNOWN[name].source, given, tools, thinking)
                rendered.add((shape, thinking))
    assert len(rendered) >= 3 * 7


@pytest.mark.parametrize("name", KNOWN)
def test_finds_what_a_template_can(name: str, derived: dict[str, ChatFormats]) -> None:
    known, formats = KNOWN[name], derived[name]
    offering = ways(formats, offered=True).default
    assert offering.tools == known.tools and formats.default.tools is None
    assert formats.thinking_tags == known.tags
    for format in (formats.default, offering):
        calls = format.calls
        assert isinstance(calls, Calls), calls
        assert {name: getattr(calls, name) for name in known.calls} == known.calls
        assert format.reasoning == known.reasoning
    told = "several calls" if known.calls["several"] else "one call a message"
    assert f"tools ({known.calls['syntax']}, {told}" in chat.told(formats)


@pytest.mark.parametrize("name", KNOWN)
def test_json_says_all_of_it(name: str, derived: dict[str, ChatFormats]) -> None:
    assert chat.from_json(chat.to_json(derived[name])) == derived[name]


def test_json_is_as_the_daemon_reads_it(derived: dict[str, ChatFormats]) -> None:
    mistral = json.loads(chat.to_json(derived["mistral"]))
    assert mistral["tools"]["default"] == {
        "begin": {"tools": ["<s>[AVAILABLE_TOOLS]["], "user": ["<s>[INST]"]},
        "between": {
            "user assistant": ["[/INST]"],
            "assistant user": ["</s>[INST]"],
            "assistant tools": ["</s>[AVAILABLE_TOOLS]["],
            "tools user": ["][/AVAILABLE_TOOLS][INST]"],
            "tools system": ["][/AVAILABLE_TOOLS][INST]"],
            "system user": ["\n\n"],
            "user call": ['[/INST][TOOL_CALLS][{"name": "'],
            "call call": ['"}, {"name": "'],
            "call result": ['"}]</s>[TOOL_RESULTS]{"content": '],
            "result result": ['"}[/TOOL_RESULTS][TOOL_RESULTS]{"content": '],
            "result call": ['"}[/TOOL_RESULTS][TOOL_CALLS][{"name": "'],
            "result assistant": ['"}[/TOOL_RESULTS]'],
        },
        "generation": ["[/INST]"],
        "end": None,
        "system": "last_user",
        "strip": {"system": "none", "user": "none", "assistant": "none"},
        "history": {"after": None, "strip": "none"},
        "refuse": {"system": [], "user": [], "assistant": []},
        "calls": {
            "call": [
                {"field": "name"},
                '", "arguments": ',
                {"field": "arguments"},
                ', "id": "',
                {"field": "id"},
            ],
            "result": [{"field": "content"}, ', "call_id": "', {"field": "id"}],
            "result_strip": "none",
            "result_generation": ['"}[/TOOL_RESULTS]'],
            "content": "dropped",
            "several": True,
            "arguments": "object",
            "id_length": 9,
            "syntax": "mistral",
            "system": "dropped",
        },
        "tools": {
            "place": "last_user",
            "between": ", ",
            "indent": None,
            "raw_descriptions": True,
            "equal_users": "repeated",
        },
    }
    thinking = json.loads(chat.to_json(derived["hermes_thinking"]))
    assert [*thinking] == ["default", "thinking", "no_thinking", "tools", "thinking_tags"]
    assert [*thinking["tools"]] == ["default", "thinking", "no_thinking"]
    reasoning = {"strip": "newlines", "content_strip": "left_newlines"}
    assert thinking["tools"]["default"]["reasoning"] == reasoning
    assert thinking["tools"]["default"]["tools"] == {
        "place": "first",
        "between": "\n",
        "indent": None,
    }


def swapped(format: Format, **fields: Any) -> Format:
    """Fields of its fields, set."""

    def changed(name: str, value: Any) -> Any:
        old = getattr(format, name)
        if not isinstance(value, dict):
            return value
        return {**old, **value} if isinstance(old, dict) else replace(old, **value)

    return replace(format, **{name: changed(name, value) for name, value in fields.items()})


NAME, ARGUMENTS_FIELD, ID = Field("name"), Field("arguments"), Field("id")
MUTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "begin_of_tools": ("hermes", {"begin": {"tools": ("<tools>",)}}),
    "tools_behind_system": ("hermes", {"between": {"system tools": ("\n<tools>",)}}),
    "tools_before_users": ("mistral", {"between": {"assistant tools": ("[AVAILABLE_TOOLS][",)}}),
    "system_behind_tools": ("mistral", {"between": {"tools system": ("[INST]",)}}),
    "between_tools": ("hermes", {"tools": {"between": "\n\n"}}),
    "indent": ("llama3", {"tools": {"indent": 2}}),
    "no_indent": ("llama3", {"tools": {"indent": None}}),
    "escaped_descriptions": ("mistral", {"tools": {"raw_descriptions": False}}),
    "raw_descriptions": ("hermes", {"tools": {"raw_descriptions": True}}),
    "tools_once": ("mistral", {"tools": {"equal_users": None}}),
    "tools_first": ("mistral", {"tools": {"place": "first"}}),
    "call": ("hermes", {"calls": {"call": (NAME, '","arguments":', ARGUMENTS_FIELD)}}),
    "call_without_id": ("mistral", {"calls": {"call": (NAME, '", "arguments": ', ARGUMENTS_FIELD)}}),
    "arguments_as_text": ("hermes", {"calls": {"arguments": "string"}}),
    "result": ("mistral", {"calls": {"result": (Field("content"), ', "id": "', ID)}}),
    "result_of_a_name": ("hermes", {"calls": {"result": (NAME, ": ", Field("content"))}}),
    "strip_of_results": ("hermes", {"calls": {"result_strip": "right"}}),
    "results_as_json": ("mistral", {"calls": {"result_strip": "json"}}),
    "results_as_text": ("llama3", {"calls": {"result_strip": "none"}}),
    "result_generation": ("llama3", {"calls": {"result_generation": ()}}),
    "drops_contents": ("hermes", {"calls": {"content": "dropped"}}),
    "keeps_contents": ("llama3", {"calls": {"content": "kept"}, "between": {"assistant call": ()}}),
    "keeps_nothing_of_contents": ("hermes_thinking", {"calls": {"content": "kept"}}),
    "several_calls": ("llama3", {"calls": {"several": True}, "between": {"call call": (), "result result": ()}}),
    "ids_of_any_length": ("mistral", {"calls": {"id_length": None}}),
    "system_among_calls": ("mistral", {"calls": {"system": "kept"}}),
    "first_call": ("hermes", {"between": {"user call": ("<tool_call>\n",)}}),
    "next_call": ("hermes", {"between": {"call call": ("\n",)}}),
    "results_of_calls": ("llama3", {"between": {"call result": ('"',)}}),
    "next_result": ("hermes", {"between": {"result result": ("\n",)}}),
    "answers_to_results": ("mistral", {"between": {"result assistant": ()}}),
    "calls_after_results": ("mistral", {"between": {"result call": ()}}),
    "questions_after_results": ("hermes", {"between": {"result user": ()}}),
    "questions_after_calls": ("llama3", {"between": {"call user": ()}}),
    "strip_of_reasoning": ("hermes_thinking", {"reasoning": {"strip": "both"}}),
    "strip_behind_reasoning": ("hermes_thinking", {"reasoning": {"content_strip": "none"}}),
    "calls_behind_reasoning": ("hermes_thinking", {"between": {"reasoning call": ()}}),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_verification_catches_what_is_not_the_template(
    name: str, derived: dict[str, ChatFormats]
) -> None:
    family, fields = MUTANTS[name]
    format = ways(derived[family], offered=True).default
    template = Template(KNOWN[family].source, TOKENS)
    mutant = swapped(format, **fields)
    try:
        assert verify(mutant, template, None) != mutant
    except Refusal as reason:
        assert "of [" in str(reason)


def test_takes_calls_only_where_turns_and_ids_are_right(derived: dict[str, ChatFormats]) -> None:
    def refused(family: str, messages: list[dict[str, Any]], reason: str) -> None:
        format = ways(derived[family], offered=True).default
        with pytest.raises(Refusal, match=reason):
            format.render(messages, str, TOOLS)

    looped = talk("user call result", 0)
    for messages in (
        looped[:2],
        looped[1:],
        [looped[0], looped[2]],
        [*looped, looped[2]],
        talk("user call call result", 0),
        [*talk("user call call result", 0), talk("user assistant", 0)[1]],
        [*looped[:2], talk("user assistant", 0)[1]],
    ):
        refused("hermes", messages, "a result for each call")
    refused("llama3", talk("user call call result result", 0), "takes one call a message")
    refused("mistral", talk("user call result user", 0), "not known for tools behind result")
    ids = talk("user call result", 0)
    ids[1]["tool_calls"][0]["id"] = "call_1"
    refused("mistral", ids, "ids of calls must be 9 letters and digits")
    ids = talk("user call result", 0)
    ids[2]["tool_call_id"] = "abc-12345"
    refused("mistral", ids, "ids of calls must be 9 letters and digits")
    thinking = talk("user call result", 0)
    thinking[1]["content"] = "<think>Why?</think>"
    refused("hermes_thinking", thinking, "give the thinking as the message's reasoning")


def test_reasoning_counts_only_behind_the_last_question(derived: dict[str, ChatFormats]) -> None:
    format = ways(derived["hermes_thinking"], offered=True).default
    looped = talk("user reasoning call result reasoning call result", 0)
    assert format.render(looped, str, TOOLS).count("<think>\n") == 2
    answered = [*looped, *talk("user assistant user", 0)[1:]]
    assert "<think>" not in format.render(answered, str, TOOLS)


def test_thinking_is_chosen_with_tools_where_it_is_without(derived: dict[str, ChatFormats]) -> None:
    thinks = "{{- '<think>' if enable_thinking and not tools else '' }}"
    formats = chat.derive(templates.HERMES + thinks, TOKENS)
    assert isinstance(formats, ChatFormats) and isinstance(formats.tools, Ways)
    assert formats.thinking != formats.no_thinking
    assert formats.tools.thinking == formats.tools.no_thinking == formats.tools.default
    assert ways(derived["hermes"], offered=True).thinking is None
