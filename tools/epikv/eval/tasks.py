"""Tasks: problems with answers that can be checked, by name.

sample:programs          a family of the sample model (epikv.sample.families), at its tested length
sample:ledger@26         the same with 26 lines
solved:ledger            the same with its worked solution in the prompt: only the answer is written
file:math500.jsonl       problems of a file (epikv.eval.formats): of benchmarks, or one's own
needle@2000, recall@100  probes (epikv.eval.probes): a fact in 2000 words, 100 pairs of them
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from epikv.eval import files
from epikv.eval.items import Axis, Item, Needed, Question
from epikv.eval.probes import PROBES

if TYPE_CHECKING:
    from epikv.sample.need import Need
    from epikv.sample.problem import Problem


def axis(name: str) -> Axis:
    """Of the task called so."""
    kind, _, rest = name.partition(":")
    if kind.startswith("needle"):
        return Axis.NEEDLE
    if kind == "solved" or kind.startswith("recall"):
        return Axis.RECALL
    if kind == "sample" and not rest.startswith("programs"):
        return Axis.RECALL
    return Axis.REASONING


def load(
    name: str,
    split: str,
    count: int,
    *,
    reading: files.Reading = files.Reading(),
    needs: "Mapping[str, Need] | None" = None,
) -> Sequence[Question]:
    """The first `count` problems of a task's split; splits share no problem, but a file is one.

    reading: of files. needs: what a sample model was measured to
    need, by family, for an oracle.
    """
    kind, _, rest = name.partition(":")
    match kind:
        case "sample":
            return _sample(rest, split, count, needs or {})
        case "solved":
            return _solved(rest, split, count)
        case "file":
            return files.read(Path(rest), count, reading)
    kind, _, length = name.partition("@")
    if kind not in PROBES or not (length or "1").isdecimal():
        raise click.BadParameter(
            f"no task is called {name}: sample:FAMILY, solved:FAMILY, file:PATH, {', '.join(PROBES)}"
        )
    probe = PROBES[kind]
    return [probe(split, number, int(length) if length else None) for number in range(count)]


def _problems(name: str, split: str, count: int) -> "Iterator[Problem]":
    from epikv.sample.families import FAMILIES, problem

    family, _, lines = name.partition("@")
    if family not in FAMILIES or not (lines or "1").isdecimal():
        raise click.BadParameter(f"no family is called {family}: {', '.join(FAMILIES)}")
    for number in range(count):
        yield problem(f"{split}/{number}", family, int(lines) if lines else None)


def _sample(name: str, split: str, count: int, needs: "Mapping[str, Need]") -> list[Item]:
    items = []
    for number, task in enumerate(_problems(name, split, count)):
        needed = _needed(needs[task.family], task) if task.family in needs else None
        trace = len(task.trace_tokens)
        items.append(Item(f"{split}/{number}", task.prompt, task.correct, trace, needed))
    return items


def _solved(name: str, split: str, count: int) -> list[Item]:
    from epikv.sample.vocabulary import END_THINK

    items = []
    for number, task in enumerate(_problems(name, split, count)):
        worked, _, answer = task.trace.partition(END_THINK)
        prompt = f"{task.prompt} {worked.strip()}"
        items.append(Item(f"{split}/{number}", prompt, task.correct, 1 + len(answer.split())))
    return items


def _needed(need: "Need", task: "Problem") -> Needed:
    from epikv.sample.need import recent

    prompt = len(task.prompt.split())

    def indexes(budget: int) -> list[int]:
        return [prompt + at for at in need.tokens(task, recent(budget, prompt))]

    return indexes
