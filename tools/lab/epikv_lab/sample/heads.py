"""The second list of candidates (tools/sample_model/CANDIDATES.md), tried by simulation: every KV head keeps tokens of its own.

Learned on problems `fit/*`, chosen on `choose/*`; the judge is the daemon, on others. Shapes use L layers, B problems, H
query heads, G KV heads, D head size, C width, S cached columns, t generated tokens, A ages.
"""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Protocol, cast

import torch
from epikv.sample import need
from epikv.sample.families import FAMILIES, problem
from epikv.sample.problem import Problem
from epikv.sample.vocabulary import EOS, TOKEN_IDS, encode
from torch import Tensor, nn

from epikv_lab.sample.candidates import normalised
from epikv_lab.sample.model import (
    HEAD_SIZE,
    HEADS,
    KV_HEADS,
    LAYERS,
    ROPE_THETA,
    WIDTH,
    Attention,
    Block,
    Cache,
    Llama,
    Taps,
    rotate,
)
from epikv_lab.sample.simulate import SLACK_TOKENS, until_eos

FILE = "heads.json"
GROUP = HEADS // KV_HEADS
LANES = LAYERS * KV_HEADS
AGES = (16, 32, 64, 128, 256)
BLOCK = 3  # whose residual is read
ROUND = 16  # tokens from one eviction to the next
FUTURE = 512  # positions over which expected attention averages
SINKS = 4  # whose queries do not count
STEPS = 300  # of a network's training
LEAST = 1e-3  # an attention, or a share, below it counts as this one


@dataclass
class LaneCache(Cache):
    """A cache whose lanes keep tokens of their own."""

    by_lane: Tensor | None = None  # [L, B, G, S] bool

    def seen(self, layer: int, end: int) -> Tensor:
        assert self.by_lane is not None
        return self.by_lane[layer, :, :, None, :end]


@dataclass
class Token:
    """What a forward of one new token a problem tells of it."""

    residual: Tensor  # [B, C], after BLOCK
    inputs: Tensor  # [L, B, C], what each layer's attention is given
    queries: Tensor  # [L, B, H, D], before RoPE


class Scorer(Protocol):
    def begin(self, prompt: Tensor, shown: Tensor, capacity: int) -> None:
        """A run begins. prompt: queries before RoPE [L, B, H, P, D]; shown: which of them are of the prompt [B, P]."""

    def born(self, t: int, token: Token) -> None:
        """Generated token t has been fed."""

    def score(self, t: int, cache: LaneCache, prompt: int) -> Tensor:
        """At a round, of all generated tokens, 0 to t: [L, B, G, t + 1]."""


def attentions(model: Llama) -> list[Attention]:
    return [cast(Block, block).self_attn for block in cast(nn.ModuleList, model.model["layers"])]


@contextmanager
def listening(model: Llama) -> Iterator[dict[tuple[int, str], Tensor]]:
    """Of the newest forward, by layer: what attention is given, "given", and queries, keys and values before RoPE, "q",
    "k", "v"."""
    heard: dict[tuple[int, str], Tensor] = {}

    def hear(layer: int, name: str) -> Callable[..., None]:
        def hook(_: object, given: tuple[Tensor, ...], out: Tensor) -> None:
            heard[layer, "given"], heard[layer, name] = given[0], out

        return hook

    hooks = [
        projection.register_forward_hook(hear(layer, name))
        for layer, own in enumerate(attentions(model))
        for name, projection in (("q", own.q_proj), ("k", own.k_proj), ("v", own.v_proj))
    ]
    try:
        yield heard
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def run(
    model: Llama, tasks: Sequence[Problem], scorer: Scorer, fraction: float, pooled: bool
) -> list[str]:
    """The completions under eviction in rounds, prompts and the newest tokens protected; each lane holds the prompt and
    this fraction of the trace, or all lanes together that many (`pooled`)."""
    prompts = [encode(task.prompt) for task in tasks]
    batch, prompt = len(tasks), max(map(len, prompts))
    capacity = max(len(task.trace_tokens) for task in tasks) + SLACK_TOKENS
    ids = torch.tensor([[0] * (prompt - len(row)) + row for row in prompts])
    shown = torch.tensor([[False] * (prompt - len(row)) + [True] * len(row) for row in prompts])
    sees = torch.ones(prompt, prompt, dtype=torch.bool).tril()[None, None] & shown[:, None, None]
    sees = sees | torch.eye(prompt, dtype=torch.bool)  # padding sees itself, so that nothing is NaN
    total = prompt + capacity
    by_lane = torch.ones(LAYERS, batch, KV_HEADS, total, dtype=torch.bool)
    by_lane[..., :prompt] &= shown[None, :, None]
    plain = Cache.empty(batch, total, torch.device("cpu"))
    cache = LaneCache(plain.keys, plain.values, plain.visible, by_lane=by_lane)
    lengths = shown.sum(1)
    budgets = torch.tensor([round(fraction * len(task.trace_tokens)) for task in tasks])
    recent = torch.minimum((budgets + lengths) // 4, torch.tensor(need.RECENT)).minimum(budgets)
    with listening(model) as heard:
        token = model(ids, mask=sees, cache=cache)[:, -1].argmax(-1)
        queries = torch.stack([heard[layer, "q"] for layer in range(LAYERS)])
        scorer.begin(queries.unflatten(-1, (HEADS, HEAD_SIZE)).transpose(2, 3), shown, capacity)
        generated: list[Tensor] = []
        finished = torch.zeros(batch, dtype=torch.bool)
        for t in range(capacity):
            generated.append(token)
            finished |= token == TOKEN_IDS[EOS]
            if bool(finished.all()):
                break
            taps = Taps([])
            token = model(token[:, None], cache=cache, taps=taps)[:, -1].argmax(-1)
            given = torch.stack([heard[layer, "given"][:, 0] for layer in range(LAYERS)])
            q = torch.stack([heard[layer, "q"][:, 0] for layer in range(LAYERS)])
            scorer.born(
                t, Token(taps.residuals[BLOCK][:, 0], given, q.unflatten(-1, (HEADS, HEAD_SIZE)))
            )
            if t % ROUND == ROUND - 1 and t + 1 > int(budgets.min()):
                shape = (LAYERS, batch, KV_HEADS, t + 1)
                scores = scorer.score(t, cache, prompt).expand(shape)
                evict(by_lane[..., prompt : prompt + t + 1], scores, budgets, recent, pooled)
    return [until_eos(row) for row in torch.stack(generated, 1).tolist()]


def evict(kept: Tensor, scores: Tensor, budgets: Tensor, recent: Tensor, pooled: bool) -> None:
    """Brings every lane of kept [L, B, G, t] (changed) down to its problem's budget [B], or all lanes together."""
    count = kept.shape[-1]
    newest = torch.arange(count) >= (count - recent)[:, None]  # [B, t]
    worth = scores.masked_fill(~kept, -math.inf).masked_fill(newest[None, :, None] & kept, math.inf)
    if not pooled:
        order = worth.argsort(dim=-1, descending=True, stable=True).argsort(-1)
        kept &= order < budgets[:, None, None]
        return
    rows = worth.transpose(0, 1).flatten(1)  # [B, L G t]
    order = (
        rows.argsort(dim=-1, descending=True, stable=True).argsort(-1) < budgets[:, None] * LANES
    )
    kept &= order.view(kept.shape[1], LAYERS, KV_HEADS, count).transpose(0, 1)


# What a token is worth by its age, said at its birth: [..., A] of what it reads.
ReadOut = Callable[[Token], Tensor]  # [L, B, G, A]


class ByAge:
    """Between two ages by the logarithm of the age, beyond the first and last what it is there."""

    def __init__(self, read: ReadOut) -> None:
        self.read = read

    def begin(self, prompt: Tensor, shown: Tensor, capacity: int) -> None:
        self.worth = torch.zeros(LAYERS, len(shown), KV_HEADS, capacity, len(AGES))

    def born(self, t: int, token: Token) -> None:
        self.worth[..., t, :] = self.read(token)

    def score(self, t: int, cache: LaneCache, prompt: int) -> Tensor:
        ages = (t - torch.arange(t + 1)).clamp(AGES[0], AGES[-1]).double().log2()
        marks = torch.tensor(AGES).double().log2()
        at = (torch.searchsorted(marks, ages, right=True) - 1).clamp(0, len(AGES) - 2)
        beyond = ((ages - marks[at]) / (marks[at + 1] - marks[at])).float()
        rows = self.worth[..., : t + 1, :]
        pick = at.expand(rows.shape[:-1])[..., None]
        low, high = rows.gather(-1, pick)[..., 0], rows.gather(-1, pick + 1)[..., 0]
        return low * (1 - beyond) + high * beyond


@dataclass
class Moments:
    """Of queries before RoPE, [L, B or 1, H, ...]."""

    count: Tensor
    total: Tensor  # [.., D]
    squares: Tensor  # [.., D, D]

    def normal(self) -> tuple[Tensor, Tensor]:
        mean = self.total / self.count[..., None]
        return mean, self.squares / self.count[..., None, None] - mean[..., None] * mean[
            ..., None, :
        ]


def moments_of(queries: Tensor, counts: Tensor) -> Moments:
    """queries [L, B, H, n, D], counts [B, n] as 0 or 1."""
    rows = queries * counts[None, :, None, :, None]
    count = counts.sum(-1)[None, :, None].expand(rows.shape[:3])
    return Moments(count, rows.sum(-2), rows.mT @ rows)


class Expected:
    """expected_attention: exp(k.mu / sqrt d + k cov k / 2d), as a share, by the norm of the value."""

    def __init__(
        self,
        known: Moments | None = None,
        rank: int = HEAD_SIZE,
        every: int = 1,
        frozen: bool = False,
    ) -> None:
        self.known, self.rank, self.every, self.frozen = known, rank, every, frozen

    def begin(self, prompt: Tensor, shown: Tensor, capacity: int) -> None:
        counts = (shown & (shown.cumsum(1) > SINKS)).float()
        self.moments = self.known or moments_of(prompt, counts)
        self.rounds = 0
        self.seen = 0
        self.made = torch.zeros(LAYERS, len(shown), KV_HEADS, capacity)

    def born(self, t: int, token: Token) -> None:
        if self.known is None:
            one = moments_of(token.queries[..., None, :], torch.ones(token.queries.shape[1], 1))
            own = self.moments
            self.moments = Moments(
                own.count + one.count, own.total + one.total, own.squares + one.squares
            )

    def score(self, t: int, cache: LaneCache, prompt: int) -> Tensor:
        first = 0 if not self.frozen and self.rounds % self.every == 0 else self.seen
        self.rounds += 1
        self.seen = t + 1
        columns = slice(prompt + first, prompt + t + 1)
        keys = cache.keys[..., columns, :]
        mean, covariance = self.moments.normal()
        if self.rank < HEAD_SIZE:
            values, vectors = torch.linalg.eigh(covariance)
            values, vectors = values[..., -self.rank :], vectors[..., -self.rank :]
            covariance = (vectors * values[..., None, :]) @ vectors.mT
        turn = mean_rotation(prompt + t + 1)
        mean = mean @ turn.T
        covariance = turn @ covariance @ turn.T
        batch = keys.shape[1]
        grouped = keys[:, :, :, None]  # [L, B, G, 1, n, D]
        mean = mean.unflatten(2, (KV_HEADS, GROUP)).expand(-1, batch, -1, -1, -1)
        covariance = covariance.unflatten(2, (KV_HEADS, GROUP)).expand(-1, batch, -1, -1, -1, -1)
        logits = (grouped @ mean[..., None])[..., 0] * HEAD_SIZE**-0.5
        logits = logits + ((grouped @ covariance) * grouped).sum(-1) / (2 * HEAD_SIZE)
        length = cache.values[..., columns, :].norm(dim=-1).log()
        if self.frozen or self.every > 1:
            # Without the softmax, whose sum changes as tokens come and go.
            fresh = logits.logsumexp(3) + length
            self.made[..., first : t + 1] = fresh
            return self.made[..., : t + 1]
        assert cache.by_lane is not None
        gone = ~cache.by_lane[..., None, columns]
        return logits.masked_fill(gone, -math.inf).softmax(-1).mean(3).log() + length


def mean_rotation(first: int) -> Tensor:
    """The mean of RoPE's rotations at FUTURE positions from `first` on: [D, D]."""
    frequencies = ROPE_THETA ** -(torch.arange(0, HEAD_SIZE, 2).double() / HEAD_SIZE)
    angles = torch.arange(first, first + FUTURE).double()[:, None] * frequencies
    cos, sin = angles.cos().mean(0).float().diag(), angles.sin().mean(0).float().diag()
    return torch.cat([torch.cat([cos, -sin], 1), torch.cat([sin, cos], 1)])


class Product:
    """Of scorers that give logarithms."""

    def __init__(self, *factors: Scorer) -> None:
        self.factors = factors

    def begin(self, prompt: Tensor, shown: Tensor, capacity: int) -> None:
        for factor in self.factors:
            factor.begin(prompt, shown, capacity)

    def born(self, t: int, token: Token) -> None:
        for factor in self.factors:
            factor.born(t, token)

    def score(self, t: int, cache: LaneCache, prompt: int) -> Tensor:
        scores = [factor.score(t, cache, prompt) for factor in self.factors]
        return torch.stack(scores).sum(0)


class Log:
    def __init__(self, of: Scorer) -> None:
        self.of = of

    def begin(self, prompt: Tensor, shown: Tensor, capacity: int) -> None:
        self.of.begin(prompt, shown, capacity)

    def born(self, t: int, token: Token) -> None:
        self.of.born(t, token)

    def score(self, t: int, cache: LaneCache, prompt: int) -> Tensor:
        return self.of.score(t, cache, prompt).clamp_min(LEAST).log()


class Chance:
    """A fresh victim in every lane at every round."""

    def begin(self, prompt: Tensor, shown: Tensor, capacity: int) -> None:
        self.rng = torch.Generator().manual_seed(0)

    def born(self, t: int, token: Token) -> None:
        pass

    def score(self, t: int, cache: LaneCache, prompt: int) -> Tensor:
        shape = (LAYERS, cache.visible.shape[0], KV_HEADS, t + 1)
        return torch.rand(shape, generator=self.rng)


@dataclass
class Seen:
    """Of a problem with its trace: what is read of its generated tokens, and what they were worth by age."""

    residual: Tensor  # [n, C]
    inputs: Tensor  # [L, n, C]
    attended: Tensor  # the largest attention, [A, L, G, n]
    taken: Tensor  # the largest share of a value, [A, L, G, n]
    needed: Tensor  # by the oracle, 0 or 1, [A, n]
    counts: Tensor  # whether an age is within the trace, [A, n] bool
    queries: Tensor  # [L, H, n, D]


@torch.inference_mode()
def watch(model: Llama, task: Problem, needs: dict[str, need.Need], family: str) -> Seen:
    ids = torch.tensor([encode(f"{task.prompt} {task.trace}")])
    count, prompt = ids.shape[1], len(task.prompt.split())
    taps = Taps([])
    with listening(model) as heard:
        model(ids, taps=taps)
    ages = torch.arange(count)[:, None] - torch.arange(count)
    rope = model.rope[:, :count]
    attended = torch.zeros(len(AGES), LAYERS, KV_HEADS, count)
    taken = torch.zeros(len(AGES), LAYERS, KV_HEADS, count)
    embedded = cast(nn.Embedding, model.model["embed_tokens"])(ids)[0]
    streams = [embedded, *[row[0] for row in taps.residuals]]
    for layer, own_attention in enumerate(attentions(model)):
        q = rotate(_heads(heard[layer, "q"]), rope)
        k = rotate(_heads(heard[layer, "k"]), rope).repeat_interleave(GROUP, 0)
        scores = (q @ k.mT) * HEAD_SIZE**-0.5
        weights = scores.masked_fill(ages < 0, -math.inf).softmax(-1)  # [H, n, n]
        out = own_attention.o_proj.weight.unflatten(1, (HEADS, HEAD_SIZE)).permute(1, 2, 0)
        length = (_heads(heard[layer, "v"]).repeat_interleave(GROUP, 0) @ out).norm(
            dim=-1
        )  # [H, n]
        shares = weights * length[:, None] / streams[layer].norm(dim=-1)[:, None]
        for number, age in enumerate(AGES):
            for of, into in ((weights, attended), (shares, taken)):
                most = of.masked_fill(ages < age, 0).amax(1)
                into[number, layer] = most.unflatten(0, (KV_HEADS, GROUP)).amax(1)
    last = task.last_read()
    roles = needs[family].roles
    final = [
        last.get(token.name or "", -1) if token.role in roles else -1 for token in task.trace_tokens
    ]
    own = torch.arange(count - prompt)
    until = torch.full((count - prompt,), -1)
    until[: len(final)] = torch.tensor(final)[: count - prompt]
    needed = torch.stack([(until - own >= age).float() for age in AGES])
    counts = torch.stack([own + age < count - prompt for age in AGES])
    given = torch.stack([heard[layer, "given"][0, prompt:] for layer in range(LAYERS)])
    queries = torch.stack([_heads(heard[layer, "q"]) for layer in range(LAYERS)])
    return Seen(
        streams[BLOCK + 1][prompt:],
        given,
        attended[..., prompt:],
        taken[..., prompt:],
        needed,
        counts,
        queries[:, :, SINKS:],
    )


def _heads(rows: Tensor) -> Tensor:
    """[1, n, heads D] as [heads, n, D]."""
    return rows[0].unflatten(-1, (-1, HEAD_SIZE)).transpose(0, 1)


RIDGE = 1e-2  # of a channel's mean variance


def ridge(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Of rows [n, C] on labels [n, k]: weights [C, k] and biases [k]."""
    x, y = x.double(), y.double()
    x_mean, y_mean = x.mean(0), y.mean(0)
    inside = (x - x_mean).T @ (x - x_mean)
    inside += RIDGE * inside.diagonal().mean() * torch.eye(x.shape[1]).double()
    weights = torch.linalg.solve(inside, (x - x_mean).T @ (y - y_mean))
    return weights.float(), (y_mean - x_mean @ weights).float()


# Of a problem and the place of an age among AGES, what each token was worth: [L, G, n].
Label = Callable[[Seen, int], Tensor]


def from_residual(seen: Sequence[Seen], label: Label) -> ReadOut:
    fits = []
    for age in range(len(AGES)):
        x = torch.cat([normalised(one.residual)[one.counts[age]] for one in seen])
        y = torch.cat([label(one, age).flatten(0, 1).T[one.counts[age]] for one in seen])
        fits.append(ridge(x, y))

    def read(token: Token) -> Tensor:
        x = normalised(token.residual)
        said = torch.stack([x @ weights + bias for weights, bias in fits], -1)  # [B, L G, A]
        return said.unflatten(1, (LAYERS, KV_HEADS)).transpose(0, 1)

    return read


def from_inputs(seen: Sequence[Seen], label: Label) -> ReadOut:
    """The same of what each head's own layer is given."""
    fits: list[list[tuple[Tensor, Tensor]]] = []
    for layer in range(LAYERS):
        of_layer = []
        for age in range(len(AGES)):
            x = torch.cat([one.inputs[layer][one.counts[age]] for one in seen])
            y = torch.cat([label(one, age)[layer].T[one.counts[age]] for one in seen])
            of_layer.append(ridge(x, y))
        fits.append(of_layer)

    def read(token: Token) -> Tensor:
        return torch.stack(
            [
                torch.stack([x @ weights + bias for weights, bias in of_layer], -1)
                for x, of_layer in zip(token.inputs, fits, strict=True)
            ]
        )

    return read


def by_network(seen: Sequence[Seen], label: Label, width: int = 64) -> ReadOut:
    """The same by a network of one hidden layer."""
    torch.manual_seed(0)
    x = torch.cat([one.inputs for one in seen], 1)  # [L, n, C]
    y = torch.cat(
        [torch.stack([label(one, age) for age in range(len(AGES))], -1) for one in seen], 2
    )
    y = y.transpose(1, 2)  # [L, n, G, A]
    counts = torch.cat([one.counts for one in seen], 1).T[None, :, None].expand(y.shape)
    middle = y.mean(1, keepdim=True)
    scale = y.std(1, keepdim=True).clamp_min(1e-6)
    first = (torch.randn(LAYERS, WIDTH, width) * WIDTH**-0.5).requires_grad_()
    bias = torch.zeros(LAYERS, 1, width, requires_grad=True)
    last = (torch.randn(LAYERS, width, KV_HEADS * len(AGES)) * 0.1 * width**-0.5).requires_grad_()
    optimizer = torch.optim.AdamW([first, bias, last], lr=5e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 5e-3, total_steps=STEPS)

    def say(rows: Tensor) -> Tensor:
        return (torch.nn.functional.gelu(rows @ first + bias) @ last).unflatten(
            -1, (KV_HEADS, len(AGES))
        )

    with torch.inference_mode(False), torch.enable_grad():
        for _ in range(STEPS):
            some = torch.randint(x.shape[1], (2048,))
            miss = (say(x[:, some].clone()) - (y - middle)[:, some] / scale).square() * counts[
                :, some
            ]
            optimizer.zero_grad()
            miss.mean().backward()
            optimizer.step()
            schedule.step()
    arrays = [a.detach() for a in (first, bias, last)]

    def read(token: Token) -> Tensor:
        hidden = torch.nn.functional.gelu(token.inputs @ arrays[0] + arrays[1])
        said = (hidden @ arrays[2]).unflatten(-1, (KV_HEADS, len(AGES)))
        return said * scale + middle

    return read


def candidates(seen: Sequence[Seen]) -> dict[str, tuple[Callable[[], Scorer], bool]]:
    """By name: how a run's scorer is made, and whether lanes share one budget."""

    def attended(one: Seen, age: int) -> Tensor:
        return one.attended[age]

    def taken(one: Seen, age: int) -> Tensor:
        return one.taken[age]

    def log_attended(one: Seen, age: int) -> Tensor:
        return one.attended[age].clamp_min(LEAST).log()

    def log_taken(one: Seen, age: int) -> Tensor:
        return one.taken[age].clamp_min(LEAST).log()

    def needed(one: Seen, age: int) -> Tensor:
        return one.needed[age].expand(LAYERS, KV_HEADS, -1)

    def all_heads(one: Seen, age: int) -> Tensor:
        return one.attended[age].amax((0, 1)).expand(LAYERS, KV_HEADS, -1)

    parts = [moments_of(one.queries[:, None], torch.ones(1, one.queries.shape[2])) for one in seen]
    known = Moments(
        torch.stack([part.count for part in parts]).sum(0),
        torch.stack([part.total for part in parts]).sum(0),
        torch.stack([part.squares for part in parts]).sum(0),
    )

    def by_age(read: ReadOut) -> Callable[[], Scorer]:
        return lambda: ByAge(read)

    own = from_inputs(seen, attended)
    own_log = from_inputs(seen, log_attended)
    alone = {
        "random": Chance,
        "aged": by_age(from_residual(seen, all_heads)),
        "expected": Expected,
        "heads": by_age(residual := from_residual(seen, attended)),
        "input_alike": by_age(own),
        "distilled": by_age(from_inputs(seen, needed)),
        "born": lambda: Expected(known, frozen=True),
        "renewed": lambda: Expected(every=8),
        "low_rank": lambda: Expected(rank=4),
        "mixed": lambda: Product(Expected(), Log(ByAge(own))),
        "forecast": lambda: Product(Expected(known, frozen=True), ByAge(own_log)),
        "forecast_input": by_age(own_log),
    }
    pooled = {
        "heads_pooled": by_age(residual),
        "input": by_age(own),
        "taken": by_age(from_inputs(seen, taken)),
        "log_taken": by_age(from_inputs(seen, log_taken)),
        "network": by_age(by_network(seen, taken)),
        "network_log": by_age(by_network(seen, log_taken)),
    }
    return {name: (make, False) for name, make in alone.items()} | {
        name: (make, True) for name, make in pooled.items()
    }


def trial(
    model: Llama,
    found: dict[str, tuple[Callable[[], Scorer], bool]],
    count: int,
    fractions: Sequence[float],
) -> Iterator[dict[str, object]]:
    """Share of `count` problems `choose/*` of each family that is solved."""
    tasks = [problem(f"choose/{n}", family) for family in FAMILIES for n in range(count)]
    for fraction in fractions:
        for name, (make, pooled) in found.items():
            texts = run(model, tasks, make(), fraction, pooled)
            right = [all(task.correct(text)) for task, text in zip(tasks, texts, strict=True)]
            for number, family in enumerate(FAMILIES):
                solved = fmean(right[number * count : (number + 1) * count])
                yield {
                    "candidate": name,
                    "family": family,
                    "fraction": fraction,
                    "problems": count,
                    "solved": solved,
                }


def learn(model: Llama, folder: Path, count: int) -> list[Seen]:
    needs = need.load(folder)
    return [
        watch(model, problem(f"fit/{number}", family), needs, family)
        for family in FAMILIES
        for number in range(count)
    ]


def measure(folder: Path, fit: int, count: int, fractions: Sequence[float]) -> None:
    """Writes a seed's heads.json."""
    from epikv_lab.sample.model import load

    model = load(folder)
    rows = list(trial(model, candidates(learn(model, folder, fit)), count, fractions))
    (folder / FILE).write_text("\n".join(map(json.dumps, rows)) + "\n")
