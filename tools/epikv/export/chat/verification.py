"""A format against its template, on conversations that were not used to derive it."""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from epikv.export.chat.format import Format, Message, Refusal
from epikv.export.chat.template import Template

_DATES = (
    datetime(2026, 11, 22, 20, 5, 9),
    datetime(2024, 2, 29),
    datetime(2031, 12, 31, 23, 59, 59),
)
_LENGTHS = (*range(1, 10), 40, 41)  # messages beside the system's
_RANDOM = 200  # conversations of each kind
_PLAIN = ("What is a lane?", "Rows of K and V.", "Who owns them?", "The pool does.", "Why?")
_THOUGHT = ("What is a lane?", "<think>\nRows?\n</think>\n\nRows.")
_CONTENTS = (
    "", " ", "\n", "\n\n \t", "  ahead", "behind  ", "\n\nahead", "behind\n\n", " \r\n both\t\n ",
    "\f\v\x1c\u0085x\x1f\v\f", "\u00a0\u3000both\u2003\u2028", "a\n\n b\r\n\tc", "\n ahead", "behind \n",
    "<think>", "</think>", "<think>why</think>so", "<think>\nwhy\n</think>\n\nso",
    "why\n</think>\n\n so \n", "<think>a</think>b</think> c", "<think></think>",
    "<think>\n\n</think>\n\n", "<think>why", " <think>why</think> so ", "\n\n<think>\n why \n</think>\nso",
    "Grüße, 世界 👋🏽 e\u0301", "\u200b\ufeff", "\ue000%d\ue001", "<|im_start|>system\nno<|im_end|>",
    "<s>[INST] x [/INST]</s>", "<|eot_id|>", "<end_of_turn>\n<start_of_turn>model\n", "<|end|>",
    "{{ bos_token }}", "{% endfor %}", "{# no #}", "%d %s {0} {}", "\\n \\\" ' <>&amp;", "user",
    "system", "assistant", "None", "0", "[]", '{"role": "user"}', "# Title\n\n```\ncode\n```\n",
    "/think", "/no_think please", "a word " * 300,
)  # fmt: skip


@dataclass(frozen=True)
class _Kind:
    system: bool
    answered: bool  # ends with the assistant's


def verify(format: Format, template: Template, thinking: bool | None) -> Format:
    """The format, less what it does not reproduce of system messages and last answers.

    Raises Refusal, if it does not reproduce the rest.
    """
    found = _mismatch(format, template, thinking, _Kind(system=False, answered=False))
    if found is not None:
        raise found
    if not isinstance(format.system, Refusal):
        found = _mismatch(format, template, thinking, _Kind(system=True, answered=False))
        if found is not None:
            format = replace(format, system=found)
    if format.end is not None:
        for system in (False, True):
            kind = _Kind(system, answered=True)
            if _mismatch(format, template, thinking, kind) is not None:
                return replace(format, end=None)
    return format


def _mismatch(
    format: Format, template: Template, thinking: bool | None, kind: _Kind
) -> Refusal | None:
    """Told on the shortest conversation that shows one."""
    worst: tuple[int, int] | None = None
    reason = None
    for date, messages in _held_out(template, kind):
        try:
            ours = format.render(messages, date.strftime)
        except Refusal:
            continue
        size = (len(messages), sum(len(message["content"]) for message in messages))
        if worst is not None and size >= worst:
            continue
        try:
            theirs = template.render(messages, date.strftime, thinking)
        except Refusal as error:
            worst, reason = size, Refusal(f"of {_shown(messages)} {error}")
            continue
        if ours != theirs:
            worst, reason = size, Refusal(f"of {_shown(messages)} {_difference(ours, theirs)}")
    return reason


def _held_out(template: Template, kind: _Kind) -> Iterator[tuple[datetime, list[Message]]]:
    for length in _LENGTHS:
        if (length % 2 == 0) == kind.answered:
            for date in _DATES:
                yield date, _plain(kind, _PLAIN, length)
            yield _DATES[0], _conversation(kind, itertools.repeat("Again."), length)
    contents = list(_contents(template))
    bases = ((_PLAIN, 2),) if kind.answered else ((_PLAIN, 1), (_PLAIN, 3), (_THOUGHT, 3))
    for texts, length in bases:
        base = _plain(kind, texts, length)
        for place, content in itertools.product(range(len(base)), contents):
            changed = {**base[place], "content": content}
            yield _DATES[0], [*base[:place], changed, *base[place + 1 :]]
    rng = random.Random(0)
    lengths = [n for n in range(1, 10) if (n % 2 == 0) == kind.answered]
    for _ in range(_RANDOM):
        chosen = (rng.choice(contents) for _ in itertools.count())
        yield rng.choice(_DATES), _conversation(kind, chosen, rng.choice(lengths))


def _contents(template: Template) -> Iterator[str]:
    """Those that templates in general trip over, and those that may be special to this one."""
    yield from _CONTENTS
    for text in template.deciding:
        yield from (text, f"So {text}", f"{text}, so", f"One {text} two", f" {text}\n{text} ")
    for first, last in itertools.product(template.markup, repeat=2):
        yield f"{first}and{last}"


def _plain(kind: _Kind, texts: Sequence[str], length: int) -> list[Message]:
    system = ["Answer briefly."] if kind.system else []
    return _conversation(kind, itertools.chain(system, itertools.cycle(texts)), length)


def _conversation(kind: _Kind, contents: Iterator[str], length: int) -> list[Message]:
    roles = [*(["system"] if kind.system else []), *(["user", "assistant"] * length)[:length]]
    return [{"role": role, "content": next(contents)} for role in roles]


def _shown(messages: Sequence[Message]) -> str:
    said = [
        f"{message['role']} {message['content'][:60]!r}{'...' if len(message['content']) > 60 else ''}"
        for message in messages
    ]
    return f"[{', '.join(said)}]"


def _difference(ours: str, theirs: str) -> str:
    same = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    return (
        f"the template writes {theirs[same : same + 40]!r} at character {same}, where what was"
        f" derived has {ours[same : same + 40]!r}"
    )
