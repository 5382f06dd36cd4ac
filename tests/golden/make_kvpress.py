"""Runs of kvpress's presses as data.

    pip install kvpress==0.5.5
    python tests/golden/make_kvpress.py [POLICY ...]

kvpress (Apache-2.0) is imported and is no part of this repository. A press is asked for its scores
over the cache of each round, as its `compress` would; which tokens go, and when, is world.py's.
"""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import kvpress
import torch
from torch import Tensor
from world import Chooser, Round, Scorer, Setting, Shape, play, write

COMMAND = "python tests/golden/make_kvpress.py"


def attention_module(round_: Round, layer: int, count: int) -> SimpleNamespace:
    """Stands for the attention layer whose query projection gives the newest queries: rows of
    "hidden states" are their numbers."""
    shape = round_.world.shape
    queries = round_.queries(layer, count)  # [heads, count, width]

    def q_proj(hidden: Tensor) -> Tensor:
        """[1, rows, heads x width] of the last rows."""
        return (
            queries[:, count - hidden.shape[1] :]
            .transpose(0, 1)
            .reshape(1, -1, shape.heads * shape.width)
        )

    return SimpleNamespace(
        config=SimpleNamespace(
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            num_hidden_layers=shape.layers,
        ),
        head_dim=shape.width,
        layer_idx=layer,
        q_proj=q_proj,
    )


def scores_of(press: kvpress.ScorerPress) -> Scorer:
    """Rows are taken as they are: an identity for the rotary embedding."""

    def scorer(round_: Round) -> list[Tensor]:
        scores = []
        for layer in range(round_.world.shape.layers):
            keys, values = round_.keys(layer)[None], round_.values(layer)[None]
            n, width = keys.shape[2], round_.world.shape.width
            count = min(n, round_.newest + 1)
            rotary = (torch.ones(1, n, width), torch.zeros(1, n, width))
            module = attention_module(round_, layer, count)
            hidden = torch.zeros(1, count, 1)
            kwargs = {"position_embeddings": rotary}
            scores.append(press.score(module, hidden, keys, values, None, kwargs)[0])
        return scores

    return scorer


def reference_of(press: kvpress.BasePress) -> str:
    return f"kvpress 0.5.5 `{type(press).__name__}`"


def run(press: kvpress.ScorerPress, **setting: Any) -> dict[str, Any]:
    return play(reference_of(press), scores_of(press), Setting(**setting))


class Given(kvpress.ScorerPress):
    """A press of given scores."""

    scores: Tensor

    def score(self, *args: Any) -> Tensor:
        return self.scores.clone()


def ada_kv_choice(safeguard: float, budget: int, kv_heads: int) -> Chooser:
    """What AdaKVPress masks in each layer. It takes lanes of one length: shorter ones are filled up
    with entries that go first."""
    press = kvpress.AdaKVPress(Given(), safeguard)

    def chooser(scores: list[Tensor], lanes: list[list[int]]) -> list[list[int]]:
        dropped: list[list[int]] = []
        for first in range(0, len(lanes), kv_heads):
            layer = scores[first : first + kv_heads]
            longest = max(len(lane) for lane in layer)
            # In the middle of what compute_n_kept rounds down to the budget.
            press.press.compression_ratio = 1 - (budget + 0.5) / longest
            press.press.scores = torch.stack(
                [torch.nn.functional.pad(s, (0, longest - len(s)), value=-1.0) for s in layer]
            )[None]
            module = SimpleNamespace(config=SimpleNamespace(_attn_implementation="sdpa"))
            press.compress(module, None, None, None, None, {})
            _, heads, slots = module.masked_key_indices
            for i, lane in enumerate(lanes[first : first + kv_heads]):
                masked = slots[heads == i].tolist()
                dropped.append(sorted(lane[slot] for slot in masked if slot < len(lane)))
        return dropped

    return chooser


def lanes_of(press: kvpress.SnapKVPress) -> Scorer:
    """scores_of, lane by lane: for lanes of different lengths."""

    def scorer(round_: Round) -> list[Tensor]:
        shape = round_.world.shape
        group = shape.heads // shape.kv_heads
        scores = []
        for layer in range(shape.layers):
            of_layer = []
            for head, index in enumerate(round_.index[layer]):
                keys = round_.world.rows("key", layer, head, index)[None, None]
                n = len(index)
                module = attention_module(round_, layer, n)
                queries = round_.queries(layer, press.window_size)
                queries = queries[head * group : (head + 1) * group]
                module.config.num_attention_heads = group
                module.config.num_key_value_heads = 1
                module.q_proj = lambda _, q=queries: q.transpose(0, 1).reshape(1, q.shape[1], -1)
                rotary = (torch.ones(1, n, shape.width), torch.zeros(1, n, shape.width))
                kwargs = {"position_embeddings": rotary}
                of_layer.append(press.score(module, torch.zeros(1, n, 1), keys, None, None, kwargs))
            scores.append([s[0, 0] for s in of_layer])
        return scores

    return scorer


def snapkv_allocators() -> list[dict[str, Any]]:
    runs = []
    shape = Shape()
    press = kvpress.SnapKVPress(0.5, window_size=4, kernel_size=3)
    for seed, budget, floor in ((1, 24, 0.2), (2, 24, 0.6), (4, 20, 0.0)):
        params = {"window": 4, "kernel": 3, "slack": 7, "allocator": "head_pool", "floor": floor}
        setting = Setting(
            seed=seed,
            budget=budget,
            prompt_tokens=40,
            tokens=110,
            slack=7,
            recent=4,
            params=params,
            pool="layer",
            floor=floor,
        )
        choice = ada_kv_choice(floor, budget, shape.kv_heads)
        reference = "kvpress 0.5.5 `AdaKVPress`"
        runs.append(play(reference, lanes_of(press), setting, chooser=choice))
    # PyramidKVPress takes the budget for what is kept beside the window (the other published code
    # adds the window to each layer, as is done here), and gives it out as long as the last layer
    # holds its window and the first no more than the prompt.
    window, budget, shape = 2, 62, Shape(layers=3, heads=2, kv_heads=2)
    press = kvpress.PyramidKVPress(1 - (budget - window) / 200, window_size=window, kernel_size=3)
    config = SimpleNamespace(num_hidden_layers=shape.layers)
    budgets = []
    for layer in range(shape.layers):
        module = SimpleNamespace(config=config, layer_idx=layer)
        budgets += [press.get_layer_budget(module, 200) + window] * shape.kv_heads
    assert sum(budgets) == budget * len(budgets) and len(set(budgets)) == shape.layers
    params = {"window": window, "kernel": 3, "slack": 7, "allocator": "pyramid"}
    for seed, prompt in ((1, 12), (2, 130)):
        setting = Setting(
            seed=seed,
            budget=budget,
            prompt_tokens=prompt,
            tokens=170,
            slack=7,
            recent=window,
            params=params,
            shape=shape,
            budgets=budgets,
        )
        runs.append(play(reference_of(press), lanes_of(press), setting, keep_scores=False))
    return runs


def knorm() -> list[dict[str, Any]]:
    press = kvpress.KnormPress(0.5)
    setting = {"budget": 24, "prompt_tokens": 12, "tokens": 90, "slack": 7, "recent": 4}
    return [run(press, seed=seed, params={"slack": 7}, **setting) for seed in (1, 2)]


def snapkv() -> list[dict[str, Any]]:
    runs = []
    for seed, window, kernel in ((1, 8, 5), (2, 6, 3)):
        press = kvpress.SnapKVPress(0.5, window_size=window, kernel_size=kernel)
        params = {"window": window, "kernel": kernel, "slack": 7}
        setting = {"seed": seed, "budget": 24, "slack": 7, "recent": window, "params": params}
        runs.append(run(press, prompt_tokens=12, tokens=90, **setting))
        # As published: a prompt that is cached whole, and then on.
        runs.append(run(press, prompt_tokens=60, tokens=110, **setting))
    return runs + snapkv_allocators()


def tova() -> list[dict[str, Any]]:
    press = kvpress.TOVAPress(0.5)
    runs = []
    for seed, slack in ((1, 0), (2, 3)):
        setting = {"seed": seed, "budget": 20, "slack": slack, "shares": "layer"}
        setting["params"] = {"slack": slack}
        runs.append(run(press, prompt_tokens=12, tokens=70, **setting))
        runs.append(run(press, prompt_tokens=50, tokens=80, **setting))
    return runs


# Of `snapkv`: make_attention.py, for other code has a part in it.
POLICIES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "knorm": knorm,
    "tova": tova,
}


if __name__ == "__main__":
    for name in sys.argv[1:] or POLICIES:
        write(name, COMMAND, POLICIES[name]())
