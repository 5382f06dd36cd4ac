"""What a search measures, chooses and certifies, in worlds whose truths are known."""

import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from epikv.advise.search import FINALISTS, FIRST, Candidate, Explored, Found, search

PROBLEMS, EXPLORE = 564, 64
POLICIES = "abcdefghijklmnop"
BUDGETS = (500, 300, 200, 100)


class World:
    """Losses are drawn: of each candidate by its own mean, and `gains` both ways."""

    def __init__(self, truth: Mapping[Candidate, float], seed: int = 0, gains: float = 0.0) -> None:
        dice = np.random.default_rng(seed)
        self.truth, self.gains = dict(truth), gains
        self.drawn = {candidate: dice.random(PROBLEMS) for candidate in truth}
        self.asked: list[tuple[Candidate, int]] = []
        self.stops_at = 1 << 30
        self.last = PROBLEMS  # where batches may not begin any more
        self.kept: Explored | None = None

    def prepare(self, candidates: Sequence[Candidate], problems: range) -> bool:
        if len(self.asked) >= self.stops_at or problems.start >= self.last:
            return False
        self.asked += [(each, problem) for each in candidates for problem in problems]
        return True

    def losses(self, candidate: Candidate, problems: range) -> list[float]:
        at = self.drawn[candidate][problems.start : problems.stop]
        lost = self.truth[candidate] + self.gains
        drawn: list[float] = np.where(
            at < lost, 1.0, np.where(at < lost + self.gains, -1.0, 0.0)
        ).tolist()
        return drawn

    def cost(self, candidate: Candidate) -> tuple[float, ...]:
        return (candidate.budget / 1000,)

    def explored(self) -> Explored | None:
        return self.kept

    def keep(self, explored: Explored) -> None:
        assert self.kept is None
        self.kept = explored


def world(means: Sequence[float], seed: int = 0, gains: float = 0.0) -> World:
    dice = random.Random(seed)
    truth = {Candidate(b, p): dice.choice(means) for b in BUDGETS for p in POLICIES}
    return World(truth, seed, gains)


def run(of: World, most: float = 0.02) -> Found:
    return search(of, list(of.truth), EXPLORE, PROBLEMS, most, 0.95)


@pytest.mark.parametrize(
    ("means", "gains", "repetitions"),
    [([0.0201], 0.0, 1000), ([0.0201], 0.01, 1000), ([0.0, 0.005, 0.0201, 0.03], 0.0, 200)],
)
def test_a_certificate_is_wrong_one_time_in_twenty_at_the_most(
    means: list[float], gains: float, repetitions: int
) -> None:
    """Over all that was tried and all that is certified."""
    wrong = 0
    for seed in range(repetitions):
        tried = world(means, seed, gains)
        chain = run(tried).chain
        wrong += any(link.certified and tried.truth[link.candidate] > 0.02 for link in chain)
    assert wrong <= 0.05 * repetitions


def test_what_is_good_is_found() -> None:
    truth = {
        Candidate(b, p): 0.0 if p == "c" and b > 100 else 0.3 for b in BUDGETS for p in POLICIES
    }
    found = run(World(truth))
    assert [link.candidate for link in found.chain if link.certified] == [
        Candidate(500, "c"), Candidate(300, "c"), Candidate(200, "c")
    ]  # fmt: skip


def test_what_chose_does_not_certify() -> None:
    tried = world([0.0, 0.005])
    found = run(tried)
    chosen = {problem for candidate, problem in tried.asked if problem < EXPLORE}
    assert chosen == set(range(EXPLORE))
    for link in found.chain:
        asked = [problem for candidate, problem in tried.asked if candidate == link.candidate]
        assert len(link.losses) == sum(problem >= EXPLORE for problem in asked)
        assert len(asked) == len(set(asked))


def test_few_are_tried_at_every_budget() -> None:
    tried = world([0.0, 0.1, 0.3])
    run(tried)
    first = {candidate for candidate, problem in tried.asked if problem < FIRST}
    assert (
        len({each.policy for each in first if each.budget != 300 and each.budget != 200})
        == FINALISTS
    )
    assert len(first) == len(POLICIES) + FINALISTS * (len(BUDGETS) - 1)


@pytest.mark.parametrize("stops_at", [1, 200, 900])
def test_time_that_runs_out_leaves_what_is_certified_true(stops_at: int) -> None:
    tried = world([0.0])
    tried.stops_at = stops_at
    found = run(tried)
    assert not found.in_time
    for link in found.chain:
        assert link.certified == (link.evidence >= np.log(20))


def test_a_chain_that_has_begun_to_certify_is_kept() -> None:
    """Also where another would be chosen now."""
    tried = world([0.0, 0.1, 0.3])
    tried.last = EXPLORE + 1  # one batch certifies
    before = [link.candidate for link in run(tried).chain]
    tried.last = PROBLEMS
    for candidate in before:
        tried.truth[candidate] = 0.02
    after = run(tried)
    assert [link.candidate for link in after.chain] == before and after.in_time
    assert max(problem for _, problem in tried.asked) > EXPLORE + 32


def test_a_chain_that_certified_nothing_yet_may_change() -> None:
    tried = world([0.0, 0.1, 0.3])
    tried.last = EXPLORE
    assert not run(tried).in_time and tried.kept is None


def test_no_time_at_all_finds_nothing() -> None:
    tried = world([0.0])
    tried.stops_at = 0
    found = run(tried)
    assert not found.in_time and not found.chain and not found.explored


def test_what_saves_no_memory_is_left_out() -> None:
    truth = {Candidate(b, p): 0.0 if p == "a" else 0.01 for b in BUDGETS for p in POLICIES}
    tried = World(truth)
    tried.cost = lambda candidate: (1.0 if candidate.policy == "a" else 0.5,)  # type: ignore[method-assign]
    found = run(tried)
    assert found.chain and all(link.candidate.policy != "a" for link in found.chain)


def test_what_loses_little_is_told_apart_at_smaller_budgets() -> None:
    truth = {
        Candidate(b, p): 0.0 if b > 100 else 0.3 if p == "c" else 0.9
        for b in BUDGETS
        for p in POLICIES
    }
    found = run(World(truth))
    assert [link.candidate for link in found.chain] == [
        Candidate(500, "c"), Candidate(300, "c"), Candidate(200, "c")
    ]  # fmt: skip
