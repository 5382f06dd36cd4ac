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


def run(press: kvpress.ScorerPress, **setting: Any) -> dict[str, Any]:
    reference = f"kvpress 0.5.5 `{type(press).__name__}`"
    return play(reference, scores_of(press), Setting(**setting))


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
    "expected_attention": expected_attention,
    "knorm": knorm,
    "snapkv": snapkv,
}


if __name__ == "__main__":
    for name in sys.argv[1:] or POLICIES:
        write(name, COMMAND, POLICIES[name]())
