"""The sample model's held-out problems, run through a daemon and judged; and what a run says."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from epikv.client import Client
from epikv.messages import KvUsage
from epikv.options import Kv, Sampling, Stop
from epikv.stats import Estimate, wilson

if TYPE_CHECKING:
    from epikv.sample.calibrate import Need
    from epikv.sample.programs import Problem
    from epikv.sample.simulate import Outcome

PUBLISHED = {"layer_a": 1, "layer_b": 3, "sign": 1, "window": 64}  # at their depths in this model
SLACK_TOKENS = 32  # how far past its expected trace a completion may go on


class Trial:
    """The first `count` test problems of a model, each with its budget of prompt and `fraction` of
    its expected trace."""

    def __init__(self, directory: Path, count: int, fraction: float) -> None:
        from epikv.sample.calibrate import need_from, problems
        from epikv.sample.simulate import budgets

        self.calibration: dict[str, Any] = json.loads((directory / "calibration.json").read_text())
        self.need: Need = need_from(self.calibration)
        self.tasks: list[Problem] = problems("test", count)
        self.budgets: list[int] = budgets(self.tasks, fraction)

    def run(
        self,
        client: Client,
        at_once: int,
        kv: Callable[[int], Kv],
        first: int | None = None,
    ) -> "tuple[Outcome, list[KvUsage]]":
        """Completes the problems, or the `first` ones, `at_once` at a time. kv: by number."""
        from epikv.sample.simulate import judge

        def complete(number: int) -> tuple[str, KvUsage]:
            task = self.tasks[number]
            result = client.generate_once(
                task.prompt,
                kv=kv(number),
                sampling=Sampling(seed=number),
                stop=Stop(max_output_tokens=len(task.trace_tokens) + SLACK_TOKENS),
            )
            return result.text, result.summary.kv

        tasks = self.tasks[:first]
        with ThreadPoolExecutor(at_once) as pool:
            texts, usages = zip(*pool.map(complete, range(len(tasks))), strict=True)
        return judge(tasks, texts), list(usages)

    def needed(self, number: int) -> list[int]:
        """Indexes of the tokens that an oracle keeps: those the model was measured to need."""
        from epikv.sample.simulate import recent

        prompt = len(self.tasks[number].prompt.split())
        needed = self.need.tokens(self.tasks[number], recent(self.budgets[number], prompt))
        return [prompt + index for index in needed]


def exact(outcome: "Outcome") -> list[int]:
    """1 for each problem all of whose answers are right."""
    return [int(all(row)) for row in outcome.correct]


def share(outcome: "Outcome") -> Estimate:
    """Of problems all of whose answers are right."""
    return wilson(outcome.exact, len(outcome.correct))
