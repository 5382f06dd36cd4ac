"""Which candidates are measured, on how many problems, and which of them are certified.

First an exploration, on problems that decide nothing later: all policies at the middle budget, then the best of them
at each budget by successive halving (Jamieson and Talwalkar, 2016). What is left, one policy a budget, is a chain from
the largest budget to the smallest. Then the chain is certified on problems of its own (risk.py).
"""

from collections.abc import Callable, Mapping, Sequence
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
        """What each problem loses against the full cache, from -1 to 1, of those that the full cache answers. The same
        at each call."""

    def prepare(self, candidates: Sequence[Candidate], problems: range) -> bool:
        """Runs what `losses` is going to be asked of. False: time was up, and less than that is there."""

    def cost(self, candidate: Candidate) -> tuple[float, ...]:
        """Of what was run so far: memory over that of the full cache, and more. Decides between policies that lose the
        same; the least is best."""

    def explored(self) -> "Explored | None":
        """What an exploration of this study has come to before; None: nothing yet."""

    def keep(self, explored: "Explored") -> None:
        """For good: a chain that changed after a look at what certifies it would be another test."""


@dataclass
class Link:
    """One of the chain."""

    candidate: Candidate
    losses: list[float]  # of the problems that certify
    problems: range  # those
    explored: Sequence[float]
    evidence: float  # log of the wager's largest capital
    certified: bool = False
    hopeless: bool = False


@dataclass
class Explored:
    """What an exploration came to."""

    losses: dict[Candidate, list[float]] = field(default_factory=dict)  # all that was measured
    chain: list[Candidate] = field(default_factory=list)  # from the largest budget to the smallest


@dataclass
class Found:
    """What a search came to."""

    explored: dict[Candidate, list[float]]  # all that was measured to choose
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
    kept = measure.explored()
    explored, in_time = (kept, True) if kept else _explore(measure, candidates, explore)
    found = Found(explored.losses, in_time=in_time)
    for candidate in explored.chain:
        losses = explored.losses[candidate]
        if losses and not _hopeless(losses, most):
            found.chain.append(Link(candidate, [], range(explore, explore), losses, 0.0))
    keep = (lambda: None) if kept else (lambda: measure.keep(explored))
    _certify(measure, range(explore, problems), most, confidence, found, keep)
    return found


def _explore(
    measure: Measure, candidates: Sequence[Candidate], explore: int
) -> tuple[Explored, bool]:
    """And whether there was time for all of it."""
    found = Explored()
    first = range(min(FIRST, explore))

    def run(some: Sequence[Candidate], problems: range) -> bool:
        if not measure.prepare(some, problems):
            return False
        for candidate in some:
            losses = measure.losses(candidate, problems)
            found.losses.setdefault(candidate, []).extend(losses)
        return True

    budgets = sorted({candidate.budget for candidate in candidates})
    middle = [each for each in candidates if each.budget == budgets[len(budgets) // 2]]
    if not run(middle, first):
        return found, False
    middle.sort(key=lambda each: _merit(measure, each, found.losses))
    best = {candidate.policy for candidate in middle[:FINALISTS]}
    left = [each for each in candidates if each.policy in best]
    in_time = run([each for each in left if each not in found.losses], first)
    left = [each for each in left if each in found.losses]
    done = len(first)
    while in_time and done < explore:
        left = _halved(measure, left, found.losses)
        upto = min(2 * done, explore)
        in_time = run(left, range(done, upto))
        done = upto
    # What saves no memory is no better than the full cache.
    left = [each for each in left if measure.cost(each)[0] < 1]
    while len({candidate.budget for candidate in left}) < len(left):
        left = _halved(measure, left, found.losses)
    found.chain = sorted(left, reverse=True)
    return found, in_time


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
    """The best has the least. Few problems do not tell policies apart that lose little: what they lose at the other
    budgets does."""
    cost = measure.cost(candidate)
    anywhere = [_mean(losses) for of, losses in explored.items() if of.policy == candidate.policy]
    return (cost[0] >= 1, _mean(explored[candidate]), _mean(anywhere), cost, candidate.policy)


def _certify(
    measure: Measure,
    problems: range,
    most: float,
    confidence: float,
    found: Found,
    keep: Callable[[], None],
) -> None:
    """keep: is called before the first loss that certifies is looked at."""
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
        if begin == problems.start:
            keep()
        for link in open_links:
            link.problems = range(problems.start, batch.stop)
            for loss in measure.losses(link.candidate, batch):
                link.losses.append(loss)
                wagers[link.candidate].add(loss)
            link.evidence = wagers[link.candidate].best
            link.hopeless = bool(link.losses) and _hopeless(link.losses, most)
        # What stands behind one that is given up can be certified no more.
        given_up = False
        for link in found.chain:
            given_up = given_up or link.hopeless
            link.hopeless = given_up
    count = certified([wagers[link.candidate] for link in found.chain], confidence)
    for link in found.chain[:count]:
        link.certified = True


def _mean(losses: Sequence[float]) -> float:
    """Of none: the worst there is."""
    return sum(losses) / len(losses) if losses else 1.0


def _hopeless(losses: Sequence[float], most: float) -> bool:
    """Whether the losses speak clearly against it: to go on is not worth the time."""
    mean = _mean(losses)
    variance = sum((loss - mean) ** 2 for loss in losses) / len(losses)
    # Of few problems the spread is not known: as if one more had lost.
    spread = sqrt((variance + (1 - mean) ** 2 / (len(losses) + 1)) / len(losses))
    return mean - HOPELESS * spread > most
