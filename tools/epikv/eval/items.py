"""What tasks are made of: problems and probes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias


class Axis(StrEnum):
    """What a task asks of a cache. Averages are taken within an axis, never across."""

    REASONING = "reasoning"  # later steps need results of earlier ones
    RECALL = "recall"  # facts among others like them
    NEEDLE = "needle"  # one fact in much else


# Of a budget in tokens: indexes, of prompt and reference trace, that an oracle prefers to keep.
Needed: TypeAlias = Callable[[int], list[int]]


# How right the parts of an answer are, each from 0 to 1; most parts are right or wrong.
Right: TypeAlias = Sequence[float]


def score(right: Right) -> float:
    """Of a whole answer: 1 where it is solved, that is, where every part is right; else that of its
    worst part, which is 0 but for measures that grade."""
    return min(right, default=0)


def solved(right: Right) -> bool:
    return score(right) >= 1


@dataclass(frozen=True)
class Item:
    """One problem."""

    id: str  # unique within its task, the same on every machine
    prompt: str
    judge: Callable[[str], Right]  # of a completion's text
    # Length of the reference trace in output tokens; None: that of the same model under `full`.
    trace_tokens: int | None = None
    needed: Needed | None = None  # None: not known, and no oracle
    most_tokens: int | None = None  # of output, where the problem's benchmark says so
    stop_strings: tuple[str, ...] = ()
    # The character of a text with which its answer begins, None where none is found; None: not told.
    begins: Callable[[str], int | None] | None = None
    expects: tuple[str, ...] = ()  # measure and answers, for the plan; (): those of older plans


@dataclass(frozen=True)
class Probe:
    """A text that is forced through after a prompt, one token a step: nothing is generated.

    parts: passages and answers in turn. An answer is right if each of its tokens is the likeliest.
    """

    id: str
    prompt: str
    parts: tuple[str, ...]
    trace_tokens: None = None  # its parts are
    needed: None = None


@dataclass(frozen=True)
class Choices:
    """A question with its answers to choose from: each is scored after the prompt, and nothing is
    generated."""

    id: str
    prompt: str
    continuations: tuple[str, ...]  # as they stand behind the prompt
    characters: tuple[int, ...]  # of each choice without the space before it
    right: int  # which of them is
    by_length: bool = False  # whether log-probabilities are by character (acc_norm), or not (acc)
    trace_tokens: None = None  # those of the longest choice
    needed: None = None

    @property
    def expects(self) -> tuple[str, ...]:
        """As of an Item."""
        metric = "acc_norm" if self.by_length else "acc"
        return (metric, *self.continuations, str(self.right))


@dataclass(frozen=True)
class Replay:
    """A request of one's own, to which no answer is known. `full` answers it greedily; what another
    policy keeps is judged by the share of that answer's tokens that it would have said, too."""

    id: str
    prompt: str | tuple[tuple[str, str], ...]  # a text, or role and content of each message
    most_tokens: int  # of the answer
    trace_tokens: None = None  # that of `full`
    needed: None = None

    @property
    def expects(self) -> tuple[str, ...]:
        """As of an Item."""
        return ("replay", str(self.most_tokens))


Question: TypeAlias = Item | Probe | Choices | Replay
