"""The rows that policies are compared over, and a loop that plays a reference's scores round by
round. Used by the make_*.py beside it; golden_world.h is the same world in C++.

Rows are drawn by hashing, so that nothing but scores and victims has to be stored. Everything is
fp32. A run is as the runtime's: tokens are cached one by one after the prompt; a lane that holds
more than budget + slack has a round down to the budget; protected tokens stay.
"""

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

OUT = Path(__file__).parent / "policies"
# Scores at a cut that are nearer than this (relative) say nothing of who is right.
MIN_GAP = 1e-5
MASK64 = (1 << 64) - 1
KINDS = {
    "key": 1,
    "value": 2,
    "query": 3,
    "hidden": 4,
    "output": 5,
    "input": 6,
    "gate": 7,
    "final": 8,
}
GATE_WIDTH = 6


def mix(x: int) -> int:
    """splitmix64's finaliser."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


@cache
def row(seed: int, kind: str, layer: int, head: int, token: int, width: int) -> tuple[float, ...]:
    """Sums of four uniform numbers in [-1, 1): of mean 0 and variance 4/3. Some rows are three
    times as long, so that tokens differ."""
    start = seed
    for part in (KINDS[kind], layer, head, token):
        start = mix(start ^ part)
    size = 3.0 if mix(start) % 8 == 0 else 1.0
    numbers = []
    for channel in range(width):
        bits = mix(start ^ (channel + 1))
        # Four numbers of 16 bits each.
        total = sum((bits >> shift & 0xFFFF) / 32768 - 1 for shift in (0, 16, 32, 48))
        numbers.append(float(numpy.float32(size * total)))
    return tuple(numbers)


@dataclass(frozen=True)
class Shape:
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    width: int = 8

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.width)

    @property
    def inv_freq(self) -> Tensor:
        """Of the rotary embedding, in halves. fp32 [width / 2]"""
        return torch.tensor([10000.0 ** (-2 * i / self.width) for i in range(self.width // 2)])


@dataclass(frozen=True)
class World:
    seed: int
    shape: Shape = field(default_factory=Shape)

    def rows(self, kind: str, layer: int, head: int, tokens: Sequence[int]) -> Tensor:
        """[tokens, width]; heads are query heads for "query", KV heads else."""
        width = self.shape.width
        return torch.tensor([row(self.seed, kind, layer, head, t, width) for t in tokens])

    def lanes(self, kind: str, layer: int, index: Sequence[Sequence[int]]) -> Tensor:
        """Keys or values of a layer's lanes, in birth order. [kv_heads, n, width]"""
        return torch.stack([self.rows(kind, layer, h, tokens) for h, tokens in enumerate(index)])

    def queries(self, layer: int, tokens: Sequence[int]) -> Tensor:
        """[heads, tokens, width]"""
        return torch.stack([self.rows("query", layer, h, tokens) for h in range(self.shape.heads)])

    def attention_input(self, layer: int, tokens: Sequence[int]) -> Tensor:
        """[tokens, hidden]"""
        width = 2 * self.shape.width
        return torch.tensor([row(self.seed, "input", layer, 0, t, width) for t in tokens])

    def final_hidden(self, tokens: Sequence[int]) -> Tensor:
        """[tokens, hidden]"""
        width = 2 * self.shape.width
        return torch.tensor([row(self.seed, "final", 0, 0, t, width) for t in tokens])

    def token_id(self, token: int) -> int:
        return mix(mix(self.seed) ^ token) % 12

    def output_projection(self, layer: int) -> Tensor:
        """W_O by query head; the residual stream is twice as wide as a head. [heads, width, hidden]"""
        width = self.shape.width
        return torch.tensor(
            [
                [row(self.seed, "output", layer, head, c, 2 * width) for c in range(width)]
                for head in range(self.shape.heads)
            ]
        )


@dataclass(frozen=True)
class Round:
    """What a reference is asked about: the lanes of the cache, each in birth order."""

    world: World
    newest: int
    index: list[list[list[int]]]  # [layers][kv_heads][n]

    def keys(self, layer: int) -> Tensor:
        return self.world.lanes("key", layer, self.index[layer])

    def values(self, layer: int) -> Tensor:
        return self.world.lanes("value", layer, self.index[layer])

    def queries(self, layer: int, count: int) -> Tensor:
        """Of the newest `count` tokens. [heads, count, width]"""
        return self.world.queries(layer, range(self.newest + 1 - count, self.newest + 1))


def gate_arrays(setting: "Setting", depth: int, middle: float) -> dict[str, Tensor]:
    """The maps of a gate by their names in policies/mlp_gate.h, GATE_WIDTH wide in between, that
    says numbers around `middle`."""
    shape = setting.shape
    sizes = [2 * shape.width, *[GATE_WIDTH] * (depth - 1), shape.kv_heads]
    found = {}
    for layer in range(shape.layers):
        for i in range(1, depth + 1):
            rows = range(sizes[i])
            wide = sizes[i - 1] + 1
            numbers = torch.tensor([row(setting.seed, "gate", layer, i, r, wide) for r in rows])
            scale = 0.15 if i == 1 else 0.5
            found[f"layers.{layer}.linear{i}.weight"] = numbers[:, 1:] * scale
            found[f"layers.{layer}.linear{i}.bias"] = numbers[:, 0] + (middle if i == depth else 0)
    return found


def as_json(arrays: dict[str, Tensor]) -> dict[str, Any]:
    return {
        name: {"shape": list(array.shape), "values": short(array.flatten())}
        for name, array in arrays.items()
    }


# Scores of every lane, in birth order, higher stays: [layers][kv_heads][n]. Of lanes that keep the
# same tokens, those of the first count.
Scorer = Callable[[Round], list[Tensor]]
# Of references that choose victims by themselves: scores and lanes in, victims of each lane out.
Chooser = Callable[[list[Tensor], list[list[int]]], list[list[int]]]


@dataclass(frozen=True)
class Setting:
    """A run: of the request, and of the policy."""

    seed: int
    budget: int
    prompt_tokens: int
    tokens: int  # cached in all
    slack: int = 0
    prompt: int = 0  # protected
    sinks: int = 0
    recent: int = 1
    params: dict[str, Any] = field(default_factory=dict)
    shape: Shape = field(default_factory=Shape)
    shares: str = "head"  # which lanes keep the same tokens: each "head", "layer", or all ("token")
    pool: str = "lane"  # lanes that share a budget: "lane", "layer", "model"
    floor: float = 0  # of the budget, that each lane of a pool keeps for its own best
    budgets: list[int] = field(default_factory=list)  # of each lane, where they differ

    def budget_of(self, lane: int) -> int:
        return self.budgets[lane] if self.budgets else self.budget


def short(values: Tensor) -> list[float]:
    """fp32 numbers in the fewest digits that read back as the same fp32 number."""
    return [float(str(numpy.float32(value))) for value in values.tolist()]


def play(
    reference: str,
    scorer: Scorer,
    setting: Setting,
    *,
    keep_scores: bool = True,
    watch: Callable[[Round], None] | None = None,
    chooser: Chooser | None = None,
) -> dict[str, Any]:
    """Rounds of a scorer with the runtime's protection; of equals, the older goes. reference: the
    code that scores, as the policy's row in policies/README.md names it. watch: shown the cache
    after each decode token, before its round. chooser: the reference's own choice, which must be
    the same."""
    shape = setting.shape
    world = World(setting.seed, shape)
    layers, heads = range(shape.layers), range(shape.kv_heads)
    decisions = {  # (layer, head) that stand for lanes that keep the same tokens
        "head": [(layer, head) for layer in layers for head in heads],
        "layer": [(layer, 0) for layer in layers],
        "token": [(0, 0)],
    }[setting.shares]
    lanes: list[list[int]] = [[] for _ in decisions]
    cached = [
        [
            lanes[max(i for i, first in enumerate(decisions) if first <= (layer, head))]
            for head in heads
        ]
        for layer in layers
    ]
    rounds = []

    def grow(tokens: range) -> None:
        for lane in lanes:
            lane.extend(tokens)

    grow(range(setting.prompt_tokens))
    for newest in range(setting.prompt_tokens - 1, setting.tokens):
        if newest >= setting.prompt_tokens:
            grow(range(newest, newest + 1))
            if watch is not None:
                watch(Round(world, newest, cached))
        slack = setting.slack if newest >= setting.prompt_tokens else 0
        due = pools_over_budget(lanes, slack, setting)
        if not due:
            continue
        scores = scorer(Round(world, newest, cached))
        flat = [scores[layer][head] for layer, head in decisions]
        dropped = choose(flat, lanes, newest, due, setting)
        if chooser is not None:
            assert dropped == chooser(flat, lanes), f"{reference} drops others after {newest}"
        rounds.append({"newest": newest, "dropped": dropped})
        if keep_scores:
            asked = {lane for pool in due for lane in pool}
            rounds[-1]["scores"] = [
                short(lane) if i in asked else [] for i, lane in enumerate(flat)
            ]
        for lane, victims in zip(lanes, dropped, strict=True):
            lane[:] = [token for token in lane if token not in set(victims)]
    dropped_in_all = sum(len(victims) for r in rounds for victims in r["dropped"])
    if len(rounds) < 5 or dropped_in_all < 50:
        sys.exit(f"{len(rounds)} rounds and {dropped_in_all} victims are no test")
    known = asdict(setting)
    del known["shares"], known["budgets"]  # follow from the policy's parameters
    return {"reference": reference, **known, "rounds": rounds}


def pools_over_budget(lanes: list[list[int]], slack: int, setting: Setting) -> list[range]:
    """Lanes that share a budget and hold more than it and their slack."""
    together = {"lane": 1, "layer": setting.shape.kv_heads, "model": len(lanes)}[setting.pool]
    pools = [range(first, first + together) for first in range(0, len(lanes), together)]
    return [
        pool
        for pool in pools
        if sum(len(lanes[i]) - setting.budget_of(i) - slack for i in pool) > 0
    ]


def choose(
    scores: list[Tensor],
    lanes: list[list[int]],
    newest: int,
    pools: list[range],
    setting: Setting,
) -> list[list[int]]:
    """The lowest scores of each pool, protected tokens and each lane's floor apart."""
    dropped: list[list[int]] = [[] for _ in lanes]
    for pool in pools:
        excess = sum(len(lanes[i]) - setting.budget_of(i) for i in pool)
        open_entries = []
        for i in pool:
            candidates = sorted(
                (float(score), token)
                for score, token in zip(scores[i], lanes[i], strict=True)
                if max(setting.prompt, setting.sinks) <= token <= newest - setting.recent
            )
            safe = max(0, int(setting.floor * setting.budget) - (len(lanes[i]) - len(candidates)))
            open_entries += [(*c, i) for c in candidates[: max(0, len(candidates) - safe)]]
        open_entries.sort()
        if excess < len(open_entries):
            low, high = open_entries[excess - 1][0], open_entries[excess][0]
            if high != low and high - low < MIN_GAP * max(abs(low), abs(high)):
                sys.exit(f"scores {low} and {high} at the cut are too near; take another seed")
        for _, token, i in open_entries[:excess]:
            dropped[i].append(token)
    return [sorted(victims) for victims in dropped]


def write(policy: str, command: str, runs: list[dict[str, Any]]) -> None:
    OUT.mkdir(exist_ok=True)
    text = json.dumps({"command": command, "runs": runs}, separators=(",", ":"))
    text = text.replace('{"newest"', '\n{"newest"').replace('{"reference"', '\n{"reference"')
    (OUT / f"{policy}.json").write_text(text + "\n")
