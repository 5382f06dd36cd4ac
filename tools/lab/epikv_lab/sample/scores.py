"""What the repository keeps of an evaluation: which problems each arm solved, in few bytes."""

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

from epikv.eval import results
from epikv.eval.plan import FROZEN, FULL, ORACLE, RANDOM, total
from epikv.stats import Estimate, wilson

NOT_RUN = "Not yet run."  # of a page, where nothing is kept yet


@dataclass(frozen=True)
class Score:
    """How one arm did on one task at one budget."""

    task: str
    budget: str  # "50%"; empty: the whole cache
    arm: str
    solved: str  # "1" or "0" of each problem, in their order; empty: not run
    answers: float = 0.0  # share of right parts
    dropped: float = 0.0  # evicted tokens, of all that were cached
    tokens: float = 0.0  # of output, on average; kept where lengths are asked for
    doubted: float = 0.0  # steps that ran twice, of output tokens
    parts: str = ""  # "1" or "0" of each problem's parts, one after another; kept where asked for
    uncalibrated: bool = False
    fault: str = ""  # why the daemon would not run it

    @property
    def place(self) -> tuple[str, str, str]:
        return self.task, self.budget, self.arm

    @property
    def hits(self) -> list[int]:
        return [int(digit) for digit in self.solved]


def condense(folder: Path, lengths: bool = False, parts: bool = False) -> list[Score]:
    """The scores of a finished evaluation, with outputs' `lengths` and problems' `parts`. Raises ValueError of another."""
    plan, records = results.read(folder)
    if len(records) < total(plan):
        raise ValueError(f"{folder}: {len(records)} of {total(plan)} completions are there")
    cells: dict[tuple[str, str, str], list[results.Record]] = defaultdict(list)
    for record in records:
        cells[record.task, record.budget, record.arm].append(record)
    order = {arm["label"]: number for number, arm in enumerate(plan["arms"])}
    budgets = ["", *plan["budgets"]]
    names = [task["name"] for task in plan["tasks"]]
    made = [
        _score(*key, cells[key])
        for key in sorted(
            cells, key=lambda key: (names.index(key[0]), budgets.index(key[1]), order[key[2]])
        )
    ]
    if lengths:
        made = [
            replace(score, tokens=round(fmean(r.output_tokens for r in cells[score.place]), 1))
            for score in made
        ]
    if parts:
        made = [replace(score, parts=_parts(cells[score.place])) for score in made]
    return made


def joined(before: Sequence[Score], more: Sequence[Score]) -> list[Score]:
    """What there was of all policies, with the arms of `more` that are new, each in its place by name.
    Raises ValueError if an arm of both did not come out the same: then the model, the engine or a policy is
    no longer what it was, and all must be run."""
    was = {score.place: score for score in before}
    for score in more:
        if was.get(score.place, score) != score:
            raise ValueError(f"{score.place} is no longer what it was: run all of it")
    cells = list(dict.fromkeys((score.task, score.budget) for score in before))
    together = list({score.place: score for score in [*before, *more]}.values())
    # Behind the anchors, which come first, arms are in order of their names.
    anchors = [FULL, ORACLE, RANDOM, FROZEN]

    def order(score: Score) -> tuple[int, int, str]:
        place = anchors.index(score.arm) if score.arm in anchors else len(anchors)
        return cells.index((score.task, score.budget)), place, score.arm

    return sorted(together, key=order)


def write(file: Path, scores: list[Score]) -> None:
    """One JSON object a line; what has its default is left out."""
    defaults = asdict(Score("", "", "", ""))
    lines = [
        json.dumps({k: v for k, v in asdict(score).items() if v != defaults.get(k)})
        for score in scores
    ]
    file.write_text("\n".join(lines) + "\n")


def read(file: Path) -> list[Score]:
    blank = {"budget": "", "solved": ""}
    return [Score(**blank | json.loads(line)) for line in file.read_text().splitlines()]


def solved(found: Iterable[Score], arm: str, budget: str) -> list[int]:
    """Of all problems of `found`, in their order; of the whole cache at every budget."""
    wanted = "" if arm == FULL else budget
    return [hit for s in found if (s.arm, s.budget) == (arm, wanted) for hit in s.hits]


def budgets_of(found: Iterable[Score]) -> list[str]:
    """Those of `found`, largest first."""
    told = {score.budget for score in found if score.budget}
    return sorted(told, key=lambda budget: -float(budget.rstrip("%")))


def share(hits: Sequence[int]) -> str:
    """What is solved, with its interval."""
    told = wilson(sum(hits), len(hits))
    return f"{told.value:.2f} [{told.low:.2f}, {told.high:.2f}]"


def signed(gain: Estimate) -> str:
    """A difference and its interval."""
    return f"{gain.value:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}]"


def table_row(*cells: str) -> str:
    """Of a table of the pages that are made of scores."""
    return "| " + " | ".join(cells) + " |"


def _score(task: str, budget: str, arm: str, found: list[results.Record]) -> Score:
    faults = [record.fault for record in found if record.fault]
    if faults:
        return Score(task, budget, arm, "", fault=faults[0])
    found = _ordered(found)
    cached = sum(record.prompt_tokens + record.output_tokens for record in found)
    return Score(
        task,
        budget,
        arm,
        "".join(str(int(record.solved)) for record in found),
        answers=round(fmean(fmean(record.right) for record in found), 4),
        dropped=round(sum(record.evicted_tokens for record in found) / cached, 4),
        doubted=round(
            sum(record.doubted_steps for record in found)
            / sum(record.output_tokens for record in found),
            4,
        ),
        uncalibrated=arm != FULL and any(record.uncalibrated for record in found),
    )


def _ordered(found: Iterable[results.Record]) -> list[results.Record]:
    """By the numbers of their problems."""
    return sorted(found, key=lambda record: int(record.item.rpartition("/")[2]))


def _parts(found: Iterable[results.Record]) -> str:
    return "".join(str(int(right)) for record in _ordered(found) for right in record.right)
