"""What a sample model was measured to need: the tokens that an oracle keeps."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from epikv.sample.problem import Problem, Role

FILE = "need.json"
RECENT = 128


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


def recent(budget: int, prompt: int) -> int:
    """How many of the newest tokens are protected."""
    return min(RECENT, budget // 4, budget - prompt)


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
