"""Which candidates are measured, on how many problems, and which of them are certified.

First an exploration, on problems that decide nothing later: all policies at the middle budget, then the best of them
at each budget by successive halving (Jamieson and Talwalkar, 2016). What is left, one policy a budget, is a chain from
the largest budget to the smallest. Then the chain is certified on problems of its own (risk.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, sqrt
from typing import Protocol

from epikv.advise.risk import Wager, certified

FIRST = 8  # problems of the first round; each round has as many as all before it
FINALISTS = 8  # policies that are tried at every budget
BATCH = 32  # problems between two looks at what is certified
HOPELESS = 3.0  # standard errors above what is allowed


@dataclass(frozen=True, order=True)
class Candidate:
    budget: int  # tokens of KV cache, the prompt included
    policy: str  # an arm's label


class Measure(Protocol):
    """Runs problems, which have numbers."""

    def losses(self, candidate: Candidate, problems: range) -> Sequence[float]:
        """What each problem loses against the full cache, from -1 to 1. The same at each call."""

    def prepare(self, candidates: Sequence[Candidate], problems: range) -> bool:
        """Runs what `losses` is going to be asked of. False: time was up, and less than that is there."""

    def cost(self, candidate: Candidate) -> tuple[float, ...]:
        """Of what was run so far. Decides between policies that lose the same; the least is best."""


@dataclass
class Link:
    """One of the chain."""

    candidate: Candidate
    losses: list[float]  # of the problems that certify
    explored: Sequence[float]
    evidence: float  # log of the wager's largest capital
    certified: bool = False
    hopeless: bool = False


@dataclass
class Found:
    """What a search came to."""

    explored: dict[Candidate, list[float]] = field(default_factory=dict)  # all that was measured
    chain: list[Link] = field(default_factory=list)  # from the largest budget to the smallest
    in_time: bool = True


def search(
    measure: Measure,
    candidates: Sequence[Candidate],
    explore: int,
    problems: int,
    most: float,
    confidence: float,
) -> Found:
    """Problems from 0 to `explore` choose, those from there to `problems` certify.

    most: the mean loss that is allowed.
    """
    found = Found()
    left = _explore(measure, candidates, explore, found)
    for candidate in sorted(left, reverse=True):
        losses = found.explored[candidate]
        if not _hopeless(losses, most):
            found.chain.append(Link(candidate, [], losses, 0.0))
    _certify(measure, range(explore, problems), most, confidence, found)
    return found


def _explore(
    measure: Measure, candidates: Sequence[Candidate], explore: int, found: Found
) -> list[Candidate]:
    """One policy of each budget."""
    first = range(min(FIRST, explore))

    def run(some: Sequence[Candidate], problems: range) -> bool:
        found.in_time = measure.prepare(some, problems)
        if found.in_time:
            for candidate in some:
                losses = measure.losses(candidate, problems)
                found.explored.setdefault(candidate, []).extend(losses)
        return found.in_time

    budgets = sorted({candidate.budget for candidate in candidates})
    middle = [each for each in candidates if each.budget == budgets[len(budgets) // 2]]
    if not run(middle, first):
        return []
    middle.sort(key=lambda each: _merit(measure, each, found.explored))
    best = {candidate.policy for candidate in middle[:FINALISTS]}
    left = [each for each in candidates if each.policy in best]
    if not run([each for each in left if each not in found.explored], first):
        left = [each for each in left if each in found.explored]
    done = len(first)
    while done < explore and found.in_time:
        left = _halved(measure, left, found.explored)
        upto = min(2 * done, explore)
        if not run(left, range(done, upto)):
            break
        done = upto
    there = [candidate for candidate in left if candidate in found.explored]
    while len({candidate.budget for candidate in there}) < len(there):
        there = _halved(measure, there, found.explored)
    return there


def _halved(
    measure: Measure, left: Sequence[Candidate], explored: Mapping[Candidate, Sequence[float]]
) -> list[Candidate]:
    """Of each budget the better half."""
    kept: list[Candidate] = []
    for budget in {candidate.budget for candidate in left}:
        here = [candidate for candidate in left if candidate.budget == budget]
        here.sort(key=lambda each: _merit(measure, each, explored))
        kept += here[: ceil(len(here) / 2)]
    return kept


def _merit(
    measure: Measure, candidate: Candidate, explored: Mapping[Candidate, Sequence[float]]
) -> tuple[object, ...]:
    """The best has the least."""
    return (_mean(explored[candidate]), measure.cost(candidate), candidate.policy)


def _certify(
    measure: Measure, problems: range, most: float, confidence: float, found: Found
) -> None:
    wagers = {link.candidate: Wager(most, prior=link.explored) for link in found.chain}
    for begin in range(problems.start, problems.stop, BATCH):
        batch = range(begin, min(begin + BATCH, problems.stop))
        open_links = [
            link
            for link in found.chain
            if not link.hopeless and not wagers[link.candidate].certified(confidence)
        ]
        if not open_links:
            break
        if not measure.prepare([link.candidate for link in open_links], batch):
            found.in_time = False
            break
        for link in open_links:
            for loss in measure.losses(link.candidate, batch):
                link.losses.append(loss)
                wagers[link.candidate].add(loss)
            link.evidence = wagers[link.candidate].best
            link.hopeless = _hopeless(link.losses, most)
        # What stands behind one that is given up can be certified no more.
        given_up = False
        for link in found.chain:
            given_up = given_up or link.hopeless
            link.hopeless = given_up
    count = certified([wagers[link.candidate] for link in found.chain], confidence)
    for link in found.chain[:count]:
        link.certified = True


def _mean(losses: Sequence[float]) -> float:
    return sum(losses) / len(losses)


def _hopeless(losses: Sequence[float], most: float) -> bool:
    """Whether the losses speak clearly against it: to go on is not worth the time."""
    mean = _mean(losses)
    variance = sum((loss - mean) ** 2 for loss in losses) / len(losses)
    # Of few problems the spread is not known: as if one more had lost.
    spread = sqrt((variance + (1 - mean) ** 2 / (len(losses) + 1)) / len(losses))
    return mean - HOPELESS * spread > most
