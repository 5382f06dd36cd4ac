"""The task families of the sample model, and the lengths it is trained and tested at."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from epikv.sample.problem import Problem
from epikv.sample.programs import program
from epikv.sample.totals import alarms, ledger, passcode
from epikv.sample.vocabulary import MAX_STEPS


@dataclass(frozen=True)
class Family:
    """One kind of problem. Lengths are lines of a trace, of 18 to 35 tokens each."""

    name: str
    make: Callable[[int | str, int, int], Problem]  # of a seed, lines and first step
    first: int  # lines at which training starts
    trained: range  # lengths of training, but for those held out
    held_out: tuple[int, ...]  # two among the trained ones, and one beyond them
    tested: int  # lines of a test problem, unless said otherwise

    def lengths(self, most: int) -> list[int]:
        """Those of training up to so many lines."""
        return [n for n in self.trained if n <= most and n not in self.held_out]

    def draw(self, seed: str, most: int) -> Problem:
        """A training problem of up to so many lines, its labels starting anywhere."""
        rng = random.Random(f"draw/{self.name}/{seed}")
        lines = rng.choice(self.lengths(most))
        return self.make(seed, lines, rng.randint(0, MAX_STEPS - lines))


FAMILIES = {
    family.name: family
    for family in (
        Family("programs", program, 4, range(2, 21), (9, 14, 24), 18),
        Family("passcode", passcode, 6, range(5, 33), (13, 22, 34), 18),
        Family("ledger", ledger, 6, range(5, 23), (9, 14, 26), 18),
        Family("alarms", alarms, 6, range(5, 33), (13, 22, 34), 18),
    )
}


def problem(seed: int | str, family: str = "programs", lines: int | None = None) -> Problem:
    """The problem of a family and length that belongs to `seed`, the same on every machine."""
    kind = FAMILIES[family]
    return kind.make(seed, lines or kind.tested, 0)
