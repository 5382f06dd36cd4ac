"""What a second look at what was dropped is worth, where the next token is uncertain (KvTier.doubt): tables of the page
of claims, made of claims-doubt.jsonl and claims-needles.jsonl in each seed's folder."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
from epikv.eval.plan import FROZEN, FULL, ORACLE
from epikv.sample.families import problem
from epikv.sample.problem import Role
from epikv.stats import difference, ratio

from epikv_lab.sample.measure import DOUBTING, DOUBTS, EVALUATIONS, FETCH, SLACK, varied
from epikv_lab.sample.scores import (
    NOT_RUN,
    Score,
    budgets_of,
    share,
    signed,
    solved,
    table_row,
)

DOUBT, NEEDLES = "claims-doubt", "claims-needles"
PERIOD = SLACK + 1  # tokens from one round to the next
SHUFFLES = 2000
QUARTERS = ("first", "second", "third", "last")

Scores = Mapping[str, Sequence[Score]]  # by seed
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Needle:
    """A fact that is told once, and asked for at the end."""

    quarter: int  # of the trace, in which it is told
    phase: int  # tokens since the last round, from 0


def needles(count: int, split: str, kept: float) -> list[Needle]:
    """Of the first so many ledgers, part by part. kept: share of the trace that the budget holds beside the prompt."""
    found = []
    for number in range(count):
        task = problem(f"{split}/{number}", "ledger")
        trace = task.trace_tokens
        told = {t.name: at for at, t in enumerate(trace) if t.role == Role.DEFINITION}
        room = round(kept * len(trace))
        for name in task.answers:
            at = told[name]
            found.append(Needle(len(QUARTERS) * at // len(trace), (at - room) % PERIOD))
    return found


def doubts(scores: Scores, fetching: Scores) -> str:
    """What each arm solves, and with a tier that it looks at in doubt; and how often it does. fetching: scores of the
    same problems with FETCH, at each step."""
    if not scores:
        return NOT_RUN
    pooled = [score for found in scores.values() for score in found]
    [budget] = budgets_of(pooled)
    nats = [f"{variant['tier_doubt']:g}" for variant in DOUBTS]
    titles = [title for n in nats for title in (f"doubt above {n}", "gain", "steps run twice")]
    titles.append(f"{FETCH['tier_fetch']} tokens at each step")
    lines = [table_row("policy", budget, *titles), table_row(*["---"] * (2 + len(titles)))]
    at_each = [score for seed, found in fetching.items() if seed in scores for score in found]
    for arm in DOUBTING:
        plain = solved(pooled, arm, budget)
        cells = [share(plain)]
        for variant in DOUBTS:
            name = varied(arm, variant)
            with_tier = solved(pooled, name, budget)
            gain = difference(with_tier, plain)
            twice = [score.doubted for score in pooled if score.arm == name]
            of_cells = f"{fmean(twice):.1%} ({min(twice):.1%} to {max(twice):.1%})"
            cells += [share(with_tier), signed(gain), of_cells]
        fetched = solved(at_each, varied(arm, FETCH), budget)
        cells.append(share(fetched) if fetched else "not run")
        lines.append(table_row(f"`{arm}`", *cells))
    count = len(solved(pooled, DOUBTING[0], budget))
    note = (
        f"Problems: {count}, the same {count // len(scores)} on each model ({', '.join(scores)}). In brackets behind"
        " steps run twice: of one family on one model, the least and the most."
    )
    return "\n".join([*lines, "", note])


def found_needles(scores: Scores) -> str:
    """Share of facts that each arm tells, by model, by where in the trace they stand, and by their phase."""
    if not scores:
        return NOT_RUN
    of = EVALUATIONS[NEEDLES]
    [kept] = of.budgets
    facts = needles(of.problems, of.split, kept)
    [variant] = of.variants
    arms = [FULL, ORACLE, FROZEN, *(arm for a in DOUBTING for arm in (a, varied(a, variant)))]
    titles = [
        *scores,
        *(f"{quarter} quarter" for quarter in QUARTERS),
        *("worst phase", "best phase", "p"),
    ]
    lines = [table_row("policy", "all", *titles), table_row(*["---"] * (2 + len(titles)))]
    quarters = np.array([fact.quarter for fact in facts])
    phases = np.array([fact.phase for fact in facts])
    for arm in arms:
        parts = [score.parts for found in scores.values() for score in found if score.arm == arm]
        hits = np.array([[int(digit) for digit in digits] for digits in parts])  # [seeds, facts]
        by_fact = hits.mean(axis=0)
        by_problem = by_fact.reshape(of.problems, -1).sum(axis=1)
        told = ratio(by_problem.tolist(), [len(facts) / of.problems] * of.problems)
        by_phase = [by_fact[phases == phase].mean() for phase in range(PERIOD)]
        lines.append(
            table_row(
                f"`{arm.split()[0]}` in doubt" if " " in arm else f"`{arm}`",
                f"{told.value:.2f} [{told.low:.2f}, {told.high:.2f}]",
                *(f"{seed:.2f}" for seed in hits.mean(axis=1)),
                *(f"{by_fact[quarters == each].mean():.2f}" for each in range(len(QUARTERS))),
                f"{min(by_phase):.2f}",
                f"{max(by_phase):.2f}",
                f"{same_phases(by_fact, phases, quarters):.2g}",
            )
        )
    note = (
        f"Facts: {len(facts)} of {of.problems} problems, the same on each model; a quarter of the trace has"
        f" {np.bincount(quarters).min()} and a phase {np.bincount(phases).min()} at least. Intervals: of these models,"
        f" over problems. Doubt: above {variant['tier_doubt']:g}. p: that phases do not matter, by {SHUFFLES} shuffles"
        " of the facts' phases, beside what their quarter explains."
    )
    return "\n".join([*lines, "", note])


def same_phases(shares: Array, phases: Array, quarters: Array) -> float:
    """How likely shares of facts scatter over phases as widely as they do, if these do not matter."""
    beside = shares - np.array([shares[quarters == each].mean() for each in quarters])

    def scatter(shuffled: Array) -> float:
        counts = np.bincount(shuffled, minlength=PERIOD)
        return float((np.bincount(shuffled, beside, PERIOD) ** 2 / counts).sum())

    draw = np.random.default_rng(0)
    wider = sum(
        scatter(draw.permutation(phases)) >= scatter(phases) - 1e-12 for _ in range(SHUFFLES)
    )
    return (1 + wider) / (1 + SHUFFLES)
