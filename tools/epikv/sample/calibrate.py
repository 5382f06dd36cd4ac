"""What the sample model reads, measured; and the pair of layers that predicts it.

Which trace tokens matter differs from seed to seed, so roles are ablated instead of assumed, the
few best pairs by how many of the tokens found to matter they keep are tried, and the best of them is
confirmed against random eviction. Every stage takes problems of its own: `select/*`, `try/*`,
`confirm/*`; `test/*` stay untouched.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt

import torch
from torch import Tensor

from epikv.sample.model import LAYERS, Llama
from epikv.sample.families import problem
from epikv.sample.problem import Problem, Role
from epikv.sample.vocabulary import encode
from epikv.sample.simulate import (
    WINDOW,
    EpikvFlat,
    Frozen,
    Outcome,
    Scorer,
    Uniform,
    budgets,
    judge,
    recent,
    run,
    z_scores,
)

READERS = frozenset({Role.OPERAND, Role.ANSWER})
HURTS = 0.02  # a role is needed when its ablation costs this much accuracy
SUFFICES = 0.98  # the needed roles alone must reach this share of the full cache's accuracy
CANDIDATES = 4


def problems(name: str, count: int) -> list[Problem]:
    """The first problems of a named set."""
    return [problem(f"{name}/{index}") for index in range(count)]


@dataclass(frozen=True)
class Need:
    """The roles a model is measured to need, with the evidence.

    Accuracies are teacher-forced, over quoted operands and answers; a role or set counts as
    ablated where its tokens are older than the recent window of a half budget.
    """

    roles: frozenset[Role]
    full: float
    without: dict[str, float]  # accuracy with one role ablated
    only: dict[str, float]  # accuracy with everything old ablated but these roles

    def tokens(self, task: Problem, window: int) -> list[int]:
        """Trace indexes of the tokens needed later: of a needed role, about a name whose value
        is still read when they have left a recent window of `window` tokens."""
        last = task.last_read()
        return [
            i
            for i, token in enumerate(task.trace_tokens)
            if token.role in self.roles and last.get(token.name, -1) - i >= window
        ]


def measure_need(model: Llama, tasks: Sequence[Problem], fraction: float = 0.5) -> Need:
    """Ablate each role alone; then add roles until those kept suffice by themselves."""

    def accuracy(hidden: Callable[[Role], bool]) -> float:
        return _reading_accuracy(model, tasks, hidden, fraction)

    full = accuracy(lambda role: False)
    without = {role: accuracy(lambda other, role=role: other == role) for role in Role}
    roles = {role for role, rate in without.items() if full - rate >= HURTS}
    only: dict[str, float] = {}

    def keeping(kept: Collection[Role]) -> float:
        rate = accuracy(lambda role: role not in kept)
        only["+".join(sorted(kept)) or "nothing"] = rate
        return rate

    rate = keeping(roles)
    while rate < SUFFICES * full and len(roles) < len(Role):
        gains = {role: keeping(roles | {role}) for role in Role if role not in roles}
        best = max(gains, key=gains.__getitem__)
        if gains[best] <= rate:
            break
        roles.add(best)
        rate = gains[best]
    return Need(frozenset(roles), full, {str(r): v for r, v in without.items()}, only)


def oracle(tasks: Sequence[Problem], need: Need, fraction: float, sign: int = 1) -> Frozen:
    """Keeps the tokens needed later; with sign -1, drops them first. Of equals the older goes."""
    scores = torch.zeros(len(tasks), max(len(task.trace_tokens) for task in tasks))
    for row, task, budget in zip(scores, tasks, budgets(tasks, fraction), strict=True):
        row[need.tokens(task, recent(budget, len(task.prompt.split())))] = sign
    return Frozen(scores)


@dataclass(frozen=True)
class Choice:
    """A pair of layers, its sign, and the share of needed tokens among the kept fraction."""

    a: int
    b: int
    sign: int
    recall: float

    def scorer(self, sign: int = 1) -> EpikvFlat:
        """The policy, or with sign -1 its inverse."""
        return EpikvFlat(self.a, self.b, sign * self.sign)


def rank_pairs(
    model: Llama, tasks: Sequence[Problem], need: Need, fraction: float = 0.5
) -> list[Choice]:
    """All pairs a < b of layers but the last, with both signs, best recall first."""
    totals: dict[tuple[int, int, int], float] = {}
    counted = 0
    for task, z in zip(tasks, z_scores(model, tasks), strict=True):
        window = recent(budgets([task], fraction)[0], len(task.prompt.split()))
        needed = need.tokens(task, window)
        if not needed:
            continue
        counted += 1
        for a, b in combinations(range(LAYERS - 1), 2):
            for sign in (1, -1):
                rate = _recall_at(sign * (z[a] - z[b]), needed, fraction)
                totals[a, b, sign] = totals.get((a, b, sign), 0.0) + rate
    choices = [Choice(*key, total / counted) for key, total in totals.items()]
    return sorted(choices, key=lambda choice: -choice.recall)


def calibrate(
    model: Llama, select: int = 40, confirm: int = 100, fraction: float = 0.5
) -> dict[str, object]:
    """The content of `calibration.json`: need, ranking, and the pair that ran best."""
    tasks = problems("select", select)
    need = measure_need(model, tasks, fraction)
    if not need.roles:
        raise ValueError("no role's ablation hurts: this model does not read its trace")
    ranking = rank_pairs(model, tasks, need, fraction)

    tasks = problems("try", select)
    trials = [
        (choice, judge(tasks, run(model, tasks, choice.scorer(), budgets(tasks, fraction))))
        for choice in ranking[:CANDIDATES]
    ]
    best, _ = max(trials, key=lambda trial: (trial[1].exact, trial[1].right_answers))

    tasks = problems("confirm", confirm)
    scorers: dict[str, Scorer] = {
        "chosen": best.scorer(),
        "inverse": best.scorer(-1),
        "random": Uniform(0),
        "needed_tokens_kept": oracle(tasks, need, fraction),
        "needed_tokens_dropped_first": oracle(tasks, need, fraction, -1),
    }
    outcomes = {
        name: judge(tasks, run(model, tasks, scorer, budgets(tasks, fraction)))
        for name, scorer in scorers.items()
    }
    return {
        "policy": "epikv_flat",
        "layers": {"a": best.a, "b": best.b},
        "sign": best.sign,
        "window": WINDOW,
        "confirmed": beats(outcomes["chosen"], outcomes["random"]),
        "kept_fraction": fraction,
        "recall": best.recall,
        "confirmation": {name: outcome.summary() for name, outcome in outcomes.items()},
        "trials": [{**vars(choice), **outcome.summary()} for choice, outcome in trials],
        "need": {
            "problems": select,
            "roles": sorted(need.roles),
            "full": need.full,
            "without": need.without,
            "only": need.only,
        },
        "ranking": [vars(choice) for choice in ranking],
    }


def beats(chosen: Outcome, other: Outcome) -> bool:
    """Whether `chosen` answers more on the same problems, by two standard errors of the mean."""
    gains = [sum(a) - sum(b) for a, b in zip(chosen.correct, other.correct, strict=True)]
    mean = sum(gains) / len(gains)
    variance = sum((gain - mean) ** 2 for gain in gains) / (len(gains) - 1)
    return mean > 0 and mean > 2 * sqrt(variance / len(gains))


def need_from(calibration: dict) -> Need:
    """The measured need that a `calibration.json` records."""
    need = calibration["need"]
    roles = frozenset(Role(role) for role in need["roles"])
    return Need(roles, need["full"], need["without"], need["only"])


def _recall_at(scores: Tensor, needed: Sequence[int], fraction: float) -> float:
    """The share of `needed` indexes among the top `fraction` of scores [T]."""
    kept = set(scores.topk(round(fraction * len(scores))).indices.tolist())
    return len(kept.intersection(needed)) / len(needed)


@torch.inference_mode()
def _reading_accuracy(
    model: Llama, tasks: Sequence[Problem], hidden: Callable[[Role], bool], fraction: float
) -> float:
    """Teacher-forced accuracy on quoted operands and answers, with the trace tokens of hidden
    roles masked once they are older than the recent window."""
    device = model.lm_head.weight.device
    hits = count = 0
    for task in tasks:
        prompt = len(task.prompt.split())
        window = recent(budgets([task], fraction)[0], prompt)
        ids = torch.tensor(encode(f"{task.prompt} {task.trace}"), device=device)
        columns = [False] * prompt + [hidden(token.role) for token in task.trace_tokens]
        position = torch.arange(len(ids), device=device)
        age = position[:, None] - position  # [query, key]
        mask = (age >= 0) & ~(torch.tensor(columns, device=device) & (age >= window))
        predicted = model(ids[None], mask=mask[None, None])[0].argmax(-1)
        reads = [prompt + i for i, token in enumerate(task.trace_tokens) if token.role in READERS]
        hits += int((predicted[[i - 1 for i in reads]] == ids[reads]).sum())
        count += len(reads)
    return hits / count
