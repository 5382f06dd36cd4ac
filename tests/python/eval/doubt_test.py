"""Needles of the page of claims: where a fact stands, and when rounds come."""

import numpy as np
from epikv.eval import requests
from epikv.eval.results import Record
from epikv.eval.tasks import load
from epikv.sample.families import problem
from epikv_lab.sample.doubt import (
    DOUBT,
    NEEDLES,
    PERIOD,
    doubts,
    found_needles,
    needles,
    same_phases,
)
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
    assert doubts({}, {}) == found_needles({}) == "Not yet run."


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
    at_each = [Score("t", "15%", "epikv_forecast tier_tokens=1280 tier_fetch=48", "11" * 20)]
    told = doubts({"seed6": found}, {"seed6": at_each, "not here": found}).splitlines()
    row = told[2].strip("| ").split(" | ")
    assert row[0] == "`epikv_forecast`"
    assert row[3:5] == ["+0.00 [+0.00, +0.00]", "1.0% (1.0% to 1.0%)"]
    assert row[6].startswith("+0.50 [") and row[7] == "5.0% (5.0% to 5.0%)"
    assert row[8].startswith("1.00 [")
    assert told[3].endswith("| not run |")
    assert DOUBT in EVALUATIONS


def test_phases_matter_where_they_do() -> None:
    phases, quarters = np.arange(320) % PERIOD, np.arange(320) // 80
    early = (phases < 4).astype(float)
    assert same_phases(early, phases, quarters) < 0.001
    assert same_phases(quarters / 4, phases, quarters) == 1, "what a quarter explains is no phase's"
    chance = np.random.default_rng(1).integers(0, 2, (40, 320)).astype(float)
    ps = [same_phases(shares, phases, quarters) for shares in chance[:10]]
    assert min(ps) > 0.005
