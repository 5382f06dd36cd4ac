"""Templates of which no format with tools is kept, and the reasons that are told."""

import pytest
import tool_templates as templates
from chat_templates import CHATML
from epikv.export import chat
from epikv.export.chat import ChatFormats, Refusal, Ways

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
HERMES, LLAMA3, MISTRAL = templates.HERMES, templates.LLAMA3, templates.MISTRAL
ASKED = [{"role": "user", "content": "Why?"}]


def changed(source: str, old: str, new: str) -> str:
    assert old in source
    return source.replace(old, new)


def derived(source: str) -> ChatFormats:
    found = chat.derive(source, TOKENS)
    assert isinstance(found, ChatFormats), found
    return found


ARGUMENTS = "(call.function.arguments | tojson)"
RESULT = "message.content + '\\n</tool_response>'"
TOOL = "(tool | tojson)"
BROKEN = {
    "arguments_in_tags": (
        changed(HERMES, ARGUMENTS, "call.function.arguments | items | map('first') | join(',')"),
        "leaves out a call's arguments",
    ),
    "indented_arguments": (
        changed(HERMES, ARGUMENTS, "(call.function.arguments | tojson(indent=2))"),
        "writes a call's arguments in a way of its own",
    ),
    "ascii_arguments": (
        changed(HERMES, ARGUMENTS, "(call.function.arguments | tojson(ensure_ascii=True))"),
        r"of \[user .* where what was derived has",
    ),
    "sorted_arguments": (
        changed(HERMES, ARGUMENTS, "(call.function.arguments | tojson(sort_keys=True))"),
        r"of \[user .* where what was derived has",
    ),
    "unknown_syntax": (
        changed(HERMES, "{\"name\": \"' + call", "{\"tool\": \"' + call"),
        "writes calls in a syntax that is not known",
    ),
    "unknown_tags": (changed(LLAMA3, '{"name": "\' + call', '<f>{"name": "\' + call'), "syntax"),
    "calls_left_out": (changed(HERMES, "message.tool_calls %}", "[] %}"), "a call's name"),
    "results_left_out": (changed(HERMES, RESULT, "'.</tool_response>'"), "a result's content"),
    "results_cut": (changed(HERMES, RESULT, "message.content[:50]"), r"of \[user .* character"),
    "results_listened_to": (
        changed(HERMES, RESULT, "('!' if 'error' in message.content else '') + " + RESULT),
        r"of \[user .*error.* character",
    ),
    "results_numbered": (
        changed(HERMES, RESULT, "(loop.index | string) + " + RESULT),
        "writes results in a way of its own",
    ),
    "tools_left_out": (changed(HERMES, TOOL, "'a tool'"), "leaves out tools"),
    "tools_without_type": (
        changed(HERMES, TOOL, "(tool.function | tojson)"),
        "writes tools in a way of its own",
    ),
    "tools_told": (
        changed(HERMES, TOOL, "tool.function.name + '(): ' + tool.function.description"),
        "writes tools in a way of its own",
    ),
    "tools_counted": (
        changed(HERMES, "# Tools", "# ' + (tools | length | string) + ' tools"),
        r"of \[user .* character",
    ),
    "tools_last": (
        "{% for message in messages %}{{ message.content + ';' }}{% endfor %}"
        "{{ tools | tojson if tools else '' }}{# tool_calls #}",
        "puts the tools elsewhere",
    ),
    "tools_raise": (
        changed(HERMES, "{%- for tool in tools %}", "{{ raise_exception('No tools.') }}{%- for tool in tools %}"),
        "the template says: No tools.",
    ),
    "no_calls": ("{{ tools }}" + CHATML, "does not know calls of tools"),
    "no_tools": (CHATML, "does not know tools"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_refuses_tools_that_no_format_says(name: str) -> None:
    source, reason = BROKEN[name]
    found = derived(source)
    assert isinstance(found.tools, Refusal)
    with pytest.raises(Refusal, match=reason):
        raise found.tools
    assert f"no tools ({found.tools})" in chat.told(found)
    assert found.default.render(ASKED, str), "chats without tools go on"


def test_a_format_without_calls_is_that_of_the_turns_alone() -> None:
    found = derived(changed(HERMES, ARGUMENTS, "(call.function.arguments | tojson(indent=2))"))
    knowing = derived(HERMES).default
    assert isinstance(found.default.calls, Refusal)
    assert {*found.default.between} == {"user assistant", "assistant user", "system user"}
    assert {*found.default.between.items()} <= {*knowing.between.items()}
    assert found.default.begin == knowing.begin and found.default.end == knowing.end
    with pytest.raises(Refusal, match="a call's arguments"):
        looped = [*ASKED, {"role": "assistant", "content": "", "tool_calls": [{}]}]
        found.default.render([*looped, {"role": "tool", "content": ""}], str)


def test_a_system_message_behind_the_tools_is_refused_with_tools_alone() -> None:
    moved = "\\n</tools>' + (messages[0].content if messages[0].role == 'system' else '') + '"
    source = changed(HERMES, "\\n</tools>", moved)
    source = changed(source, "(messages[0].content if messages[0].role == 'system' else 'You help.')",
                     "(messages[0].content if messages[0].role == 'system' and not tools else 'You help.')")  # fmt: skip
    found = derived(source)
    assert found.default.system == "first"
    assert isinstance(found.tools, Ways)
    assert found.tools.default.system == Refusal("the template puts the system message elsewhere")
    assert "no system" in chat.told(found).rpartition("tools (")[2]


def test_of_several_templates_that_for_tools_is_asked_about_them() -> None:
    found = chat.derive(CHATML, TOKENS, HERMES)
    assert isinstance(found, ChatFormats)
    plain, hermes = derived(CHATML), derived(HERMES)
    assert (found.default, found.tools) == (plain.default, hermes.tools)
    broken = chat.derive(CHATML, TOKENS, "{% if %}")
    assert isinstance(broken, ChatFormats) and "does not compile" in str(broken.tools)
