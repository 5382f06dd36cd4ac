"""A format from a template's renderings of conversations whose contents are marks.

What stands between the marks is the format's text. What the template does to contents is found by
trying what a format can say, until the two render alike. Nothing here is proof: see verification.py.
"""

import itertools
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from epikv.export.chat.format import (
    ROLES,
    STRIPS,
    Date,
    Format,
    History,
    Message,
    Refusal,
    Text,
    literal,
)
from epikv.export.chat.template import Template

_PADDED = ("\n \t{} \t\n", "{}\n\n", "\n\n{}", " {}", "{} ")  # tell all of STRIPS apart
_HOLDING = ("{}", "{}zq", "zq{}", "zq{}zq", "zq\n{}\nzq")


def derive(template: Template, thinking: bool | None) -> Format:
    """Raises Refusal, where the template has no such form."""
    probe = _Probe(template, thinking)
    format = _texts(probe)
    for role in _roles(format):
        format = probe.first_alike(
            [replace(format, strip={**format.strip, role: strip}) for strip in STRIPS],
            [c for padded in _PADDED for c in _with(role, padded.format("zq"))],
        )
    format = _history(probe, format)
    for role in _roles(format):
        format = _refusals(probe, format, role)
    return format


class _Probe:
    def __init__(self, template: Template, thinking: bool | None) -> None:
        self.template = template
        self._thinking = thinking

    def render(self, messages: Sequence[Message]) -> str:
        """Dates show their formats."""
        return self.template.render(messages, _marked_date, self._thinking)

    def split(self, *roles: str) -> tuple[list[int], list[Text]]:
        """The order in which the messages' contents are written, and what is written before,
        between and after them."""
        messages = [_message(role, f"zq{i}qz") for i, role in enumerate(roles)]
        parts = re.split(r"zq(\d)qz", self.render(messages))
        order = [int(part) for part in parts[1::2]]
        for i, role in enumerate(roles):
            if order.count(i) != 1:
                does = "repeats" if i in order else "leaves out"
                raise Refusal(f"the template {does} a message of the {role}'s")
        return order, [_text(part) for part in parts[::2]]

    def alike(self, format: Format, messages: Sequence[Message]) -> bool:
        """Or refused by the format."""
        try:
            ours = format.render(messages, _marked_date)
        except Refusal:
            return True
        try:
            return ours == self.render(messages)
        except Refusal:
            return False

    def first_alike(
        self, formats: Sequence[Format], conversations: Sequence[Sequence[Message]]
    ) -> Format:
        """The first that renders them as the template does; else the first."""
        for format in formats:
            if all(self.alike(format, messages) for messages in conversations):
                return format
        return formats[0]


def _texts(probe: _Probe) -> Format:
    """A format that leaves all contents as they are."""
    order, (begin, question, answer, _, _, generation) = probe.split(
        "user", "assistant", "user", "assistant", "user"
    )
    if order != sorted(order):
        raise Refusal("the template changes the order of the turns")
    format = Format(
        begin={"user": begin},
        between={"user assistant": question, "assistant user": answer},
        generation=generation,
        end=None,
        system="first",
        strip=dict.fromkeys(ROLES, "none"),
        history=History(),
        refuse=dict.fromkeys(ROLES, ()),
    )
    with suppress(Refusal):  # the format refuses such conversations, too
        format = replace(format, end=probe.split("user", "assistant")[1][-1])
    return _with_system(probe, format)


def _with_system(probe: _Probe, format: Format) -> Format:
    try:
        begin = probe.split("system", "user")[1][0]
        order, texts = probe.split("system", "user", "assistant", "user")
    except Refusal as reason:
        return replace(format, system=reason)
    if order == [0, 1, 2, 3]:
        place, between = "first", {"system user": texts[1]}
    elif order == [1, 2, 0, 3]:
        place, between = "last_user", {"assistant system": texts[2], "system user": texts[3]}
    else:
        return replace(format, system=Refusal("the template puts the system message elsewhere"))
    return replace(
        format,
        begin={**format.begin, "system": begin},
        between={**format.between, **between},
        system=place,
    )


def _history(probe: _Probe, format: Format) -> Format:
    """Finds the tag behind which answers are kept, if any."""
    for tag in sorted({"</think>", *probe.template.markup}, key=lambda tag: (len(tag), tag)):
        try:
            text = probe.render(_with("assistant", f"zqa{tag}zqb")[0])
        except Refusal:
            continue
        if "zqb" in text and "zqa" not in text:
            return probe.first_alike(
                [replace(format, history=History(tag, strip)) for strip in STRIPS],
                [c for p in _PADDED for c in _with("assistant", f"zqa{tag}{p.format('zqb')}")],
            )
    return format


def _refusals(probe: _Probe, format: Format, role: str) -> Format:
    """Adds what the template treats in a way of its own, if that is told by markup, or is that
    there is nothing."""
    after = format.history.after
    answers = ("zq2", *([f"zq3{after}zq2"] if after else []))

    def unlike(format: Format, contents: Sequence[str]) -> bool:
        return not all(
            probe.alike(format, messages)
            for content in contents
            for answer in answers
            for messages in _with(role, content, answer)
        )

    def refusing(format: Format, *texts: str) -> Format:
        return replace(format, refuse={**format.refuse, role: (*format.refuse[role], texts)})

    if unlike(format, ["", " \n"]):
        format = refusing(format)
    markup = probe.template.markup
    for text in markup:
        if unlike(format, [holding.format(text) for holding in _HOLDING]):
            format = refusing(format, text)
    for first, last in itertools.product(markup, repeat=2):
        if unlike(format, [f"{first}zq{last}"]):
            format = refusing(format, first, last)
    return format


def _roles(format: Format) -> list[str]:
    return [role for role in ROLES if role != "system" or not isinstance(format.system, Refusal)]


def _with(role: str, content: str, answered: str = "zq2") -> list[list[Message]]:
    """Conversations with `content` at the places of `role`, not as a last answer."""
    user, answer = _message("user", "zq1"), _message("assistant", answered)
    message = _message(role, content)
    if role == "system":
        return [[message, user], [message, user, answer, user]]
    if role == "user":
        return [[message], [message, answer, user], [user, answer, message]]
    return [[user, message, user], [user, message, user, answer, user]]


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _marked_date(format: str) -> str:
    return f"\ue000{format}\ue001"


def _text(rendered: str) -> Text:
    """Dates taken out of what `_marked_date` left."""
    parts = re.split("\ue000(.*?)\ue001", rendered, flags=re.DOTALL)
    texts = [Date(part) if i % 2 else literal(part) for i, part in enumerate(parts)]
    return tuple(p for text in texts for p in ((text,) if isinstance(text, Date) else text))
