"""Whether pairs keep what matters, by running them: rank statistics alone have misled before.

All arms complete the same problems under equal protection, as `epikv eval` runs and judges them.
"""

import hashlib
import json
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from epikv.calibrate.choose import CalibrationError, Pair
from epikv.calibrate.runs import Runner
from epikv.eval import results, runner
from epikv.eval.items import Right, score
from epikv.eval.plan import FULL, Arm, Settings, Task, document
from epikv.eval.results import Record
from epikv.options import show_budget
from epikv.stats import Estimate, difference, wilson

WHOLE, RANDOM = Arm(FULL, FULL, {}, 0), Arm("random", "random", {"slack": 0}, 0)


def flat(label: str, a: int, b: int, sign: int, window: int) -> Arm:
    params = {"layer_a": a, "layer_b": b, "sign": sign, "window": window, "slack": 0}
    return Arm(label, "epikv_flat", params, 0)


def arms(pair: Pair, layers: int, window: int) -> list[Arm]:
    """The pair and all that it is held against; `published` is what serves where nothing was
    measured."""
    a = max(0, round(0.344 * layers) - 1)
    b = max(a + 1, round(0.688 * layers) - 1)
    return [
        flat("chosen", pair.a, pair.b, pair.sign, window),
        flat("inverse", pair.a, pair.b, -pair.sign, window),
        flat("published", a, b, 1, window),
        RANDOM,
    ]


@dataclass(frozen=True)
class Outcome:
    """Of each problem, its task and which parts of its answer were right."""

    tasks: list[str]
    right: list[Right]

    @property
    def solved(self) -> list[float]:
        return [float(score(parts)) for parts in self.right]

    @property
    def parts(self) -> list[float]:
        """The share of a problem's parts that are right."""
        return [fmean(parts) for parts in self.right]

    def of(self, task: str) -> "Outcome":
        kept = [right for name, right in zip(self.tasks, self.right, strict=True) if name == task]
        return Outcome([task] * len(kept), kept)

    def figures(self) -> dict[str, Any]:
        return {
            "problems": len(self.right),
            "solved": asdict(wilson(sum(self.solved), len(self.right))),
            "parts": fmean(self.parts),
        }


@dataclass(frozen=True)
class Gain:
    """One outcome less another, problem by problem."""

    solved: Estimate
    parts: Estimate

    @property
    def beats(self) -> bool:
        """Judged by parts: exact answers are too few to tell at small budgets."""
        return self.parts.low > 0


def gain(more: Outcome, less: Outcome) -> Gain:
    return Gain(difference(more.solved, less.solved), difference(more.parts, less.parts))


def run(
    by: Runner,
    tasks: Sequence[Task],
    over: Sequence[Arm],
    fractions: Sequence[float],
    settings: Settings,
    folder: Path,
) -> dict[float, dict[str, Outcome]]:
    """Every arm's outcome, and that of the whole cache, at every fraction of the trace.

    Each plan has a place of its own in `folder`: what was run of another is no reason to refuse.
    Raises CalibrationError if the daemon refuses one, RpcError if it goes away, and else as
    `epikv.eval.runner.run`.
    """
    budgets = {show_budget(fraction): fraction for fraction in fractions}
    plan = document(by.served, tasks, [WHOLE, *over], [*budgets], settings)
    digest = hashlib.sha256(json.dumps(plan).encode()).hexdigest()[:12]
    daemon = runner.Server(by.client, "the daemon")
    runner.run([daemon], plan, tasks, settings, folder / digest, by.at_once)
    cells: dict[tuple[str, str], list[Record]] = defaultdict(list)
    for record in sorted(results.read(folder / digest)[1], key=lambda record: record.key):
        if record.fault:
            raise CalibrationError(f"{record.arm}, {record.task} {record.item}: {record.fault}")
        cells[record.budget, record.arm].append(record)

    def outcome(found: Sequence[Record]) -> Outcome:
        return Outcome([record.task for record in found], [record.right for record in found])

    full = outcome(cells["", FULL])
    return {
        fraction: {FULL: full, **{arm.label: outcome(cells[budget, arm.label]) for arm in over}}
        for budget, fraction in budgets.items()
    }


def told(outcomes: dict[str, Outcome]) -> dict[str, Any]:
    """What to report: figures of every arm, and what the first but `full` gains over each other;
    of all problems, and of each task's if there are several."""
    chosen = list(outcomes)[1]

    def part(select: Callable[[Outcome], Outcome]) -> dict[str, Any]:
        arms = {name: select(outcome) for name, outcome in outcomes.items()}
        return {
            "arms": {name: outcome.figures() for name, outcome in arms.items()},
            "gains": {
                name: asdict(gain(arms[chosen], outcome))
                for name, outcome in arms.items()
                if name not in (FULL, chosen)
            },
        }

    names = list(dict.fromkeys(outcomes[chosen].tasks))
    by_task = {
        name: part(lambda o: o.of(name))  # noqa: B023  asked at once
        for name in names
    }
    return part(lambda o: o) | ({"tasks": by_task} if len(names) > 1 else {})
