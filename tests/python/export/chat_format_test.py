"""Chat formats: what is derived renders as the template does, and what does not is not kept."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

import chat_templates as templates
import pytest
from epikv.export import chat
from epikv.export.chat import ChatFormats, Format, Refusal
from epikv.export.chat.conversation import Message
from epikv.export.chat.format import History
from epikv.export.chat.template import Template
from epikv.export.chat.text import Date
from epikv.export.chat.verification import verify
from epikv.export.synthetic import word_tokenizer
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
NOW = datetime(2027, 3, 4, 5, 6, 7)


@dataclass(frozen=True)
class Known:
    """What is to be found of a template."""

    source: str
    system: str = "first"  # or, if the template does not take them, its words
    answered: bool = True  # conversations that end with an answer
    thinking: bool = False
    after: str | None = None
    refuse: tuple[tuple[str, tuple[str, ...]], ...] = ()
    strip: tuple[str, str, str] = ("none", "none", "none")


TRIMMED = ("both", "both", "both")
KNOWN = {
    "chatml": Known(templates.CHATML),
    "chatml_with_a_default": Known(templates.CHATML_DEFAULT),
    "llama3": Known(templates.LLAMA3, strip=TRIMMED),
    "gemma2": Known(templates.GEMMA2, "No system role here", strip=("none", "both", "both")),
    "gemma3": Known(templates.GEMMA3, strip=("none", "both", "both")),
    "mistral_v1": Known(templates.MISTRAL_V1, "Roles must alternate user/assistant/..."),
    "mistral_v3": Known(
        templates.MISTRAL_V3, "last_user", answered=False, strip=("none", "none", "both")
    ),
    "mistral_v7": Known(templates.MISTRAL_V7),
    "phi3": Known(templates.PHI3, refuse=(("system", ()),)),
    "phi4": Known(templates.PHI4),
    "olmo2": Known(templates.OLMO2),
    "smollm3": Known(
        templates.SMOLLM3,
        thinking=True,
        refuse=(("system", ()), ("system", ("/no_think",)), ("system", ("/think",))),
        strip=("right", "none", "left_newlines"),
    ),
    "r1_distill": Known(templates.R1_DISTILL, answered=False, after="</think>"),
    "qwen3": Known(
        templates.QWEN3,
        answered=False,
        thinking=True,
        after="</think>",
        refuse=(("user", ("<tool_response>", "</tool_response>")),),
    ),
    "granite3": Known(templates.GRANITE3, thinking=True),
    "thinking_left_empty": Known(
        templates.THINKING_LEFT_EMPTY,
        answered=False,
        thinking=True,
        after="</think>",
        refuse=(("assistant", ()),),
        strip=("none", "none", "both"),
    ),
}

CONTENTS = (
    "How do lanes move?",
    "",
    "\n  They do not. \n",
    "<think>Do they?\n</think>\n\nThey do not.\n",
    "Do they?</think>\n They do not. ",
    "\u3000Wirklich? 本当に 🤔\u00a0",
    "<|im_end|>\n<|im_start|>system\n</s>[INST]{{ messages }}",
    "<tool_response>3</tool_response>",
    "/no_think, please",
    "tail\n\n",
)


@pytest.fixture(scope="module")
def derived() -> dict[str, ChatFormats]:
    found = {name: chat.derive(known.source, TOKENS) for name, known in KNOWN.items()}
    refused = {name: str(reason) for name, reason in found.items() if isinstance(reason, Refusal)}
    assert not refused
    return found


def conversations() -> list[list[Message]]:
    """With and without system messages, of 1 to 7 others, each content at each place."""
    shapes = [
        [*system, *(["user", "assistant"] * 4)[:n]]
        for n in range(1, 8)
        for system in ([], ["system"])
    ]
    return [
        [message(role, CONTENTS[(first + 3 * i) % len(CONTENTS)]) for i, role in enumerate(shape)]
        for shape in shapes
        for first in range(len(CONTENTS))
    ]


def message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def theirs(source: str, messages: Sequence[Message], thinking: bool | None) -> str:
    """Through the interface that transformers' users use."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=word_tokenizer(3), chat_template=source, **TOKENS
    )
    said = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
    return tokenizer.apply_chat_template(
        [dict(m) for m in messages],
        tokenize=False,
        add_generation_prompt=messages[-1]["role"] == "user",
        **said,
    )


class _Clock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return NOW


@pytest.mark.parametrize("name", KNOWN)
def test_renders_as_transformers_does(
    name: str, derived: dict[str, ChatFormats], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chat_template_utils, "datetime", _Clock)
    formats = derived[name]
    kinds = {None: formats.default, True: formats.thinking, False: formats.no_thinking}
    rendered = refused = 0
    for thinking, format in kinds.items():
        for messages in conversations():
            try:
                ours = (format or formats.default).render(messages, NOW.strftime)
            except Refusal:
                refused += 1
                continue
            assert ours == theirs(KNOWN[name].source, messages, thinking)
            rendered += 1
    assert rendered > 3 * 40
    assert (refused > 0) == (
        KNOWN[name].system != "first" or not KNOWN[name].answered or bool(KNOWN[name].refuse)
    )


@pytest.mark.parametrize("name", KNOWN)
def test_finds_what_a_template_can(name: str, derived: dict[str, ChatFormats]) -> None:
    known, formats = KNOWN[name], derived[name]
    format = formats.default
    if isinstance(format.system, Refusal):
        assert str(format.system) == f"the template says: {known.system}"
    else:
        assert format.system == known.system
    assert (format.end is not None) == known.answered
    assert (formats.thinking is not None) == (formats.no_thinking is not None) == known.thinking
    assert format.history.after == known.after
    assert tuple(format.strip[role] for role in ("system", "user", "assistant")) == known.strip
    found = [(role, texts) for role, refused in format.refuse.items() for texts in refused]
    assert tuple(found) == known.refuse


@pytest.mark.parametrize("name", KNOWN)
def test_json_says_all_of_it(name: str, derived: dict[str, ChatFormats]) -> None:
    assert chat.from_json(chat.to_json(derived[name])) == derived[name]


def test_json_is_as_the_daemon_reads_it(derived: dict[str, ChatFormats]) -> None:
    llama = json.loads(chat.to_json(derived["llama3"]))
    block = ["<s><|head|>system<|/head|>\n\nKnows until: 2023\nToday: ", {"date": "%d %b %Y"}]
    assert llama == {
        "default": {
            "begin": {
                "user": [*block, "\n\n<|eot|><|head|>user<|/head|>\n\n"],
                "system": [*block, "\n\n"],
            },
            "between": {
                "user assistant": ["<|eot|><|head|>assistant<|/head|>\n\n"],
                "assistant user": ["<|eot|><|head|>user<|/head|>\n\n"],
                "system user": ["<|eot|><|head|>user<|/head|>\n\n"],
            },
            "generation": ["<|eot|><|head|>assistant<|/head|>\n\n"],
            "end": ["<|eot|>"],
            "system": "first",
            "strip": {"system": "both", "user": "both", "assistant": "both"},
            "history": {"after": None, "strip": "none"},
            "refuse": {"system": [], "user": [], "assistant": []},
        },
        "tools": {"refusal": "the template does not know tools"},
    }
    gemma = json.loads(chat.to_json(derived["gemma2"]))["default"]
    assert gemma["system"] == {"refusal": "the template says: No system role here"}
    assert "system" not in gemma["begin"]
    qwen = json.loads(chat.to_json(derived["qwen3"]))
    assert [*qwen] == ["default", "thinking", "no_thinking", "tools", "thinking_tags"]
    assert qwen["thinking_tags"] == ["<think>", "</think>"]
    assert json.loads(chat.to_json(Refusal("no template"))) == {"refusal": "no template"}
    assert chat.from_json('{"refusal": "no template"}') == Refusal("no template")


def swapped(format: Format, **fields: Any) -> Format:
    """Entries of its dictionaries, set."""
    changed = {
        name: {**getattr(format, name), **value} if isinstance(value, dict) else value
        for name, value in fields.items()
    }
    return replace(format, **changed)


MUTANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "begin": ("chatml", {"begin": {"user": ("<|im_start|> user\n",)}}),
    "begin_of_system": ("chatml", {"begin": {"system": ("<|im_start|>user\n",)}}),
    "after_system": ("chatml", {"between": {"system user": ("<|im_end|><|im_start|>user\n",)}}),
    "answer": ("chatml", {"between": {"user assistant": ("<|im_end|>\n<|im_start|>model\n",)}}),
    "question": ("chatml", {"between": {"assistant user": ("<|im_end|>\n",)}}),
    "generation": ("chatml", {"generation": ("<|im_end|>\n",)}),
    "end": ("chatml", {"end": ()}),
    "strip": ("chatml", {"strip": {"user": "right"}}),
    "strip_of_system": ("chatml", {"strip": {"system": "both"}}),
    "no_strip": ("llama3", {"strip": {"assistant": "none"}}),
    "half_a_strip": ("llama3", {"strip": {"user": "left"}}),
    "strip_of_newlines": ("llama3", {"strip": {"system": "newlines"}}),
    "history": ("chatml", {"history": History("</think>", "none")}),
    "no_history": ("qwen3", {"history": History()}),
    "strip_of_history": ("qwen3", {"history": History("</think>", "both")}),
    "no_strip_of_history": ("qwen3", {"history": History("</think>", "none")}),
    "system_place": ("mistral_v3", {"system": "first"}),
    "system": ("gemma2", {"system": "first", "begin": {"system": ()}, "between": {"system user": ()}}),
    "date": ("granite3", {"begin": {"user": (Date("%B %d %Y"),)}}),
    "refuses_nothing": ("smollm3", {"refuse": {"system": ()}}),
    "takes_empty_ones": ("phi3", {"refuse": {"system": ()}}),
    "takes_responses": ("qwen3", {"refuse": {"user": ()}}),
    "takes_answers": ("r1_distill", {"end": ("<|end|>",)}),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_verification_catches_what_is_not_the_template(
    name: str, derived: dict[str, ChatFormats]
) -> None:
    family, fields = MUTANTS[name]
    format = derived[family].default
    template = Template(KNOWN[family].source, TOKENS)
    assert verify(format, template, None) == format
    mutant = swapped(format, **fields)
    try:
        assert verify(mutant, template, None) != mutant
    except Refusal as reason:
        assert "character" in str(reason)


def test_refuses_conversations_that_no_template_was_asked_about(
    derived: dict[str, ChatFormats],
) -> None:
    system, user, answer = (message(role, "So.") for role in ("system", "user", "assistant"))
    for messages in ([], [system], [answer], [user, user], [user, system], [system, system, user],
                     [user, answer, answer], [message("tool", "3")]):  # fmt: skip
        with pytest.raises(Refusal, match="in turns"):
            derived["chatml"].default.render(messages, str)


def test_refuses_contents_that_hold_texts_one_behind_the_other(
    derived: dict[str, ChatFormats],
) -> None:
    refuse = {"user": (("<a>", "<a>"), ("<b>", "<c>")), "assistant": ((),)}
    format = swapped(derived["llama3"].default, refuse=refuse)
    user, answer = message("user", "Why?"), message("assistant", "So.")
    for content in ("<a>", "<c> <b>", "", "<a><b"):
        assert format.render([message("user", content)], str)
        assert format.render([message("user", content), answer, user], str)
    for content in ("<a><a>", "<a> <b> <a>", "<c><b>\n<c>"):
        with pytest.raises(Refusal, match="user messages that hold '<[ab]>' and then '<[ac]>'"):
            format.render([user, answer, message("user", content)], str)
    with pytest.raises(Refusal, match="assistant messages that are empty"):
        format.render([user, message("assistant", " \n"), user], str)
