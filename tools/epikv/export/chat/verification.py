"""A format against its template, on conversations that were not used to derive it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from epikv.export.chat import held_out
from epikv.export.chat.calling import Calls
from epikv.export.chat.conversation import Message, calls_of, canonical
from epikv.export.chat.format import Format
from epikv.export.chat.held_out import Case
from epikv.export.chat.template import Template
from epikv.export.chat.text import Refusal


def verify(format: Format, template: Template, thinking: bool | None) -> Format:
    """The format, less what it does not reproduce of system messages, last answers and calls.

    Raises Refusal, if it does not reproduce the rest, or, with tools offered, calls.
    """
    check = _Check(template, thinking)
    brief = format.tools is not None  # contents were tried without them

    def mismatch(system: bool, answered: bool) -> Refusal | None:
        return check.mismatch(format, held_out.plain(template, system, answered, brief))

    found = mismatch(system=False, answered=False)
    if found is not None:
        raise found
    if not isinstance(format.system, Refusal):
        found = mismatch(system=True, answered=False)
        if found is not None:
            format = replace(format, system=found)
    for system in (False, True):
        if format.end is not None and mismatch(system, answered=True) is not None:
            format = replace(format, end=None)
    format = check.calls(format)
    if format.tools is not None:
        format.known_calls()
    return format


class _Check:
    def __init__(self, template: Template, thinking: bool | None) -> None:
        self._template = template
        self._thinking = thinking

    def mismatch(self, format: Format, cases: Iterable[Case]) -> Refusal | None:
        """Told on the shortest conversation that shows one."""
        worst: tuple[int, int] | None = None
        reason = None
        for case in cases:
            try:
                ours = format.render(case.messages, case.date.strftime, case.tools)
            except Refusal:
                continue
            size = (len(case.messages), sum(len(m["content"]) for m in case.messages))
            if worst is not None and size >= worst:
                continue
            differs = self._difference(format, case, ours)
            if differs is not None:
                worst, reason = size, Refusal(f"of {_shown(case.messages)} {differs}")
        return reason

    def calls(self, format: Format) -> Format:
        """Less reasoning, or all calls, if it does not reproduce them."""
        silent = _without(replace(format, reasoning=None), "reasoning")
        for less in (format, silent):
            found = self._calls_mismatch(less)
            if found is None:
                return less
        return _without(replace(silent, calls=found), "call", "result")

    def _calls_mismatch(self, format: Format) -> Refusal | None:
        if not isinstance(format.calls, Calls):
            return None
        reasoning = format.reasoning is not None
        brief = self._thinking is not None  # contents were tried without saying whether to think
        cases = held_out.calling(self._template, format.calls, reasoning, brief)
        return self.mismatch(format, cases)

    def _difference(self, format: Format, case: Case, ours: str) -> str | None:
        try:
            tools = case.tools if format.tools is not None else ()
            messages = format.given(case.messages)
            theirs = self._template.render(messages, case.date.strftime, self._thinking, tools)
        except Refusal as error:
            return str(error)
        if ours == theirs:
            return None
        same = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
            min(len(ours), len(theirs)),
        )
        return (
            f"the template writes {theirs[same : same + 40]!r} at character {same}, where what was"
            f" derived has {ours[same : same + 40]!r}"
        )


def _without(format: Format, *kinds: str) -> Format:
    """Less the texts beside parts of these kinds."""
    between = {
        pair: text for pair, text in format.between.items() if not {*pair.split()} & {*kinds}
    }
    return replace(format, between=between)


def _shown(messages: Sequence[Message]) -> str:
    said = []
    for message in messages:
        content = message["content"]
        shown = f"{message['role']} {content[:60]!r}{'...' if len(content) > 60 else ''}"
        said.append(shown + "".join(_shown_call(call) for call in calls_of(message)))
    return f"[{', '.join(said)}]"


def _shown_call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    return f" {function['name']}({canonical(function['arguments'])[:60]})"
