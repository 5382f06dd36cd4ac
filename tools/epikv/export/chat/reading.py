"""The chat formats of checkpoints: derived from their templates, kept if they render alike."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

from transformers import AutoTokenizer

from epikv.export.chat.derivation import derive as derive_format
from epikv.export.chat.format import Format
from epikv.export.chat.formats import ChatFormats, Ways
from epikv.export.chat.template import Template
from epikv.export.chat.text import Refusal
from epikv.export.chat.verification import verify


def read(directory: Path) -> ChatFormats | Refusal:
    """The formats of a checkpoint, or why it has none. Of its code, only the template runs, in a
    sandbox."""
    try:
        return derive(*_load(directory))
    except Refusal as reason:
        return reason


def template_json(directory: Path) -> str:
    """The template itself and the special tokens that it knows, for programs that run it; "" if the
    checkpoint has none."""
    try:
        source, tokens, _ = _load(directory)
    except Refusal:
        return ""
    names = {name: token for name, token in tokens.items() if isinstance(token, str)}
    return json.dumps({"template": source, "special_tokens": names}, ensure_ascii=False)


def derive(
    source: str, tokens: Mapping[str, str], tools_source: str | None = None
) -> ChatFormats | Refusal:
    """Of a template's source. `tokens`: the special tokens by the names that templates know;
    `tools_source`: the template for conversations with tools offered, if it is another."""
    try:
        template = Template(source, tokens)
        plain = _ways(template, offers=False)
    except Refusal as reason:
        return reason
    chosen = plain.thinking is not None
    tools = _with_tools(source if tools_source is None else tools_source, tokens, chosen)
    tags = _thinking_tags(plain, template)
    return ChatFormats(plain.default, plain.thinking, plain.no_thinking, tools, tags)


def _with_tools(source: str, tokens: Mapping[str, str], chosen: bool) -> Ways | Refusal:
    try:
        template = Template(source, tokens)
        for name, told in (("tools", "tools"), ("tool_calls", "calls of tools")):
            if not template.knows(name):
                raise Refusal(f"the template does not know {told}")
        return _ways(template, offers=True, chosen=chosen)
    except Refusal as reason:
        return reason


def _ways(template: Template, offers: bool, chosen: bool | None = None) -> Ways:
    """`chosen`: whether thinking is; None: where it makes a difference."""
    default = _format(template, None, offers)
    if not (template.heeds_thinking() if chosen is None else chosen):
        return Ways(default)
    on, off = (_format(template, thinking, offers) for thinking in (True, False))
    return Ways(default) if chosen is None and on == off else Ways(default, on, off)


def _format(template: Template, thinking: bool | None, offers: bool) -> Format:
    try:
        return verify(derive_format(template, thinking, offers), template, thinking)
    except Refusal as reason:
        if thinking is None:
            raise
        raise Refusal(f"with enable_thinking {str(thinking).lower()}, {reason}") from reason


def _thinking_tags(ways: Ways, template: Template) -> tuple[str, str] | None:
    """What stands around thinking, where the template shows it."""
    after = ways.default.history.after
    closing = re.fullmatch(r"([<\[])/(\w+[>\]])", after or "")
    return (closing[1] + closing[2], closing[0]) if closing else template.thinking_tags


def _load(directory: Path) -> tuple[str, Mapping[str, str], str]:
    """The template, special tokens, and the template where tools are offered, as transformers finds
    them."""
    none = Refusal("the checkpoint has no chat template")
    if not _may_have_template(directory):
        raise none
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        if tokenizer.chat_template is None:
            raise none
        source = tokenizer.get_chat_template()
        tools_source = tokenizer.get_chat_template(tools=[])
    except Refusal:
        raise
    except Exception as error:  # transformers has no one type for a bad tokenizer
        raise Refusal(f"transformers cannot load the chat template: {error}") from error
    return source, tokenizer.special_tokens_map, tools_source


def _may_have_template(directory: Path) -> bool:
    """Whether loading the tokenizer is worth its time."""
    config = directory / "tokenizer_config.json"
    named = config.exists() and b'"chat_template"' in config.read_bytes()
    return named or (directory / "chat_template.jinja").exists()
