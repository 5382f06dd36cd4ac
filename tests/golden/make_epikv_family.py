"""Runs of the EpiKV authors' classes over the rows of world.py, as data.

    git clone https://github.com/stevenkolawole/epiphany-kv-cache /tmp/authors
    git -C /tmp/authors checkout d424208
    python tests/golden/make_epikv_family.py /tmp/authors [POLICY ...]

Their code is imported from the checkout given and is no part of this repository. A step is as in
their benchmark driver: one token is appended to the cache, the policy is called once, the rows it
keeps replace the cache. What is kept, and when, is theirs; everything is fp32.
"""

import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from world import Setting, Shape, World, short, write

COMMIT = "d424208"
COMMAND = "python tests/golden/make_epikv_family.py CHECKOUT"
# Of every number that a class reads: what it drops must not hang on the last bits.
JITTER = 1e-6
SHAPE = Shape(layers=6)
CAPS = {"retain_r": 10, "retain_e": 6, "retain_t": 2}

Past = tuple[tuple[Tensor, Tensor], ...]


class Model:
    """What the model would have shown the authors' driver of a cache that holds `index`."""

    def __init__(self, world: World, jitter: float) -> None:
        self.world = world
        self.jitter = jitter
        self.noise = torch.Generator().manual_seed(world.seed)

    def shaken(self, x: Tensor) -> Tensor:
        return x * (1 + self.jitter * (2 * torch.rand(x.shape, generator=self.noise) - 1))

    def past(self, index: list[int]) -> Past:
        """((K, V), ...) of [1, kv_heads, n, width]."""
        lanes = [index] * self.world.shape.kv_heads
        return tuple(
            (
                self.shaken(self.world.lanes("key", layer, lanes))[None],
                self.shaken(self.world.lanes("value", layer, lanes))[None],
            )
            for layer in range(self.world.shape.layers)
        )

    def hidden(self, token: int) -> tuple[Tensor, ...]:
        """Entry l + 1 is the output of block l. [1, 1, width]"""
        rows = [
            self.shaken(self.world.rows("hidden", layer, 0, [token]))[None]
            for layer in range(self.world.shape.layers)
        ]
        return (torch.zeros_like(rows[0]), *rows)

    def attention(self, index: list[int]) -> tuple[Tensor, ...]:
        """Of the newest token's query, by layer. [1, heads, 1, n]"""
        shape = self.world.shape
        layers = []
        for layer in range(shape.layers):
            keys = self.world.lanes("key", layer, [index] * shape.kv_heads).double()
            keys = keys.repeat_interleave(shape.heads // shape.kv_heads, dim=0)
            queries = self.world.queries(layer, index[-1:]).double()  # [heads, 1, width]
            logits = shape.scale * queries @ keys.transpose(1, 2)
            layers.append(self.shaken(logits.softmax(-1).float())[None])
        return tuple(layers)


def watched(evict: Callable[..., Past], *arguments: Any) -> tuple[Past, list[Tensor]]:
    """What `evict` returns, and the scores that it ranked on the way: of decode tokens alone."""
    ranked: list[Tensor] = []
    topk = torch.topk

    def watched_topk(scores: Tensor, *rest: Any, **named: Any) -> Any:
        ranked.append(scores.clone())
        return topk(scores, *rest, **named)

    with mock.patch("torch.topk", watched_topk):
        return evict(*arguments), ranked


def steps(policy: Any, reads: str, setting: Setting, jitter: float) -> list[dict[str, Any]]:
    """Rounds of one of their policies. reads: what its call takes after the cache."""
    model = Model(World(setting.seed, setting.shape), jitter)
    index = list(range(setting.prompt_tokens))
    if "hidden" in reads:
        policy.set_prefill_end(model.hidden(index[-1]))
    rounds = []
    for token in range(setting.prompt_tokens, setting.tokens):
        index.append(token)
        past = model.past(index)
        rest = [
            model.attention(index) if name == "attention" else model.hidden(token)
            for name in reads.split()
        ]
        kept, ranked = watched(policy.evict_past_key_values, past, *rest)
        of_key = {tuple(row.tolist()): i for row, i in zip(past[0][0][0, 0], index, strict=True)}
        left = [of_key[tuple(row.tolist())] for row in kept[0][0][0, 0]]
        if left != index:
            dropped = sorted(set(index) - set(left))
            rounds.append({"newest": token, "dropped": [dropped], "scores": ranked[-1]})
        index = left
    return rounds


def run(
    policy: Callable[[Any], Any], reads: str, *, keep_scores: bool = False, **given: Any
) -> dict[str, Any]:
    """policy: makes one of their objects. Its prompt is protected unless `given` says otherwise."""
    given = {"prompt": given["prompt_tokens"], "shape": SHAPE} | given
    setting = Setting(**given, recent=min(128, given["budget"] // 4))
    results = []
    for jitter in (0, JITTER):
        made = policy(AUTHORS.EvictionConfig(cache_size=setting.budget))
        if hasattr(made, "reset"):
            made.reset(prefill_len=setting.prompt_tokens)
        results.append(steps(made, reads, setting, jitter))
    what = f"{type(made).__name__}, seed {setting.seed}"
    victims = [[r["newest"], r["dropped"]] for r in results[0]]
    if victims != [[r["newest"], r["dropped"]] for r in results[1]]:
        sys.exit(f"{what}: victims hang on the last bits; take another seed")
    dropped_in_all = sum(len(r["dropped"][0]) for r in results[0])
    if len(victims) < 5 or dropped_in_all < 50:
        sys.exit(f"{what}: {len(victims)} rounds and {dropped_in_all} victims are no test")
    rounds = []
    for r in results[0]:
        scores = r.pop("scores")
        if keep_scores:
            # The prompt and the recent tokens are kept, and not compared.
            scores = torch.cat([torch.zeros(setting.prompt_tokens), scores])
            r["scores"] = [short(torch.where(scores.isfinite(), scores, 0))]
        rounds.append(r)
    reference = f"stevenkolawole/epiphany-kv-cache {COMMIT} `{type(made).__name__}`"
    return {"reference": reference, **asdict(setting), "rounds": rounds}


def hs_variance() -> list[dict[str, Any]]:
    runs = []
    for seed, a, b, window in ((1, 1, 4, 64), (2, 3, 0, 16)):
        params = {"layer_a": a, "layer_b": b, "window": window}
        for budget, prompt in ((48, 8), (64, 30)):
            runs.append(
                run(
                    lambda config, a=a, b=b, w=window: AUTHORS.HSVarianceEviction(config, a, b, w),
                    "hidden",
                    seed=seed,
                    budget=budget,
                    prompt_tokens=prompt,
                    tokens=180,
                    params=params,
                )
            )
    return runs


def band_adaptive() -> list[dict[str, Any]]:
    runs = []
    for seed, a, b, weights, window in (
        (3, (0, 1, 2), (3, 4), (1.29, 1.0), 64),
        (4, (3, 4, 5), (1,), (0.5, 2.0), 16),
    ):
        params = {"a_first": a[0], "a_last": a[-1], "b_first": b[0], "b_last": b[-1]}
        params |= {"weight_a": weights[0], "weight_b": weights[1], "window": window}

        def policy(config: Any, a=a, b=b, weights=weights, window=window) -> Any:
            return AUTHORS.BandAdaptiveHSEviction(config, window, *weights, a, b)

        for budget, prompt in ((48, 8), (64, 30)):
            setting = {"budget": budget, "prompt_tokens": prompt, "tokens": 180}
            runs.append(run(policy, "hidden", seed=seed, params=params, **setting))
    return runs


def row_variance(name: str) -> list[dict[str, Any]]:
    runs = []
    for seed, window, budget, prompt in ((5, 64, 48, 8), (6, 8, 64, 30)):
        setting = {"budget": budget, "prompt_tokens": prompt, "tokens": 160}
        runs.append(
            run(
                lambda config, w=window: getattr(AUTHORS, name)(config, w),
                "",
                seed=seed,
                params={"window": window},
                **setting,
            )
        )
    return runs


def seg() -> list[dict[str, Any]]:
    runs = []
    for seed, classifier, budget, prompt, segment, reserve, by in (
        (11, "key_variance", 64, 10, 12, 0, "range"),
        (12, "key_variance", 80, 30, 16, 0, "range"),
        (13, "key_variance", 64, 10, 12, 3, "range"),
        (14, "key_variance", 64, 20, 12, 8, "variance"),
        (15, "key_variance", 64, 10, 8, 4, "norm"),
        (16, "key_variance", 48, 30, 128, 0, "range"),  # one segment
        (17, "entropy", 64, 10, 12, 0, "range"),
        (18, "entropy", 80, 30, 16, 0, "range"),
    ):
        params = {"layer_a": 1, "layer_b": 4, "window": 32, "classifier": classifier}
        params |= {"segment": segment} | CAPS

        def policy(config: Any, classifier=classifier, segment=segment, r=reserve, by=by) -> Any:
            sizes = (config, 1, 4, 32, segment, *CAPS.values())
            if classifier == "entropy":
                return AUTHORS.KVSegmentHSEviction(*sizes)
            return AUTHORS.KVSegHSEviction(*sizes, r, {"variance": "var"}.get(by, by))

        if reserve > 0:
            params |= {"reserve": reserve, "reserve_by": by}
        setting = {"budget": budget, "prompt_tokens": prompt, "tokens": 300}
        runs.append(run(policy, "hidden", seed=seed, params=params, **setting))
    return runs


def flat_with_reserve() -> list[dict[str, Any]]:
    runs = []
    for seed, budget, prompt, reserve, by in (
        (21, 48, 8, 4, "range"),
        (22, 64, 30, 8, "variance"),
        (23, 48, 20, 2, "norm"),
    ):
        params = {"layer_a": 1, "layer_b": 4, "window": 32, "reserve": reserve, "reserve_by": by}

        def policy(config: Any, reserve=reserve, by=by) -> Any:
            stat = {"variance": "var"}.get(by, by)
            return AUTHORS.DetrendendHSVarianceEviction(config, 1, 4, 32, reserve, stat)

        setting = {"budget": budget, "prompt_tokens": prompt, "tokens": 160}
        runs.append(run(policy, "hidden", seed=seed, params=params, **setting))
    return runs


def lag(name: str) -> list[dict[str, Any]]:
    runs = []
    for seed, chunk, budget, prompt in ((31, 16, 56, 8), (32, 24, 64, 30), (33, 128, 48, 8)):

        def policy(config: Any, chunk=chunk) -> Any:
            return getattr(AUTHORS, name)(config, chunk)

        setting = {"budget": budget, "prompt_tokens": prompt, "tokens": budget + 60}
        runs.append(
            run(policy, "", keep_scores=True, seed=seed, params={"chunk": chunk}, **setting)
        )
    return runs


def attention_hs_product() -> list[dict[str, Any]]:
    runs = []
    for seed, layer, window, alpha, budget, prompt in (
        (41, 1, 64, 1.0, 48, 8),
        (42, 4, 16, 0.3, 64, 30),
    ):
        params = {"layer_a": layer, "window": window, "alpha": alpha}

        def policy(config: Any, layer=layer, window=window, alpha=alpha) -> Any:
            return AUTHORS.AttentionHSProductEviction(config, layer, window, alpha)

        setting = {"budget": budget, "prompt_tokens": prompt, "tokens": budget + 60, "sinks": 4}
        runs.append(
            run(policy, "attention hidden", keep_scores=True, seed=seed, params=params, **setting)
        )
    return runs


def segment_hs() -> list[dict[str, Any]]:
    runs = []
    for seed, budget, prompt, segment, layers in ((51, 64, 10, 12, 4), (52, 80, 30, 16, 2)):
        params = {"layer_a": 1, "layer_b": 4, "window": 32, "segment": segment}
        params |= {"classifier_layers": layers} | CAPS

        def policy(config: Any, segment=segment, layers=layers) -> Any:
            sizes = (segment, *CAPS.values(), layers)
            return AUTHORS.HybridSegmentHSEviction(config, 1, 4, 32, *sizes)

        setting = {"budget": budget, "prompt_tokens": prompt, "tokens": 300}
        runs.append(run(policy, "attention hidden", seed=seed, params=params, **setting))
    return runs


def thinkv() -> list[dict[str, Any]]:
    runs = []
    for seed, variant, budget, prompt, segment, layers, refresh in (
        (61, "simplified", 64, 10, 12, 4, 128),
        (62, "simplified", 80, 30, 16, 2, 128),
        (63, "faithful", 64, 10, 6, 4, 128),
        (64, "faithful", 80, 30, 5, 2, 1),
        (65, "faithful", 80, 30, 5, 4, 3),
    ):
        params = {"variant": variant, "refresh": refresh, "segment": segment}
        params |= {"classifier_layers": layers} | CAPS

        def policy(config: Any, v=variant, s=segment, layers=layers, tau=refresh) -> Any:
            sizes = (config, s, *CAPS.values(), layers)
            if v == "simplified":
                return AUTHORS.ThinKVEviction(*sizes)
            return AUTHORS.ThinKVFaithfulEviction(*sizes, refresh_tau=tau)

        setting = {"budget": budget, "prompt_tokens": prompt, "tokens": 300, "prompt": 0}
        runs.append(run(policy, "attention", seed=seed, params=params, **setting))
    return runs


POLICIES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "attention_hs_product": attention_hs_product,
    "epikv_band_adaptive": band_adaptive,
    "epikv_flat": flat_with_reserve,
    "epikv_hs_variance": hs_variance,
    "epikv_lag_kv": lambda: lag("LagKVEviction"),
    "epikv_lag_kv_key": lambda: lag("LagKVKeyVarianceEviction"),
    "epikv_seg": seg,
    "kv_key_variance": lambda: row_variance("KVKeyVarianceEviction"),
    "kv_value_variance": lambda: row_variance("KVValVarianceEviction"),
    "segment_hs": segment_hs,
    "thinkv": thinkv,
}


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.path.insert(0, sys.argv[1])
    from src import eviction as AUTHORS

    torch.set_num_threads(1)
    for name in sys.argv[2:] or POLICIES:
        write(name, COMMAND, POLICIES[name]())
