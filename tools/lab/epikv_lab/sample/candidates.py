"""Candidates for a policy that beats every anchor, tried by simulation before any is built.

tools/sample_model/CANDIDATES.md says what each one is and why; it was written first. What is learned
is learned on problems `fit/*`, candidates are chosen on `choose/*`; the judge is the daemon, on others.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from epikv.sample.families import FAMILIES, problem
from epikv.sample.problem import Problem
from epikv.sample.vocabulary import encode
from torch import Tensor

from epikv_lab.sample.model import HEAD_SIZE, HEADS, KV_HEADS, LAYERS, Llama, Taps, rotate
from epikv_lab.sample.simulate import H2O, EpikvFlat, Scorer, budgets, newest_z, run

FILE = "candidates.json"
GAP = 64  # tokens after which attention counts as from afar
RIDGE = 1e-2  # of the mean of the diagonal
EVERY = 16  # steps from one look at attention to the next


class Random:
    """A fresh uniform victim at every eviction."""

    def begin(self, residuals: Tensor, capacity: int) -> None:
        self.rng = torch.Generator().manual_seed(0)

    def score(self, t: int, residuals: Tensor, attention: Tensor) -> Tensor:
        return torch.rand(attention.shape, generator=self.rng)


class AttentionSometimes(H2O):
    """h2o that sees every EVERY-th query alone."""

    def score(self, t: int, residuals: Tensor, attention: Tensor) -> Tensor:
        if t % EVERY == 0:
            return super().score(t, residuals, attention)
        return self.received[:, : t + 1]


class AttentionFromAfar:
    """The most attention a token got from any one query at least GAP tokens later. Younger ones have
    none yet and stay."""

    def begin(self, residuals: Tensor, capacity: int) -> None:
        self.most = residuals.new_full((residuals.shape[1], capacity), math.inf)

    def score(self, t: int, residuals: Tensor, attention: Tensor) -> Tensor:
        old = max(0, t + 1 - GAP)
        known = self.most[:, :old].nan_to_num(posinf=0)
        self.most[:, :old] = torch.maximum(known, attention[:, :old])
        return self.most[:, : t + 1]


class Frozen:
    """One score a token at birth, `of` its residuals [L, B, C] and steps [L, B]."""

    def __init__(self, of: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.of = of

    def begin(self, residuals: Tensor, capacity: int) -> None:
        self.before = residuals
        self.steps = residuals.new_zeros(LAYERS, residuals.shape[1], capacity)
        self.scores = residuals.new_zeros(residuals.shape[1], capacity)

    def score(self, t: int, residuals: Tensor, attention: Tensor) -> Tensor:
        self.steps[:, :, t] = (residuals - self.before).norm(dim=-1)
        self.before = residuals
        self.scores[:, t] = self.of(residuals, newest_z(self.steps[:, :, : t + 1]))
        return self.scores[:, : t + 1]


class Sampled(Frozen):
    """The score as a weight of sampling: with Gumbel noise, so that the best M are a draw."""

    def __init__(self, of: Callable[[Tensor, Tensor], Tensor], temperature: float) -> None:
        super().__init__(of)
        self.temperature = temperature

    def begin(self, residuals: Tensor, capacity: int) -> None:
        super().begin(residuals, capacity)
        draw = torch.rand(self.scores.shape, generator=torch.Generator().manual_seed(0))
        self.noise = -(-draw.clamp(1e-9, 1 - 1e-9).log()).log() * self.temperature

    def score(self, t: int, residuals: Tensor, attention: Tensor) -> Tensor:
        return super().score(t, residuals, attention) + self.noise[:, : t + 1]


class Local(Frozen):
    """The score against the last 64, so that every stretch keeps its share."""

    def score(self, t: int, residuals: Tensor, attention: Tensor) -> Tensor:
        raw = super().score(t, residuals, attention)
        if t == 0:
            self.local = torch.zeros_like(self.scores)
        self.local[:, t] = newest_z(raw)
        return self.local[:, : t + 1]


class Distinct(Frozen):
    """The score, less where a newer token's residual after block 3 points the same way."""

    def begin(self, residuals: Tensor, capacity: int) -> None:
        super().begin(residuals, capacity)
        self.rows = residuals.new_zeros(residuals.shape[1], capacity, residuals.shape[2])

    def score(self, t: int, residuals: Tensor, attention: Tensor) -> Tensor:
        super().score(t, residuals, attention)
        row = torch.nn.functional.normalize(residuals[3], dim=-1)
        alike = (self.rows[:, :t] @ row[:, :, None])[:, :, 0] > 0.98
        self.scores[:, :t] -= 10.0 * alike
        self.rows[:, t] = row
        return self.scores[:, : t + 1]


def candidates(model: Llama, fit: int, pair: EpikvFlat | None) -> dict[str, Callable[[], Scorer]]:
    """By name. fit: problems of each family to learn from. pair: epikv_flat's, if calibrated."""
    probes, steps = _learn(model, fit)
    found: dict[str, Callable[[], Scorer]] = {"random": Random, "h2o": H2O}
    if pair is not None:
        found["pair"] = lambda: EpikvFlat(pair.a, pair.b, pair.sign)
    found |= {
        "attention_sometimes": AttentionSometimes,
        "attention_from_afar": AttentionFromAfar,
        "surprise": lambda: Frozen(lambda h, z: z.sum(0)),
        "entropy": lambda: Frozen(_entropy(model)),
        "steps": lambda: Frozen(lambda h, z: (steps[:, None] * z).sum(0)),
        "probe_sum": lambda: Frozen(_reads(3, probes["sum", 3])),
    }
    for layer in range(LAYERS - 1):
        found[f"probe_{layer}"] = partial(Frozen, _reads(layer, probes["most", layer]))
    best = _reads(3, probes["most", 3])
    return found | {
        "probe_sampled": lambda: Sampled(best, 0.05),
        "probe_local": lambda: Local(best),
        "probe_distinct": lambda: Distinct(best),
    }


def trial(
    model: Llama, found: dict[str, Callable[[], Scorer]], count: int, fractions: Sequence[float]
) -> Iterator[dict[str, object]]:
    """Share of `count` problems `choose/*` of each family that is solved, and of right answers."""
    for family in FAMILIES:
        tasks = sorted((problem(f"choose/{n}", family) for n in range(count)), key=_prompt)
        for fraction in fractions:
            for name, make in found.items():
                right = [
                    task.correct(text)
                    for _, group in groupby(tasks, _prompt)
                    for members in [list(group)]
                    for task, text in zip(
                        members,
                        run(model, members, make(), budgets(members, fraction)),
                        strict=True,
                    )
                ]
                yield {
                    "candidate": name,
                    "family": family,
                    "fraction": fraction,
                    "problems": count,
                    "solved": fmean(all(row) for row in right),
                    "answers": fmean(fmean(row) for row in right),
                }


def measure(folder: Path, fit: int, count: int, fractions: Sequence[float]) -> None:
    """Writes a seed's candidates.json."""
    from epikv_lab.sample.model import load

    model = load(folder)
    file = folder / "calibration.json"
    calibration = json.loads(file.read_text()) if file.exists() else {"confirmed": False}
    layers: Any = calibration.get("layers")
    pair = (
        EpikvFlat(layers["a"], layers["b"], calibration["sign"])
        if calibration["confirmed"]
        else None
    )
    rows = list(trial(model, candidates(model, fit, pair), count, fractions))
    (folder / FILE).write_text("\n".join(map(json.dumps, rows)) + "\n")


def _prompt(task: Problem) -> int:
    return len(task.prompt.split())


def _reads(layer: int, weights: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda h, z: normalised(h[layer]) @ weights


def _entropy(model: Llama) -> Callable[[Tensor, Tensor], Tensor]:
    """Of the distribution over the token after this one."""

    def of(residuals: Tensor, z: Tensor) -> Tensor:
        logs = model.lm_head(model.model["norm"](residuals[-1])).log_softmax(-1)
        return -(logs.exp() * logs).sum(-1)

    return of


def normalised(rows: Tensor) -> Tensor:
    """As a block reads them: of root mean square 1."""
    return rows / (rows.square().mean(-1, keepdim=True) + 1e-6).sqrt()


@torch.inference_mode()
def _learn(model: Llama, count: int) -> tuple[dict[tuple[str, int], Tensor], Tensor]:
    """Ridge regressions of attention from afar: on the residual after each block, of the most and of
    the sum's logarithm; and of the most on all layers' z-scores."""
    rows: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    labels: dict[str, list[Tensor]] = {"most": [], "sum": []}
    z: list[Tensor] = []
    for family in FAMILIES:
        for number in range(count):
            task = problem(f"fit/{number}", family)
            prompt = len(task.prompt.split())
            residuals, far = _afar(model, task)
            for layer in range(LAYERS):
                rows[layer].append(normalised(residuals[layer, prompt:]))
            labels["most"].append(far.amax((0, 1, 2))[prompt:])
            labels["sum"].append((far.sum((0, 1, 2))[prompt:] + 1e-4).log())
            steps = residuals[:, prompt - 1 :].diff(dim=1).norm(dim=-1)
            z.append(torch.stack([newest_z(steps[:, : t + 1]) for t in range(steps.shape[1])]))
    of = {name: torch.cat(values) for name, values in labels.items()}
    probes = {
        (name, layer): _ridge(torch.cat(rows[layer]), of[name])
        for name in of
        for layer in range(LAYERS)
    }
    return probes, _ridge(torch.cat(z), of["most"])


def _ridge(x: Tensor, y: Tensor) -> Tensor:
    x = torch.cat([x, x.new_ones(len(x), 1)], 1)
    gram = x.T @ x
    gram += RIDGE * gram.diagonal().mean() * torch.eye(len(gram))
    return torch.linalg.solve(gram, x.T @ y)[:-1]


def _afar(model: Llama, task: Problem) -> tuple[Tensor, Tensor]:
    """Residuals [L, n, C] of prompt and trace, and attention [L, H, n, n] from GAP tokens or more."""
    ids = torch.tensor([encode(f"{task.prompt} {task.trace}")])
    count = ids.shape[1]
    projected: dict[tuple[int, str], Tensor] = {}
    hooks = [
        getattr(block.self_attn, name).register_forward_hook(
            lambda module, inputs, out, key=(layer, name): projected.__setitem__(key, out)
        )
        for layer, block in enumerate(model.model["layers"].children())
        for name in ("q_proj", "k_proj")
    ]
    taps = Taps([])
    model(ids, taps=taps)
    for hook in hooks:
        hook.remove()
    age = torch.arange(count)[:, None] - torch.arange(count)
    maps = []
    for layer in range(LAYERS):
        q, k = (
            rotate(
                projected[layer, name].view(1, count, -1, HEAD_SIZE).transpose(1, 2),
                model.rope[:, :count],
            )[0]
            for name in ("q_proj", "k_proj")
        )
        scores = q @ k.repeat_interleave(HEADS // KV_HEADS, 0).transpose(-1, -2)
        weights = (scores * HEAD_SIZE**-0.5).masked_fill(age < 0, -math.inf).softmax(-1)
        maps.append(weights * (age >= GAP))
    return torch.stack(taps.residuals)[:, 0], torch.stack(maps)
