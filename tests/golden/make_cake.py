"""Runs of the CAKE authors' code as data.

    git clone https://github.com/antgroup/cakekv /tmp/cakekv
    git -C /tmp/cakekv checkout c4675ce
    python tests/golden/make_cake.py /tmp/cakekv

Their code is read from the checkout given and is no part of this repository. Its attention layer is
asked for scores and preferences over the cache of each round, and its cache for what layers keep.
It is told what a layer projects, and that nothing is rotated.
"""

import __future__

import ast
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from world import Round, Scorer, Setting, Shape, play, write

REFERENCE = "antgroup/cakekv c4675ce `CakeprefillKVCache`"
CODE = {
    "cake/utils.py": {"calculate_entropy", "adjust_budgets"},
    "cake/cake_cache.py": {"CakeCache", "CakeprefillKVCache"},
    "cake/model/modify_llama.py": {"llama_attn_forward_cake"},
}


def read(checkout: Path) -> dict[str, Any]:
    """Their functions and classes, without what they import of old versions of transformers."""

    def repeat_kv(rows: Tensor, times: int) -> Tensor:
        return rows.repeat_interleave(times, dim=1)

    def attend(queries: Tensor, *_: Any, **__: Any) -> Tensor:
        return torch.zeros_like(queries)  # nobody asks for the layer's output

    known: dict[str, Any] = {
        "torch": torch,
        "nn": nn,
        "F": functional,
        "np": numpy,
        "math": math,
        "logger": SimpleNamespace(warning_once=lambda _: None),
        "Cache": object,
        "StaticCache": type(None),
        "DynamicCache": type(None),
        "repeat_kv": repeat_kv,
        "apply_rotary_pos_emb": lambda queries, keys, *_: (queries, keys),
        "_flash_attention_forward": attend,
    }
    for file, names in CODE.items():
        tree = ast.parse((checkout / file).read_text())
        found = [
            node
            for node in tree.body
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names
        ]
        assert len(found) == len(names), file
        flags = __future__.annotations.compiler_flag
        exec(compile(ast.Module(found, []), file, "exec", flags), known)
    return known


def asked(code: dict[str, Any], round_: Round, params: dict[str, Any]) -> Any:
    """Their cache of the round, with scores and preferences of all layers."""
    shape, window = round_.world.shape, params["window"]
    cache = code["CakeCache"]()
    for layer in range(shape.layers):
        keys, values = round_.keys(layer), round_.values(layer)
        n = keys.shape[1]
        queries = functional.pad(round_.queries(layer, window), (0, 0, n - window, 0))
        config = SimpleNamespace(
            decoding_evict=[None] * shape.layers,
            prefill_cake_evict=[lambda found, _: found] * shape.layers,
            prefill=[True] * shape.layers,
            window_size=[window] * shape.layers,
            key_size=[0] * shape.layers,
            tau1=params.get("tau1", 1),
            tau2=params.get("tau2", 1),
            gamma=params.get("gamma", 200),
        )
        config.prefill_cake_evict[layer].num_layers = -1  # decoding is not asked
        module = SimpleNamespace(
            config=config,
            layer_idx=layer,
            num_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            num_key_value_groups=shape.heads // shape.kv_heads,
            head_dim=shape.width,
            q_proj=projection(queries),
            k_proj=projection(keys),
            v_proj=projection(values),
            o_proj=nn.Identity(),
            attention_dropout=0.0,
            training=True,
            is_causal=True,
            _flash_attn_uses_top_left_mask=False,
        )
        code["llama_attn_forward_cake"](
            module,
            torch.zeros(1, n, 1),
            past_key_value=cache,
            position_embeddings=(torch.ones(1), torch.zeros(1)),
        )
    return cache


def projection(rows: Tensor) -> Any:
    """Of hidden states that nobody looks at. rows: [heads, n, width]"""

    class Projection:
        weight = rows  # whose dtype is asked for

        def __call__(self, _: Tensor) -> Tensor:
            return rows.transpose(0, 1).flatten(1)[None]

    return Projection()


def scores(code: dict[str, Any], params: dict[str, Any]) -> Scorer:
    def scorer(round_: Round) -> list[Tensor]:
        found = asked(code, round_, params).evict_scores
        return [functional.pad(of_layer[0], (0, params["window"])) for of_layer in found]

    return scorer


def choice(code: dict[str, Any], params: dict[str, Any], budget: int) -> Scorer:
    """1 of what it keeps, 0 of what it drops. Layers have the budgets of the first round."""
    budgets: list[int] = []

    def scorer(round_: Round) -> list[Tensor]:
        shape, window = round_.world.shape, params["window"]
        cache = asked(code, round_, params)
        for layer in range(shape.layers):
            tokens = torch.tensor(round_.index[layer], dtype=torch.float32)[None, :, :, None]
            cache.key_cache[layer] = cache.value_cache[layer] = tokens
        evict = code["CakeprefillKVCache"](
            budget, window, num_heads=shape.heads, num_layers=shape.layers
        )
        if not budgets:
            evict(cache, round_.newest + 1)
            budgets.extend(cache.layer_budget)
            assert sum(budgets) == (budget - window) * shape.layers
            assert len(set(budgets)) == shape.layers, "layers that are alike say little"
        else:
            for layer, of_layer in enumerate(budgets):
                evict.evcit_layer_kvcache(cache, layer, of_layer)
        return [
            torch.stack(
                [
                    torch.isin(torch.tensor(lane), kept.long().flatten()).float()
                    for lane, kept in zip(
                        round_.index[layer], cache.key_cache[layer][0], strict=True
                    )
                ]
            )
            for layer in range(shape.layers)
        ]

    return scorer


def runs(checkout: Path) -> list[dict[str, Any]]:
    code = read(checkout)
    found = []
    for seed, window, gamma, kernel, prompt in (
        (1, 8, 200.0, 5, 12),
        (2, 6, 20.0, 5, 60),
    ):
        params = {"window": window, "gamma": gamma, "kernel": kernel, "slack": 7}
        params["allocator"] = "uniform"
        setting = Setting(
            seed=seed,
            budget=24,
            prompt_tokens=prompt,
            tokens=100,
            slack=7,
            recent=window,
            params=params,
        )
        found.append(play(REFERENCE, scores(code, params), setting))
    for seed, taus in (
        (3, {}),
        (4, {"tau1": 1.6, "tau2": 0.4}),
        (5, {"tau1": 0.9, "tau2": 2.3}),
    ):
        params = {"window": 8, "slack": 7, **taus}
        setting = Setting(
            seed=seed,
            budget=40,
            prompt_tokens=90,
            tokens=160,
            slack=7,
            recent=8,
            params=params,
            shape=Shape(layers=3),
            pool="model",
        )
        found.append(
            play(
                REFERENCE,
                choice(code, params, setting.budget),
                setting,
                keep_scores=False,
            )
        )
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    write("cake", "python tests/golden/make_cake.py CHECKOUT", runs(Path(sys.argv[1])))
