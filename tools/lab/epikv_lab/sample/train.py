"""Training of the sample model: a first stage of associative recall, then problems of all families.

The first stage ends when recall has emerged, and ends the run if it is late: another seed is then
the better use of the time.

Both stages take steps of about a thousand tokens: larger batches delay or prevent the emergence of
lookup. A step's data depend only on (seed, stage, step), so a resumed run continues exactly.
"""

import json
import time
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from epikv.sample.families import FAMILIES
from epikv.sample.problem import Role
from epikv.sample.vocabulary import PAD, TOKEN_IDS, encode
from torch import Tensor

from epikv_lab.sample.model import Llama, save
from epikv_lab.sample.recall import recall

# What the curriculum watches: skills, each the accuracy on tokens of one role. They weigh double.
SKILLS = (Role.OPERAND, Role.CARRY, Role.DEFINITION, Role.TOTAL, Role.ANSWER)
SKILL_WEIGHT = 2.0
REVIEW_STEPS = 50


@dataclass(frozen=True)
class Recipe:
    """Everything a training run depends on."""

    seed: int
    recall_tokens: int = 2_000_000
    recall_deadline: int = 1_200_000
    problem_tokens: int = 8_000_000
    step_tokens: int = 1_000
    shares: tuple[tuple[str, float], ...] = (
        ("programs", 0.4), ("passcode", 0.2), ("ledger", 0.2), ("alarms", 0.2)
    )  # fmt: skip
    grow_above: float = 0.9
    recall_above: float = 0.97
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    warmup_steps: int = 50
    decay_fraction: float = 0.4
    clip: float = 1.0


@dataclass(frozen=True)
class Batch:
    """Padded sequences, each token the target of the one before it; all tensors [B, T]."""

    inputs: Tensor  # int64
    targets: Tensor  # int64
    weights: Tensor  # float; 0 where no loss is taken
    skills: dict[Role, Tensor]  # where the targets that show a skill are
    family: str

    @property
    def tokens(self) -> int:
        return self.inputs.numel()


class StuckError(RuntimeError):
    """Recall has not emerged in time."""


class Run:
    """A training run and its state on disk: `state.pt` to resume from, `log.jsonl` to read."""

    def __init__(self, recipe: Recipe, folder: Path, device: str) -> None:
        self.recipe, self.folder, self.device = recipe, folder, device
        torch.manual_seed(recipe.seed)
        self.model = Llama().to(device)
        self.stage, self.step, self.tokens = "recall", 0, 0
        self.lines = {name: family.first for name, family in FAMILIES.items()}
        self.recalls = False
        self.hits: dict[str, list[float]] = defaultdict(lambda: [0, 0])
        self._new_optimizers()
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "state.pt").exists():
            self._restore()

    def train(self) -> None:
        """Run both stages to their end, from wherever the saved state left off.

        Raises StuckError where the first stage is not worth going on with.
        """
        for stage, budget in (
            ("recall", self.recipe.recall_tokens),
            ("problem", self.recipe.problem_tokens),
        ):
            if self.stage == "recall" and stage == "problem":
                self.stage, self.step, self.tokens = stage, 0, 0
                self.hits.clear()
                self._new_optimizers()
            if self.stage == stage:
                self._run_stage(budget)
        save(self.model, self.folder)

    def _run_stage(self, budget: int) -> None:
        started, tokens_before = time.monotonic(), self.tokens
        while self.tokens < budget and not (self.stage == "recall" and self.recalls):
            self._take_step(budget)
            if self.step % REVIEW_STEPS == 0:
                speed = (self.tokens - tokens_before) / (time.monotonic() - started)
                self._review(speed)
            if self.step % (20 * REVIEW_STEPS) == 0:
                self._checkpoint()
        self._checkpoint()

    def _take_step(self, budget: int) -> None:
        batch = self._draw()
        for group in self.optimizers:
            for parameters in group.param_groups:
                parameters["lr"] = self.recipe.learning_rate * self._schedule(budget)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            logits = self.model(batch.inputs)
        picked = batch.weights > 0
        logits, targets = logits[picked].float(), batch.targets[picked]
        weights = batch.weights[picked]
        loss = (F.cross_entropy(logits, targets, reduction="none") * weights).sum() / weights.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self._count(batch, picked, logits.argmax(-1) == targets, loss)
        self.step += 1
        self.tokens += batch.tokens

    def _draw(self) -> Batch:
        """About `step_tokens` tokens: sequences of one family, at least one."""
        at = f"train/{self.recipe.seed}/{self.stage}/{self.step}"
        names, shares = zip(*self.recipe.shares, strict=True)
        family = "recall" if self.stage == "recall" else Random(at).choices(names, shares)[0]
        rows: list[Row] = []
        longest = 0
        while (len(rows) + 1) * longest <= self.recipe.step_tokens:
            seed = f"{at}/{len(rows)}"
            rows.append(
                _recall_row(seed)
                if self.stage == "recall"
                else _problem_row(family, seed, self.lines[family])
            )
            longest = max(longest, len(rows[-1].ids))
        return _pad(rows, family, self.device)

    def _schedule(self, budget: int) -> float:
        warm = min(1.0, (self.step + 1) / self.recipe.warmup_steps)
        left = max(0.0, 1 - self.tokens / budget)
        return warm * min(1.0, left / self.recipe.decay_fraction)

    def _count(self, batch: Batch, picked: Tensor, right: Tensor, loss: Tensor) -> None:
        for name, mask in [("all", picked), *batch.skills.items()]:
            chosen = right[mask[picked]]
            self.hits[f"{batch.family}/{name}"][0] += int(chosen.sum())
            self.hits[f"{batch.family}/{name}"][1] += chosen.numel()
        self.hits["loss"][0] += float(loss.detach())
        self.hits["loss"][1] += 1

    def _review(self, speed: float) -> None:
        """Log the last steps' accuracies and lengthen a family once every skill is there."""
        rates = {name: hit / count for name, (hit, count) in self.hits.items() if count}
        self.hits.clear()
        record = {
            "stage": self.stage,
            "step": self.step,
            "tokens": self.tokens,
            "lines": dict(self.lines),
            "tokens_per_second": round(speed),
            **{name: round(rate, 4) for name, rate in rates.items()},
        }
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")
        if self.stage == "recall":
            rate = rates[f"recall/{Role.OPERAND}"]
            self.recalls = rate > self.recipe.recall_above
            if rate < self.recipe.grow_above and self.tokens > self.recipe.recall_deadline:
                raise StuckError(f"recall {rate:.2f} after {self.tokens} tokens: try another seed")
            return
        for name, family in FAMILIES.items():
            skills = [rates[key] for skill in SKILLS if (key := f"{name}/{skill}") in rates]
            if skills and min(skills) > self.recipe.grow_above:
                self.lines[name] = min(self.lines[name] + 2, max(family.trained))

    def _new_optimizers(self) -> None:
        matrices = [p for p in self.model.model["layers"].parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        others = [p for p in self.model.parameters() if id(p) not in chosen]
        self.optimizers = [
            torch.optim.Muon(
                matrices,
                momentum=0.95,
                weight_decay=self.recipe.weight_decay,
                adjust_lr_fn="match_rms_adamw",
            ),
            torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=self.recipe.weight_decay),
        ]

    def _checkpoint(self) -> None:
        state = {
            "recipe": asdict(self.recipe),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": (self.stage, self.step, self.tokens, self.lines, self.recalls),
        }
        partial = self.folder / "state.pt.partial"
        torch.save(state, partial)
        partial.rename(self.folder / "state.pt")

    def _restore(self) -> None:
        state = torch.load(self.folder / "state.pt", map_location=self.device)
        if state["recipe"] != asdict(self.recipe):
            raise ValueError(f"{self.folder} holds a run of another recipe: {state['recipe']}")
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.stage, self.step, self.tokens, self.lines, self.recalls = state["progress"]


@dataclass(frozen=True)
class Row:
    """One training sequence; `roles[i]` is that of `ids[i]`, None where no loss is taken."""

    ids: list[int]
    roles: list[Role | None]


def _recall_row(seed: str) -> Row:
    words, is_recalled = recall(seed)
    return Row([TOKEN_IDS[w] for w in words], [Role.OPERAND if r else None for r in is_recalled])


def _problem_row(family: str, seed: str, lines: int) -> Row:
    task = FAMILIES[family].draw(seed, lines)
    prompt = encode(task.prompt)
    trace = [TOKEN_IDS[token.word] for token in task.trace_tokens]
    return Row(prompt + trace, [None] * len(prompt) + [token.role for token in task.trace_tokens])


def _pad(rows: list[Row], family: str, device: str) -> Batch:
    """Stack rows, padded on the right to the longest."""
    width = max(len(row.ids) for row in rows)

    def stack(lists: list[list], fill: object) -> Tensor:
        return torch.tensor([row + [fill] * (width - len(row)) for row in lists], device=device)

    ids = stack([row.ids for row in rows], TOKEN_IDS[PAD])
    weights = stack([[_weight(role) for role in row.roles] for row in rows], 0.0)
    skills = {
        skill: stack([[role == skill for role in row.roles] for row in rows], False)[:, 1:]
        for skill in SKILLS
    }
    return Batch(ids[:, :-1], ids[:, 1:], weights[:, 1:], skills, family)


def _weight(role: Role | None) -> float:
    if role is None:
        return 0.0
    return SKILL_WEIGHT if role in SKILLS else 1.0
