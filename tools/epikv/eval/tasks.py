"""Tasks: problems with answers that can be checked, by name.

    sample:programs          a family of the sample model (epikv.sample.families), at its tested length
    sample:ledger@26         the same with 26 lines
"""

from collections.abc import Callable
from dataclasses import dataclass

import click


@dataclass(frozen=True)
class Item:
    """One problem."""

    id: str  # unique within its task, the same on every machine
    prompt: str
    # Of a completion's text: which of the parts asked for it answers rightly. Solved: all of them.
    judge: Callable[[str], list[bool]]
    # Length of the reference trace in output tokens; None: that of the same model under `full`.
    trace_tokens: int | None = None


def load(name: str, split: str, count: int) -> list[Item]:
    """The first `count` problems of a task's split; splits share no problem."""
    kind, _, rest = name.partition(":")
    match kind:
        case "sample":
            return _sample(rest, split, count)
    raise click.BadParameter(f"no task is called {name}")


def _sample(name: str, split: str, count: int) -> list[Item]:
    from epikv.sample.families import FAMILIES, problem

    family, _, lines = name.partition("@")
    if family not in FAMILIES:
        raise click.BadParameter(f"no family is called {family}: {', '.join(FAMILIES)}")
    items = []
    for number in range(count):
        task = problem(f"{split}/{number}", family, int(lines) if lines else None)
        items.append(Item(f"{split}/{number}", task.prompt, task.correct, len(task.trace_tokens)))
    return items
