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
import torch
from torch import Tensor
from world import Round, Scorer, Setting, play, write

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


def reference(press: kvpress.ScorerPress) -> str:
    return f"kvpress 0.5.5 `{type(press).__name__}`"


def run(press: kvpress.ScorerPress, **setting: Any) -> dict[str, Any]:
    return play(reference(press), scores_of(press), Setting(**setting))


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
        runs.append(play(reference(press), drawn_projection(press, seed, mode), of_run))
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
    return runs


POLICIES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "cur": cur,
    "expected_attention": expected_attention,
    "keydiff": keydiff,
    "knorm": knorm,
    "lagkv": lagkv,
    "snapkv": snapkv,
}


if __name__ == "__main__":
    for name in sys.argv[1:] or POLICIES:
        write(name, COMMAND, POLICIES[name]())
