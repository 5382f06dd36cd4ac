"""Conversations that are not used to derive formats, to try them on."""

import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from epikv.export.chat.calling import Calls
from epikv.export.chat.conversation import Message, Tool, conversation
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
_NAMES = ("look_up", "f", "get-weather", "Name9", "a_very_long_name_" * 3)
_ARGUMENTS: tuple[dict[str, Any], ...] = (
    {}, {"city": "Köln", "days": 3}, {"x": 1.5, "y": -2e-7, "z": 10**20, "e": 1e300},
    {"on": True, "off": False, "none": None}, {"a": {"b": [{"c": []}, [1, [2]]], "d": {}}},
    {"text": "\"quoted\" \\ 'single'\n\ttab \u0001 </tool_call> <|im_end|>"},
    {"世界": "👋🏽 e\u0301 \u2028", "": "", " ": " ", "key \"with\"\n": "<b>&amp;</b>"},
    {"name": "f", "arguments": {"parameters": {}}}, {"json": '{"a": 1}'}, {"list": ["", "a", None]},
)  # fmt: skip
_PARAMETERS: tuple[dict[str, Any], ...] = (
    {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    {"type": "object", "properties": {}},
    {
        "type": "object",
        "properties": {
            "größe": {"type": ["number", "null"], "description": "In \"m\".\n\\ 世界 <b>", "default": 1.0},
            "kind": {"enum": ["a", "b"], "default": None},
            "items": {"type": "array", "items": {"type": "object", "properties": {"x": {}}}},
        },
        "additionalProperties": False,
    },
)  # fmt: skip
_DESCRIPTIONS = ("Looks a city up.", "Größe, 世界 👋🏽", 'Says "so":\n\\d+\t<b>', "{{ x }} [/INST]")
TOOLS: tuple[Sequence[Tool], ...] = (
    [{"name": "look_up", "description": _DESCRIPTIONS[0], "parameters": _PARAMETERS[0]}],
    [
        {"name": name, "description": description, "parameters": parameters}
        for name, description, parameters in zip(_NAMES, _DESCRIPTIONS, _PARAMETERS, strict=False)
    ],
    [{"name": "f"}, {"name": "g", "description": _DESCRIPTIONS[2]}],
    [{"name": "f", "parameters": _PARAMETERS[2]}],
    [{"name": "f", "description": _DESCRIPTIONS[3], "parameters": {}}],
)


@dataclass(frozen=True)
class Case:
    date: datetime
    messages: Sequence[Message]
    tools: Sequence[Tool]  # to be offered, if any are


def plain(template: Template, system: bool, answered: bool, brief: bool = False) -> Iterator[Case]:
    """Without calls. `answered`: ends with the assistant's; `brief`: each content at one place."""
    tools = itertools.cycle(TOOLS)

    def case(messages: list[Message], date: datetime = _DATES[0]) -> Case:
        return Case(date, messages, next(tools))

    for length in _LENGTHS:
        if (length % 2 == 0) == answered:
            for date in _DATES:
                yield case(_plain(system, _PLAIN, length), date)
            yield case(_turns(system, itertools.repeat("Again."), length))
    contents = list(_contents(template))
    rng = random.Random(0)
    for texts, length in ((_PLAIN, 2),) if answered else ((_PLAIN, 1), (_PLAIN, 3), (_THOUGHT, 3)):
        base = _plain(system, texts, length)
        for content in contents:
            for place in [rng.randrange(len(base))] if brief else range(len(base)):
                changed = {**base[place], "content": content}
                yield case([*base[:place], changed, *base[place + 1 :]])
    lengths = [n for n in range(1, 10) if (n % 2 == 0) == answered]
    for _ in range(_RANDOM):
        chosen = (rng.choice(contents) for _ in itertools.count())
        yield case(_turns(system, chosen, rng.choice(lengths)), rng.choice(_DATES))


def calling(
    template: Template, calls: Calls, reasoning: bool, brief: bool = False
) -> Iterator[Case]:
    """With calls. `reasoning`: and the assistant's; `brief`: contents at random alone."""
    rng = random.Random(0)
    tools = itertools.cycle(TOOLS)

    def case(kinds: Sequence[str], contents: Iterator[str]) -> Case:
        values = _Values(kinds, contents, calls.id_length, rng.randrange(100))
        return Case(rng.choice(_DATES), conversation(kinds, values), next(tools))

    shapes = list(_shapes())
    if reasoning:
        shapes += [_with_reasoning(shape, lambda: rng.random() < 0.5) for shape in shapes]
    for shape in shapes:
        yield case(shape, itertools.cycle(_PLAIN))
    contents = list(_contents(template))
    base = "user assistant call result user assistant call result".split()
    bases = () if brief else (base, _with_reasoning(base)) if reasoning else (base,)
    spoken = ("assistant", "result", "reasoning")
    for shape, kind, content in itertools.product(bases, spoken, contents):
        places = [i for i, part in enumerate(p for p in shape if p != "call") if part == kind]
        if places:
            ahead = ["So."] * rng.choice(places)
            yield case(shape, itertools.chain(ahead, [content], itertools.repeat("So.")))
    for _ in range(_RANDOM):
        chosen = (rng.choice(contents) for _ in itertools.count())
        yield case(rng.choice(shapes), rng.choice((chosen, itertools.repeat("Again."))))


_ROUNDS = (
    "call result", "call call result result", "assistant call result",
    "assistant call call call result result result",
)  # fmt: skip
_LOOPED = (
    "{}", "{} assistant", "{} assistant user", "{} user", "call user {}", "assistant user {}",
    "{0} assistant user {0}", "{} assistant user assistant user", "{0} user {0} assistant user",
)  # fmt: skip


def _shapes() -> Iterator[list[str]]:
    """Kinds of parts of conversations with calls."""
    pairs = itertools.product(_ROUNDS, repeat=2)
    loops = [
        *(looped.format(one) for looped, one in itertools.product(_LOOPED, _ROUNDS)),
        *(f"{one} {two} assistant user" for one, two in pairs),
        " ".join(9 * _ROUNDS[:1]),
    ]
    for loop in loops:
        kinds = ["user", *loop.split()]
        yield kinds
        yield ["system", *kinds]


def _with_reasoning(kinds: Sequence[str], chosen: Callable[[], bool] = lambda: True) -> list[str]:
    """In messages of the assistant's."""
    found: list[str] = []
    for before, kind in itertools.pairwise(["", *kinds]):
        begins = kind == "assistant" or (kind == "call" and before not in ("assistant", "call"))
        found += ["reasoning", kind] if begins and chosen() else [kind]
    return found


class _Values:
    """What parts hold: contents in turn, calls of the lists above, and results of these."""

    def __init__(
        self, kinds: Sequence[str], contents: Iterator[str], id_length: int | None, seed: int
    ) -> None:
        self._contents = contents
        self._id_length = id_length
        self._seed = seed
        self._call: dict[int, int] = {}  # of a result's part, its call's
        due: list[int] = []
        for i, kind in enumerate(kinds):
            if kind == "call":
                due = [*(due if kinds[i - 1] == "call" else []), i]
            elif kind == "result":
                self._call[i] = due.pop(0)

    def __call__(self, part: int, field: str) -> Any:
        if field == "content":
            return next(self._contents)
        part = self._seed + self._call.get(part, part)
        if field == "id":
            ids = (f"{part:03}aBc9Xy", f"call_{part}", f"chatcmpl-tool-{part:032x}", str(part))
            return ids[0 if self._id_length else part % len(ids)]
        given: Sequence[Any] = _NAMES if field == "name" else _ARGUMENTS
        return given[part % len(given)]


def _contents(template: Template) -> Iterator[str]:
    """Those that templates in general trip over, and those that may be special to this one."""
    yield from _CONTENTS
    for text in template.deciding:
        yield from (text, f"So {text}", f"{text}, so", f"One {text} two", f" {text}\n{text} ")
    for first, last in itertools.product(template.markup, repeat=2):
        yield f"{first}and{last}"


def _plain(system: bool, texts: Sequence[str], length: int) -> list[Message]:
    told = ["Answer briefly."] if system else []
    return _turns(system, itertools.chain(told, itertools.cycle(texts)), length)


def _turns(system: bool, contents: Iterator[str], length: int) -> list[Message]:
    roles = [*(["system"] if system else []), *(["user", "assistant"] * length)[:length]]
    return [{"role": role, "content": next(contents)} for role in roles]
