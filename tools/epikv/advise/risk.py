"""Certificates: "this arm loses at most so much, with this confidence", valid for any number of problems.

An arm (a policy at a budget) has one loss a problem, in [least, 1]. It is certified by a wager against the
hypothesis that its mean loss is above what is allowed: a gambler who starts with 1 and bets on small losses. If the
hypothesis holds, the capital reaches 1 / (1 - confidence) with a chance of at most 1 - confidence, whenever one looks
(Ville's inequality; Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting", 2024,
section 4). So one may stop at any time.

Several arms stand in a chain from the safest to the cheapest, in an order that was fixed before. Each is tested at the
full level, and those before the first that fails are certified: the chance that any certificate is wrong is at most
1 - confidence (fixed-sequence testing, as in Angelopoulos et al., "Learn then Test", 2022, section 3).

What fixed the chain and the bets, the exploration, must share no problem with what decides.
"""

from collections.abc import Sequence
from math import log

# Of the largest bet that cannot lose all: capital stays above 0.
MOST_OF_BET = 0.9
# Weight of what was known before, in problems.
PRIOR = 20


class Wager:
    """Evidence against "the mean loss is above `most`", from losses that are added one by one."""

    def __init__(self, most: float, least: float = -1.0, prior: Sequence[float] = ()) -> None:
        """most: the loss that is allowed, below 1. least: of a loss, at most `most`; -1 where an arm may do better
        than the full cache. prior: losses of other problems, which only choose how much is bet."""
        if not least <= most < 1:
            raise ValueError(
                f"a loss of at most {most} is allowed where losses are in [{least}, 1]"
            )
        self.most = most
        self._largest = MOST_OF_BET / (1 - most)
        self._log_capital = 0.0
        self.best = 0.0  # log of the largest capital so far
        # Before anything is known: half of what is allowed, hardly spread.
        weight = min(len(prior), PRIOR)
        mean = sum(prior) / len(prior) if prior else most / 2
        spread = sum((x - mean) ** 2 for x in prior) / len(prior) if prior else 0.0
        self._count = 1.0 + weight
        self._sum = most / 2 + weight * mean
        self._squares = (most / 2) ** 2 + weight * (spread + mean**2)

    def add(self, loss: float) -> None:
        """The next problem's."""
        bet = self._bet()  # before it is known
        self._log_capital += log(1 + bet * (self.most - loss))
        self.best = max(self.best, self._log_capital)
        self._count += 1
        self._sum += loss
        self._squares += loss**2

    def certified(self, confidence: float) -> bool:
        return self.best >= -log(1 - confidence)

    def _bet(self) -> float:
        """What grows the capital fastest if losses go on as they were (an approximation of Kelly's)."""
        mean = self._sum / self._count
        gain = self.most - mean
        variance = max(self._squares / self._count - mean**2, 0.0)
        if gain <= 0:
            return 0.0
        return min(gain / (variance + gain**2), self._largest)


def certified(chain: Sequence[Wager], confidence: float) -> int:
    """How many arms of a chain, from its beginning, are certified."""
    count = 0
    for wager in chain:
        if not wager.certified(confidence):
            break
        count += 1
    return count


def problems_without_loss(most: float, confidence: float) -> int:
    """How many problems certify an arm at the least, where none loses anything."""
    wager, count = Wager(most), 0
    while not wager.certified(confidence):
        wager.add(0.0)
        count += 1
    return count
