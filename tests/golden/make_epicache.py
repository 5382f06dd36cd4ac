"""What the EpiCache authors' code scores, keeps, and gives layers, as data.

    git clone https://github.com/apple/ml-epicache /tmp/ml-epicache    # b742661, Apple's own licence
    python tests/golden/make_epicache.py /tmp/ml-epicache

Their code is imported from the checkout given and is no part of this repository. Its attention layers
run with projections and rotations that change nothing: queries and keys below are as they meet, after
the rotation. All is fp32, of `layers` layers of `heads` query heads on `kv_heads` KV heads (query head
h reads KV head h / 2) that are `width` wide. Arrays of numbers are flat, the last dimension fastest.

"prefills": histories that their prefill_memory_constrained caches block by block. After each block a
scratch pass is scored by _get_score_flatten and forgotten, then evict_flattened drops tokens.
    prompt              tokens of the system prompt, the first of the history. Nothing protects them
    tokens              of the history, the prompt's among them
    block               tokens of a block; the last may have fewer
    scratch             tokens of a scratch pass: the same ones after each block
    budget              tokens that a KV head of a layer holds; at level "pair" they are the layer's
                        heads' together, at "pair-uniform" each head's own
    power, similarities of allocate_layer_budget; not asked at power 0
    budgets             [layers], by it
    keys                [layers, kv_heads, tokens, width]
    queries             [layers, heads, scratch, width], of the scratch pass
    steps               one a block, of
        scratch_at      the position of the scratch pass's first token: that of the block's last one
        tokens          [layers][kv_heads][held], cached before the eviction, oldest first
        scores          of the same, 6 digits: the softmax of q.k / sqrt(width) over the tokens cached,
                        this block's among them; then the most over scratch tokens and over the query
                        heads of the KV head. Scratch tokens' own keys are not in the softmax, so that
                        there is no mask, and their values change nothing
        kept            [layers][kv_heads][kept], those of `tokens` that stay

"evictions": evict_flattened alone.
    lengths             [layers][heads], tokens held; the heads are KV heads, 2 or more of them
    budgets             [layers], of a head
    scores              [layers][sum of lengths], a head's after another's
    kept                [layers][heads][kept], places within a head

"budgets": allocate_layer_budget, from `similarities` [layers] as layer_profile.py tells them. `budgets`
[layers] are of a mean of `budget`, but for the floor and for fractions cut off: their sum may be more.

"profiles": compute_windowed_key_similarity of layers, from keys under the full mask and under theirs.
    window              tokens of a head that are one vector; the last may have fewer, and counts as much
    full, limited       [layers = 3, kv_heads, tokens, width]
    similarities        [layers], 7 digits

"masks": _create_block_only_mask as analyze_sample_key_similarity asks for it, [tokens] rows of that
many digits, row = who looks. `overlap` is of the block before.
"""

import importlib.util
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from world import OUT

COMMIT = "apple/ml-epicache b742661"
LAYERS, HEADS, KV_HEADS, WIDTH = 2, 4, 2, 8
SIMILARITIES = [0.91, 0.42]
PREFILLS = (  # seed, prompt, tokens, block, scratch, budget, level, power
    (1, 3, 24, 24, 5, 10, "pair", 0.0),
    (2, 4, 60, 60, 12, 30, "pair", 0.0),
    (3, 2, 41, 41, 7, 16, "pair-uniform", 0.0),
    (4, 3, 30, 30, 6, 40, "pair", 0.0),  # nothing to drop
    (5, 5, 70, 20, 8, 18, "pair", 0.0),  # the last block is short
    (6, 5, 64, 16, 9, 20, "pair-uniform", 0.0),
    (7, 2, 60, 24, 6, 16, "pair", 1.1),
    (8, 2, 60, 24, 6, 16, "pair-uniform", 1.1),
)
EVICTIONS = (  # seed, lengths by layer, budgets by layer, level
    (21, ((12, 12), (12, 12)), (5, 5), "pair"),
    (22, ((20, 9), (3, 14)), (8, 8), "pair"),
    (23, ((7, 16, 11, 2), (9, 9, 9, 9)), (6, 3), "pair"),
    (24, ((15, 15), (10, 10)), (4, 10), "pair-uniform"),
    (25, ((9, 9, 9), (9, 9, 9)), (2, 30), "pair-uniform"),
)
BUDGETS = (  # mean budget, power, similarities
    (64, 0.0, (0.99, 0.75, 0.81, 0.6)),
    (64, 1.1, (0.99, 0.75, 0.81, 0.6)),
    (8192, 1.1, (0.991, 0.973, 0.934, 0.902, 0.955, 0.871, 0.83, 0.899)),
    (8192, 1.3, (0.991, 0.973, 0.934, 0.902, 0.955, 0.871, 0.83, 0.888)),
    (1000, 2.0, (0.9, 0.89, 0.91, 0.1, 0.88, 0.92)),  # most have the floor: more than the whole
    (3, 1.1, (0.5, 0.7, 0.2)),  # a floor of one
    (100, 1.1, (0.8, 0.8, 0.8)),
    (100, 1.1, (0.3,)),
)
PROFILES = ((31, 10, 4), (32, 24, 8), (33, 17, 100))  # seed, tokens, window
MASKS = (  # tokens, block, sinks, overlap ratio
    (12, 4, 2, 0.5),
    (10, 4, 1, 0.25),
    (16, 5, 3, 0.5),  # an odd block
    (9, 4, 0, 0.5),
    (8, 3, 5, 0.0),  # sinks of more than a block
    (5, 8, 2, 0.5),  # one block
)


class Anything(ModuleType):
    """What their imports ask for and nothing here uses."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {"__class_getitem__": classmethod(lambda cls, _: cls)})


class DynamicCache:
    def __init__(self) -> None:
        self.key_cache: list[Tensor] = []
        self.value_cache: list[Tensor] = []
        self._seen_tokens = 0


def load(checkout: Path) -> SimpleNamespace:
    """Their classes and functions."""
    for name in (
        "flash_attn", "tiny_api_cuda", "tqdm", "transformers", "transformers.cache_utils",
        "transformers.modeling_flash_attention_utils", "transformers.models",
        "transformers.models.llama", "transformers.models.llama.modeling_llama",
        "transformers.processing_utils", "transformers.utils", "utils", "utils.func",
    ):  # fmt: skip
        sys.modules[name] = Anything(name)
    given = sys.modules
    given["transformers"].DynamicCache = DynamicCache
    given["transformers.utils"].logging = SimpleNamespace(get_logger=lambda _: None)
    given["transformers.models.llama.modeling_llama"].apply_rotary_pos_emb = lambda q, k, *_: (q, k)
    # What attention gives is not looked at.
    given["transformers.modeling_flash_attention_utils"]._flash_attention_forward = (
        lambda q, *_, **__: q
    )
    given["flash_attn"].flash_attn_varlen_func = lambda q, *_, **__: q
    sys.path.insert(0, str(checkout))
    from attention.attn import llama_flash_attn2_forward
    from attention.kvcache import EvictCache
    from model.wrapper import LongConvQAModel

    path = checkout / "data/layer_scores/layer_profile.py"
    spec = importlib.util.spec_from_file_location("layer_profile", path)
    assert spec is not None
    assert spec.loader is not None
    profile = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(profile)
    return SimpleNamespace(
        forward=llama_flash_attn2_forward,
        cache=EvictCache,
        model=LongConvQAModel,
        profile=profile,
    )


def numbers(*shape: int) -> Tensor:
    """Normal numbers of few digits."""
    return (torch.randn(*shape) * 100).round() / 100


def short(values: Tensor, digits: int = 4) -> list[float]:
    return [float(f"{value:.{digits}g}") for value in values.flatten().tolist()]


def by_head(flat: Tensor, lengths: Tensor) -> list[Tensor]:
    return list(flat.split(lengths.tolist()))


def check(scores: Tensor, keep: int) -> None:
    """Scores at a cut that are near say nothing of who is right."""
    if keep < len(scores):
        order = scores.sort(descending=True).values
        gap = float((order[keep - 1] - order[keep]) / order[keep - 1].abs())
        assert gap > 1e-4, f"{gap} at the cut is too near; take another seed"


def fake(shape: tuple[int, int, int], layer: Any = None) -> SimpleNamespace:
    """A model that says its shape, and runs a layer for each of its layers."""
    layers, heads, kv_heads = shape

    def run(ids: Tensor, past_key_values: Any, cache_position: Tensor) -> None:
        for index in range(layers):
            layer(index, ids[0], past_key_values, cache_position)

    config = SimpleNamespace(
        num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=kv_heads
    )

    def parameters() -> Iterator[Tensor]:
        return iter([torch.zeros(1)])

    return SimpleNamespace(config=config, parameters=parameters, model=run)


def prefill(
    theirs: Any,
    seed: int,
    prompt: int,
    tokens: int,
    block: int,
    scratch: int,
    budget: int,
    level: str,
    power: float,
    scratch_keys: float = 1,
) -> dict[str, Any]:
    torch.manual_seed(seed)
    keys = numbers(LAYERS, KV_HEADS, tokens, WIDTH)
    queries = 2 * numbers(LAYERS, HEADS, scratch, WIDTH)
    # Tokens are their own ids; those of the scratch pass follow the history's.
    all_keys = torch.cat([keys, scratch_keys * numbers(LAYERS, KV_HEADS, scratch, WIDTH)], 2)
    all_queries = torch.cat([numbers(LAYERS, HEADS, tokens, WIDTH), queries], 2)
    scratch_at: list[int] = []
    steps: list[dict[str, Any]] = []

    def layer(index: int, ids: Tensor, past: Any, cache_position: Tensor) -> None:
        if index == 0 and ids[0] >= tokens:
            scratch_at.append(int(cache_position[0]))

        def rows(of: Tensor) -> Any:
            return lambda _: of[index][:, ids].transpose(0, 1).reshape(1, len(ids), -1)

        me = SimpleNamespace(
            head_dim=WIDTH,
            layer_idx=index,
            q_proj=rows(all_queries),
            k_proj=rows(all_keys),
            # Values say which token a row is.
            v_proj=lambda _: ids.float()[None, :, None].repeat(1, 1, KV_HEADS * WIDTH),
            o_proj=lambda out: out,
            training=False,
            is_causal=True,
            attention_dropout=0.0,
            num_key_value_groups=HEADS // KV_HEADS,
            config=SimpleNamespace(num_key_value_heads=KV_HEADS),
        )
        theirs.forward(me, torch.zeros(1, len(ids), 1), (None, None), None, past, cache_position)

    def held(cache: Any) -> list[list[list[int]]]:
        """Tokens by layer and head."""
        return [
            [
                lane.tolist()
                for lane in by_head(
                    cache.value_cache[i].reshape(-1, WIDTH)[:, 0].int(), cache.info["len_k"][i]
                )
            ]
            for i in range(LAYERS)
        ]

    class Cache(theirs.cache):
        def evict_flattened(self, level: str = "pair") -> None:
            scores = [torch.cat(self.flattened_scores[i]) for i in range(LAYERS)]
            lanes = [by_head(scores[i], self.info["len_k"][i]) for i in range(LAYERS)]
            for i in range(LAYERS):
                each = int(self.kv_budget if self.budget is None else self.budget[i])
                if "uniform" in level:
                    for lane in lanes[i]:
                        check(lane, each)
                else:
                    check(scores[i], each * KV_HEADS)
            step = {
                "scratch_at": scratch_at[-1],
                "tokens": held(self),
                "scores": [[short(lane, 6) for lane in layer] for layer in lanes],
            }
            super().evict_flattened(level)
            steps.append({**step, "kept": held(self)})

    class Model(theirs.model):
        def __init__(self) -> None:
            self.model = SimpleNamespace(model=fake((LAYERS, HEADS, KV_HEADS), layer).model)
            self.device = torch.device("cpu")
            self.evict_level, self.scoring_method = level, "clustering"
            ids = torch.arange(tokens + scratch)[None]
            self.sys_prompt_ids = ids[:, :prompt]
            self.asked, self.postfix_ids, self.cluster_ids = ids[:, tokens:].tensor_split((2, 3), 1)

        def encode(self, _: str) -> Tensor:
            return self.asked

        def _init_kv(self, kv: Any = None, evict_range: Any = (0, 0), kv_budget: int = 0) -> Any:
            return Cache(fake((LAYERS, HEADS, KV_HEADS)), evict_range, kv_budget)

    with tempfile.NamedTemporaryFile("w", suffix=".json") as scores:
        json.dump({"combined_scores": SIMILARITIES}, scores)
        scores.flush()
        cache = Model().prefill_memory_constrained(
            torch.arange(prompt, tokens)[None],
            prefill_chunk_size=block,
            kv_budget=budget,
            power=power,
            score_path=scores.name,
        )
    assert cache._seen_tokens == tokens
    return {
        "prompt": prompt,
        "tokens": tokens,
        "block": block,
        "budget": budget,
        "level": level,
        "power": power,
        "similarities": SIMILARITIES,
        "budgets": [budget] * LAYERS if cache.budget is None else cache.budget.tolist(),
        "keys": short(keys),
        "scratch": scratch,
        "queries": short(queries),
        "steps": steps,
    }


def eviction(
    theirs: Any,
    seed: int,
    lengths: tuple[tuple[int, ...], ...],
    budgets: tuple[int, ...],
    level: str,
) -> dict[str, Any]:
    torch.manual_seed(seed)
    layers, kv_heads = len(lengths), len(lengths[0])
    cache = theirs.cache(fake((layers, kv_heads, kv_heads)), (0, 0), budgets[0])
    if len(set(budgets)) > 1:
        cache.budget = torch.tensor(budgets)
    places = [torch.cat([torch.arange(n) for n in layer]) for layer in lengths]
    scores = [(torch.rand(sum(layer)) ** 3).mul(1e4).round() / 1e4 for layer in lengths]
    cache.flattened_scores = [[layer] for layer in scores]
    cache.key_cache = [p.float()[:, None] for p in places]
    cache.value_cache = list(cache.key_cache)
    cache.info["len_k"] = [torch.tensor(layer) for layer in lengths]
    for layer, size, budget in zip(scores, lengths, budgets, strict=True):
        for lane in layer.split(list(size)) if "uniform" in level else [layer]:
            check(lane, budget * (1 if "uniform" in level else kv_heads))
    cache.evict_flattened(level)
    return {
        "level": level,
        "lengths": lengths,
        "budgets": budgets,
        "scores": [short(layer) for layer in scores],
        "kept": [
            [lane.int().tolist() for lane in by_head(rows[:, 0], size)]
            for rows, size in zip(cache.key_cache, cache.info["len_k"], strict=True)
        ],
    }


def allocation(
    theirs: Any, budget: int, power: float, similarities: tuple[float, ...]
) -> dict[str, Any]:
    found = theirs.model.allocate_layer_budget(
        SimpleNamespace(device="cpu"), {"combined_scores": list(similarities)}, budget, power=power
    )
    return {
        "budget": budget,
        "power": power,
        "similarities": similarities,
        "budgets": found.tolist(),
    }


def profile(theirs: Any, seed: int, tokens: int, window: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    full = numbers(3, KV_HEADS, tokens, WIDTH)
    # The deeper the layer, the more its keys are other ones.
    limited = full + torch.tensor([0.1, 0.5, 2])[:, None, None, None] * numbers(*full.shape)
    limited = (limited * 1000).round() / 1000
    found = theirs.profile.compute_windowed_key_similarity(
        {i: keys[None] for i, keys in enumerate(full)},
        {i: keys[None] for i, keys in enumerate(limited)},
        window,
    )
    return {
        "tokens": tokens,
        "window": window,
        "full": short(full),
        "limited": short(limited, 6),
        "similarities": short(torch.tensor(found), 7),
    }


def mask(theirs: Any, tokens: int, block: int, sinks: int, ratio: float) -> dict[str, Any]:
    overlap = int(block * ratio)
    rows = theirs.profile._create_block_only_mask(
        1, tokens, "cpu", block, sinks, overlap, tokens // block + 1, tokens
    )[0]
    return {
        "tokens": tokens,
        "block": block,
        "sinks": sinks,
        "overlap": overlap,
        "mask": ["".join("1" if seen else "0" for seen in row) for row in rows.tolist()],
    }


def main(checkout: Path) -> None:
    theirs = load(checkout)
    prefills = [prefill(theirs, *case) for case in PREFILLS]
    # Keys of the scratch pass are nothing to its scores.
    assert prefills == [prefill(theirs, *case, scratch_keys=50) for case in PREFILLS]
    found = {
        "command": "python tests/golden/make_epicache.py CHECKOUT",
        "reference": f"{COMMIT} `LongConvQAModel`, `EvictCache`, `layer_profile.py`",
        "layers": LAYERS,
        "heads": HEADS,
        "kv_heads": KV_HEADS,
        "width": WIDTH,
        "prefills": prefills,
        "evictions": [eviction(theirs, *case) for case in EVICTIONS],
        "budgets": [allocation(theirs, *case) for case in BUDGETS],
        "profiles": [profile(theirs, *case) for case in PROFILES],
        "masks": [mask(theirs, *case) for case in MASKS],
    }
    text = json.dumps(found, separators=(",", ":"))
    for first in ("prompt", "scratch_at", "level", "budget", "tokens"):
        text = text.replace(f'{{"{first}"', f'\n{{"{first}"')
    (OUT.parent / "epicache.json").write_text(text + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
