"""Step-by-step modular arithmetic programs: the task of the sample model.

A prompt lists `n` assignments and asks for three variables; the trace works through the lines in
order. Every line quotes the values of its operands, which appear only earlier *in the trace*, so
evicting the wrong token breaks everything downstream:

    prompt  <bos> #0 $m = 8 + 9 #1 $y = 4 + 1 #2 $n = $y + $m ... ask $v $j $c <think>
    trace   #0 $m = 8 + 9 : 8 9 so $m 7 . check 8 + 9 = 7 ok good until here now ... done #0 . ...
            </think> answer $v 1 $j 6 $c 2 <eos>

Texts are words separated by single spaces, one token per word. Filler is a function of a line's
value and variable, so greedy decoding reproduces a whole trace and every error can be attributed.
"""

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

MODULUS = 10
ASKED = 3
CONSTANT_PROBABILITY = 0.35
RECALL_VARIABLES = (4, 24)

DIGITS = tuple(str(digit) for digit in range(MODULUS))
VARIABLES = tuple(f"${letter}" for letter in string.ascii_lowercase)
MAX_LINES = 24
STEPS = tuple(f"#{index}" for index in range(MAX_LINES))

# The first word of a phrase names it; the rest follows from the word before.
VALUE_PHRASES = (
    "yes i am sure of it",
    "that looks fine to me",
    "ok good until here",
    "right as it should be",
    "well this one was easy",
)
VARIABLE_PHRASES = (
    "now let us keep going",
    "we need to find all others too",
    "next comes another line",
    "then move on with the rest",
    "there is still more work left",
    "remember that for later",
    "take a look at what follows",
    "no reason for any pause",
)

PAD, UNK, BOS, EOS = "<pad>", "<unk>", "<bos>", "<eos>"
THINK, END_THINK = "<think>", "</think>"
SPECIALS = (PAD, UNK, BOS, EOS, THINK, END_THINK)
_FILLER = dict.fromkeys(word for p in VALUE_PHRASES + VARIABLE_PHRASES for word in p.split())
VOCABULARY = (
    *SPECIALS,
    *("ask", "answer", "so", "check", "done", "=", "+", ":", "."),
    *DIGITS,
    *VARIABLES,
    *STEPS,
    *_FILLER,
)
TOKEN_IDS = {word: index for index, word in enumerate(VOCABULARY)}


class Role(StrEnum):
    """What a trace token is for. Evaluation and calibration group tokens by it."""

    STEP = "step"  # the label that opens a line
    COPY = "copy"  # the assignment copied from the prompt, up to the colon
    OPERAND_NAME = "operand_name"  # an operand's variable, just before its value
    OPERAND = "operand"  # the value of a variable operand, looked up in the trace
    CONSTANT = "constant"  # the value of a constant operand
    SO = "so"
    DEFINITION_NAME = "definition_name"  # the assigned variable, just before its value
    DEFINITION = "definition"  # the value of the assigned variable
    DEFINITION_END = "definition_end"  # the full stop after it
    CHECK = "check"  # words and signs of a check
    DECOY = "decoy"  # digits of a check: correct, but nothing needs them
    FILLER = "filler"
    DONE = "done"  # the words that close a line
    CONTROL = "control"  # </think>, answer, <eos>
    ANSWER_NAME = "answer_name"
    ANSWER = "answer"


@dataclass(frozen=True)
class Token:
    """One token of a trace: its word, role, and the variable it is about, if any."""

    word: str
    role: Role
    variable: str | None = None


@dataclass(frozen=True)
class Line:
    """One assignment `target = left + right`; an operand is a variable or a digit."""

    target: str
    operands: tuple[str, str]


@dataclass(frozen=True)
class Problem:
    """A program, its prompt and the trace that solves it."""

    lines: tuple[Line, ...]
    asked: tuple[str, ...]
    values: dict[str, int]  # of every variable
    trace_tokens: tuple[Token, ...]

    @property
    def prompt(self) -> str:
        listing = (
            f"{STEPS[i]} {line.target} = {line.operands[0]} + {line.operands[1]}"
            for i, line in enumerate(self.lines)
        )
        return " ".join([BOS, *listing, "ask", *self.asked, THINK])

    @property
    def trace(self) -> str:
        return " ".join(token.word for token in self.trace_tokens)

    @property
    def answers(self) -> dict[str, int]:
        return {variable: self.values[variable] for variable in self.asked}

    def last_read(self) -> dict[str, int]:
        """Trace index at which each variable's value is quoted for the last time."""
        readers = (Role.OPERAND, Role.ANSWER)
        return {t.variable: i for i, t in enumerate(self.trace_tokens) if t.role in readers}

    def correct(self, generated: str) -> list[bool]:
        """Which asked variables a completion answers rightly, scored by name, not by position."""
        given = parse_answers(generated)
        return [given.get(variable) == value for variable, value in self.answers.items()]


def problem(seed: int | str, n: int = 18) -> Problem:
    """The problem of `n` assignments that belongs to `seed`, the same on every machine."""
    if not 2 <= n <= MAX_LINES:
        raise ValueError(f"a program has 2 to {MAX_LINES} lines, not {n}")
    rng = random.Random(f"problem/{seed}/{n}")
    names = rng.sample(VARIABLES, n)
    lines: list[Line] = []
    uses = dict.fromkeys(names, 0)
    for i, name in enumerate(names):
        operands = _draw_operands(rng, names[:i], uses)
        for operand in operands:
            if operand in uses:
                uses[operand] += 1
        lines.append(Line(name, operands))
    asked = tuple(rng.sample(names, min(ASKED, n)))
    values = _evaluate(lines)
    return Problem(tuple(lines), asked, values, tuple(_trace(lines, asked, values)))


def recall(seed: int | str) -> tuple[list[str], list[bool]]:
    """A sequence of dense associative recall in the final token format (training stage 0).

    Returns its words and, for each, whether it is the value of a variable quoted again.
    """
    rng = random.Random(f"recall/{seed}")
    names = rng.sample(VARIABLES, rng.randint(*RECALL_VARIABLES))
    words, is_recalled = [BOS, THINK], [False, False]
    values: dict[str, str] = {}
    for name in names:
        values[name] = rng.choice(DIGITS)
        words += ["so", name, values[name], "."]
        is_recalled += [False] * 4
        for quoted in rng.choices(list(values), k=rng.randint(0, 4)):
            words += [quoted, values[quoted]]
            is_recalled += [False, True]
    return words, is_recalled


def parse_answers(generated: str) -> dict[str, int]:
    """The `variable value` pairs between the last `answer` and the end, by variable."""
    words = generated.split()
    if "answer" not in words:
        return {}
    tail = words[len(words) - words[::-1].index("answer") :]
    pairs = pairwise(tail)
    return {name: int(digit) for name, digit in pairs if name in VARIABLES and digit in DIGITS}


def encode(text: str) -> list[int]:
    """Token ids of a text, as the saved tokenizer gives them."""
    return [TOKEN_IDS.get(word, TOKEN_IDS[UNK]) for word in text.split()]


def decode(ids: Sequence[int]) -> str:
    """The text of token ids."""
    return " ".join(VOCABULARY[i] for i in ids)


def _draw_operands(
    rng: random.Random, earlier: Sequence[str], uses: dict[str, int]
) -> tuple[str, str]:
    """Two operands. Variables little used so far are preferred, the line just before is not, so
    that references reach far back and most values are read once or twice."""
    weights = {name: 1 / (1 + 3 * uses[name]) for name in earlier}
    if earlier:
        weights[earlier[-1]] *= 0.3

    def draw() -> str:
        if len(earlier) < 2 or not weights or rng.random() < CONSTANT_PROBABILITY:
            return rng.choice(DIGITS)
        name = rng.choices(list(weights), list(weights.values()))[0]
        del weights[name]
        return name

    return draw(), draw()


def _evaluate(lines: Sequence[Line]) -> dict[str, int]:
    values: dict[str, int] = {}
    for line in lines:
        terms = (values[o] if o in values else int(o) for o in line.operands)
        values[line.target] = sum(terms) % MODULUS
    return values


def _trace(lines: Sequence[Line], asked: Sequence[str], values: dict[str, int]) -> list[Token]:
    tokens: list[Token] = []

    def say(role: Role, words: str, variable: str | None = None) -> None:
        tokens.extend(Token(word, role, variable) for word in words.split())

    for step, line in zip(STEPS, lines, strict=False):
        target, (left, right), value = line.target, line.operands, values[line.target]
        quoted = [str(values.get(operand, operand)) for operand in line.operands]
        say(Role.STEP, step, target)
        say(Role.COPY, f"{target} = {left} + {right} :", target)
        for operand, digit in zip(line.operands, quoted, strict=True):
            if operand in values:
                say(Role.OPERAND_NAME, operand, operand)
                say(Role.OPERAND, digit, operand)
            else:
                say(Role.CONSTANT, digit, target)
        say(Role.SO, "so", target)
        say(Role.DEFINITION_NAME, target, target)
        say(Role.DEFINITION, str(value), target)
        say(Role.DEFINITION_END, ".", target)
        if value % 2:
            for word in f"check {quoted[0]} + {quoted[1]} = {value}".split():
                say(Role.DECOY if word in DIGITS else Role.CHECK, word, target)
        say(Role.FILLER, VALUE_PHRASES[value % len(VALUE_PHRASES)], target)
        say(Role.FILLER, VARIABLE_PHRASES[VARIABLES.index(target) % len(VARIABLE_PHRASES)], target)
        say(Role.DONE, f"done {step} .", target)
    say(Role.CONTROL, f"{END_THINK} answer")
    for variable in asked:
        say(Role.ANSWER_NAME, variable, variable)
        say(Role.ANSWER, str(values[variable]), variable)
    say(Role.CONTROL, EOS)
    return tokens
