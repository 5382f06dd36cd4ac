"""The chat formats of checkpoints: derived from their templates, kept if they render alike."""

import json
from collections.abc import Mapping
from pathlib import Path

from transformers import AutoTokenizer

from epikv.export.chat.derivation import derive as derive_format
from epikv.export.chat.format import ChatFormats, Format, Refusal
from epikv.export.chat.template import Template
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
        source, tokens = _load(directory)
    except Refusal:
        return ""
    names = {name: token for name, token in tokens.items() if isinstance(token, str)}
    return json.dumps({"template": source, "special_tokens": names}, ensure_ascii=False)


def derive(source: str, tokens: Mapping[str, str]) -> ChatFormats | Refusal:
    """Of a template's source. `tokens`: the special tokens by the names that templates know."""
    try:
        template = Template(source, tokens)
        default = _format(template, None)
        if not template.heeds_thinking():
            return ChatFormats(default)
        on, off = (_format(template, thinking) for thinking in (True, False))
    except Refusal as reason:
        return reason
    return ChatFormats(default) if on == off else ChatFormats(default, on, off)


def _format(template: Template, thinking: bool | None) -> Format:
    try:
        return verify(derive_format(template, thinking), template, thinking)
    except Refusal as reason:
        if thinking is None:
            raise
        raise Refusal(f"with enable_thinking {str(thinking).lower()}, {reason}") from reason


def _load(directory: Path) -> tuple[str, Mapping[str, str]]:
    """The template and special tokens, as transformers finds them."""
    none = Refusal("the checkpoint has no chat template")
    if not _may_have_template(directory):
        raise none
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            directory, local_files_only=True, trust_remote_code=False
        )
        source = tokenizer.get_chat_template() if tokenizer.chat_template is not None else None
    except Exception as error:  # transformers has no one type for a bad tokenizer
        raise Refusal(f"transformers cannot load the chat template: {error}") from error
    if source is None:
        raise none
    return source, tokenizer.special_tokens_map


def _may_have_template(directory: Path) -> bool:
    """Whether loading the tokenizer is worth its time."""
    config = directory / "tokenizer_config.json"
    named = config.exists() and b'"chat_template"' in config.read_bytes()
    return named or (directory / "chat_template.jinja").exists()
