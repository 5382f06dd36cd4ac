"""Needles of the page of claims: where a fact stands, and when rounds come."""

from epikv.eval import requests
from epikv.eval.results import Record
from epikv.eval.tasks import load
from epikv.sample.families import problem
from epikv_lab.sample.doubt import DOUBT, NEEDLES, PERIOD, doubts, found_needles, needles
from epikv_lab.sample.measure import DOUBTING, EVALUATIONS, scores_of
from epikv_lab.sample.scores import Score


def test_a_phase_counts_from_the_last_round() -> None:
    """Rounds come as the cache exceeds budget + slack, and then every slack + 1 tokens."""
    [item, *_] = load("sample:ledger", "needles", 1)
    task = problem("needles/0", "ledger")
    prompt = len(task.prompt.split())
    full = Record("", "", "", "", 0, prompt_tokens=prompt)
    budget = requests.tokens("15%", item, full)
    found = needles(1, "needles", 0.15)
    assert len(found) == len(task.answers)
    for (name, _), needle in zip(task.answers.items(), found, strict=True):
        at = next(
            i
            for i, token in enumerate(task.trace_tokens)
            if token.name == name and token.role == "definition"
        )
        rounds = range(budget + PERIOD - 1, prompt + len(task.trace_tokens), PERIOD)  # newest index
        since = [prompt + at - newest - 1 for newest in rounds if newest < prompt + at]
        assert needle.phase == (min(since) if since else (prompt + at - budget) % PERIOD)
        assert needle.quarter == 4 * at // len(task.trace_tokens)


def test_what_is_kept_has_each_part() -> None:
    of = EVALUATIONS[NEEDLES]
    for found in scores_of(NEEDLES).values():
        assert {len(score.parts) for score in found} == {len(needles(of.problems, of.split, 0.15))}
        assert all(score.doubted > 0 for score in found if "tier_doubt" in score.arm)


def test_nothing_is_told_before_it_is_run() -> None:
    assert doubts({}) == found_needles({}) == "Not yet run."


def test_steps_that_ran_twice_are_told_beside_what_they_gain() -> None:
    found = [
        Score("t", "15%", f"{arm}{more}", hits * 20, doubted=twice)
        for arm in DOUBTING
        for more, hits, twice in (
            ("", "10", 0.0),
            (" tier_tokens=1280 tier_fetch=1280 tier_doubt=0.01", "10", 0.01),
            (" tier_tokens=1280 tier_fetch=1280 tier_doubt=0.001", "11", 0.05),
        )
    ]
    row = doubts({"seed6": found}).splitlines()[2].strip("| ").split(" | ")
    assert row[0] == "`epikv_forecast`"
    assert row[3:5] == ["+0.00 [+0.00, +0.00]", "1.0%"]
    assert row[6].startswith("+0.50 [") and row[7] == "5.0%"
    assert DOUBT in EVALUATIONS
