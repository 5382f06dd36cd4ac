"""Running totals modulo 10, some of them named: facts that are made once and read at the end.

A prompt lists numbers, the trace adds them up one line at a time, and lines that have a name in the
prompt give their total that name. No named total can be had from the prompt without adding up
everything before it. The families differ in which lines are named, and so in what must be kept:

    passcode  the first four lines; the rest is work that nothing refers to
    ledger    all lines; four of them are asked for, the others are distractors
    alarms    two to four lines anywhere among many without names: rare events

    prompt  <bos> log 5 #0 4 #1 2 #2 alarm first 7 #3 9 ... ask first second third <think>
    trace   #0 : 5 + 4 total 9 . that looks ... done #0 . ... #2 alarm first : 1 + 7 so first 8 . ...
            </think> answer first 8 second 3 third 0 <eos>
"""

import random
from collections.abc import Callable, Sequence

from epikv.sample.problem import Problem, Role, Writer
from epikv.sample.vocabulary import BOS, MAX_STEPS, MODULUS, ORDINALS, STEPS, THINK, VARIABLES

PASSCODE = 4  # digits
ASKED = 4  # of a ledger
ALARMS = (2, 4)

# Of each line the words before its number: none, a name, or a word and a name.
Labels = list[str]
Draw = Callable[[random.Random, int], tuple[Labels, Sequence[str]]]


def passcode(seed: int | str, lines: int = 18, first_step: int = 0) -> Problem:
    """Four totals named at the very start of the trace, asked for at its end."""

    def draw(rng: random.Random, lines: int) -> tuple[Labels, Sequence[str]]:
        labels = [f"passcode {name}" for name in ORDINALS[:PASSCODE]]
        return labels + [""] * (lines - PASSCODE), ORDINALS[:PASSCODE]

    return _problem("passcode", "passcode", seed, lines, first_step, PASSCODE + 1, draw)


def ledger(seed: int | str, lines: int = 18, first_step: int = 0) -> Problem:
    """Every total is an entry with a name of its own; four are asked for at the end."""
    if lines > len(VARIABLES):
        raise ValueError(f"a ledger has at most {len(VARIABLES)} lines, not {lines}")

    def draw(rng: random.Random, lines: int) -> tuple[Labels, Sequence[str]]:
        names = rng.sample(VARIABLES, lines)
        return list(names), rng.sample(names, ASKED)

    return _problem("ledger", "ledger", seed, lines, first_step, ASKED, draw)


def alarms(seed: int | str, lines: int = 18, first_step: int = 0) -> Problem:
    """Two to four totals named anywhere in a log, all asked for at the end."""

    def draw(rng: random.Random, lines: int) -> tuple[Labels, Sequence[str]]:
        names = ORDINALS[: rng.randint(*ALARMS)]
        labels = [""] * lines
        for at, name in zip(sorted(rng.sample(range(lines), len(names))), names, strict=True):
            labels[at] = f"alarm {name}"
        return labels, names

    return _problem("alarms", "log", seed, lines, first_step, ALARMS[1], draw)


def _problem(
    family: str,
    opening: str,
    seed: int | str,
    lines: int,
    first_step: int,
    fewest: int,
    draw: Draw,
) -> Problem:
    if not fewest <= lines <= MAX_STEPS:
        raise ValueError(f"{family} has {fewest} to {MAX_STEPS} lines, not {lines}")
    rng = random.Random(f"{family}/{seed}/{lines}")
    labels, asked = draw(rng, lines)
    total = rng.randrange(MODULUS)
    writer, prompt, values = Writer(), [BOS, opening, str(total)], {}
    for step, label in enumerate(labels, first_step):
        number = rng.randrange(MODULUS)
        name = label.split()[-1] if label else None
        prompt += [STEPS[step], *label.split(), str(number)]
        terms, total = (total, number), (total + number) % MODULUS
        if name is not None:
            values[name] = total
        writer.say(Role.STEP, STEPS[step], name)
        writer.say(Role.COPY, f"{label} :", name)
        writer.say(Role.CARRY, str(terms[0]), name)
        writer.say(Role.CONSTANT, f"+ {number}", name)
        writer.result(step, name, terms, total)
    answers = {name: values[name] for name in asked}
    writer.answer(answers)
    prompt += ["ask", *asked, THINK]
    return Problem(family, " ".join(prompt), answers, tuple(writer.tokens))
