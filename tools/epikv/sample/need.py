"""What a sample model reads, measured: the tokens that an oracle keeps.

Which trace tokens matter differs from seed to seed, so roles are ablated instead of assumed. The
problems are `need/*` of each family; nothing else uses them.
"""

import json
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from epikv.sample.families import problem
from epikv.sample.model import Llama
from epikv.sample.problem import Problem, Role
from epikv.sample.simulate import budgets, recent
from epikv.sample.vocabulary import encode

FILE = "need.json"
READERS = frozenset({Role.OPERAND, Role.ANSWER})
HURTS = 0.02  # a role is needed when its ablation costs this much accuracy
SUFFICES = 0.98  # the needed roles alone must reach this share of the full cache's accuracy


@dataclass(frozen=True)
class Need:
    """The roles a model is measured to need in one family, with the evidence.

    Accuracies are teacher-forced, over quoted operands and answers; a role or set counts as
    ablated where its tokens are older than the recent window of the budget.
    """

    roles: frozenset[Role]
    full: float
    without: dict[str, float]  # accuracy with one role ablated
    only: dict[str, float]  # accuracy with everything old ablated but these roles

    def tokens(self, task: Problem, window: int) -> list[int]:
        """Trace indexes of the tokens needed later: of a needed role, about a name whose value is
        still read when they have left a recent window of `window` tokens."""
        last = task.last_read()
        return [
            i
            for i, token in enumerate(task.trace_tokens)
            if token.role in self.roles and last.get(token.name or "", -1) - i >= window
        ]


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


def save(needs: dict[str, Need], folder: Path) -> None:
    """Writes the needs of every family beside the model."""
    content = {
        family: {**asdict(need), "roles": sorted(need.roles)} for family, need in needs.items()
    }
    (folder / FILE).write_text(json.dumps(content, indent=1) + "\n")


def load(folder: Path) -> dict[str, Need]:
    content = json.loads((folder / FILE).read_text())
    return {
        family: Need(frozenset(map(Role, need.pop("roles"))), **need)
        for family, need in content.items()
    }


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
