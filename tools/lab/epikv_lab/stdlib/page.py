"""The generated parts of tools/lab/TEXT.md, from what `train` and `judge` left in tools/lab/text."""

import json
from collections.abc import Callable
from statistics import fmean

import numpy as np
from epikv.stats import Estimate, bootstrap
from scipy.stats import rankdata

from epikv_lab.sample.measure import MODELS, scores_of
from epikv_lab.sample.scores import NOT_RUN, solved, table_row
from epikv_lab.stdlib import judge

PAGE = MODELS.parent / "lab" / "TEXT.md"
FOLDER = MODELS.parent / "lab" / "text"
CURVE_POINTS = 9  # columns


def parts() -> dict[str, Callable[[], str]]:
    return {
        "text-costs": lambda: _costs("costs.jsonl"),
        "text-doubt": lambda: _costs("doubt.jsonl"),
        "text-carries": _carries,
        "text-curve": _curve,
    }


def _costs(name: str) -> str:
    return judge.table(judge.costs(FOLDER / name)).rstrip()


def _carries() -> str:
    """Whether a policy that costs little here solves much in the tournament."""
    found = judge.costs(FOLDER / "costs.jsonl")
    lines = [table_row("budget", "policies in both", "Spearman's"), table_row(*["---"] * 3)]
    for share in judge.SHARES:
        here = judge.ranking(found, round(share * (judge.PROMPT + judge.FORCED)))
        there = _solved(f"{100 * share:.0f}%")
        pairs = [(-here[arm], there[arm]) for arm in here if arm in there]
        if not pairs:
            return NOT_RUN
        told = bootstrap(pairs, lambda drawn: spearman(*zip(*drawn, strict=True)))
        lines.append(table_row(f"{share:.0%}", str(len(pairs)), _shown(told)))
    return "\n".join(lines)


def _solved(budget: str) -> dict[str, float]:
    """The share of problems that each arm of the tournament solves, all seeds and families together."""
    scores = [score for of_seed in scores_of("tournament").values() for score in of_seed]
    arms = dict.fromkeys(score.arm for score in scores)
    return {arm: fmean(hits) for arm in arms if (hits := solved(scores, arm, budget))}


def spearman(first: tuple[float, ...], second: tuple[float, ...]) -> float:
    """Of two figures of the same things; equal ones share their ranks. 0 where all are equal."""
    ranks = rankdata([first, second], axis=1)
    if np.ptp(ranks, axis=1).min() == 0:
        return 0.0
    return float(np.corrcoef(ranks)[0, 1])


def _shown(of: Estimate) -> str:
    return f"{of.value:.2f} [{of.low:.2f}, {of.high:.2f}]"


def _curve() -> str:
    """Loss of the training, at some lines of the log and the last; and by place in a window."""
    read = [json.loads(line) for line in (FOLDER / "log.jsonl").read_text().splitlines()]
    rows = [
        read[i] for i in np.linspace(0, len(read) - 1, min(len(read), CURVE_POINTS)).astype(int)
    ]
    lines = [
        table_row("million tokens", *(f"{row['tokens'] / 1e6:.1f}" for row in rows)),
        table_row(*["---"] * (len(rows) + 1)),
        table_row("training loss", *(f"{row['loss']:.2f}" for row in rows)),
        table_row("validation loss", *(f"{row['validation']:.2f}" for row in rows)),
    ]
    for part in rows[-1]["by_position"]:
        said = (f"{row['by_position'][part]:.2f}" for row in rows)
        lines.append(table_row(f"of its places {part}", *said))
    return "\n".join(lines)
