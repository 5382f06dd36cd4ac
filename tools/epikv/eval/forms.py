"""How an answer is read from a text, and when it is the expected one.

A text is read by a regular expression or by the words before the answer; what is read is compared in
one of the ways of MATCHES, or by a function of the user's. Where neither is said, a file's format says
it (epikv.eval.formats).
"""

import hashlib
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import click

from epikv.eval.answers import extract, same
from epikv.eval.measures import contains, f1, rouge_l

# Of what is read of a text, and one expected answer: how right that is, from 0 to 1.
Measure: TypeAlias = Callable[[str, str], float]

FUNCTION = "right"  # of a file of the user's
LETTERS = string.ascii_uppercase[:10]  # that name choices
_PYTHON = "python:"
_SIGNED = re.compile(r"(?:(?<![\w.)\]])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")
# Not the pronoun: "I think".
_LETTER = re.compile(rf"(?<![A-Za-z0-9])(?!I(?:['’]| [a-z]))[{LETTERS}](?![A-Za-z0-9])")


class AnswerError(click.ClickException):
    """A function of the user's that does not judge."""


@dataclass(frozen=True)
class AnswerForm:
    """What the options say; None of all: as the file's format does."""

    regex: str | None = None  # its first group is the answer, in the last match that has one
    after: str | None = None  # the answer is the line behind the last of these
    match: str | None = None  # of MATCHES, or python:NAME
    function: Measure | None = None  # of python:NAME
    digest: str | None = None  # of that file

    @property
    def reads(self) -> bool:
        """Whether it says where in a text the answer is."""
        return self.regex is not None or self.after is not None

    @property
    def boxed(self) -> bool:
        """Whether answers are to stand in a box."""
        return not self.reads and self.match in (None, "math")

    def facts(self) -> dict[str, str]:
        """What plans and reports say of it: what was given."""
        given = {"regex": self.regex, "after": self.after, "match": self.match}
        return {k: v for k, v in {**given, "digest": self.digest}.items() if v is not None}

    def read(self, text: str) -> str | None:
        """The answer in a text, or all of it where the form says nothing of the place; None: none."""
        if self.regex is not None:
            found = [m[1] for m in re.finditer(self.regex, text) if m[1] is not None]
            return found[-1].strip() if found else None
        if self.after is not None:
            return next((line.strip() for line in self._behind(text) if line.strip()), None)
        return text

    def begins(self, text: str) -> int | None:
        """The character with which the last match, or the words before the answer, begin."""
        if self.regex is not None:
            starts = [m.start() for m in re.finditer(self.regex, text) if m[1] is not None]
            return starts[-1] if starts else None
        at = text.rfind(self.after) if self.after is not None else -1
        return at if at >= 0 else None

    def measure(self, default: Measure | None) -> Measure | None:
        """How what is read is compared. default: of the format, None where it has none."""
        if self.function is not None:
            return self.function
        match self.match:
            case None:
                return same if self.reads and default is boxed else default
            case "math" if not self.reads:
                return boxed
            case "number":
                return partial(number, last=not self.reads)
            case "choice":
                return partial(letter, last=not self.reads)
        return MATCHES[self.match]

    def _behind(self, text: str) -> list[str]:
        assert self.after is not None
        _, found, tail = text.rpartition(self.after)
        return tail.splitlines() if found else []


def form(
    regex: str | None = None, after: str | None = None, match: str | None = None
) -> AnswerForm:
    """Of what the options say. Raises click.UsageError or click.BadParameter that names the option."""
    if regex is not None and after is not None:
        raise click.UsageError("--answer-regex and --answer-after both say where: give one")
    if regex is not None:
        _check(regex)
    if after is not None and not after.strip():
        raise click.BadParameter("words are needed", param_hint="--answer-after")
    if match is not None and match.startswith(_PYTHON):
        return replace(_of_file(Path(match.removeprefix(_PYTHON))), regex=regex, after=after)
    if match is not None and match not in MATCHES:
        known = ", ".join(MATCHES)
        raise click.BadParameter(
            f"'{match}' is none of {known}, {_PYTHON}FILE", param_hint="--match"
        )
    return AnswerForm(regex, after, match)


def boxed(text: str, truth: str) -> bool:
    """Whether the last box of a text, or what follows its last `####`, is the answer."""
    return same(extract(text), truth)


def boxed_or_all(text: str, truth: str) -> bool:
    """As `boxed`; of a text that has neither, all of it."""
    return same(extract(text) or text, truth)


def exact(answer: str, truth: str) -> bool:
    """Whether both have the same words, whatever the spaces between them."""
    return answer.split() == truth.split()


def number(answer: str, truth: str, last: bool = False) -> bool:
    """Whether the first number, or the last, is that of the truth."""
    found, wanted = _SIGNED.findall(answer), _SIGNED.findall(truth)
    return bool(found and wanted) and _value(found[-1 if last else 0]) == _value(wanted[-1])


def letter(answer: str, truth: str, last: bool = False) -> bool:
    """Whether the first capital letter that stands alone, or the last, is that of the truth."""
    found = _LETTER.findall(answer)
    return bool(found) and found[-1 if last else 0] == truth.strip("() .")


MATCHES: dict[str, Measure] = {
    "math": same,
    "exact": exact,
    "number": number,
    "choice": letter,
    "contains": contains,
    "f1": f1,
    "rouge-l": rouge_l,
}


def misfit(match: str | None, truth: str) -> str | None:
    """Why no text can match an expected answer; None: one can."""
    if match == "number" and not _SIGNED.search(truth):
        return f"the answer '{truth}' has no number"
    if match == "choice" and truth.strip("() .") not in [*LETTERS]:
        return f"the answer '{truth}' is no letter from {LETTERS[0]} to {LETTERS[-1]}"
    return None


def _value(text: str) -> Decimal:
    return Decimal(text.replace(",", ""))


def _check(regex: str) -> None:
    try:
        groups = re.compile(regex).groups
    except re.error as error:
        raise click.BadParameter(f"'{regex}': {error}", param_hint="--answer-regex") from error
    if not groups:
        raise click.BadParameter(
            f"'{regex}' has no group: put what is the answer in parentheses",
            param_hint="--answer-regex",
        )


def _of_file(path: Path) -> AnswerForm:
    """Runs a file of the user's and takes its function."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise click.BadParameter(str(error), param_hint="--match") from error
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    try:
        exec(compile(source, path, "exec"), names)
    except Exception as error:
        raise click.BadParameter(
            f"{path} does not run: {type(error).__name__}: {error}", param_hint="--match"
        ) from error
    function = names.get(FUNCTION)
    if not callable(function):
        raise click.BadParameter(
            f"{path} has no function {FUNCTION}(output, answer)", param_hint="--match"
        )

    def measure(text: str, truth: str) -> float:
        try:
            value = function(text, truth)
        except Exception as error:
            raise AnswerError(
                f"{FUNCTION}() of {path} raised {type(error).__name__}: {error}"
            ) from error
        if not isinstance(value, bool | int | float) or not 0 <= value <= 1:
            raise AnswerError(f"{FUNCTION}() of {path} gave {value!r}: neither a bool nor 0 to 1")
        return float(value)

    digest = hashlib.sha256(source).hexdigest()[:16]
    return AnswerForm(match=f"{_PYTHON}{path.name}", function=measure, digest=digest)


def judge(
    asked: AnswerForm, measure: Measure, answers: Sequence[str], each: bool, problem: str
) -> Callable[[str], list[float]]:
    """How right a text is. each: every answer is asked for, and is a part; else any of them is right.

    problem: its name, for what a function of the user's raises.
    """

    def judged(text: str) -> list[float]:
        read = asked.read(text)
        if read is None:
            return [0.0] * (len(answers) if each else 1)
        try:
            values = [measure(read, answer) for answer in answers]
        except AnswerError as error:
            raise AnswerError(f"problem {problem}: {error.message}") from error
        return values if each else [max(values)]

    return judged
