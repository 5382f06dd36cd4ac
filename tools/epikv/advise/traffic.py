"""Requests of one's own as problems: nobody knows their answers, so the full cache's are what others are held against."""

import json
import random
from pathlib import Path
from typing import Any

import click

from epikv.eval.items import Axis, Replay
from epikv.eval.plan import Task

_ROLES = ("system", "user", "assistant")
MOST_TOKENS = 256  # of an answer, where neither the request nor the user says


def task(path: Path, count: int, most_tokens: int | None) -> Task:
    """`count` requests of JSON lines, drawn from all of them: each an object with `prompt`, a text, or `messages`, as of OpenAI's
    API; and, if it likes, `max_tokens` or `max_completion_tokens`. All else of them is passed over. Raises
    click.ClickException."""
    items: list[Replay] = []
    try:
        lines = path.read_text("utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise click.ClickException(f"{path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            items.append(_replay(str(number), json.loads(line), most_tokens))
        except ValueError as error:
            raise click.ClickException(f"{path}:{number}: {error}") from error
    if not items:
        raise click.ClickException(f"{path}: no requests")
    drawn = random.Random(0).sample(items, min(count, len(items)))
    return Task(f"traffic:{path.name}", Axis.REASONING, drawn)


def _replay(number: str, request: Any, most_tokens: int | None) -> Replay:
    if not isinstance(request, dict):
        raise ValueError("not a JSON object")
    asked = request.get("max_completion_tokens") or request.get("max_tokens")
    if asked is not None and (not isinstance(asked, int) or asked < 1):
        raise ValueError("max_tokens is a number of tokens")
    most = most_tokens or asked or MOST_TOKENS
    if isinstance(prompt := request.get("prompt"), str) and prompt:
        return Replay(number, prompt, most)
    messages = request.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError("neither `prompt`, a text, nor `messages`")
    parts = []
    for message in messages:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in _ROLES or not isinstance(content, str):
            raise ValueError(f"a message has a role ({', '.join(_ROLES)}) and a content, a text")
        parts.append((role, content))
    return Replay(number, tuple(parts), most)
