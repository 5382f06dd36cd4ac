"""How well numbers tell needed tokens from others, by trace; and how well they would by chance.

Chance is the labels of each trace turned round its circle: runs of needed tokens stay runs, signals
stay as smooth as they are, and what connects the two is gone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
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
    """Statistics of N traces; columns are layers, pairs, or pairs with sign 1 and then with -1."""

    raw: Floats  # AUC of each layer's step. [N, layers]
    mean: Floats  # AUC of its rolling mean
    z: Floats  # AUC of its rolling z-score, the one that serves
    z_in_place: Floats  # the same after taking out what the token's place alone explains
    pair: Floats  # AUC of each pair's difference of z-scores. [N, pairs]
    recall: Floats  # share of needed tokens that its score keeps. [N, 2 * pairs]
    share: Floats  # of candidates that are kept. [N]


@dataclass(frozen=True)
class Chance:
    """Means over traces under S random turns, the same turn for all columns."""

    z: Floats  # [S, layers]
    recall: Floats  # [S, 2 * pairs]


def measure(cases: Sequence[Case], window: int) -> Measured:
    rows = []
    for case in cases:
        raw, mean, z, pair = _values(case, window)
        rows.append(
            (
                aucs(raw, case.needed),
                aucs(mean, case.needed),
                aucs(z, case.needed),
                aucs(_without_place(z), case.needed),
                aucs(pair, case.needed),
                _kept_by_sign(pair, case.keep)[:, case.needed].mean(1),
                case.share,
            )
        )
    return Measured(*(np.array(column) for column in zip(*rows, strict=True)))


def by_chance(cases: Sequence[Case], window: int, turns: int, seed: int) -> Chance:
    draw = np.random.default_rng(seed)
    z_sum, recall_sum = 0.0, 0.0
    for case in cases:
        _, _, z, pair = _values(case, window)
        by = draw.integers(len(case.needed), size=turns)
        z_sum = z_sum + turned_aucs(z, case.needed)[:, by]
        recall_sum = recall_sum + turned_recalls(_kept_by_sign(pair, case.keep), case.needed)[:, by]
    return Chance(np.asarray(z_sum).T / len(cases), np.asarray(recall_sum).T / len(cases))


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
    order = np.argsort(values, axis=1, kind="stable")
    kept = np.zeros(values.shape, bool)
    np.put_along_axis(kept, order[:, values.shape[1] - count :], True, axis=1)
    return kept


def pooled_correlation(cases: Sequence[Case], window: int) -> dict[str, list[float]]:
    """Spearman's, of each layer's variants with the label over all traces' candidates in one pot:
    only to compare with published figures."""
    label = np.concatenate([case.needed for case in cases]).astype(np.float64)
    columns = zip(*(_values(case, window)[:3] for case in cases), strict=True)
    return {
        name: [
            float(np.corrcoef(rankdata(row), rankdata(label))[0, 1]) for row in np.hstack(values)
        ]
        for name, values in zip(("raw", "mean", "z"), columns, strict=True)
    }


def _values(case: Case, window: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Steps, rolling means, z-scores and pairs' scores of the candidates. [layers or pairs, T]"""
    mean, z = rolling(case.steps, window)
    count = len(case.needed)
    z = z[:, :count]
    return case.steps[:, :count], mean[:, :count], z, pair_scores(z)


def _kept_by_sign(pair: Floats, count: int) -> Bools:
    return np.concatenate([keepers(pair, count), keepers(-pair, count)])


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
