"""A checkpoint's chat template, rendered as transformers renders it.

A template is a stranger's program: it runs in transformers' sandbox, in a bounded number of steps.
"""

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from types import FrameType
from typing import TYPE_CHECKING

import jinja2
from jinja2 import nodes
from transformers.utils import chat_template_utils

from epikv.export.chat.format import Message, Now, Refusal

if TYPE_CHECKING:
    from _typeshed import TraceFunction

STEPS = 1_000_000  # lines of the compiled template, of one rendering
_THINKING = ("enable_thinking", "thinking")  # variables by which templates are told


class Template:
    """Raises Refusal of a source that does not compile."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """`tokens`: the special tokens by the names templates know, as `bos_token`."""
        try:
            # Not through apply_chat_template: it does not let the clock be set.
            self._compiled = chat_template_utils._compile_jinja_template(source)
        except jinja2.TemplateSyntaxError as error:
            raise Refusal(
                f"the template does not compile: line {error.lineno}: {error.message}"
            ) from error
        except RecursionError as error:
            raise Refusal("the template does not compile: it is nested too deeply") from error
        self.source = source
        self._tokens = dict(tokens)

    def render(self, messages: Sequence[Message], now: Now, thinking: bool | None = None) -> str:
        """With the generation prompt after a last user message. Raises Refusal in the template's
        own words, where it has some."""
        said = {} if thinking is None else dict.fromkeys(_THINKING, thinking)
        try:
            return _bounded(
                lambda: self._compiled.render(
                    messages=[dict(message) for message in messages],
                    tools=None,
                    documents=None,
                    add_generation_prompt=messages[-1]["role"] == "user",
                    strftime_now=now,
                    **self._tokens,
                    **said,
                )
            )
        except Refusal:
            raise
        except Exception as error:  # a template may fail in any way
            own = type(error) is jinja2.TemplateError
            raise Refusal(
                f"the template says: {error}"
                if own
                else f"the template fails: {type(error).__name__}: {error}"
            ) from error

    def heeds_thinking(self) -> bool:
        """Or may: where not, it need not be asked."""
        return any(name in self.source for name in _THINKING)

    @cached_property
    def deciding(self) -> list[str]:
        """String constants that it compares with, passes to functions or assigns: contents that
        hold one may be treated in a way of their own."""
        tree = self._compiled.environment.parse(self.source)
        kinds = (nodes.Compare, nodes.Call, nodes.Filter, nodes.Test, nodes.Assign)
        found = {
            constant.value
            for node in tree.find_all(kinds)
            for constant in node.find_all(nodes.Const)
            if isinstance(constant.value, str) and len(constant.value) <= 40
        }
        return sorted(found)

    @property
    def markup(self) -> list[str]:
        """Those of `deciding` that nobody writes by chance."""
        return [text for text in self.deciding if re.search(r"[^\w\s]", text) and len(text) >= 4]


def _bounded(render: Callable[[], str]) -> str:
    left = STEPS

    def step(frame: FrameType, event: str, argument: object) -> "TraceFunction":
        nonlocal left
        left -= 1
        if left < 0:
            raise Refusal(f"the template does not end within {STEPS} steps")
        return step

    def enter(frame: FrameType, event: str, argument: object) -> "TraceFunction | None":
        return step if frame.f_code.co_filename == "<template>" else None

    previous = sys.gettrace()
    sys.settrace(enter)
    try:
        return render()
    finally:
        sys.settrace(previous)
