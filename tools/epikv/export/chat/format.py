"""How a model's conversations become prompts.

A format is what its template writes around the parts of a conversation: one text for the beginning,
one for each pair of neighbours, one for the end. It says of the parts themselves what the template
takes off them, and which it treats in a way of its own, so that they are refused.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from epikv.export.chat.calling import Calls, Reasoning, Tools
from epikv.export.chat.conversation import Message, Tool, calls_of, check_turns, last_user
from epikv.export.chat.text import STRIPS, Now, Refusal, Text, written


@dataclass(frozen=True)
class History:
    """Of assistant messages before the last user message: of one that holds `after`, only what is
    behind the last of it stays, stripped."""

    after: str | None = None
    strip: str = "none"


Part = tuple[str, str]  # kind and text


@dataclass(frozen=True)
class Format:
    """Parts are of the kinds system, tools, user, assistant, reasoning, call and result. Keys of
    `begin` are kinds, of `between` two with a space, of `strip` and `refuse` roles."""

    begin: dict[str, Text]
    between: dict[str, Text]
    generation: Text  # from the last user message's content to where the answer begins
    end: Text | None  # after a last assistant message; None: such conversations are refused
    system: str | Refusal  # its content stands "first", or before that of the "last_user"
    strip: dict[str, str]  # one of STRIPS
    history: History
    # Contents that hold the texts of one of these, one behind the other, are refused; where it has
    # no texts, those of which nothing is left.
    refuse: dict[str, tuple[tuple[str, ...], ...]]
    calls: Calls | Refusal | None = None  # None: the template does not know them
    tools: Tools | None = None  # None: none are offered
    reasoning: Reasoning | None = None  # None: it is not written

    def render(self, messages: Sequence[Message], now: Now, tools: Sequence[Tool] = ()) -> str:
        """The prompt of a conversation, with `tools` offered, if the format has them.

        Ends where an answer begins, unless the last message is one. Raises Refusal.
        """
        self._check(messages)
        parts = list(self._parts(messages, tools))
        texts = [_text(self.begin, parts[0][0], now), parts[0][1]]
        for (before, _), (kind, text) in itertools.pairwise(parts):
            texts += [_text(self.between, f"{before} {kind}", now), text]
        return "".join([*texts, written(self._ending(parts[-1][0]), now)])

    def shown(self, message: Message, history: bool, strip: str = "none") -> str:
        """What of a message's content is written. `history`: it stands before the last user
        message; `strip`: what else is taken off. Raises Refusal."""
        role = message["role"]
        given: str = message["content"]
        content = STRIPS[strip](STRIPS[self.strip[role]](given))
        after = self.history.after
        if role == "assistant" and history and after is not None and after in content:
            content = STRIPS[self.history.strip](content.rpartition(after)[2])
        for texts in self.refuse[role]:
            if _holds(given, texts) if texts else not content:
                raise Refusal(
                    f"the template treats {role} messages that {refused(texts)} in a special way"
                )
        return content

    def given(self, messages: Sequence[Message]) -> list[Message]:
        """What its template is to be given for the same prompt: messages that call have no blank
        content, and only those behind the last user message have reasoning, if any."""
        last = last_user(messages)
        return [self._given(message, i > last) for i, message in enumerate(messages)]

    def known_calls(self) -> Calls:
        """Raises Refusal, where there are none."""
        if self.calls is None:
            raise Refusal("the template does not know calls of tools")
        if isinstance(self.calls, Refusal):
            raise self.calls
        return self.calls

    def _given(self, message: Message, later: bool) -> Message:
        said = dict(message)
        thought = said.pop("reasoning_content", None) or ""
        if later and self.reasoning is not None and thought.strip():
            said["reasoning_content"] = thought
        if calls := calls_of(message):
            said["content"] = message["content"] if message["content"].strip() else ""
            said["tool_calls"] = [self.known_calls().given(call) for call in calls]
        return said

    def _check(self, messages: Sequence[Message]) -> None:
        check_turns(messages)
        if messages[0]["role"] == "system" and isinstance(self.system, Refusal):
            raise self.system
        if messages[-1]["role"] == "assistant" and self.end is None:
            raise Refusal("the template is not known for conversations that end with an answer")
        for message in messages:
            if calls_of(message) or message["role"] == "tool":
                self.known_calls().check(message)

    def _ending(self, kind: str) -> Text:
        if kind == "result":
            return self.known_calls().result_generation
        return self.generation if kind == "user" else self.end or ()

    def _parts(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Iterator[Part]:
        """In the order in which they are written."""
        system = messages[0]["role"] == "system"
        if system and self.system == "first":
            yield "system", self.shown(messages[0], history=False)
        if self.tools is not None and self.tools.place == "first":
            yield "tools", self.tools.written(tools)
        last = last_user(messages)
        looping = any(calls_of(message) for message in messages[last:])
        for i, message in enumerate(messages[system:], start=int(system)):
            match message["role"]:
                case "user":
                    yield from self._tools_before(message, messages[last], tools)
                    if i == last and system and self._system_before_last(messages):
                        yield "system", self.shown(messages[0], history=False)
                    yield "user", self.shown(message, history=False)
                case "tool":
                    yield "result", self.known_calls().written_result(message)
                case _:
                    yield from self._said(message, history=i < last, looping=looping and i > last)

    def _tools_before(
        self, message: Message, last: Message, tools: Sequence[Tool]
    ) -> Iterator[Part]:
        if self.tools is None or self.tools.place != "last_user":
            return
        repeated = self.tools.equal_users == "repeated" and message["content"] == last["content"]
        if message is last or repeated:
            yield "tools", self.tools.written(tools)

    def _system_before_last(self, messages: Sequence[Message]) -> bool:
        """Whether it is written there."""
        dropped = messages[-1]["role"] == "tool" and self.known_calls().system == "dropped"
        return self.system == "last_user" and not dropped

    def _said(self, message: Message, history: bool, looping: bool) -> Iterator[Part]:
        """What the assistant said, and calls. `looping`: between a call and the answer to come."""
        after, content = self.history.after, message["content"]
        if looping and after is not None and after in content:
            raise Refusal(
                f"the template treats {after!r} in messages among calls in a special way: give the"
                " thinking as the message's reasoning"
            )
        strip = "none"
        thought = "" if history else message.get("reasoning_content") or ""
        if self.reasoning is not None and thought.strip():
            strip = self.reasoning.content_strip
            yield "reasoning", STRIPS[self.reasoning.strip](thought)
        calls = calls_of(message)
        if not calls:
            yield "assistant", self.shown(message, history, strip)
        elif content.strip() and (mode := self.known_calls().content) != "dropped":
            shown = self.shown(message, history, strip)
            if shown or mode == "kept":
                yield "assistant", shown
        for call in calls:
            yield "call", self.known_calls().written(call)


def refused(texts: Sequence[str]) -> str:
    """What contents do that hold these."""
    return f"hold {' and then '.join(map(repr, texts))}" if texts else "are empty"


def _text(texts: Mapping[str, Text], key: str, now: Now) -> str:
    if key not in texts:
        before, _, kind = key.rpartition(" ")
        raise Refusal(
            f"the template is not known for {kind} {f'behind {before}' if before else 'first'}"
        )
    return written(texts[key], now)


def _holds(content: str, texts: Sequence[str]) -> bool:
    """Whether they follow each other in it."""
    begin = 0
    for text in texts:
        found = content.find(text, begin)
        if found < 0:
            return False
        begin = found + len(text)
    return True
