"""Measures what a sample model reads.

Which trace tokens matter differs from seed to seed, so roles are ablated instead of assumed. The
problems are `need/*` of each family; nothing else uses them.
"""

from collections.abc import Callable, Collection, Sequence

import torch
from epikv.sample.families import problem
from epikv.sample.need import Need, recent
from epikv.sample.problem import Problem, Role
from epikv.sample.vocabulary import encode

from epikv_lab.sample.model import Llama
from epikv_lab.sample.simulate import budgets

READERS = frozenset({Role.OPERAND, Role.ANSWER})
HURTS = 0.02  # a role is needed when its ablation costs this much accuracy
SUFFICES = 0.98  # the needed roles alone must reach this share of the full cache's accuracy


def measure(model: Llama, family: str, count: int, fraction: float = 0.5) -> Need:
    """Ablates each role alone; then adds roles until those kept suffice by themselves."""
    tasks = [problem(f"need/{number}", family) for number in range(count)]

    def accuracy(hidden: Callable[[Role], bool]) -> float:
        return _reading_accuracy(model, tasks, hidden, fraction)

    used = {token.role for task in tasks for token in task.trace_tokens}
    full = accuracy(lambda role: False)
    without = {
        role: accuracy(lambda other: other == role)  # noqa: B023  asked at once
        for role in sorted(used)
    }
    roles = {role for role, rate in without.items() if full - rate >= HURTS}
    only: dict[str, float] = {}

    def keeping(kept: Collection[Role]) -> float:
        rate = accuracy(lambda role: role not in kept)
        only["+".join(sorted(kept)) or "nothing"] = rate
        return rate

    rate = keeping(roles)
    while rate < SUFFICES * full and roles < used:
        gains = {role: keeping(roles | {role}) for role in sorted(used - roles)}
        best = max(gains, key=gains.__getitem__)
        if gains[best] <= rate:
            break
        roles.add(best)
        rate = gains[best]
    return Need(frozenset(roles), full, {str(r): v for r, v in without.items()}, only)


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
