"""Evaluation through the daemon against a plain Python loop: the same completions, token for token.

`epikv_lab.sample.simulate` decodes greedily and evicts one token a step by rules of its own writing;
the daemon, in deterministic mode, runs the same policies at slack 0 under equal protection. Layers
and needed roles are fixed ones: it is the evaluation that is tried, not the model.
"""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from epikv.client import Client
from epikv.eval import results, runner
from epikv.eval.plan import Settings, Task, arms, document
from epikv.eval.requests import digest
from epikv.eval.tasks import axis, load
from epikv.options import show_budget
from epikv.sample.families import problem
from epikv.sample.need import Need, recent
from epikv.sample.problem import Problem, Role
from epikv.sample.vocabulary import encode

from epikv_lab.sample.model import Llama
from epikv_lab.sample.simulate import (
    H2O,
    SLACK_TOKENS,
    EpikvFlat,
    Frozen,
    Recency,
    Scorer,
    budgets,
    run,
)

NEED = Need(frozenset({Role.DEFINITION}), 1.0, {}, {})
PAIR = EpikvFlat(1, 3, 1)
FLAT = f"epikv_flat:layer_a={PAIR.a},layer_b={PAIR.b},sign={PAIR.sign},window=64"
SPLIT = "test"


@dataclass(frozen=True)
class Agreement:
    """Of an arm: of how many problems the completions are the same, and which ones differ."""

    arm: str
    problems: int
    evicting: int
    different: list[str]


def agree(
    client: Client, model: Llama, family: str, count: int, fraction: float
) -> list[Agreement]:
    """client: of a daemon in deterministic mode that serves `model` in float32."""
    tasks = [problem(f"{SPLIT}/{number}", family) for number in range(count)]
    tasks.sort(key=_prompt)  # the loop takes prompts of one length at a time
    groups = [list(group) for _, group in groupby(tasks, _prompt)]
    # Both go on to here at most.
    longest = SLACK_TOKENS + min(max(len(t.trace_tokens) for t in group) for group in groups)
    name = f"sample:{family}"
    items = load(name, SPLIT, count, needs={family: NEED})
    found = _evaluated(client, Task(name, axis(name), items), fraction, longest)
    ids = {item.prompt: item.id for item in items}
    agreements = []
    for arm in ("full", "oracle", "sliding", "h2o:scope=model", FLAT):
        looped = {
            ids[task.prompt]: digest(encode(text)[:longest])
            for group in groups
            for task, text in zip(group, _loop(model, group, arm, fraction), strict=True)
        }
        mine = [record for record in found if record.arm == arm]
        different = [record.item for record in mine if record.digest != looped[record.item]]
        evicting = sum(record.rounds > 0 for record in mine)
        agreements.append(Agreement(arm, len(mine), evicting, different))
    return agreements


def _prompt(task: Problem) -> int:
    return len(task.prompt.split())


def _evaluated(client: Client, task: Task, fraction: float, longest: int) -> list[results.Record]:
    wanted = ["sliding", "h2o:scope=model", FLAT]
    chosen = arms(client.policies(), wanted, slack=0, oracle=True)
    settings = Settings(SPLIT, max_output_tokens=longest)
    plan = document(client.models()[0], [task], chosen, [show_budget(fraction)], settings)
    with tempfile.TemporaryDirectory() as folder:
        servers = [runner.Server(client, "the daemon")]
        runner.run(servers, plan, [task], settings, Path(folder), at_once=64)
        return results.read(Path(folder))[1]


def _loop(model: Llama, group: Sequence[Problem], arm: str, fraction: float) -> list[str]:
    if arm == "full":
        return run(model, group)
    scorers: dict[str, Scorer] = {
        "oracle": _oracle(group, fraction),
        "sliding": Recency(),
        "h2o:scope=model": H2O(),
        FLAT: PAIR,
    }
    return run(model, group, scorers[arm], budgets(group, fraction))


def _oracle(group: Sequence[Problem], fraction: float) -> Frozen:
    """Keeps the tokens needed later; of equals the older goes."""
    scores = torch.zeros(len(group), max(len(task.trace_tokens) for task in group))
    for row, task, budget in zip(scores, group, budgets(group, fraction), strict=True):
        row[NEED.tokens(task, recent(budget, _prompt(task)))] = 1
    return Frozen(scores)
