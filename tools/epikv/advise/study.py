"""A study of one model on one set of problems: what `epikv advise` runs, and goes on with after an interruption.

All completions lie in one folder, as those of an evaluation do (epikv.eval.results), so none is run twice. Once problems
have begun to certify, the chain that they certify stands in the folder, too, and is not chosen again.
"""

import json
import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import click

from epikv.advise.search import Candidate, Explored, Found, Link, search
from epikv.errors import RpcError
from epikv.eval.items import Question, Replay
from epikv.eval.plan import FULL, RANDOM, Arm, Settings, Task, document
from epikv.eval.requests import ask
from epikv.eval.results import PLAN, Key, Record, Store, read, store
from epikv.eval.runner import Evaluation, Server
from epikv.messages import Model, Policy
from epikv.stats import Estimate, ratio

SHARES = (0.75, 0.5, 0.35, 0.25, 0.15)  # budgets, of the tokens that `full` caches
ROUNDED = 16  # tokens, to which budgets are rounded up
SIZING = 16  # problems that say how many tokens `full` caches
EXPLORED = 0.25  # of the problems, at most
MOST_EXPLORED = 64
EXPLORING_TIME = 0.5  # of the time, at most
CHAIN = "chain.json"
SLICE = 64  # completions between two looks at the clock
LEAST_SOLVED = 5  # times the loss that is allowed: else what is lost is most of what there is
TIMED = 6  # problems that are run alone, for the time of a token


@dataclass(frozen=True)
class Wish:
    """What the user allows."""

    most_loss: float  # mean loss a problem
    confidence: float
    seconds: float
    budgets: Sequence[int] = ()  # (): SHARES of what `full` caches


@dataclass
class Advice:
    """What a study came to."""

    wish: Wish
    found: Found
    problems: int  # that there were
    explored: int  # of those, that chose and certify nothing
    cached: float  # tokens that `full` caches, the median
    full: list[float]  # what it solves, of the problems that certify
    unanswered: int  # of those, that `full` itself was refused or failed
    graded: bool  # whether right answers are known
    memory: dict[Candidate, Estimate | None]  # peak bytes over those of `full`, of the chain
    speed: Estimate | None = None  # of what is advised: seconds a token over those of `full`, alone
    seconds: float = 0.0
    flags: Sequence[str] = ()  # of the daemon, as the user has given them

    @property
    def advised(self) -> Link | None:
        """Of what is certified, that with the least memory; None where `full` solves too little for a loss to show."""
        if self.shows_nothing:
            return None
        safe = [link for link in self.found.chain if link.certified]
        return min(safe, key=self._memory, default=None)

    @property
    def shows_nothing(self) -> bool:
        return (
            self.graded
            and bool(self.full)
            and fmean(self.full) < LEAST_SOLVED * self.wish.most_loss
        )

    def _memory(self, link: Link) -> float:
        of = self.memory.get(link.candidate)
        return math.inf if of is None else of.value


class _Measure:
    """Runs what a search asks for."""

    def __init__(
        self,
        evaluation: Evaluation,
        records: dict[Key, Record],
        problems: Sequence[tuple[str, str]],
        explore: int,
        shares: dict[str, float],
        seconds: Callable[[], float],
        wish: Wish,
        file: Path,
        of: Sequence[str],
        say: Callable[[str], None],
    ) -> None:
        """shares: of a step, by arm. seconds: since the study began. file: of what was explored; of: among what."""
        self._evaluation, self._records = evaluation, records
        self._problems, self._explore, self._shares = problems, explore, shares
        self._seconds, self._wish, self._file, self._say = seconds, wish, file, say
        self._of = list(of)
        # Peaks, and those of `full`.
        self._bytes: dict[Candidate, list[tuple[int, int]]] = defaultdict(list)

    def prepare(self, candidates: Sequence[Candidate], problems: range) -> bool:
        explores = problems.start < self._explore
        share = EXPLORING_TIME if explores else 1.0
        arms = [(FULL, ""), *((each.policy, str(each.budget)) for each in candidates)]
        keys = [
            Key(task, item, arm, budget, 0)
            for task, item in self._problems[problems.start : problems.stop]
            for arm, budget in arms
        ]
        verb = "choose between" if explores else "certify"
        self._say(
            f"problems {problems.start + 1} to {problems.stop} {verb} {len(candidates)} policies and budgets"
        )
        for of_full in (True, False):  # what it wrote may be needed for the others
            missing = [
                key
                for key in keys
                if (key.arm == FULL) == of_full
                and key not in self._records
                and (of_full or not self._full(key.task, key.item).fault)
            ]
            for begin in range(0, len(missing), SLICE):
                if self._seconds() > share * self._wish.seconds:
                    return False
                self._evaluation.run(missing[begin : begin + SLICE])
        return True

    def _full(self, task: str, item: str) -> Record:
        return self._records[Key(task, item, FULL, "", 0)]

    def losses(self, candidate: Candidate, problems: range) -> list[float]:
        pairs = self.pairs(candidate, problems)
        self._bytes[candidate] += [
            (mine.peak_bytes, full.peak_bytes) for full, mine in pairs if not mine.fault
        ]
        return [full.solved - (0.0 if mine.fault else mine.solved) for full, mine in pairs]

    def pairs(self, candidate: Candidate, problems: range) -> list[tuple[Record, Record]]:
        """Records of `full` and of the candidate, of the problems that `full` answers."""
        return [
            (full, self._records[Key(task, item, candidate.policy, str(candidate.budget), 0)])
            for task, item in self._problems[problems.start : problems.stop]
            if not (full := self._full(task, item)).fault
        ]

    def explored(self) -> Explored | None:
        if not self._file.exists():
            return None
        told = json.loads(self._file.read_text("utf-8"))
        if told["of"] != self._of:
            raise click.ClickException(
                f"{self._file.parent} has begun to certify, of other policies or budgets: name another folder, and"
                " problems that decided nothing yet"
            )
        losses = {Candidate(budget, policy): found for budget, policy, found in told["losses"]}
        return Explored(losses, [Candidate(*each) for each in told["chain"]])

    def keep(self, explored: Explored) -> None:
        told = {
            "of": self._of,
            "chain": [[each.budget, each.policy] for each in explored.chain],
            "losses": [[c.budget, c.policy, found] for c, found in explored.losses.items()],
        }
        draft = self._file.with_suffix(".new")
        draft.write_text(json.dumps(told) + "\n", "utf-8")
        draft.replace(self._file)

    def cost(self, candidate: Candidate) -> tuple[float, ...]:
        """Peak bytes over those of `full`; share of a step."""
        peaks = self._bytes[candidate]
        memory = sum(mine for mine, _ in peaks) / sum(full for _, full in peaks) if peaks else 1.0
        return (memory, self._shares[candidate.policy])


def study(
    servers: Sequence[Server],
    model: Model,
    catalog: Sequence[Policy],
    tasks: Sequence[Task],
    arms: Sequence[Arm],
    settings: Settings,
    wish: Wish,
    folder: Path,
    at_once: int,
    say: Callable[[str], None],
) -> Advice:
    """Runs it, or what is left of it. Raises as epikv.eval.runner.run does."""
    began = time.monotonic()
    problems = _mixed(tasks)
    explore = max(1, min(MOST_EXPLORED, int(len(problems) * EXPLORED)))

    def open_with(budgets: Sequence[int]) -> tuple[dict[str, Any], Any]:
        plan = document(model, tasks, arms, [str(each) for each in budgets], settings)
        return plan, store(folder, plan)

    budgets = list(wish.budgets) or _budgets_of(folder)
    plan, opened = open_with(budgets)
    with opened as there:
        evaluation = _evaluation(servers, plan, tasks, settings, there, at_once)
        sizing = problems[: min(SIZING, explore)]
        keys = [Key(task, item, FULL, "", 0) for task, item in sizing]
        evaluation.run([key for key in keys if key not in there.records])
        tried = [there.records[key] for key in keys]
        records = [record for record in tried if not record.fault]
        if not records:
            raise click.ClickException(f"the full cache itself was refused: {tried[0].fault}")
        cached = median(record.prompt_tokens + record.output_tokens for record in records)
    budgets = budgets or sorted({_rounded(share * cached) for share in SHARES}, reverse=True)
    plan, opened = open_with(budgets)
    say(f"`full` caches {cached:.0f} tokens (median); budgets: {', '.join(map(str, budgets))}")
    with opened as there:
        evaluation = _evaluation(servers, plan, tasks, settings, there, at_once)
        measure = _Measure(
            evaluation,
            there.records,
            problems,
            explore,
            _shares_of_step(catalog, arms),
            lambda: time.monotonic() - began,
            wish,
            folder / CHAIN,
            [*(arm.label for arm in arms), *map(str, budgets)],
            say,
        )
        candidates = [
            Candidate(budget, arm.label)
            for budget in budgets
            for arm in arms
            if arm.policy not in (FULL, RANDOM)
        ]
        found = search(
            measure,
            candidates,
            explore,
            len(problems),
            wish.most_loss,
            wish.confidence,
        )
        memory = {link.candidate: _memory(measure, link) for link in found.chain}
        full = [
            there.records[key]
            for task, item in problems[explore:]
            if (key := Key(task, item, FULL, "", 0)) in there.records
        ]
    solved = [record.solved for record in full if not record.fault]
    graded = not any(isinstance(item, Replay) for task in tasks for item in task.items)
    advice = Advice(
        wish, found, len(problems), explore, cached, solved, len(full) - len(solved), graded, memory
    )
    if (advised := advice.advised) is not None and all(task.generated for task in tasks):
        pairs = measure.pairs(advised.candidate, advised.problems)
        ran = [(mine.task, mine.item) for _, mine in pairs if not mine.fault]
        timed = [_item(tasks, problem) for problem in ran[:TIMED]]
        arm = next(each for each in arms if each.label == advised.candidate.policy)
        advice.speed = _speed(servers[0], model, settings, arm, advised.candidate, timed)
    advice.seconds = time.monotonic() - began
    return advice


def _mixed(tasks: Sequence[Task]) -> list[tuple[str, str]]:
    """Task and id of every problem, in an order that is drawn once: any part of it is like the whole."""
    problems = [(task.name, item.id) for task in tasks for item in task.items]
    random.Random(0).shuffle(problems)
    return problems


def _item(tasks: Sequence[Task], problem: tuple[str, str]) -> Question:
    [task] = [task for task in tasks if task.name == problem[0]]
    return next(item for item in task.items if item.id == problem[1])


def _memory(measure: _Measure, link: Link) -> Estimate | None:
    """Peak bytes over those of `full`; None: nothing was measured."""
    pairs = measure.pairs(link.candidate, link.problems)
    ran = [(mine.peak_bytes, full.peak_bytes) for full, mine in pairs if not mine.fault]
    if not ran:
        return None
    mine, full = zip(*ran, strict=True)
    return ratio(mine, full)


def _speed(
    server: Server,
    model: Model,
    settings: Settings,
    arm: Arm,
    candidate: Candidate,
    items: Sequence[Question],
) -> Estimate | None:
    """Seconds a token over those of `full`, each alone on the machine, in turns. None: too few tokens."""
    told = {each.label: each.facts() for each in (Arm(FULL, FULL, {}, 0), arm)}
    times: dict[str, list[float]] = {label: [] for label in told}
    for item in items:
        row = {}
        for label in told:
            budget = "" if label == FULL else str(candidate.budget)
            key = Key("", item.id, label, budget, 0)
            try:
                record = ask(server.client, model.name, key, item, told[label], settings, None)
            except RpcError:
                return None
            row[label] = record.decode_seconds / max(1, record.output_tokens - 1)
        if all(row.values()):
            for label, seconds in row.items():
                times[label].append(seconds)
    if not times[FULL]:
        return None
    return ratio(times[arm.label], times[FULL])


def _budgets_of(folder: Path) -> list[int]:
    """Of the study that is there."""
    if not (folder / PLAN).exists():
        return []
    return [int(budget) for budget in read(folder)[0]["budgets"] if budget.isdecimal()]


def _shares_of_step(catalog: Sequence[Policy], arms: Sequence[Arm]) -> dict[str, float]:
    """Share of a step, by arm; of a policy that was not measured, much."""
    known = {policy.name: policy.cost.share_of_step for policy in catalog if policy.cost}
    return {arm.label: known.get(arm.policy, 1.0) for arm in arms}


def _rounded(tokens: float) -> int:
    return -int(-tokens // ROUNDED) * ROUNDED


def _evaluation(
    servers: Sequence[Server],
    plan: dict[str, Any],
    tasks: Sequence[Task],
    settings: Settings,
    there: Store,
    at_once: int,
) -> Evaluation:
    return Evaluation(servers, plan, tasks, settings, there, at_once, lambda _: None)


def runnable(catalog: Sequence[Policy]) -> list[str]:
    """Policies that need nothing but the model, and what artefacts the daemon has."""
    return [
        policy.name
        for policy in catalog
        if not policy.evaluation_only
        and policy.name not in (FULL, RANDOM)
        and (policy.has_artefact or not policy.needs_artefact)
    ]
