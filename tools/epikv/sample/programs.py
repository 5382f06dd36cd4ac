"""Step-by-step modular arithmetic programs: what is read late was itself worked out.

A prompt lists assignments and asks for three variables; the trace works through the lines in order.
Every line quotes the values of its operands, which appear only earlier *in the trace*, so evicting
the wrong token breaks everything downstream:

    prompt  <bos> #0 $m = 8 + 9 #1 $y = 4 + 1 #2 $n = $y + $m ... ask $v $j $c <think>
    trace   #0 $m = 8 + 9 : 8 9 so $m 7 . check 8 + 9 = 7 ok good until here now ... done #0 . ...
            </think> answer $v 1 $j 6 $c 2 <eos>
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from epikv.sample.problem import Problem, Role, Writer
from epikv.sample.vocabulary import BOS, DIGITS, MODULUS, STEPS, THINK, VARIABLES

ASKED = 3
CONSTANT_PROBABILITY = 0.35
MAX_LINES = len(VARIABLES)


@dataclass(frozen=True)
class Line:
    """One assignment `target = left + right`; an operand is a variable or a digit."""

    target: str
    operands: tuple[str, str]


def program(seed: int | str, lines: int = 18, first_step: int = 0) -> Problem:
    """The program of so many lines that belongs to `seed`, the same on every machine.

    first_step: the label of its first line.
    """
    if not 2 <= lines <= MAX_LINES:
        raise ValueError(f"a program has 2 to {MAX_LINES} lines, not {lines}")
    rng = random.Random(f"problem/{seed}/{lines}")
    names = rng.sample(VARIABLES, lines)
    assignments: list[Line] = []
    uses = dict.fromkeys(names, 0)
    for i, name in enumerate(names):
        operands = _draw_operands(rng, names[:i], uses)
        for operand in operands:
            if operand in uses:
                uses[operand] += 1
        assignments.append(Line(name, operands))
    asked = tuple(rng.sample(names, min(ASKED, lines)))
    values = _evaluate(assignments)
    labels = STEPS[first_step : first_step + lines]
    listing = (
        f"{label} {line.target} = {line.operands[0]} + {line.operands[1]}"
        for label, line in zip(labels, assignments, strict=True)
    )
    prompt = " ".join([BOS, *listing, "ask", *asked, THINK])
    answers = {name: values[name] for name in asked}

    writer = Writer()
    for step, line in enumerate(assignments, first_step):
        _solve(writer, step, line, values)
    writer.answer(answers)
    return Problem("programs", prompt, answers, tuple(writer.tokens))


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


def _solve(writer: Writer, step: int, line: Line, values: dict[str, int]) -> None:
    target, (left, right) = line.target, line.operands
    writer.say(Role.STEP, STEPS[step], target)
    writer.say(Role.COPY, f"{target} = {left} + {right} :", target)
    terms = []
    for operand in line.operands:
        terms.append(values[operand] if operand in values else int(operand))
        if operand in values:
            writer.say(Role.OPERAND_NAME, operand, operand)
            writer.say(Role.OPERAND, str(terms[-1]), operand)
        else:
            writer.say(Role.CONSTANT, operand, target)
    writer.result(step, target, (terms[0], terms[1]), values[target])
