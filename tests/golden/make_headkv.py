"""Runs of the HeadKV authors' code as data.

    git clone https://github.com/FYYFU/HeadKV /tmp/headkv
    git -C /tmp/headkv checkout 0862a09
    python tests/golden/make_headkv.py /tmp/headkv

Their class is read from the checkout given and is no part of this repository. It is asked for the
budgets of heads, given their scores in a file as it reads it, and for its scores over the cache of
each round. A query head has a cache of its own there, so here each KV head has one query head.
"""

import ast
import json
import math
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn import functional
from world import Round, Scorer, Setting, Shape, play, write

REFERENCE = "FYYFU/HeadKV 0862a09 `ReasonSnapKVCluster`"
SHAPE = Shape(layers=3, heads=2, kv_heads=2)


def read(checkout: Path, root: Path) -> Any:
    """The class. root: the folder in which it looks for scores."""
    tree = ast.parse((checkout / "headkv" / "snapkv_utils.py").read_text())
    (found,) = (
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == "ReasonSnapKVCluster"
    )
    known: dict[str, Any] = {"torch": torch, "nn": nn, "F": functional, "np": numpy}
    known.update(math=math, os=os, json=json, __file__=str(root / "headkv" / "snapkv_utils.py"))
    exec(compile(ast.Module([found], []), "snapkv_utils.py", "exec"), known)
    return known["ReasonSnapKVCluster"]


def cluster(checkout: Path, heads: list[list[float]], params: dict[str, Any], budget: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        scores = Path(folder) / "Important_Head" / "head_score"
        scores.mkdir(parents=True)
        named = {
            f"{layer}-{head}": [score]
            for layer, of_layer in enumerate(heads)
            for head, score in enumerate(of_layer)
        }
        file = scores / "Meta-Llama-3-8B-Instruct_retrieval_heads.json"
        file.write_text(json.dumps(named))
        return read(checkout, Path(folder))(
            window_size=params["window"],
            kernel_size=params["kernel"],
            base_capacity=budget,
            head_choice="copy",
            beta=params["beta"],
            temp=params["power"],
            num_hidden_layers=SHAPE.layers,
            num_attention_heads=SHAPE.heads,
            model="llama",
        )


def scorer_of(asked: Any) -> Scorer:
    """Lane by lane, for they are of different lengths."""

    def scorer(round_: Round) -> list[Tensor]:
        window = asked.window_size
        scores: list[Any] = []
        for layer in range(SHAPE.layers):
            queries = round_.queries(layer, window)
            of_layer = []
            for head, index in enumerate(round_.index[layer]):
                keys = round_.world.rows("key", layer, head, index)[None, None]
                before = asked.calcul_attn_sore(keys, queries[None, head : head + 1])
                of_layer.append(functional.pad(before[0, 0], (0, window)))
            scores.append(of_layer)
        return scores

    return scorer


def runs(checkout: Path) -> list[dict[str, Any]]:
    found = []
    # Scores whose budgets are whole numbers: else theirs add up to another budget.
    cases = (
        (1, [[4.0, 1.0], [2.0, 3.0], [0.0, 5.0]], 4, 34, 2.0, 1.0),
        (2, [[1.0, 2.0], [0.0, 3.0], [1.0, 1.0]], 6, 30, 1.5, 2.0),
    )
    for seed, heads, window, budget, beta, power in cases:
        params = {
            "window": window,
            "kernel": 7,
            "beta": beta,
            "power": power,
            "slack": 7,
        }
        asked = cluster(checkout, heads, params, budget)
        budgets = [b + window for b in asked.head_capacity.flatten().tolist()]
        assert sum(budgets) == budget * len(budgets), budgets
        assert len(set(budgets)) > 3, budgets
        setting = Setting(
            seed=seed,
            budget=budget,
            prompt_tokens=90,
            tokens=150,
            slack=7,
            recent=window,
            params=params,
            shape=SHAPE,
            budgets=budgets,
        )
        run = play(REFERENCE, scorer_of(asked), setting)
        found.append({**run, "artefact": {"scores": heads}})
    return found


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    torch.set_num_threads(1)
    write("headkv", "python tests/golden/make_headkv.py CHECKOUT", runs(Path(sys.argv[1])))
