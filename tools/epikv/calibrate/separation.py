"""How well numbers tell needed tokens from others, by trace; and how well they would by chance.

Chance is the labels of each trace turned round its circle: runs of needed tokens stay runs, signals
stay as smooth as they are, and what connects the two is gone.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from epikv.calibrate.signals import Bools, Floats, pair_scores, rolling


@dataclass(frozen=True)
class Case:
    """One trace: its steps, and what is known of its candidates, the first of its tokens."""

    task: str
    steps: Floats  # [layers - 1, at least candidates]; without the last layer
    needed: Bools  # [candidates]
    keep: int  # how many candidates the budget has room for

    @property
    def share(self) -> float:
        """Of the candidates that are kept: the recall of random eviction."""
        return self.keep / len(self.needed)

    def usable(self, least: int) -> bool:
        """Whether something is evicted, and there are so many tokens of either kind."""
        positives = int(self.needed.sum())
        return (
            0 < self.keep < len(self.needed)
            and min(positives, len(self.needed) - positives) >= least
        )


@dataclass(frozen=True)
class Measured:
    """Statistics of N traces, by what is made of steps: "raw" (the step), "mean" (its rolling mean),
    "z" (its rolling z-score, the one that serves), "z_in_place" (that, without what the token's
    place alone explains), each of every layer; "pair", the difference of two layers' z-scores."""

    auc: Mapping[str, Floats]  # [N, layers or pairs]
    recall: Mapping[str, Floats]  # of the highest, then of the lowest. [N, 2 * layers or pairs]
    share: Floats  # of candidates that are kept: the recall of random eviction. [N]
    tasks: list[str]

    def of(self, task: str) -> NDArray[np.intp]:
        """Its rows."""
        return np.flatnonzero([name == task for name in self.tasks])


@dataclass(frozen=True)
class Chance:
    """Means over traces under S random turns, the same turn for all columns."""

    z: Floats  # AUC. [S, layers]
    recall: Floats  # of pairs. [S, 2 * pairs]


def measure(cases: Sequence[Case], window: int) -> Measured:
    auc: dict[str, list[Floats]] = defaultdict(list)
    recall: dict[str, list[Floats]] = defaultdict(list)
    for case in cases:
        of = values(case, window)
        for name, each in (of | {"z_in_place": _without_place(of["z"])}).items():
            auc[name].append(aucs(each, case.needed))
            recall[name].append(_kept_by_sign(each, case.keep)[:, case.needed].mean(1))
    return Measured(
        {name: np.array(rows) for name, rows in auc.items()},
        {name: np.array(rows) for name, rows in recall.items()},
        np.array([case.share for case in cases]),
        [case.task for case in cases],
    )


def by_chance(cases: Sequence[Case], window: int, turns: int, seed: int) -> Chance:
    draw = np.random.default_rng(seed)
    z_sum: Floats | float = 0.0
    recall_sum: Floats | float = 0.0
    for case in cases:
        of = values(case, window)
        kept = _kept_by_sign(of["pair"], case.keep)
        by = draw.integers(len(case.needed), size=turns)
        z_sum = z_sum + turned_aucs(of["z"], case.needed)[:, by]
        recall_sum = recall_sum + turned_recalls(kept, case.needed)[:, by]
    return Chance(np.asarray(z_sum).T / len(cases), np.asarray(recall_sum).T / len(cases))


def values(case: Case, window: int) -> dict[str, Floats]:
    """Steps, rolling means, z-scores and pairs' scores of the candidates. [layers or pairs, T]"""
    mean, z = (each[:, : len(case.needed)] for each in rolling(case.steps, window))
    raw = case.steps[:, : len(case.needed)]
    return {"raw": raw, "mean": mean, "z": z, "pair": pair_scores(z)}


def aucs(values: Floats, needed: Bools) -> Floats:
    """The chance that a needed token has a higher value than another, ties counting half.
    values [n, T], needed [T], of both kinds -> [n]"""
    positives = int(needed.sum())
    ranks = rankdata(values, axis=1)[:, needed].sum(1)
    return (ranks - positives * (positives + 1) / 2) / (positives * (len(needed) - positives))


def turned_aucs(values: Floats, needed: Bools) -> Floats:
    """`aucs` with the labels turned by 0, 1, ... T - 1 tokens. [n, T]"""
    positives = int(needed.sum())
    ranks = _correlate(rankdata(values, axis=1), needed)
    return (ranks - positives * (positives + 1) / 2) / (positives * (len(needed) - positives))


def turned_recalls(kept: Bools, needed: Bools) -> Floats:
    """The share of needed tokens among `kept` [n, T], the labels turned as above. [n, T]"""
    return _correlate(kept.astype(np.float64), needed) / needed.sum()


def keepers(values: Floats, count: int) -> Bools:
    """Which tokens a frozen score keeps: the highest, the newer of equals. [n, T] -> [n, T]"""
    if count == 0:
        return np.zeros(values.shape, bool)
    lowest = np.partition(values, values.shape[1] - count, axis=1)[:, [values.shape[1] - count]]
    kept, equal = values > lowest, values == lowest
    newer = np.cumsum(equal[:, ::-1], axis=1)[:, ::-1]  # of equals, those from here on
    return kept | (equal & (newer <= count - kept.sum(1, keepdims=True)))


def pooled_correlation(cases: Sequence[Case], window: int) -> dict[str, list[float]]:
    """Spearman's, of each layer's variants with the label over all traces' candidates in one pot:
    only to compare with published figures."""
    label = rankdata(np.concatenate([case.needed for case in cases]))
    of = [values(case, window) for case in cases]
    return {
        name: [
            float(np.corrcoef(rankdata(row), label)[0, 1])
            for row in np.hstack([each[name] for each in of])
        ]
        for name in ("raw", "mean", "z")
    }


def _kept_by_sign(values: Floats, count: int) -> Bools:
    return np.concatenate([keepers(values, count), keepers(-values, count)])


def _without_place(values: Floats) -> Floats:
    """Ranks, less the straight line through them over the trace."""
    ranks = rankdata(values, axis=1)
    ranks -= ranks.mean(1, keepdims=True)
    place = np.arange(values.shape[1]) - (values.shape[1] - 1) / 2
    return ranks - np.outer(ranks @ place / (place @ place), place)


def _correlate(values: Floats, needed: Bools) -> Floats:
    """sum_t values[t + s] needed[t] for every turn s. [n, T]"""
    spectrum = np.fft.rfft(values, axis=1) * np.fft.rfft(needed.astype(np.float64)).conj()
    return np.fft.irfft(spectrum, n=len(needed), axis=1)
