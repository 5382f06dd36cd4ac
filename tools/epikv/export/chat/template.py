"""A checkpoint's chat template, rendered as transformers renders it.

A template is a stranger's program: it runs in transformers' sandbox, in a bounded number of steps.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from transformers.utils import chat_template_utils

from epikv.export.chat.conversation import Message, Tool, offered
from epikv.export.chat.text import Now, Refusal

STEPS = 200_000  # bodies of loops, macros and blocks that one rendering enters
_TAG = r"((?<!\w)[<\[]((?:\w*(?:think|reason)\w*)|THINK|REASON\w*)[>\]])"
_THINKING = ("enable_thinking", "thinking")  # variables by which templates are told


class Template:
    """Raises Refusal of a source that does not compile."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        """`tokens`: the special tokens by the names templates know, as `bos_token`."""
        try:
            # Not through apply_chat_template: it does not let the clock be set.
            environment = chat_template_utils._compile_jinja_template(source).environment
            self._tree = environment.parse(source)
            self._compiled, self._steps = _bounded(environment, source)
        except jinja2.TemplateSyntaxError as error:
            raise Refusal(
                f"the template does not compile: line {error.lineno}: {error.message}"
            ) from error
        except RecursionError as error:
            raise Refusal("the template does not compile: it is nested too deeply") from error
        self.source = source
        self._tokens = dict(tokens)

    def render(
        self,
        messages: Sequence[Message],
        now: Now,
        thinking: bool | None = None,
        tools: Sequence[Tool] = (),
    ) -> str:
        """With the generation prompt, unless the last message is the assistant's. Raises Refusal in
        the template's own words, where it has some."""
        said = {} if thinking is None else dict.fromkeys(_THINKING, thinking)
        self._steps.left = STEPS
        try:
            return self._compiled.render(
                messages=[dict(message) for message in messages],
                tools=[offered(tool) for tool in tools] or None,
                documents=None,
                add_generation_prompt=messages[-1]["role"] != "assistant",
                strftime_now=now,
                **self._tokens,
                **said,
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

    def knows(self, name: str) -> bool:
        """Or may: where not, it need not be asked."""
        return name in self.source

    def heeds_thinking(self) -> bool:
        return any(self.knows(name) for name in _THINKING)

    @cached_property
    def thinking_tags(self) -> tuple[str, str] | None:
        """Two tags of one name that it writes or looks for around thinking."""
        constants = self._tree.find_all(nodes.Const)
        texts = [node.value for node in constants if isinstance(node.value, str)]
        texts += [node.data for node in self._tree.find_all(nodes.TemplateData)]
        for opening, name in re.findall(_TAG, "\n".join(texts)):
            closing = opening.replace(name, f"/{name}")
            if any(closing in text for text in texts):
                return opening, closing
        return None

    @cached_property
    def deciding(self) -> list[str]:
        """String constants that it compares with, passes to functions or assigns: contents that
        hold one may be treated in a way of their own."""
        kinds = (nodes.Compare, nodes.Call, nodes.Filter, nodes.Test, nodes.Assign)
        found = {
            constant.value
            for node in self._tree.find_all(kinds)
            for constant in node.find_all(nodes.Const)
            if isinstance(constant.value, str) and len(constant.value) <= 40
        }
        return sorted(found)

    @cached_property
    def markup(self) -> list[str]:
        """Those of `deciding` that nobody writes by chance."""
        return [text for text in self.deciding if re.search(r"[^\w\s]", text) and len(text) >= 4]


class _Steps(Extension):
    """Counts the steps of a rendering, and ends it where they are too many."""

    left = STEPS

    @property
    def step(self) -> bool:
        """True. Raises Refusal."""
        self.left -= 1
        if self.left < 0:
            raise Refusal(f"the template does not end within {STEPS} steps")
        return True


def _bounded(environment: jinja2.Environment, source: str) -> tuple[jinja2.Template, _Steps]:
    """A template that counts its steps."""
    if _Steps.identifier not in environment.extensions:  # transformers has one for each source
        environment.add_extension(_Steps)
    steps = environment.extensions[_Steps.identifier]
    assert isinstance(steps, _Steps)
    tree = environment.parse(source)
    for node in list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))):
        assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock | nodes.Block)
        node.body.insert(0, nodes.ExprStmt(steps.attr("step")))
        if isinstance(node, nodes.For) and node.test is not None:
            node.test = nodes.And(steps.attr("step"), node.test)
    code = environment.compile(tree)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None)), steps
