"""Whether a pair keeps what matters, by running it: rank statistics alone have misled before.

All arms complete the same problems at the same budget under equal protection.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from epikv.bench.targets import Estimate, bootstrap
from epikv.calibrate.choose import Pair
from epikv.calibrate.journal import Journal
from epikv.calibrate.runs import FULL, Runner, room
from epikv.calibrate.traces import Budget, Problem
from epikv.options import Kv
from epikv.sample.simulate import wilson


@dataclass(frozen=True)
class Arm:
    """A policy as it is run. `full` has no budget."""

    name: str
    policy: str
    params: Mapping[str, Any]

    def kv(self, budget: int) -> Kv:
        if self.policy == "full":
            return FULL
        return Kv(self.policy, budget, self.params, equal_protection=True)


WHOLE, RANDOM = Arm("full", "full", {}), Arm("random", "random", {})


def flat(name: str, a: int, b: int, sign: int, window: int) -> Arm:
    params = {"layer_a": a, "layer_b": b, "sign": sign, "window": window}
    return Arm(name, "epikv_flat", params)


def arms(pair: Pair, layers: int, window: int) -> list[Arm]:
    """The pair and all that it is held against; `published` is what serves where nothing was
    measured."""
    a = max(0, round(0.344 * layers) - 1)
    b = max(a + 1, round(0.688 * layers) - 1)
    return [
        WHOLE,
        flat("chosen", pair.a, pair.b, pair.sign, window),
        flat("inverse", pair.a, pair.b, -pair.sign, window),
        flat("published", a, b, 1, window),
        RANDOM,
    ]


@dataclass(frozen=True)
class Outcome:
    """Of each problem, which parts of its answer were right."""

    right: list[list[bool]]

    @property
    def solved(self) -> list[float]:
        return [float(all(parts)) for parts in self.right]

    @property
    def parts(self) -> list[float]:
        """The share of a problem's parts that are right."""
        return [fmean(parts) for parts in self.right]

    def figures(self) -> dict[str, Any]:
        solved = sum(self.solved)
        return {
            "problems": len(self.right),
            "exact": solved / len(self.right),
            "exact_interval": wilson(int(solved), len(self.right)),
            "parts": fmean(self.parts),
        }


def run(
    runner: Runner,
    problems: Sequence[Problem],
    over: Sequence[Arm],
    fraction: float,
    most: int,
    journal: Journal,
) -> dict[str, Outcome]:
    """Every arm's outcome on the problems; the whole cache's first, where it is asked for or a task
    does not say how long its traces are: a budget is a share of that."""
    prompts: dict[str, list[int]] = {}
    unknown = any(problem.item.trace_tokens is None for problem in problems)
    ordered = [WHOLE] * unknown + [arm for arm in over if arm != WHOLE or not unknown]

    def key(problem: Problem, arm: Arm) -> str:
        at = "" if arm == WHOLE else f" {fraction} {json.dumps(arm.params, sort_keys=True)}"
        return f"{problem.key} {arm.policy}{at}"

    def one(work: tuple[int, Problem, Arm]) -> None:
        number, problem, arm = work
        prompt = prompts.setdefault(problem.key, runner.ids(problem.item.prompt))
        length = problem.item.trace_tokens
        if length is None and arm != WHOLE:
            length = journal.records[key(problem, WHOLE)]["tokens"]
        budget = Budget.of(len(prompt), length, fraction).tokens if length else 0
        result = runner.complete(
            prompt, room(length) if length else most, arm.kv(budget), seed=number
        )
        right = problem.item.judge(result.text)
        tokens = result.summary.usage.output_tokens
        journal.add(key(problem, arm), {"right": right, "tokens": tokens})

    for arm in ordered:
        missing = [
            (number, problem, arm)
            for number, problem in enumerate(problems)
            if key(problem, arm) not in journal
        ]
        runner.each(f"{fraction:.0%} {arm.name}", one, missing)
    return {
        arm.name: Outcome([journal.records[key(problem, arm)]["right"] for problem in problems])
        for arm in over
    }


def difference(more: Sequence[float], less: Sequence[float]) -> Estimate:
    """Of two means over the same problems."""
    pairs = list(zip(more, less, strict=True))
    return bootstrap(pairs, lambda sample: fmean(x - y for x, y in sample))


@dataclass(frozen=True)
class Verdict:
    """The chosen pair less another arm, problem by problem."""

    against: str
    exact: Estimate
    parts: Estimate

    @property
    def better(self) -> bool:
        """Judged by parts: exact answers are too few to tell at small budgets."""
        return self.parts.low > 0


def verdicts(outcomes: Mapping[str, Outcome]) -> list[Verdict]:
    chosen = outcomes["chosen"]

    def against(name: str, values: Callable[[Outcome], list[float]]) -> Estimate:
        return difference(values(chosen), values(outcomes[name]))

    return [
        Verdict(name, against(name, lambda o: o.solved), against(name, lambda o: o.parts))
        for name in ("random", "inverse", "published")
    ]
