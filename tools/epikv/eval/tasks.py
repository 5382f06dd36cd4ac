"""Tasks: problems with answers that can be checked, by name.

sample:programs          a family of the sample model (epikv.sample.families), at its tested length
sample:ledger@26         the same with 26 lines
file:math500.jsonl       problems of a file (epikv.eval.files): MATH-500, AIME, GSM8K, one's own
needle@2000, recall@100  probes (epikv.eval.probes): a fact in 2000 words, 100 pairs of them
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import click

if TYPE_CHECKING:
    from epikv.sample.need import Need
    from epikv.sample.problem import Problem


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


def axis(name: str) -> Axis:
    """Of the task called so."""
    kind, _, rest = name.partition(":")
    if kind.startswith("needle"):
        return Axis.NEEDLE
    if kind.startswith("recall") or (kind == "sample" and not rest.startswith("programs")):
        return Axis.RECALL
    return Axis.REASONING


def load(
    name: str,
    split: str,
    count: int,
    *,
    template: str | None = None,
    needs: "Mapping[str, Need] | None" = None,
) -> Sequence[Item | Probe]:
    """The first `count` problems of a task's split; splits share no problem, but a file is one.

    template: of prompts for the problems of a file. needs: what a sample model was measured to
    need, by family, for an oracle.
    """
    kind, _, rest = name.partition(":")
    match kind:
        case "sample":
            return _sample(rest, split, count, needs or {})
        case "file":
            from epikv.eval import files

            return files.read(Path(rest), count, template or files.TEMPLATE)
    from epikv.eval.probes import PROBES

    kind, _, length = name.partition("@")
    if kind not in PROBES or not (length or "1").isdecimal():
        raise click.BadParameter(
            f"no task is called {name}: sample:FAMILY, file:PATH, {', '.join(PROBES)}"
        )
    probe = PROBES[kind]
    return [probe(split, number, int(length) if length else None) for number in range(count)]


def _sample(name: str, split: str, count: int, needs: "Mapping[str, Need]") -> list[Item]:
    from epikv.sample.families import FAMILIES, problem

    family, _, lines = name.partition("@")
    if family not in FAMILIES or not (lines or "1").isdecimal():
        raise click.BadParameter(f"no family is called {family}: {', '.join(FAMILIES)}")
    items = []
    for number in range(count):
        task = problem(f"{split}/{number}", family, int(lines) if lines else None)
        needed = _needed(needs[family], task) if family in needs else None
        trace = len(task.trace_tokens)
        items.append(Item(f"{split}/{number}", task.prompt, task.correct, trace, needed))
    return items


def _needed(need: "Need", task: "Problem") -> Needed:
    from epikv.sample.simulate import recent

    prompt = len(task.prompt.split())

    def indexes(budget: int) -> list[int]:
        return [prompt + at for at in need.tokens(task, recent(budget, prompt))]

    return indexes
