"""Free-running greedy decoding under eviction, batched over problems.

The rules are the daemon's (token granularity, one decision for all layers and heads): the prompt
and the newest R = min(128, K / 4, K - prompt) tokens are protected, every token counts inside the
budget of K tokens, a new token is cached before one is evicted, and tokens keep their true
positions. B problems of one prompt length P run together; t counts generated tokens from 0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from epikv.sample.need import recent
from epikv.sample.problem import Problem
from epikv.sample.vocabulary import EOS, TOKEN_IDS, decode, encode
from torch import Tensor

from epikv_lab.sample.model import Cache, Llama, Taps

WINDOW = 64
EPSILON = 1e-6
SLACK_TOKENS = 32  # how far past its expected trace a run may go on


class Scorer(Protocol):
    """Ranks generated tokens; the lowest scored unprotected one is evicted, the older of equals."""

    def begin(self, residuals: Tensor, capacity: int) -> None:
        """Start a run of up to `capacity` tokens after a prompt whose last token left
        `residuals` [L, B, C]."""

    def score(self, t: int, residuals: Tensor, attention: Tensor) -> Tensor:
        """Scores [B, t + 1], given token t's `residuals` [L, B, C] and the `attention` [B, t + 1]
        it paid to the generated tokens, summed over layers and heads."""


class Frozen:
    """Scores [B, T] known beforehand, such as an oracle's."""

    def __init__(self, scores: Tensor) -> None:
        self.scores = scores

    def begin(self, residuals: Tensor, capacity: int) -> None:
        missing = max(0, capacity - self.scores.shape[1])
        self.scores = torch.nn.functional.pad(self.scores, (0, missing))

    def score(self, t: int, residuals: Tensor, attention: Tensor) -> Tensor:
        return self.scores[:, : t + 1]


class Recency:
    """The oldest goes first."""

    def begin(self, residuals: Tensor, capacity: int) -> None:
        self.ages = torch.arange(capacity, dtype=torch.float32, device=residuals.device)
        self.batch = residuals.shape[1]

    def score(self, t: int, residuals: Tensor, attention: Tensor) -> Tensor:
        return self.ages[: t + 1].expand(self.batch, -1)


class H2O:
    """Attention received since the first generated token, over all layers and heads."""

    def begin(self, residuals: Tensor, capacity: int) -> None:
        self.received = residuals.new_zeros(residuals.shape[1], capacity)

    def score(self, t: int, residuals: Tensor, attention: Tensor) -> Tensor:
        self.received[:, : t + 1] += attention
        return self.received[:, : t + 1]


@dataclass
class EpikvFlat:
    """sign * (Z64(step of layer a) - Z64(step of layer b)), frozen at birth."""

    a: int
    b: int
    sign: int

    def begin(self, residuals: Tensor, capacity: int) -> None:
        self.previous = residuals[[self.a, self.b]]
        self.steps = residuals.new_zeros(2, residuals.shape[1], capacity)
        self.scores = residuals.new_zeros(residuals.shape[1], capacity)

    def score(self, t: int, residuals: Tensor, attention: Tensor) -> Tensor:
        current = residuals[[self.a, self.b]]
        self.steps[:, :, t] = (current - self.previous).norm(dim=-1)
        self.previous = current
        z = newest_z(self.steps[:, :, : t + 1])
        self.scores[:, t] = self.sign * (z[0] - z[1])
        return self.scores[:, : t + 1]


def newest_z(steps: Tensor) -> Tensor:
    """The newest of `steps` [..., t] as a z-score [...] among the last 64, itself included."""
    window = steps[..., -WINDOW:]
    deviation = window[..., -1] - window.mean(-1)
    return deviation / (window.std(-1, unbiased=False) + EPSILON)


def budgets(problems: Sequence[Problem], fraction: float) -> list[int]:
    """Tokens in all: each problem's prompt and this fraction of its expected trace."""
    return [
        len(task.prompt.split()) + round(fraction * len(task.trace_tokens)) for task in problems
    ]


@torch.inference_mode()
def run(
    model: Llama,
    problems: Sequence[Problem],
    scorer: Scorer | None = None,
    budget: Sequence[int] = (),
) -> list[str]:
    """The completions of `problems`, each within its `budget`; without a scorer, nothing is
    evicted. The prompts must be of one length."""
    device = model.lm_head.weight.device
    prompts = torch.tensor([encode(task.prompt) for task in problems], device=device)
    batch, prompt = prompts.shape
    capacity = max(len(task.trace_tokens) for task in problems) + SLACK_TOKENS
    cache = Cache.empty(batch, prompt + capacity, device)
    taps = Taps([])
    token = model(prompts, cache=cache, taps=taps)[:, -1].argmax(-1)
    if scorer is not None:
        scorer.begin(torch.stack([residual[:, -1] for residual in taps.residuals]), capacity)
        limits = torch.tensor(budget, device=device)
        protected = torch.tensor([recent(k, prompt) for k in budget], device=device)
        if int(protected.min()) < 1:
            raise ValueError(f"a budget of {min(budget)} tokens leaves none beside the prompt")

    generated: list[Tensor] = []
    finished = torch.zeros(batch, dtype=torch.bool, device=device)
    for t in range(capacity):
        generated.append(token)
        finished |= token == TOKEN_IDS[EOS]
        if bool(finished.all()):
            break
        taps = Taps([])
        logits = model(token[:, None], cache=cache, taps=taps)
        token = logits[:, -1].argmax(-1)
        if scorer is not None:
            residuals = torch.stack(taps.residuals)[:, :, 0]
            assert taps.attention is not None  # of a decode step there is one
            scores = scorer.score(t, residuals, taps.attention[:, prompt:])
            evict_one(cache.visible[:, : cache.length], scores, limits, protected)
    return [until_eos(ids) for ids in torch.stack(generated, 1).tolist()]


def evict_one(visible: Tensor, scores: Tensor, limits: Tensor, protected: Tensor) -> None:
    """Hide one token of every sequence over its limit.

    visible [B, n] (changed), scores [B, g] of the newest g columns, limits and protected [B].
    """
    over = visible.sum(1) > limits
    if not bool(over.any()):
        return
    generated = scores.shape[1]
    columns = torch.arange(generated, device=scores.device)
    old = columns < (generated - protected)[:, None]
    candidates = visible[:, -generated:] & old
    victims = scores.masked_fill(~candidates, torch.inf).argmin(1)
    rows = over.nonzero()[:, 0]
    visible[rows, visible.shape[1] - generated + victims[rows]] = False


def until_eos(ids: list[int]) -> str:
    end = ids.index(TOKEN_IDS[EOS]) + 1 if TOKEN_IDS[EOS] in ids else len(ids)
    return decode(ids[:end])
