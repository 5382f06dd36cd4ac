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

from collections import defaultdict
from collections.abc import Sequence
from math import log

# Of the largest bet that cannot lose all: capital stays above 0.
MOST_OF_BET = 0.9
# Weight of what was known before, in problems.
PRIOR = 20
BISECTIONS = 12
RECKONED = 8  # problems between two looks at what should be bet


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
        self._added, self._bet_now = 0, 0.0
        self.best = 0.0  # log of the largest capital so far
        # How often each loss was seen, and one problem of which nothing is known: half of what is allowed.
        self._seen = defaultdict[float, float](float, {1.0: most / 2, 0.0: 1 - most / 2})
        weight = min(1.0, PRIOR / len(prior)) if prior else 0.0
        for loss in prior:
            self._seen[_rounded(loss)] += weight

    def add(self, loss: float) -> None:
        """The next problem's."""
        if self._added % RECKONED == 0:
            self._bet_now = self._bet()  # before it is known
        self._added += 1
        self._log_capital += log(1 + self._bet_now * (self.most - loss))
        self.best = max(self.best, self._log_capital)
        self._seen[_rounded(loss)] += 1

    def certified(self, confidence: float) -> bool:
        return self.best >= -log(1 - confidence)

    def _bet(self) -> float:
        """What grows the capital fastest if losses go on as they were (Kelly's)."""

        gains = [(self.most - loss, count) for loss, count in self._seen.items()]

        def grows(bet: float) -> bool:
            """Whether the growth at this bet, the mean of log(1 + bet * (most - loss)), still rises."""
            return sum([count * gain / (1 + bet * gain) for gain, count in gains]) > 0

        low, high = 0.0, self._largest
        if grows(high):
            return high
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            low, high = (middle, high) if grows(middle) else (low, middle)
        return low


def _rounded(loss: float) -> float:
    """For what is bet alone: losses of every size are counted in few kinds."""
    return round(loss, 2)


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
