"""What tasks are made of: problems and probes."""

from collections.abc import Callable
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


@dataclass(frozen=True)
class Item:
    """One problem."""

    id: str  # unique within its task, the same on every machine
    prompt: str
    # Of a completion's text: which of the parts asked for it answers rightly. Solved: all of them.
    judge: Callable[[str], list[bool]]
    # Length of the reference trace in output tokens; None: that of the same model under `full`.
    trace_tokens: int | None = None
    needed: Needed | None = None  # None: not known, and no oracle


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
