"""What honest clients got, and what is asked of it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_GOODPUT = 0.95  # of what there is alone
MOST_TTFT_RATIO = 2.0


@dataclass(frozen=True)
class Answer:
    """Of one honest request. Times are seconds."""

    due: float  # when it was to be sent, of the phase
    ttft: float | None  # from when it was due; None: no text came
    status: str  # "OK", or why not
    right: bool  # its bytes, as far as they came, are those of the request alone


@dataclass(frozen=True)
class Phase:
    attacked: bool
    seconds: float
    answers: Sequence[Answer]

    @property
    def goodput(self) -> float:
        """Requests a second that ended well, of those that were due."""
        return sum(answer.status == "OK" for answer in self.answers) / self.seconds

    @property
    def wrong(self) -> int:
        return sum(not answer.right for answer in self.answers)


def p99(values: Sequence[float]) -> float:
    """The value that 99 of 100 are at most; infinite where there is none."""
    if not values:
        return math.inf
    ordered = sorted(values)
    return ordered[math.ceil(0.99 * len(ordered)) - 1]


@dataclass(frozen=True)
class Comparison:
    """Phases under attack with those beside them that were alone."""

    alone: Sequence[Phase]
    attacked: Sequence[Phase]

    @property
    def goodput_ratio(self) -> float:
        """1 is no loss."""
        return _goodput(self.attacked) / _goodput(self.alone)

    @property
    def ttft_ratio(self) -> float:
        return _ttft_p99(self.attacked) / _ttft_p99(self.alone)

    @property
    def wrong(self) -> int:
        return sum(phase.wrong for phase in (*self.alone, *self.attacked))

    def failures(self) -> list[str]:
        """What does not hold, a sentence each."""
        found = []
        if self.goodput_ratio < LEAST_GOODPUT:
            found.append(
                f"goodput under attack is {self.goodput_ratio:.3f} of what it is alone,"
                f" at least {LEAST_GOODPUT} is asked for"
            )
        if self.ttft_ratio >= MOST_TTFT_RATIO:
            found.append(
                f"p99 of the time to first token under attack is {self.ttft_ratio:.2f} times what it is"
                f" alone, less than {MOST_TTFT_RATIO} is asked for"
            )
        if self.wrong:
            found.append(f"{self.wrong} answers have wrong bytes")
        return found

    def lines(self) -> list[str]:
        answers = [sum(len(p.answers) for p in phases) for phases in (self.alone, self.attacked)]
        return [
            f"honest requests       alone {answers[0]}, under attack {answers[1]}",
            f"goodput, a second     alone {_goodput(self.alone):.2f},"
            f" under attack {_goodput(self.attacked):.2f}: {self.goodput_ratio:.3f}",
            f"p99 of TTFT, seconds  alone {_ttft_p99(self.alone):.3f},"
            f" under attack {_ttft_p99(self.attacked):.3f}: {self.ttft_ratio:.2f}",
            f"wrong answers         {self.wrong}",
        ]


def _goodput(phases: Sequence[Phase]) -> float:
    seconds = sum(phase.seconds for phase in phases)
    return sum(phase.goodput * phase.seconds for phase in phases) / seconds


def _ttft_p99(phases: Sequence[Phase]) -> float:
    return p99([a.ttft for phase in phases for a in phase.answers if a.ttft is not None])
