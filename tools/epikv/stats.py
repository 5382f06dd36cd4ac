"""Intervals and tests that benches and evaluations share. All are 95 % and repeatable."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, sqrt
from statistics import median
from typing import Any

RESAMPLES = 2000
Z = 1.96


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; of an exact count, the interval is the value."""

    value: float
    low: float
    high: float

    @classmethod
    def exact(cls, value: float) -> "Estimate":
        return cls(value, value, value)


def bootstrap(
    samples: Sequence[Any], statistic: Callable[[Sequence[Any]], float] = median
) -> Estimate:
    """The statistic of independent samples, with its percentile-bootstrap interval.

    Samples that belong together (a baseline and its pair) go in as one tuple.
    """
    draw = random.Random(0)
    resampled = sorted(statistic(draw.choices(samples, k=len(samples))) for _ in range(RESAMPLES))
    low, high = (resampled[round(share * (RESAMPLES - 1))] for share in (0.025, 0.975))
    return Estimate(statistic(samples), low, high)


def wilson(hits: float, count: int) -> Estimate:
    """A share with its Wilson score interval. hits: a mean over repetitions need not be whole."""
    share = hits / count
    centre = share + Z * Z / (2 * count)
    margin = Z * sqrt(share * (1 - share) / count + Z * Z / (4 * count * count))
    scale = 1 + Z * Z / count
    return Estimate(share, max(0.0, (centre - margin) / scale), min(1.0, (centre + margin) / scale))


@lru_cache(maxsize=4)
def _drawn(size: int) -> Any:
    """How often each resample has each of `size` problems, as an array: [RESAMPLES, size]. Its products are
    einsum's, which starts no threads."""
    import numpy as np

    draw = np.random.default_rng(0).integers(size, size=(RESAMPLES, size))
    draw += size * np.arange(RESAMPLES)[:, None]
    counts = np.bincount(draw.ravel(), minlength=draw.size).reshape(draw.shape)
    return counts.astype(float)


def difference(more: Sequence[float], less: Sequence[float]) -> Estimate:
    """Of the means of two figures of the same problems, with its bootstrap over problems."""
    import numpy as np

    gains = np.subtract(more, less)
    means = np.einsum("ri,i->r", _drawn(len(gains)), gains.astype(float)) / len(gains)
    low, high = np.quantile(means, (0.025, 0.975))
    return Estimate(float(gains.mean()), float(low), float(high))


def ratio(more: Sequence[float], less: Sequence[float]) -> Estimate:
    """Of the sums of two figures of the same problems, with its bootstrap over problems. The second
    sum is positive."""
    import numpy as np

    pairs = np.array([more, less], dtype=float)
    above, below = np.einsum("pi,ri->pr", pairs, _drawn(pairs.shape[1]))
    drawn = above[below > 0] / below[below > 0]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return Estimate(float(pairs[0].sum() / pairs[1].sum()), float(low), float(high))


def sign_test(more: Sequence[float], less: Sequence[float]) -> float:
    """The exact two-sided p of as many problems on which one is ahead, if neither is better.

    Of problems that are solved or not, this is McNemar's exact test.
    """
    ahead = sum(a > b for a, b in zip(more, less, strict=True))
    behind = sum(a < b for a, b in zip(more, less, strict=True))
    n = ahead + behind
    tail = sum(comb(n, k) for k in range(min(ahead, behind) + 1))
    return min(1.0, 2 * tail / 2**n)
