"""Runs of the SkipKV authors' code as data.

    git clone https://github.com/TTTTTTris/SkipKV /tmp/skipkv
    git -C /tmp/skipkv checkout 4492840
    python tests/golden/make_skipkv.py /tmp/skipkv

Their code is read from the checkout given and is no part of this repository. It is asked which
sentences repeat one another, and for its scores over the cache of each round. What it reads of a
model (hidden states, where sentences end) is the world's. Its own code for that needs a model.
"""

import ast
import logging
import sys
from pathlib import Path
from typing import Any

import torch
from make_attention import ranked
from torch import Tensor, nn
from torch.nn import functional
from world import Round, Scorer, Setting, World, play, write

COMMIT = "TTTTTTris/SkipKV 4492840"
WINDOW = 8
ENDS = [3, 7]


def read(path: Path, names: set[str]) -> dict[str, Any]:
    """Some functions and classes of a file whose imports are not there."""
    tree = ast.parse(path.read_text())
    found = [
        node
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in names
    ]
    assert len(found) == len(names), path
    known: dict[str, Any] = {"torch": torch, "nn": nn, "F": functional, "logging": logging}
    known["math"] = __import__("math")
    exec(compile(ast.Module(found, []), str(path), "exec"), known)
    return known


class Sentences:
    """Those of a world, and which of them repeat one another, as a sequence grows."""

    def __init__(self, checkout: Path, world: World, threshold: float) -> None:
        name = "cal_sentence_similarity_from_reprs"
        self._similar = read(checkout / "skipkv/modeling_nhid.py", {name})[name]
        self._world = world
        self._threshold = threshold
        self._seen = 0
        self._begin = 0
        self.complete: list[tuple[int, int]] = []  # first and last token
        self._units: list[dict[tuple[int, int], Tensor]] = [{}]
        self.repeated: list[dict[tuple[int, int], float]] = [{}]

    def grow(self, newest: int) -> None:
        known = list(self._units[0])
        new_from = known[-1][-1] if known else 0
        for token in range(self._seen, newest + 1):
            if self._world.token_id(token) not in ENDS:
                continue
            span = (self._begin, token)
            mean = self._world.final_hidden(range(self._begin, token + 1)).mean(0)
            self._units[0][span] = mean / (mean.norm(dim=-1, keepdim=True) + 1e-8)
            self.complete.append(span)
            self._begin = token + 1
        self._seen = newest + 1
        self._similar(self._units, self.repeated, [new_from], self._threshold)


def scored_by(checkout: Path, setting: Setting, threshold: float) -> Scorer:
    shape = setting.shape
    sentences = Sentences(checkout, World(setting.seed, shape), threshold)
    names = {"compute_attention_scores", "cal_similarity_multi_batch"}
    helpers = read(checkout / "skipkv/utils.py", names)
    known = read(checkout / "skipkv/compression/skipkv.py", {"SkipKV"})
    known.update({name: helpers[name] for name in names})
    layers = [
        known["SkipKV"](setting.budget, WINDOW, kernel_size=7, mix_lambda=0.1)
        for _ in range(shape.layers)
    ]

    def scorer(round_: Round) -> list[Tensor]:
        sentences.grow(round_.newest)
        scores = []
        for layer, cluster in enumerate(layers):
            keys = round_.keys(layer)[None]
            with ranked() as seen:
                cluster.update_kv(
                    keys,
                    round_.queries(layer, WINDOW)[None],
                    keys,
                    layer,
                    None,
                    [sentences.complete],
                    sentences.repeated,
                    [round_.newest + 1],
                )
            # Tokens of the window stay, whatever they score.
            scores.append(functional.pad(seen[0][0], (0, WINDOW), value=1.0))
        return scores

    return scorer


def main() -> None:
    checkout = Path(sys.argv[1])
    runs = []
    for seed, slack, threshold in ((31, 15, 0.3), (32, 7, 0.5), (33, 23, 0.2)):
        params = {
            "slack": slack,
            "threshold": threshold,
            "window": WINDOW,
            "compat": True,
            "ends": ENDS,
        }
        setting = Setting(
            seed=seed,
            budget=60,
            prompt_tokens=90,
            tokens=240,
            slack=slack,
            recent=WINDOW,
            params=params,
        )
        runs.append(play(f"{COMMIT} `SkipKV`", scored_by(checkout, setting, threshold), setting))
    write("skipkv", "python tests/golden/make_skipkv.py CHECKOUT", runs)


if __name__ == "__main__":
    main()
