"""What a problem of the sample model is: a prompt, the trace that solves it, and its answers.

A trace is a function of its prompt, filler included, so greedy decoding reproduces it whole and
every error can be attributed to a token and its role.
"""

from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from epikv.sample.vocabulary import (
    DIGITS,
    END_THINK,
    EOS,
    NAME_PHRASES,
    NAMES,
    STEPS,
    VALUE_PHRASES,
)


class Role(StrEnum):
    """What a trace token is for. Evaluation and calibration group tokens by it."""

    STEP = "step"  # the label that opens a line
    COPY = "copy"  # what a line repeats of its prompt, up to the colon
    OPERAND_NAME = "operand_name"  # an operand's variable, just before its value
    OPERAND = "operand"  # the value of a variable operand, looked up in the trace
    CARRY = "carry"  # the result of the line before, quoted
    CONSTANT = "constant"  # the value of a constant operand, and signs beside it
    SO = "so"  # so, or total
    DEFINITION_NAME = "definition_name"  # the assigned name, just before its value
    DEFINITION = "definition"  # the value of the assigned name
    TOTAL = "total"  # a line's result that has no name
    END = "end"  # the full stop after a result
    CHECK = "check"  # words and signs of a check
    DECOY = "decoy"  # digits of a check: correct, but nothing needs them
    FILLER = "filler"
    DONE = "done"  # the words that close a line
    CONTROL = "control"  # </think>, answer, <eos>
    ANSWER_NAME = "answer_name"
    ANSWER = "answer"


@dataclass(frozen=True)
class Token:
    """One token of a trace: its word, role, and the name it is about, if any."""

    word: str
    role: Role
    name: str | None = None


@dataclass(frozen=True)
class Problem:
    """A prompt, the names it asks for with their values, and the trace that finds them."""

    family: str
    prompt: str
    answers: dict[str, int]
    trace_tokens: tuple[Token, ...]

    @property
    def trace(self) -> str:
        return " ".join(token.word for token in self.trace_tokens)

    def last_read(self) -> dict[str, int]:
        """Trace index at which each name's value is quoted for the last time."""
        readers = (Role.OPERAND, Role.ANSWER)
        return {t.name: i for i, t in enumerate(self.trace_tokens) if t.name and t.role in readers}

    def correct(self, generated: str) -> list[bool]:
        """Which asked names a completion answers rightly, scored by name, not by position."""
        given = parse_answers(generated)
        return [given.get(name) == value for name, value in self.answers.items()]


class Writer:
    """Writes a trace, word by word with roles."""

    def __init__(self) -> None:
        self.tokens: list[Token] = []

    def say(self, role: Role, words: str, name: str | None = None) -> None:
        self.tokens.extend(Token(word, role, name) for word in words.split())

    def result(self, step: int, name: str | None, terms: tuple[int, int], value: int) -> None:
        """The end of a line: its result, for odd ones a check, filler, and its closing words."""
        if name is None:
            self.say(Role.SO, "total")
            self.say(Role.TOTAL, str(value))
        else:
            self.say(Role.SO, "so", name)
            self.say(Role.DEFINITION_NAME, name, name)
            self.say(Role.DEFINITION, str(value), name)
        self.say(Role.END, ".", name)
        if value % 2:
            for word in f"check {terms[0]} + {terms[1]} = {value}".split():
                self.say(Role.DECOY if word in DIGITS else Role.CHECK, word, name)
        phrase = NAMES.index(name) if name is not None else step
        self.say(Role.FILLER, VALUE_PHRASES[value % len(VALUE_PHRASES)], name)
        self.say(Role.FILLER, NAME_PHRASES[phrase % len(NAME_PHRASES)], name)
        self.say(Role.DONE, f"done {STEPS[step]} .", name)

    def answer(self, answers: dict[str, int]) -> None:
        """The end of a trace."""
        self.say(Role.CONTROL, f"{END_THINK} answer")
        for name, value in answers.items():
            self.say(Role.ANSWER_NAME, name, name)
            self.say(Role.ANSWER, str(value), name)
        self.say(Role.CONTROL, EOS)


def parse_answers(generated: str) -> dict[str, int]:
    """The `name value` pairs between the last `answer` and the end, by name."""
    words = generated.split()
    if "answer" not in words:
        return {}
    tail = words[len(words) - words[::-1].index("answer") :]
    return {name: int(digit) for name, digit in pairwise(tail) if name in NAMES and digit in DIGITS}
