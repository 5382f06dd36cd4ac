"""What the lines of a file of problems say, in the format of each benchmark.

    own         {"problem" or "question": ..., "answer": ...}      put into the template
                {"prompt": ..., "answer": ...}                     a prompt as it stands
                either with "choices": [...], and an index or a letter as the answer
    mmlu        {"question": ..., "choices": [...], "answer": ..., "subject": ...}; or CSV
    longbench   {"input": ..., "context": ..., "answers": [...], "dataset": ..., "all_classes": ...}
    ruler       {"input": ..., "outputs": [...], "answer_prefix": ...}
    lm-eval     {"doc": ..., "target": ..., "arguments": ...}, of `lm_eval --log_samples`

MMLU's lines are own ones with choices. "answers", a list, serves for "answer": each of them is right.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from epikv.eval import forms
from epikv.eval.forms import LETTERS, Measure
from epikv.eval.longbench import DATA_SETS, DataSet
from epikv.eval.measures import contains

Fields = Mapping[str, Any]

TEMPLATE = "{problem}\n\nReason step by step, and put your final answer within \\boxed{}.\n\n"  # the last line break begins the reasoning
PLAIN = "{problem}\n\n"  # where it is said how answers are read
CHOICES = "{subject}{problem}\n{choices}\nAnswer:"
CONTEXT = "{context}\n\n{input}\n\n"
_SUBJECT = "The following are multiple choice questions (with answers) about {}.\n\n"
_SLOT = re.compile(r"\{(problem|question|choices|subject|context|input)\}")


@dataclass(frozen=True)
class Line:
    """A problem, before it is known how its answer is to be read."""

    prompt: str
    answers: tuple[str, ...]
    measure: Measure | None = forms.boxed  # unless the options say another; None: they have to
    measure_name: str = ""  # "": that of plans that do not name it
    each: bool = False  # whether all answers are asked for, not one of them
    choices: tuple[str, ...] = ()
    continuations: tuple[str, ...] = ()  # of the choices
    right: int = 0  # of the choices
    most_tokens: int | None = None
    stop_strings: tuple[str, ...] = ()
    id: str | None = None  # None: the line's number


@dataclass(frozen=True)
class Place:
    """Where a line stands, and what the options say of its prompt."""

    path: Path
    template: str | Mapping[str, str] | None = None  # by data set, where there are several
    boxed: bool = True  # whether an answer is asked for in a box

    @property
    def lettered(self) -> bool:
        """Whether prompts that are made show the choices with their letters."""
        return self.template is None or "{choices}" in self.template

    def fill(self, default: str, name: str, slots: Mapping[str, str]) -> str:
        """The prompt. name: of the data set. Raises ValueError where the templates have none."""
        template = default if self.template is None else self.template
        if not isinstance(template, str):
            if name not in template:
                raise ValueError(f"--template has no prompt called '{name}'")
            template = template[name]
        return _SLOT.sub(lambda slot: slots.get(slot[1], slot[0]), template)


def detect(fields: Fields) -> str:
    """The format of a line."""
    if {"arguments", "target", "doc"} <= fields.keys():
        return "lm-eval"
    if {"context", "input", "answers"} <= fields.keys():
        return "longbench"
    if {"input", "outputs"} <= fields.keys():
        return "ruler"
    return "own"


def own(fields: Fields, at: Place) -> Line:
    name = fields.get("id", fields.get("unique_id"))
    name = None if name is None else str(name)
    choices = _texts(fields, "choices") if "choices" in fields else ()
    prompt = fields.get("prompt")
    lettered = prompt is None and at.lettered
    if prompt is None:
        prompt = _asked(fields, choices, at)
    if not isinstance(prompt, str) or not prompt:
        raise ValueError("prompt is not a text")
    if choices:
        return _chosen(prompt, choices, fields.get("answer"), lettered, name)
    answers = _texts(fields, "answers") if "answers" in fields else (_answer(fields),)
    return Line(prompt, tuple(map(_without_work, answers)), id=name)


def _asked(fields: Fields, choices: Sequence[str], at: Place) -> str:
    """The prompt that the template makes of a problem."""
    problem = fields.get("problem", fields.get("question"))
    if not isinstance(problem, str) or not problem.strip():
        raise ValueError("needs a text called problem, question or prompt")
    if not choices:
        default = TEMPLATE if at.boxed else PLAIN
        return at.fill(default, "", {"problem": problem, "question": problem})
    subject = fields.get("subject")
    slots = {
        "problem": problem.strip(),
        "question": problem.strip(),
        "choices": "\n".join(map("{}. {}".format, LETTERS, choices)),
        "subject": _SUBJECT.format(subject.replace("_", " ")) if subject else "",
    }
    return at.fill(CHOICES, "", slots)


def _chosen(
    prompt: str, choices: Sequence[str], answer: object, lettered: bool, name: str | None
) -> Line:
    """lettered: the prompt shows the choices with their letters, and a letter follows it."""
    if not 2 <= len(choices) <= len(LETTERS):
        raise ValueError(f"there are 2 to {len(LETTERS)} choices, not {len(choices)}")
    letters = LETTERS[: len(choices)]
    if isinstance(answer, int) and not isinstance(answer, bool) and 0 <= answer < len(choices):
        answer = letters[answer]
    if not isinstance(answer, str) or len(answer) != 1 or answer not in letters:
        raise ValueError(
            f"needs an answer, an index below {len(choices)} or a letter to {letters[-1]}"
        )
    shown = tuple(letters if lettered else choices)
    behind = _behind(prompt, shown)
    right = letters.index(answer)
    return Line(prompt, (answer,), choices=shown, continuations=behind, right=right, id=name)


def longbench(fields: Fields, at: Place) -> Line:
    name = str(fields.get("dataset", at.path.stem)).removesuffix("_e")
    data = DATA_SETS.get(name, DataSet())
    slots = {key: _text(fields, key) for key in ("context", "input")}
    classes = tuple(fields.get("all_classes") or ())
    return Line(
        at.fill(CONTEXT, name, slots),
        _texts(fields, "answers"),
        data.measured(classes),
        name,
        most_tokens=data.most_tokens,
    )


def ruler(fields: Fields, at: Place) -> Line:
    """Each of the outputs is asked for; of its task `qa` one of them. The task is the name of the file,
    or of the folder in which validation.jsonl is."""
    task = at.path.stem if at.path.stem != "validation" else at.path.parent.name
    one = task.startswith("qa")
    return Line(
        _text(fields, "input") + str(fields.get("answer_prefix", "")),
        _texts(fields, "outputs"),
        contains,
        "string_match_part" if one else "string_match_all",
        each=not one,
    )


def lm_eval(fields: Fields, at: Place) -> Line:
    """Requests of log-probabilities are choices; a completion is compared with the target."""
    if "arguments" not in fields or "target" not in fields:
        raise ValueError("needs arguments and a target, as those of `lm_eval --log_samples`")
    arguments = fields["arguments"]
    if isinstance(arguments, dict):
        arguments = [[*each.values()] for each in arguments.values()]
    try:
        prompt, more = arguments[0][0], [each[1] for each in arguments]
        contexts = {each[0] for each in arguments}
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError("arguments are not pairs of a context and what follows it") from error
    name, target = fields.get("doc_id"), str(fields["target"])
    name = None if name is None else str(name)
    if isinstance(more[0], dict):
        until = more[0].get("until") or ()
        ends = [until] if isinstance(until, str) else until
        return Line(
            prompt,
            (_without_work(target),),
            forms.boxed_or_all,
            "boxed or all",
            most_tokens=more[0].get("max_gen_toks"),
            stop_strings=tuple(end for end in ends if end),
            id=name,
        )
    if len(contexts) > 1:
        raise ValueError("the choices stand behind different contexts, which is not read")
    if not target.isdecimal() or not int(target) < len(more):
        raise ValueError(f"the target '{target}' is not the index of one of {len(more)} choices")
    choices, right = tuple(text.removeprefix(" ") for text in more), int(target)
    return Line(
        prompt,
        (choices[right],),
        choices=choices,
        continuations=tuple(more),
        right=right,
        id=name,
    )


READERS: dict[str, Callable[[Fields, Place], Line]] = {
    "own": own,
    "mmlu": own,
    "longbench": longbench,
    "ruler": ruler,
    "lm-eval": lm_eval,
}


def _text(fields: Fields, name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ValueError(f"needs a text called {name}")
    return value


def _texts(fields: Fields, name: str) -> tuple[str, ...]:
    value = fields.get(name)
    if not isinstance(value, list) or not value or not all(map(_told, value)):
        raise ValueError(f"needs a list of texts called {name}")
    return tuple(map(str, value))


def _answer(fields: Fields) -> str:
    value = fields.get("answer")
    if not _told(value):
        raise ValueError("needs an answer, a text or a number")
    return str(value)


def _told(value: object) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool) and value != ""


def _without_work(answer: str) -> str:
    """Of an answer that shows its work (GSM8K), what stands behind `####`."""
    return answer.rpartition("####")[2].strip() if "####" in answer else answer


def _behind(prompt: str, choices: Sequence[str]) -> tuple[str, ...]:
    """With a space before each, where there is none."""
    return tuple(
        choice if prompt[-1:].isspace() or choice[:1].isspace() else f" {choice}"
        for choice in choices
    )
