"""Templates of which no format is kept, and the reasons that are told."""

import pytest
from epikv.export import chat
from epikv.export.chat import ChatFormats, Refusal
from epikv.export.chat.conversation import Message
from epikv.export.chat.template import Template

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def turns(body: str, ahead: str = "") -> str:
    """A template that does `body` with each message."""
    return f"{ahead}{{% for message in messages %}}{body}{{% endfor %}}{{{{ 'assistant:' if add_generation_prompt else '' }}}}"


SAID = "{{ message.role + ': ' + message.content + '\\n' }}"
BROKEN = {
    "no_syntax": ("a\n{% if %}", "does not compile: line 2: Expected an expression"),
    "endless": (
        turns("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"),
        "does not end within 200000 steps",
    ),
    "endless_filter": (
        turns("{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}"),
        "does not end within 200000 steps",
    ),
    "recursive_doubly": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "does not end within 200000 steps",
    ),
    "recursive": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "fails: RecursionError"),
    "always_raises": ("{{ raise_exception('Not for chats.') }}", "says: Not for chats."),
    "wants_tools": ("{% for tool in tools %}{% endfor %}", "fails: TypeError"),
    "unknown_function": ("{{ now() }}", "fails: UndefinedError: 'now' is undefined"),
    "forbidden": ("{{ ''.__class__.__mro__ }}" + turns(SAID), "fails: SecurityError"),
    "leaves_out": (turns("{% if loop.last %}" + SAID + "{% endif %}"), "leaves out"),
    "repeats": (turns(SAID + SAID), "repeats"),
    "changes_case": (turns("{{ message.content | upper }}"), "leaves out"),
    "reverses": ("{% for message in messages[::-1] %}" + SAID + "{% endfor %}", "order"),
    "numbers": (turns("{{ loop.index }}. " + SAID), r"of \[user .* character"),
    "counts": (turns(SAID, "{{ messages | length }} messages\n"), r"of \[user .* character 0"),
    "first_differs": (turns("{{ '' if loop.index > 4 else '#' }}" + SAID), r"of \[user "),
    "keeps_the_last": (
        "{% for message in messages[-12:] %}" + SAID + "{% endfor %}",
        r"of \[user .* character 0",
    ),
    "listens": (
        turns("{{ 'Politely: ' if 'please' in message.content else '' }}" + SAID),
        r"of \[user 'please'\] the template writes 'Politely: user: please.* at character 0",
    ),
    "listens_to_a_word": (
        turns("{{ 'Hi! ' if message.content.lower().startswith('hello') else '' }}" + SAID),
        "Hi!",
    ),
    "measures": (turns("{{ '!' if message.content | length > 999 else '' }}" + SAID), "!user"),
    "compares": (
        turns("{{ '!' if message == messages[0] and not loop.first else '' }}" + SAID),
        "user 'Again.'",
    ),
    "joins_lines": (turns("{{ message.content.replace('\\n', ' ') + ';' }}"), "character"),
    "collapses": (turns("{{ message.content.split() | join(' ') + ';' }}"), "character"),
    "quotes": (turns("{{ message.content | tojson }}"), "character"),
    "escapes": (turns("{{ message.content | escape + ';' }}"), "character"),
    "cuts": (turns("{{ message.content[:200] + ';' }}"), "character"),
    "celebrates": (
        turns(SAID, "{{ 'Leap day!' if strftime_now('%d %m') == '29 02' else '' }}"),
        "Leap day!",
    ),
    "computes_dates": (turns(SAID, "{{ strftime_now('%Y') | int + 1 }}"), "character 0"),
    "only_one_turn": (
        turns(SAID, "{{ raise_exception('One question only.') if messages | length > 1 else '' }}"),
        "says: One question only.",
    ),
    "thinks_by_the_word": (
        turns(SAID, "{{ 'think!' if enable_thinking and 'why' in messages[0].content else '' }}"),
        "with enable_thinking true, of .*think!",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_refuses_what_no_format_says(name: str) -> None:
    source, reason = BROKEN[name]
    found = chat.derive(source, TOKENS)
    assert isinstance(found, Refusal)
    with pytest.raises(Refusal, match=reason):
        raise found


def test_each_rendering_has_all_steps_to_itself() -> None:
    loops = "{% for i in range(12000) %}{% for j in range(10) %}{% endfor %}{% endfor %}"
    first, second = Template(loops, TOKENS), Template(loops, TOKENS)
    for template in (first, second, first, first):
        assert template.render([message("user", "Why?")], str) == ""


SYSTEM_ELSEWHERE = {
    "left_out": (
        "{% for message in messages if message.role != 'system' %}" + SAID + "{% endfor %}",
        "leaves out",
    ),
    "at_the_end": (
        "{% for message in messages if message.role != 'system' %}"
        + SAID
        + "{% endfor %}{{ messages[0].content if messages[0].role == 'system' else '' }}",
        "elsewhere",
    ),
    "trimmed_with_the_question": (
        "{% set told = messages[0].content + '\\n' if messages[0].role == 'system' else '' %}"
        + "{% for message in messages if message.role != 'system' %}"
        + "{{ '> ' + ((told if loop.first else '') + message.content) | trim + '\\n' }}{% endfor %}",
        r"of \[system .* character",
    ),
}


@pytest.mark.parametrize("name", SYSTEM_ELSEWHERE)
def test_keeps_what_is_known_without_system_messages(name: str) -> None:
    source, reason = SYSTEM_ELSEWHERE[name]
    found = chat.derive(source, TOKENS)
    assert isinstance(found, ChatFormats)
    with pytest.raises(Refusal, match=reason):
        found.default.render([message("system", "Be brief."), message("user", "Why?")], str)
    assert found.default.render([message("user", "Why?")], str)
