"""What the LAQ authors' code keeps of prompts, as data.

    git clone https://github.com/noforit/Lookahead_Q-Cache /tmp/laq
    git -C /tmp/laq checkout 74612bd
    python tests/golden/make_laq.py /tmp/laq

Their code is read from the checkout given and is no part of this repository. It is given a prompt's
keys, the queries of its newest tokens, and as those that were told ahead the queries of the tokens
that would come next.
"""

import ast
import contextlib
import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from make_attention import ranked
from torch import nn
from torch.nn import functional
from world import OUT, Shape, World, short

COMMIT = "noforit/Lookahead_Q-Cache 74612bd"
AHEAD = 8
SHAPE = Shape(layers=2, heads=2, kv_heads=2)


def cluster_class(checkout: Path) -> Any:
    """One class of a file whose imports are not there."""
    path = checkout / "pyramidkv/pyramidkv_utils.py"
    tree = ast.parse(path.read_text())
    found = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "SnapKVCluster"]
    known: dict[str, Any] = {"torch": torch, "nn": nn, "F": functional, "math": math}
    exec(compile(ast.Module(found, []), str(path), "exec"), known)
    return known["SnapKVCluster"]


def run(checkout: Path, seed: int, prompt: int, budget: int, prompt_queries: int) -> dict[str, Any]:
    world = World(seed, SHAPE)
    asking = range(prompt - prompt_queries, prompt + AHEAD)
    lanes = []
    for layer in range(SHAPE.layers):
        cluster = cluster_class(checkout)(
            window_size=prompt_queries,
            max_capacity_prompt=budget,
            kernel_size=7,
            pooling="maxpool",
            lookahead_size=AHEAD,
        )
        keys = world.lanes("key", layer, [range(prompt)] * SHAPE.kv_heads)[None]
        with ranked() as seen, contextlib.redirect_stdout(io.StringIO()):
            cluster.update_kv_LAQ(keys, world.queries(layer, asking)[None], keys, None, None)
        for scores in seen[0][0] / len(asking):  # they have sums
            order = scores.sort(descending=True, stable=True)
            cut = budget - prompt_queries
            gap = (order.values[cut - 1] - order.values[cut]) / order.values[cut]
            tied = bool(order.values[cut - 1] == order.values[cut])
            assert tied or gap > 1e-5, "scores at the cut are too near; take another seed"
            # Among equals the newer stays, as everywhere here.
            newest_first = scores.flip(0).sort(descending=True, stable=True)
            kept = prompt - prompt_queries - 1 - newest_first.indices[:cut]
            lanes.append({"scores": short(scores), "kept": sorted(kept.tolist())})
    return {
        "reference": f"{COMMIT} `SnapKVCluster.update_kv_LAQ`",
        "seed": seed,
        "prompt_tokens": prompt,
        "budget": budget,
        "prompt_queries": prompt_queries,
        "lanes": lanes,
    }


def main() -> None:
    checkout = Path(sys.argv[1])
    runs = [
        run(checkout, seed, prompt, budget, prompt_queries)
        for prompt_queries in (0, 8)
        for seed, prompt, budget in ((41, 90, 40), (42, 150, 64), (43, 61, 20))
    ]
    text = json.dumps(
        {"command": "python tests/golden/make_laq.py CHECKOUT", "runs": runs},
        separators=(",", ":"),
    )
    (OUT.parent / "laq.json").write_text(text.replace('{"reference"', '\n{"reference"') + "\n")


if __name__ == "__main__":
    main()
