"""Runs of kvpress's presses as data.

    pip install kvpress==0.5.5
    python tests/golden/make_kvpress.py [POLICY ...]

kvpress (Apache-2.0) is imported and is no part of this repository. A press is asked for its scores
over the cache of each round, as its `compress` would; which tokens go, and when, is world.py's.
"""

import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import draws
import kvpress
import numpy
import torch
from torch import Tensor
from world import (
    GATE_WIDTH,
    Chooser,
    Round,
    Scorer,
    Setting,
    Shape,
    as_json,
    gate_arrays,
    play,
    write,
)

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

    def rotary_emb(_: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].float() * shape.inv_freq
        return torch.cat([angles, angles], -1).cos(), torch.cat([angles, angles], -1).sin()

    by_head = round_.world.output_projection(layer)  # [heads, width, hidden]
    return SimpleNamespace(
        config=SimpleNamespace(
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            num_hidden_layers=shape.layers,
            head_dim=shape.width,
            hidden_size=by_head.shape[2],
        ),
        num_key_value_groups=shape.heads // shape.kv_heads,
        rotary_emb=rotary_emb,
        o_proj=SimpleNamespace(weight=by_head.flatten(0, 1).T),
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
            count = round_.newest + 1
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


def expected_attention() -> list[dict[str, Any]]:
    runs = []
    for seed, future, covariance, epsilon in ((1, 512, True, 0.0), (2, 32, False, 0.02)):
        press = kvpress.ExpectedAttentionPress(
            0.5, n_future_positions=future, use_covariance=covariance, epsilon=epsilon
        )
        params = {"future": future, "covariance": covariance, "epsilon": epsilon, "slack": 7}
        setting = {"seed": seed, "budget": 24, "slack": 7, "sinks": 4, "params": params}
        runs.append(run(press, prompt_tokens=12, tokens=90, **setting))
    params = {"value_norm": False, "slack": 0}
    setting = {"seed": 3, "budget": 20, "sinks": 4, "params": params}
    press = kvpress.ExpectedAttentionPress(0.5, use_vnorm=False)
    runs.append(run(press, prompt_tokens=40, tokens=70, **setting))
    return runs


def knorm() -> list[dict[str, Any]]:
    press = kvpress.KnormPress(0.5)
    setting = {"budget": 24, "prompt_tokens": 12, "tokens": 90, "slack": 7, "recent": 4}
    return [run(press, seed=seed, params={"slack": 7}, **setting) for seed in (1, 2)]


def keydiff() -> list[dict[str, Any]]:
    press = kvpress.KeyDiffPress(0.5)
    setting = {"budget": 24, "tokens": 100, "params": {"slack": 7}, "slack": 7}
    return [
        run(press, seed=1, prompt_tokens=12, recent=4, **setting),
        run(press, seed=2, prompt_tokens=60, sinks=2, recent=1, **setting),
    ]


def lagkv() -> list[dict[str, Any]]:
    runs = []
    for seed, lag, cross in ((1, 8, False), (2, 6, False), (3, 8, True)):
        press = kvpress.LagKVPress(0.5, lag_size=lag, cross_scoring=cross)
        params = {"lag": lag, "cross_scoring": cross, "slack": 7}
        setting = {"seed": seed, "slack": 7, "sinks": 4, "params": params}
        runs.append(run(press, budget=36, prompt_tokens=60, tokens=120, recent=lag, **setting))
        # Rounds of too few tokens for two partitions.
        runs.append(run(press, budget=9, prompt_tokens=12, tokens=80, **setting))
    return runs


def drawn_projection(press: kvpress.CURPress, seed: int, mode: str) -> Scorer:
    """The press with its random numbers replaced by policies/random.h's."""

    def scorer(round_: Round) -> list[Tensor]:
        layers = itertools.count()

        def randn(rows: int, rank: int, **_: Any) -> Tensor:
            first = round_.newest + 1 if mode == "resample" else 0
            stream = first << 24 | next(layers)
            numbers = [draws.normal(seed, stream, i) for i in range(rows * rank)]
            return torch.tensor(numbers).reshape(rows, rank)

        with mock.patch("torch.randn", randn):
            return scores_of(press)(round_)

    return scorer


def cur() -> list[dict[str, Any]]:
    setting = {"budget": 24, "tokens": 100, "slack": 7, "sinks": 4}
    runs = []
    for seed, leverage, window in (
        (1, "kv_product", 16),
        (2, "key", 7),
        (3, "value", 16),
        (4, "kv_avg", 5),
        (5, "kv_avg", 0),
    ):
        press = kvpress.CURPress(
            leverage_type=leverage,
            use_local_approximation=window > 0,
            local_window_size=window,
        )
        params = {"leverage": leverage, "local_window": window, "slack": 7}
        runs.append(run(press, seed=seed, prompt_tokens=12, params=params, **setting))
    for seed, mode, window in ((6, "resample", 16), (7, "fixed", 0)):
        press = kvpress.CURPress(
            use_random_leverage=True, use_local_approximation=window > 0, local_window_size=16
        )
        params = {"projection": mode, "local_window": window, "slack": 7}
        of_run = Setting(seed=seed, prompt_tokens=60, params=params, **setting)
        runs.append(play(reference_of(press), drawn_projection(press, seed, mode), of_run))
    return runs


def snapkv() -> list[dict[str, Any]]:
    runs = []
    for seed, window, kernel in ((1, 8, 5), (2, 6, 3)):
        press = kvpress.SnapKVPress(0.5, window_size=window, kernel_size=kernel)
        params = {"window": window, "kernel": kernel, "slack": 7}
        setting = {"seed": seed, "budget": 24, "slack": 7, "recent": window, "params": params}
        runs.append(run(press, prompt_tokens=12, tokens=90, **setting))
        # As published: a prompt that is cached whole, and then on.
        runs.append(run(press, prompt_tokens=60, tokens=110, **setting))
    # The press takes the budget as a share of the cache, which rounds of a fixed size keep.
    press = kvpress.CriticalKVPress(kvpress.SnapKVPress(0.25, window_size=8))
    params = {"window": 8, "slack": 7, "decorate": ["critical"]}
    setting = {"seed": 3, "budget": 24, "slack": 7, "recent": 8, "params": params}
    runs.append(run(press, prompt_tokens=12, tokens=90, **setting))
    return runs + snapkv_allocators()


def kvzap() -> list[dict[str, Any]]:
    from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel, KVzapPress

    runs = []
    for seed, depth in ((1, 1), (2, 2)):
        setting = Setting(
            seed=seed,
            budget=24,
            prompt_tokens=40,
            recent=6,
            tokens=110,
            slack=7,
            params={"allocator": "uniform", "slack": 7},
        )
        shape, arrays = setting.shape, gate_arrays(setting, depth, 0)
        config = KVzapConfig(
            input_dim=2 * shape.width,
            output_dim=shape.kv_heads,
            n_modules=shape.layers,
            hidden_dim=None if depth == 1 else GATE_WIDTH,
        )
        press = KVzapPress(model_type="linear" if depth == 1 else "mlp")
        press.kvzap_model = KVzapModel(config)
        state = {}
        for name, array in arrays.items():
            _, layer, linear, kind = name.split(".")
            place = "" if depth == 1 else f".{2 * (int(linear[-1]) - 1)}"
            state[f"layers.{layer}{place}.{kind}"] = array
        press.kvzap_model.load_state_dict(state)

        def scorer(round_: Round, press: Any = press) -> list[Tensor]:
            scores = []
            for layer, lanes in enumerate(round_.index):
                given = round_.world.attention_input(layer, range(round_.newest + 1))
                module = SimpleNamespace(layer_idx=layer)
                with torch.no_grad():
                    said = press.score(module, given[None], None, None, None, {})[0]
                scores.append(torch.stack([said[h][lane] for h, lane in enumerate(lanes)]))
            return scores

        run = play("kvpress 0.5.5 `KVzapPress`", scorer, setting)
        runs.append({**run, "artefact": {}, "arrays": as_json(arrays)})
    return runs


def tova() -> list[dict[str, Any]]:
    press = kvpress.TOVAPress(0.5)
    runs = []
    for seed, slack in ((1, 0), (2, 3)):
        setting = {"seed": seed, "budget": 20, "slack": slack, "shares": "layer"}
        setting["params"] = {"slack": slack}
        runs.append(run(press, prompt_tokens=12, tokens=70, **setting))
        runs.append(run(press, prompt_tokens=50, tokens=80, **setting))
    return runs


def duo_attention() -> list[dict[str, Any]]:
    """It lets nobody see what streaming heads would have dropped, and drops nothing in the others:
    so these runs end where the others reach their budgets."""
    runs = []
    shape = Shape(layers=3)
    for seed, slack, sparsity, streaming in ((1, 0, 0.5, 3), (2, 3, 2 / 3, 4)):
        scores = numpy.random.default_rng(seed).uniform(size=(shape.layers, shape.kv_heads))
        budget, sinks, recent = 24, 4, 8
        press = kvpress.DuoAttentionPress(head_compression_ratio=sparsity)
        pattern = (sinks, recent, scores)
        given = staticmethod(lambda _, pattern=pattern: pattern)
        with mock.patch.object(kvpress.DuoAttentionPress, "load_attention_pattern", given):
            press.post_init_from_model(SimpleNamespace(device="cpu"))
        of_others = budget + streaming * (budget - sinks - recent) // (6 - streaming)
        budgets = [
            sinks + recent if streams else of_others
            for streams in press.streaming_mask.flatten().tolist()
        ]
        assert sum(budgets) == budget * len(budgets)

        def chooser(_: list[Tensor], lanes: list[list[int]], press: Any = press) -> list[list[int]]:
            newest = max(map(max, lanes))
            dropped = []
            for layer in range(shape.layers):
                config = SimpleNamespace(_attn_implementation="sdpa")
                module = SimpleNamespace(config=config, layer_idx=layer)
                keys = torch.zeros(1, shape.kv_heads, newest + 1, shape.width)
                press.compress(module, None, keys, keys, None, {})
                _, heads, tokens = module.masked_key_indices
                for head in range(shape.kv_heads):
                    hidden = set(tokens[heads == head].tolist())
                    lane = lanes[layer * shape.kv_heads + head]
                    dropped.append([token for token in lane if token in hidden])
            return dropped

        def alike(round_: Round) -> list[Tensor]:
            return [[torch.zeros(len(lane)) for lane in layer] for layer in round_.index]  # type: ignore[misc]

        setting = Setting(
            seed=seed,
            budget=budget,
            prompt_tokens=6,
            tokens=of_others,
            slack=slack,
            sinks=sinks,
            recent=recent,
            params={"sparsity": sparsity, "slack": slack},
            shape=shape,
            budgets=budgets,
        )
        found = play(reference_of(press), alike, setting, chooser=chooser)
        runs.append({**found, "artefact": {"scores": scores.tolist()}})
    return runs


# Of `snapkv`: make_attention.py, and of `cur`: make_vase.py, for other code has a part in them.
POLICIES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "duo_attention": duo_attention,
    "expected_attention": expected_attention,
    "keydiff": keydiff,
    "knorm": knorm,
    "kvzap": kvzap,
    "lagkv": lagkv,
    "tova": tova,
}


if __name__ == "__main__":
    for name in sys.argv[1:] or POLICIES:
        write(name, COMMAND, POLICIES[name]())
