"""A format from a template's renderings of conversations whose contents are marks.

What the template does to contents is found by trying what a format can say, until the two render
alike. Nothing here is proof: see verification.py.
"""

import itertools
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from epikv.export.chat.calling import Tools
from epikv.export.chat.conversation import ROLES, Message
from epikv.export.chat.derive_calls import with_calls
from epikv.export.chat.format import Format, History
from epikv.export.chat.marks import Written
from epikv.export.chat.probe import PADDED, Probe, with_texts
from epikv.export.chat.template import Template
from epikv.export.chat.text import STRIPS, Refusal

_HOLDING = ("{}", "{}zq", "zq{}", "zq{}zq", "zq\n{}\nzq")
_ESCAPED = {"name": "zq", "description": 'Says "zq", a \\,\nand more.'}


def derive(template: Template, thinking: bool | None, offers: bool = False) -> Format:
    """`offers`: tools are offered. Raises Refusal, where the template has no such form."""
    probe = Probe(template, thinking, offers)
    format = _with_system(probe, _texts(probe))
    if format.tools is not None:
        format = _with_odd_tools(probe, format, format.tools)
    for role in _roles(format):
        format = probe.first_alike(
            [replace(format, strip={**format.strip, role: strip}) for strip in STRIPS],
            [c for padded in PADDED for c in _with(role, padded.format("zq"))],
        )
    format = _history(probe, format)
    for role in _roles(format):
        format = _refusals(probe, format, role)
    return with_calls(probe, format) if template.knows("tool_calls") else format


def _texts(probe: Probe) -> Format:
    """A format that leaves all contents as they are."""
    turns = probe.written("user assistant user assistant user")
    format = Format(
        begin={},
        between={},
        generation=turns.around[-1],
        end=None,
        system="first",
        strip=dict.fromkeys(ROLES, "none"),
        history=History(),
        refuse=dict.fromkeys(ROLES, ()),
        tools=_tools(probe, probe.written("user assistant user")) if probe.offers else None,
    )
    for written in (turns, probe.written("user")):
        format = with_texts(format, written)
    with suppress(Refusal):  # the format refuses such conversations, too
        format = replace(format, end=probe.written("user assistant").around[-1])
    return format


def _tools(probe: Probe, written: Written) -> Tools:
    for place in ("first", "last_user"):
        if written.kinds == _arranged(system=None, tools=place):
            between = "".join(piece for piece in written.piece("tools") if isinstance(piece, str))
            return Tools(place, between, written.indent)
    raise Refusal("the template puts the tools elsewhere")


def _arranged(system: str | None, tools: str | None) -> list[str]:
    """The parts of a conversation of three turns, where these stand at their places."""
    first = [kind for kind, place in (("system", system), ("tools", tools)) if place == "first"]
    last = [kind for kind, place in (("tools", tools), ("system", system)) if place == "last_user"]
    return [*first, "user", "assistant", *last, "user"]


def _with_system(probe: Probe, format: Format) -> Format:
    tools = format.tools.place if format.tools is not None else None
    try:
        written = [probe.written(kinds) for kinds in ("system user", "system user assistant user")]
    except Refusal as reason:
        return replace(format, system=reason)
    for place in ("first", "last_user"):
        if written[1].kinds == _arranged(place, tools):
            for one in written:
                format = with_texts(format, one)
            return replace(format, system=place)
    return replace(format, system=Refusal("the template puts the system message elsewhere"))


def _with_odd_tools(probe: Probe, format: Format, tools: Tools) -> Format:
    """What the template does to descriptions, and to the tools where user messages are equal."""
    manners = [
        replace(format, tools=replace(tools, raw_descriptions=raw, equal_users=equal))
        for equal in (None, "repeated")
        for raw in (False, True)
    ]
    conversations = [_with("user", "zq1")[1]]
    return probe.first_alike(manners, conversations, (_ESCAPED,))


def _history(probe: Probe, format: Format) -> Format:
    """Finds the tag behind which answers are kept, if any."""
    for tag in sorted({"</think>", *probe.template.markup}, key=lambda tag: (len(tag), tag)):
        try:
            text = probe.render(_with("assistant", f"zqa{tag}zqb")[0])
        except Refusal:
            continue
        if "zqb" in text and "zqa" not in text:
            return probe.first_alike(
                [replace(format, history=History(tag, strip)) for strip in STRIPS],
                [c for p in PADDED for c in _with("assistant", f"zqa{tag}{p.format('zqb')}")],
            )
    return format


def _refusals(probe: Probe, format: Format, role: str) -> Format:
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
