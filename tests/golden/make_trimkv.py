"""Runs of the TRIM-KV and DBTrimKV authors' code as data.

    git clone https://github.com/ngocbh/trimkv /tmp/trimkv
    git -C /tmp/trimkv checkout 0456bc4
    python tests/golden/make_trimkv.py /tmp/trimkv

Their code is imported from the checkout given and is no part of this repository. What of it needs a
GPU is left out: the kernel that appends to a flat cache, which is filled here by hand. Their gates
are read out of the models that they belong to.
"""

import ast
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional
from world import (
    GATE_WIDTH,
    Chooser,
    Round,
    Scorer,
    Setting,
    as_json,
    gate_arrays,
    play,
    write,
)

COMMIT = "ngocbh/trimkv 0456bc4"
MODEL = "src/trimkv/models/qwen3/modeling_trimkv_qwen3.py"
DEPTH = {"trimkv": 2, "dbtrimkv": 3}  # linear maps of a gate


class DeepGate(nn.Module):
    """DBTrimKV's gate, which later commits of theirs have as RetentionGate10."""

    def __init__(self, config: SimpleNamespace) -> None:
        super().__init__()
        width = config.retention_gate_intermediate_size
        self.linear1 = nn.Linear(config.hidden_size, width)
        self.linear2 = nn.Linear(width, width)
        self.linear3 = nn.Linear(width, config.num_key_value_heads, bias=False)
        self.bias = nn.Parameter(torch.zeros(config.num_key_value_heads))

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.silu(self.linear2(functional.silu(self.linear1(x))))
        return functional.logsigmoid(self.linear3(hidden) + self.bias)


def gate_class(path: Path, name: str) -> Callable[..., nn.Module]:
    """One class of a file whose imports are not there."""
    tree = ast.parse(path.read_text())
    found = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    known: dict[str, Any] = {"nn": nn, "torch": torch, "F": functional}
    known["ACT2FN"] = {"silu": functional.silu}
    exec(compile(ast.Module(found, []), str(path), "exec"), known)
    made: Callable[..., nn.Module] = known[name]
    return made


def gates(checkout: Path, policy: str, setting: Setting) -> list[nn.Module]:
    """Theirs, with the maps of `gate_arrays`."""
    depth, shape = DEPTH[policy], setting.shape
    kind = DeepGate if policy == "dbtrimkv" else gate_class(checkout / MODEL, "RetentionGate")
    config = SimpleNamespace(
        hidden_size=2 * shape.width,
        retention_gate_intermediate_size=GATE_WIDTH,
        num_key_value_heads=shape.kv_heads,
        retention_gate_bias_init=0.0,
        hidden_act="silu",
    )
    maps = gate_arrays(setting, depth, 3)
    found = []
    for layer in range(shape.layers):
        gate = kind(config)
        state = {}
        for i in range(1, depth + 1):
            state[f"linear{i}.weight"] = maps[f"layers.{layer}.linear{i}.weight"]
            bias = maps[f"layers.{layer}.linear{i}.bias"]
            state["bias" if i == depth else f"linear{i}.bias"] = bias
        gate.load_state_dict(state)
        found.append(gate)
    return found


def scored_by(checkout: Path, policy: str, setting: Setting) -> tuple[Scorer, Chooser]:
    """Their scores of a round, and their choice."""
    from trimkv import cache_utils as theirs

    shape = setting.shape
    modules = gates(checkout, policy, setting)
    kept: list[list[int]] = []  # of each lane

    def scorer(round_: Round) -> list[Tensor]:
        @cache
        def log_beta(layer: int, token: int) -> Tensor:
            given = round_.world.attention_input(layer, [token])
            with torch.no_grad():
                said: Tensor = modules[layer](given[None])
            return said[0, 0]

        lanes = [
            [torch.stack([log_beta(layer, t)[head] for t in lane]) for head, lane in enumerate(of)]
            for layer, of in enumerate(round_.index)
        ]
        kind = theirs.TrimKVCache if policy == "trimkv" else theirs.DynamicBudgetTrimKVCache
        cached = kind(device="cpu")
        cached._seen_tokens = round_.newest + 1
        cached.n_seen_tokens = [round_.newest + 1] * shape.layers
        for layer, of in enumerate(round_.index):
            if policy == "trimkv":
                positions = torch.tensor(of)[None]
                weights = torch.stack(lanes[layer])[None]
                rows = torch.zeros(*positions.shape, 1)
            else:
                positions = torch.tensor([t for lane in of for t in lane])[:, None]
                weights = torch.cat(lanes[layer])[:, None]
                rows = torch.zeros(len(positions), 1)
                lengths = torch.tensor([len(lane) for lane in of], dtype=torch.int32)
                cached.head_lens.append(lengths)
                ends = functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
                cached.cu_seqlens_k.append(ends)
            cached.key_cache.append(rows)
            cached.value_cache.append(rows)
            cached.retention_weights.append(weights)
            cached.kv_positions.append(positions)
        ranked: list[Tensor] = []
        topk = torch.topk

        def recorded(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
            ranked.append(scores)
            return topk(scores, *args, **kwargs)

        with mock.patch.object(torch, "topk", recorded):
            cached.compress(memory_size=setting.budget, buffer_size=0)
        kept.clear()
        for layer in range(shape.layers):
            positions = cached.kv_positions[layer]
            if policy == "trimkv":
                kept.extend(positions[0].tolist())
            else:
                kept.extend(
                    part.tolist()
                    for part in positions[:, 0].split(cached.head_lens[layer].tolist())
                )
        if policy == "trimkv":
            return [scores[0] for scores in ranked]
        flat = ranked[0].split([len(lane) for of in round_.index for lane in of])
        heads = shape.kv_heads
        return [list(flat[i : i + heads]) for i in range(0, len(flat), heads)]  # type: ignore[misc]

    def chooser(_: list[Tensor], cached: list[list[int]]) -> list[list[int]]:
        return [
            [token for token in lane if token not in set(stays)]
            for lane, stays in zip(cached, kept, strict=True)
        ]

    return scorer, chooser


def main() -> None:
    checkout = Path(sys.argv[1])
    package = ModuleType("trimkv")  # without what it imports first
    package.__path__ = [str(checkout / "src" / "trimkv")]
    sys.modules["trimkv"] = package
    for name, attribute in (
        ("einops", "rearrange"),
        ("trimkv.triton", "update_flatten_view_triton"),
    ):
        stub = ModuleType(name)
        setattr(stub, attribute, None)
        sys.modules.setdefault(name, stub)
    for policy, depth in DEPTH.items():
        runs = []
        for seed, slack in ((21, 15), (22, 3), (23, 7)):
            setting = Setting(
                seed=seed,
                budget=40,
                prompt_tokens=60,
                recent=0,
                tokens=150,
                slack=slack,
                params={"slack": slack},
                pool="lane" if policy == "trimkv" else "model",
            )
            scorer, chooser = scored_by(checkout, policy, setting)
            kind = "TrimKVCache" if policy == "trimkv" else "DynamicBudgetTrimKVCache"
            run = play(f"{COMMIT} `{kind}`", scorer, setting, chooser=chooser)
            maps = as_json(gate_arrays(setting, depth, 3))
            runs.append({**run, "artefact": {}, "arrays": maps})
        write(policy, "python tests/golden/make_trimkv.py CHECKOUT", runs)


if __name__ == "__main__":
    main()
