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
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

OUT = Path(__file__).parent / "policies"
# Scores at a cut that are nearer than this (relative) say nothing of who is right.
MIN_GAP = 1e-5
MASK64 = (1 << 64) - 1
KINDS = {"key": 1, "value": 2, "query": 3, "hidden": 4, "output": 5}


def mix(x: int) -> int:
    """splitmix64's finaliser."""
    x = (x + 0x9E3779B97F4A7C15) & MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


@lru_cache(maxsize=None)
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


# Scores of every lane, in birth order, higher stays: [layers][kv_heads][n].
Scorer = Callable[[Round], list[Tensor]]


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
    pool: str = "lane"  # lanes that share a budget: "lane", "layer", "model"
    floor: float = 0  # of the budget, that each lane of a pool keeps for its own best


def short(values: Tensor) -> list[float]:
    """fp32 numbers in the fewest digits that read back as the same fp32 number."""
    return [float(str(numpy.float32(value))) for value in values.tolist()]


def play(
    reference: str, scorer: Scorer, setting: Setting, *, keep_scores: bool = True
) -> dict[str, Any]:
    """Rounds of a scorer with the runtime's protection; of equals, the older goes. reference: the
    code that scores, as the policy's row in policies/README.md names it."""
    shape = setting.shape
    world = World(setting.seed, shape)
    cached: list[list[list[int]]] = [
        [[] for _ in range(shape.kv_heads)] for _ in range(shape.layers)
    ]
    rounds = []

    def grow(tokens: range) -> None:
        for layer in cached:
            for lane in layer:
                lane.extend(tokens)

    grow(range(setting.prompt_tokens))
    for newest in range(setting.prompt_tokens - 1, setting.tokens):
        if newest >= setting.prompt_tokens:
            grow(range(newest, newest + 1))
        slack = setting.slack if newest >= setting.prompt_tokens else 0
        lanes = [lane for layer in cached for lane in layer]
        held = sum(len(lane) for lane in lanes) / len(lanes)
        if held <= setting.budget + slack:
            continue
        scores = scorer(Round(world, newest, cached))
        flat = [
            scores[layer][head] for layer in range(shape.layers) for head in range(shape.kv_heads)
        ]
        dropped = choose(flat, lanes, newest, setting)
        rounds.append({"newest": newest, "dropped": dropped})
        if keep_scores:
            rounds[-1]["scores"] = [short(lane) for lane in flat]
        for lane, victims in zip(lanes, dropped, strict=True):
            lane[:] = [token for token in lane if token not in set(victims)]
    dropped_in_all = sum(len(victims) for r in rounds for victims in r["dropped"])
    if len(rounds) < 5 or dropped_in_all < 50:
        sys.exit(f"{len(rounds)} rounds and {dropped_in_all} victims are no test")
    return {"reference": reference, **asdict(setting), "rounds": rounds}


def choose(
    scores: list[Tensor], lanes: list[list[int]], newest: int, setting: Setting
) -> list[list[int]]:
    """The lowest scores of each pool, protected tokens and each lane's floor apart."""
    shape = setting.shape
    together = {"lane": 1, "layer": shape.kv_heads, "model": len(lanes)}[setting.pool]
    dropped: list[list[int]] = [[] for _ in lanes]
    for first in range(0, len(lanes), together):
        pool = range(first, first + together)
        excess = sum(len(lanes[i]) - setting.budget for i in pool)
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
