"""What honest clients got, and what is asked of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

LEAST_GOODPUT = 0.95  # of what there is alone
MOST_TTFT_RATIO = 2.0


@dataclass(frozen=True)
class Answer:
    """Of one honest request. Times are seconds."""

    due: float  # when it was to be sent, of the phase
    ttft: float | None  # from when it was due; None: no text came
    status: str  # "OK", or why not
    right: bool  # its bytes, as far as they came, are those of the request alone


class Kind(Enum):
    """What went on beside honest clients."""

    ALONE = "alone"
    DECOY = "another daemon attacked"
    ATTACKED = "attacked"


@dataclass(frozen=True)
class Phase:
    seconds: float
    answers: Sequence[Answer]

    @property
    def goodput(self) -> float:
        """Requests a second that ended well, of those that were due."""
        return sum(answer.status == "OK" for answer in self.answers) / self.seconds

    @property
    def wrong(self) -> int:
        return sum(not answer.right for answer in self.answers)

    def ttft(self, percent: float) -> float:
        """Seconds."""
        return percentile([a.ttft for a in self.answers if a.ttft is not None], percent)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many percent are at most; infinite where there is none."""
    if not values:
        return math.inf
    ordered = sorted(values)
    return ordered[math.ceil(percent / 100 * len(ordered)) - 1]


@dataclass(frozen=True)
class Comparison:
    """Phases under attack with those that were alone."""

    phases: Mapping[Kind, Sequence[Phase]]

    @property
    def goodput_ratio(self) -> float:
        """1 is no loss."""
        return _goodput(self.phases[Kind.ATTACKED]) / _goodput(self.phases[Kind.ALONE])

    @property
    def ttft_ratio(self) -> float:
        return _ttft(self.phases[Kind.ATTACKED]) / _ttft(self.phases[Kind.ALONE])

    @property
    def wrong(self) -> int:
        return sum(phase.wrong for phases in self.phases.values() for phase in phases)

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
        def of_each(figure: Callable[[Sequence[Phase]], str]) -> str:
            return ", ".join(
                f"{kind.value} {figure(phases)}" for kind, phases in self.phases.items() if phases
            )

        return [
            f"honest requests       {of_each(lambda phases: str(sum(len(p.answers) for p in phases)))}",
            f"goodput, a second     {of_each(lambda phases: f'{_goodput(phases):.2f}')}:"
            f" {self.goodput_ratio:.3f}",
            f"p50 of TTFT, seconds  {of_each(lambda phases: f'{_ttft(phases, 50):.3f}')}",
            f"p99 of TTFT, seconds  {of_each(lambda phases: f'{_ttft(phases):.3f}')}:"
            f" {self.ttft_ratio:.2f}",
            f"wrong answers         {self.wrong}",
        ]


def _goodput(phases: Sequence[Phase]) -> float:
    seconds = sum(phase.seconds for phase in phases)
    return sum(phase.goodput * phase.seconds for phase in phases) / seconds


def _ttft(phases: Sequence[Phase], percent: float = 99) -> float:
    answers = [a for phase in phases for a in phase.answers]
    return percentile([a.ttft for a in answers if a.ttft is not None], percent)
