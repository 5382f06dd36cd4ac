"""Runs of the TriAttention authors' code as data.

    git clone https://github.com/WeianMao/triattention /tmp/triattention
    git -C /tmp/triattention checkout c3744ee
    python tests/golden/make_triattention.py /tmp/triattention

Their code is imported from the checkout given and is no part of this repository. Their angles are
fp32 products, off by up to 4e-3 at the largest distance of 65536: here they are made in double.
The tie noise of up to 1e-6 that they add is left out.
"""

import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from world import Chooser, Round, Scorer, Setting, play, row, short, write

REFERENCE = "WeianMao/triattention c3744ee `TriAttention`"


def statistics(setting: Setting) -> dict[str, list[Any]]:
    """Of every query head: means of its pairs, and of their lengths, which are larger."""
    shape, pairs = setting.shape, setting.shape.width // 2
    found: dict[str, list[Any]] = {"q_mean_real": [], "q_mean_imag": [], "q_abs_mean": []}
    for layer in range(shape.layers):
        for numbers in found.values():
            numbers.append([])
        for head in range(shape.heads):
            drawn = torch.tensor(row(setting.seed, "query", layer, head, 1 << 20, shape.width))
            real, imag = drawn[:pairs], drawn[pairs:]
            spread = torch.tensor(row(setting.seed, "query", layer, head, 1 << 21, pairs)).abs()
            found["q_mean_real"][-1].append(short(real))
            found["q_mean_imag"][-1].append(short(imag))
            found["q_abs_mean"][-1].append(short((real**2 + imag**2).sqrt() + spread))
    return found


def scored_by(
    setting: Setting, mode: dict[str, bool], future: int, normalize: bool
) -> tuple[Scorer, Chooser]:
    """Their scores of a round, and their choice."""
    from triattention.methods import triattention as theirs
    from triattention.methods.pruning_utils import HeadFrequencyStats, save_head_frequency_stats

    shape = setting.shape
    numbers = {name: torch.tensor(n) for name, n in statistics(setting).items()}
    heads = [(layer, head) for layer in range(shape.layers) for head in range(shape.heads)]
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        config = {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "hidden_size": shape.heads * shape.width,
            "num_hidden_layers": shape.layers,
            "num_attention_heads": shape.heads,
            "num_key_value_heads": shape.kv_heads,
            "head_dim": shape.width,
            "rope_theta": 10000.0,
        }
        (directory / "config.json").write_text(json.dumps(config))
        save_head_frequency_stats(
            directory / "stats.pt",
            heads,
            {
                at: HeadFrequencyStats(
                    torch.complex(numbers["q_mean_real"][at], numbers["q_mean_imag"][at]),
                    numbers["q_abs_mean"][at],
                )
                for at in heads
            },
            {"head_dim": shape.width},
        )
        tri = theirs.TriAttention(
            theirs.TriAttentionConfig(
                stats_path=directory / "stats.pt",
                model_path=directory,
                device=torch.device("cpu"),
                dtype=torch.float64,
                budget=setting.budget,
                offset_max_length=future,
                normalize_scores=normalize,
                **mode,
            )
        )
    kept: list[list[int]] = []  # of each lane, places in the last round's
    width = shape.width
    tri.omega = torch.tensor([10000.0 ** (-2 * i / width) for i in range(width // 2)]).double()

    def rotary(probe: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[..., None].double() * tri.omega
        return torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)

    tri.rotary = rotary
    lanes = [(layer, head) for layer in range(shape.layers) for head in range(shape.kv_heads)]

    def scorer(round_: Round) -> list[Tensor]:
        """What it ranks by, read off where it ranks; of the prompt, which it does not rank, 0."""
        tri.absolute_position = round_.newest + 1
        tri.cache_positions = round_.index[0][0]
        if mode:
            tri.cache_positions_per_head = round_.index[0]
            tri.cache_positions_per_layer_perhead = {
                (layer, head): round_.index[layer][head] for layer, head in lanes
            }
        ranked: list[Tensor] = []
        topk, union = Tensor.topk, tri._select_union_based

        def recorded(scores: Tensor, *args: Any, **kwargs: Any) -> Any:
            ranked.append(scores)
            return topk(scores, *args, **kwargs)

        def recorded_union(by_head: Tensor, combined: Tensor, count: int) -> Tensor:
            ranked.append(combined)
            return union(by_head, combined, count)

        past = tuple((round_.keys(layer)[None].double(),) * 2 for layer in range(shape.layers))
        with mock.patch.object(Tensor, "topk", recorded) if mode else nullcontext():
            tri._select_union_based = recorded_union
            keep = tri.compute_keep_indices(past, prefix_length=setting.prompt)
        per_lane = keep.expand(shape.layers, shape.kv_heads, -1)
        kept[:] = [per_lane[lane].tolist() for lane in lanes]
        scores = (
            torch.stack(ranked).expand(len(lanes), -1)
            if len(ranked) == 1
            else torch.stack(ranked * (len(lanes) // len(ranked)))
        )
        whole = torch.cat([torch.zeros(len(lanes), setting.prompt), scores], -1)
        return list(whole.view(shape.layers, shape.kv_heads, -1))

    def chooser(_: list[Tensor], cached: list[list[int]]) -> list[list[int]]:
        return [
            [token for place, token in enumerate(lane) if place not in set(stays)]
            for lane, stays in zip(cached, kept)
        ]

    return scorer, chooser


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    modes = {
        "across_layers": {"per_head_pruning": True},
        "head": {"per_layer_perhead_pruning": True},
        "model": {},
    }
    runs = []
    seed = 10  # of which no two scores are nearer than 1e-5 at a cut
    for scope, mode in modes.items():
        for future, normalize in ((65536, True), (512, False)):
            seed += 1
            setting = Setting(
                seed=seed,
                budget=40,
                prompt_tokens=12,
                prompt=12,
                recent=0,
                tokens=140,
                slack=7,
                shares="token" if scope == "model" else "head",
                params={"scope": scope, "future": future, "normalize": normalize, "slack": 7},
            )
            scorer, chooser = scored_by(setting, mode, future, normalize)
            run = play(REFERENCE, scorer, setting, chooser=chooser)
            runs.append({**run, "artefact": statistics(setting)})
    write("triattention", "python tests/golden/make_triattention.py CHECKOUT", runs)


if __name__ == "__main__":
    main()
