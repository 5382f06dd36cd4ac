"""Runs of the VaSE authors' cache layer as data.

    git clone https://github.com/terarachang/VaSE /tmp/VaSE
    git -C /tmp/VaSE checkout bfa2692
    pip install transformers==5.2.0 kvpress==0.5.5
    python tests/golden/make_vase.py /tmp/VaSE

Their code is imported from the checkout given and is no part of this repository. In each round its
layer gets the cached rows in birth order and evicts; what it keeps is read off the rows that are
left. Its sources of chance, torch.multinomial and, of `cur`, torch.randn, are replaced by draws of
the same laws from the numbers of policies/random.h.
"""

import math
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import draws
import make_kvpress
import torch
from torch import Tensor
from world import Round, Scorer, Setting, play, write

COMMAND = "python tests/golden/make_vase.py CHECKOUT"
REFERENCE = "terarachang/VaSE bfa2692 `EvictLayer`"


def kept_by(layer_type: type, setting: Setting, mode: str, n_large: int = 0) -> Scorer:
    """1 for what stays, 0 for what goes."""
    window, kernel = setting.recent, setting.params.get("kernel")

    def scorer(round_: Round) -> list[Tensor]:
        return [kept(round_, layer) for layer in range(setting.shape.layers)]

    def kept(round_: Round, layer: int) -> Tensor:
        cache = layer_type(
            layer_idx=layer,
            token_budget=setting.budget,
            residual_length=window,
            eviction_mode=mode,
            rkv_lambda=0,
            smooth=kernel == 5,
            verbose=False,
            n_large=n_large,
        )
        keys, values = round_.keys(layer), round_.values(layer)  # [kv_heads, n, width]
        index = torch.tensor(round_.index[layer])  # [kv_heads, n]
        heads, n = index.shape
        cache.lazy_initialization(*(rows.transpose(0, 1)[None] for rows in (keys, values)))
        cache.k_cache = keys.transpose(0, 1)[None].clone()
        cache.v_cache = values.transpose(0, 1)[None].clone()
        cache.queries = round_.queries(layer, window)[None]

        def multinomial(scores: Tensor, count: int, replacement: bool) -> Tensor:
            assert not replacement and scores.shape == (heads, n - window)
            noise = torch.tensor(
                [
                    [
                        draws.gumbel(setting.seed, draws.stream_of(round_.newest, lane), token)
                        for token in index[head, : n - window].tolist()
                    ]
                    for head, lane in enumerate(range(layer * heads, (layer + 1) * heads))
                ]
            )
            return (scores.log() + noise).topk(count).indices

        def randn(*shape: int, **_: Any) -> Tensor:
            first = round_.newest + 1 if mode == "cur_resample_gauss" else 0
            numbers = [
                draws.normal(setting.seed, first << 24 | layer, i) for i in range(math.prod(shape))
            ]
            return torch.tensor(numbers).reshape(shape)

        with mock.patch("torch.multinomial", multinomial), mock.patch("torch.randn", randn):
            cache._run_eviction(n)
        left = cache.k_cache[0, : setting.budget].transpose(0, 1)  # [kv_heads, budget, width]
        stays = (keys[:, :, None] == left[:, None]).all(-1).any(-1)
        assert (stays.sum(-1) == setting.budget).all()
        return stays.float()

    return scorer


def vase(layer_type: type) -> list[dict[str, Any]]:
    runs = []
    for seed, measure, kernel, large, n_large in (
        (1, "range", 5, 0.25, 8),
        (2, "range", 1, 0.25, 8),
        (3, "range", 5, 0.5, 16),
        (4, "var", 5, 0.25, 8),
        (5, "l2", 5, 0.25, 8),
    ):
        for prompt_tokens in (12, 70):
            setting = Setting(
                seed=seed,
                budget=32,
                prompt_tokens=prompt_tokens,
                tokens=120,
                slack=7,
                sinks=4,
                recent=8,
                params={
                    "window": 8,
                    "kernel": kernel,
                    "large": large,
                    "measure": measure,
                    "slack": 7,
                },
            )
            scorer = kept_by(layer_type, setting, f"{measure}_sink_sample_attn", n_large)
            runs.append(play(REFERENCE, scorer, setting, keep_scores=False))
    return runs


def cur(layer_type: type) -> list[dict[str, Any]]:
    runs = make_kvpress.cur()
    for seed, projection, prompt_tokens in (
        (1, "fixed", 12),
        (2, "resample", 12),
        (3, "fixed", 70),
    ):
        setting = Setting(
            seed=seed,
            budget=32,
            prompt_tokens=prompt_tokens,
            tokens=120,
            slack=7,
            sinks=4,
            recent=8,
            params={"local_window": 0, "projection": projection, "slack": 7},
        )
        scorer = kept_by(layer_type, setting, f"cur_{projection}_gauss")
        runs.append(play(REFERENCE, scorer, setting, keep_scores=False))
    return runs


def main() -> None:
    sys.path.insert(0, str(Path(sys.argv[1]) / "eval/reasoning_tasks/modified/transformers"))
    from cache_utils import EvictLayer

    write("vase", COMMAND, vase(EvictLayer))
    write("cur", COMMAND, cur(EvictLayer))


if __name__ == "__main__":
    main()
