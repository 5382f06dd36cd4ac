"""Runs of published code that ranks by attention, as data.

    cd CHECKOUTS
    git clone https://github.com/Zefan-Cai/R-KV                         # d15c976
    git clone https://github.com/guozhiyu/vatp                          # 39ea686
    git clone https://github.com/FFY0/DefensiveKV                       # 9251b95
    git clone https://github.com/stevenkolawole/epiphany-kv-cache       # d424208
    git clone https://github.com/jiwonsong-dev/ReasoningPathCompression # 00e64b7
    pip install kvpress==0.5.5
    python tests/golden/make_attention.py CHECKOUTS [POLICY ...]

Their code is imported from the checkouts and is no part of this repository. It is asked for its
scores over the cache of each round; which tokens go, and when, is world.py's.
"""

import contextlib
import importlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import make_kvpress
import torch
from torch import Tensor, nn
from world import Round, Scorer, Setting, Shape, play, write

COMMAND = "python tests/golden/make_attention.py CHECKOUTS"
CHECKOUTS = Path()  # set by main


def reference(checkout: str, owner: str, what: str) -> str:
    commit = subprocess.run(
        ["git", "-C", str(CHECKOUTS / checkout), "rev-parse", "--short=7", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    return f"{owner}/{checkout} {commit} `{what}`"


def load(checkout: str, module: str) -> ModuleType:
    path = str(CHECKOUTS / checkout)
    if path not in sys.path:
        sys.path.insert(0, path)
    return importlib.import_module(module)


def attention(round_: Round, layer: int, count: int) -> Tensor:
    """Of the newest queries, over lanes of one length. fp32 [heads, count, n]"""
    shape = round_.world.shape
    group = shape.heads // shape.kv_heads
    keys = round_.keys(layer).repeat_interleave(group, 0)
    logits = round_.queries(layer, count) @ keys.transpose(1, 2) * shape.scale
    return logits.masked_fill(later(round_, layer, count), float("-inf")).softmax(-1)


def later(round_: Round, layer: int, count: int) -> Tensor:
    """Which tokens are younger than a query. [heads, count, n]"""
    shape = round_.world.shape
    group = shape.heads // shape.kv_heads
    index = torch.tensor(round_.index[layer]).repeat_interleave(group, 0)[:, None]
    return index > torch.arange(round_.newest + 1 - count, round_.newest + 1)[None, :, None]


@contextlib.contextmanager
def ranked() -> Iterator[list[Tensor]]:
    """What is given to top-k meanwhile. Among equals, whose order torch leaves open, the newer one
    is higher, as everywhere here."""
    seen: list[Tensor] = []

    def topk(scores: Tensor, k: int, dim: int = -1, largest: bool = True) -> Ranking:
        assert largest
        seen.append(scores.detach().clone())
        order = scores.flip(dim).sort(dim=dim, descending=True, stable=True)
        indices = scores.shape[dim] - 1 - order.indices.narrow(dim, 0, k)
        return Ranking(order.values.narrow(dim, 0, k), indices)

    function, method = torch.topk, Tensor.topk
    torch.topk = Tensor.topk = topk
    try:
        yield seen
    finally:
        torch.topk, Tensor.topk = function, method


class Ranking(NamedTuple):
    values: Tensor
    indices: Tensor


# ---------------------------------------------------------------------------------------------
# vatp: a Llama attention layer that scores as it attends. One query head a KV head.


class Rows(nn.Module):
    """A projection that gives the rows it was told to."""

    def __init__(self, rows: Tensor):  # [heads, tokens, width]
        super().__init__()
        self.rows = rows

    def forward(self, hidden: Tensor) -> Tensor:
        return self.rows.transpose(0, 1).reshape(1, self.rows.shape[1], -1)


class NoRotary(nn.Module):
    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__()

    def forward(self, *args: Any, **kwargs: Any) -> tuple[None, None]:
        return None, None


@lru_cache
def vatp_layer() -> type[nn.Module]:
    """Its model file needs an old transformers, and no part of it scores."""
    model = ModuleType("utils_hh.modeling_llama")
    model.LlamaRotaryEmbedding = model.LlamaAttention = NoRotary
    model.LlamaLinearScalingRotaryEmbedding = NoRotary
    model.LlamaDynamicNTKScalingRotaryEmbedding = NoRotary
    model.apply_rotary_pos_emb = lambda q, k, *_: (q, k)
    sys.modules[model.__name__] = model
    return load("vatp", "utils_hh.modify_llama").LlamaAttention_heavy_hitter


def vatp_scores(window: int, values: bool) -> Scorer:
    def scorer(round_: Round) -> list[Tensor]:
        shape = round_.world.shape
        return [
            torch.stack([lane_scores(round_, layer, head) for head in range(shape.kv_heads)])
            for layer in layers(shape)
        ]

    def lane_scores(round_: Round, layer: int, head: int) -> Tensor:
        """All that is cached is past: some queries' own tokens have left. In place of those, the
        layer gets rows that nobody sees."""
        width = round_.world.shape.width
        config = SimpleNamespace(
            hidden_size=width,
            num_attention_heads=1,
            max_position_embeddings=4096,
            rope_scaling=None,
            heavy_ratio=1,  # nothing is masked
            recent_ratio=1,
            applyval=values,
            h2o=False,
            sink_len=0,
        )
        keys, rows = round_.keys(layer)[head], round_.values(layer)[head]
        n, count = keys.shape[0], min(window, round_.newest + 1)
        module = vatp_layer()(layer, config)
        module.q_proj = Rows(round_.queries(layer, count)[head : head + 1])
        module.k_proj = module.v_proj = Rows(torch.zeros(1, count, width))
        module.value_norm = rows.norm(p=1, dim=-1)[None]
        unseen = torch.ones(count, n + count, dtype=torch.bool)
        unseen[:, :n] = later(round_, layer, count)[head]
        mask = torch.zeros(1, 1, count, n + count).masked_fill(unseen, float("-inf"))
        past = (keys[None, None], rows[None, None])
        module.forward(torch.zeros(1, count, 1), mask, None, past)
        # It divides by 400, the most queries that it takes, however many there are.
        return module.previous_scores.detach()[0, :n] * 400 / count

    return scorer


def snapkv() -> list[dict[str, Any]]:
    runs = make_kvpress.snapkv()
    name = reference("vatp", "guozhiyu", "LlamaAttention_heavy_hitter")
    for seed, window, prompt in ((1, 8, 12), (2, 5, 60)):
        params = {"window": window, "kernel": 1, "slack": 7, "decorate": ["vatp"]}
        setting = Setting(
            seed=seed,
            budget=24,
            prompt_tokens=prompt,
            tokens=110,
            slack=7,
            recent=window,
            params=params,
            shape=Shape(heads=2),
        )
        runs.append(play(name, vatp_scores(window, values=True), setting))
    return runs


# ---------------------------------------------------------------------------------------------
# R-KV


@lru_cache
def r1kv() -> type:
    """Around the package's own imports, which name a file that it does not have, and old models."""
    root = CHECKOUTS / "R-KV" / "rkv"
    for name, path in (("rkv", root), ("rkv.compression", root / "compression")):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(path)]
    utils = load("R-KV", "rkv.utils")
    for name in ("cal_similarity", "compute_attention_scores"):
        setattr(sys.modules["rkv.compression"], name, getattr(utils, name))
    return load("R-KV", "rkv.compression.r1_kv").R1KV


def rkv_scores(window: int, kernel: int, mix: float, with_all: list[bool]) -> Scorer:
    """with_all: gets whether every token of a round has a duplicate. Else `compat` matters."""
    code = r1kv()

    def scorer(round_: Round) -> list[Tensor]:
        with_all.append(duplicates(round_))
        scores = []
        for layer in range(round_.world.shape.layers):
            keys, queries = round_.keys(layer)[None], round_.queries(layer, window)[None]
            press = code(keys.shape[2] - 1, window, kernel, mix)
            with ranked() as seen:
                press.update_kv(keys, queries, keys)
            scores.append(nn.functional.pad(seen[-1][0], (0, window)))
        return scores

    return scorer


def duplicates(round_: Round) -> bool:
    """That every token has one."""
    for layer in range(round_.world.shape.layers):
        unit = nn.functional.normalize(round_.keys(layer), dim=-1)
        cosine = unit @ unit.transpose(1, 2) - 2 * torch.eye(unit.shape[1])
        if not bool((cosine > 0.5).any(-1).all()):
            return False
    return True


def rkv() -> list[dict[str, Any]]:
    runs = []
    name = reference("R-KV", "Zefan-Cai", "R1KV")
    cases = [
        # seed, window, kernel, lambda, compat, prompt, width
        (1, 8, 7, 0.5, True, 12, 8),
        (2, 8, 7, 0.07, True, 60, 16),
        (3, 4, 3, 0.1, True, 60, 16),
        (4, 8, 7, 0.5, False, 60, 3),
        (5, 6, 5, 0.9, False, 12, 3),
    ]
    for seed, window, kernel, mix, compat, prompt, width in cases:
        params = {"window": window, "kernel": kernel, "lambda": mix, "slack": 7}
        params["compat"] = compat
        setting = Setting(
            seed=seed,
            budget=24,
            prompt_tokens=prompt,
            tokens=100,
            slack=7,
            recent=window,
            params=params,
            shape=Shape(width=width),
        )
        with_all: list[bool] = []
        runs.append(play(name, rkv_scores(window, kernel, mix, with_all), setting))
        assert compat != all(with_all), f"seed {seed} is no case of compat = {compat}"
    return runs


# ---------------------------------------------------------------------------------------------
# RPC


def rpc_scores(setting: Setting) -> Scorer:
    params, shape = setting.params, setting.shape
    flash = ModuleType("flash_attn")
    flash.flash_attn_func = None
    package = ModuleType("rpc")  # whose own imports are of models
    package.__path__ = [str(CHECKOUTS / "ReasoningPathCompression" / "rpc")]
    sys.modules.update({"flash_attn": flash, "rpc": package})
    code = load("ReasoningPathCompression", "rpc.rpc_utils").RPCCluster
    window = params["window"]

    def scorer(round_: Round) -> list[Tensor]:
        scores = []
        for layer in layers(shape):
            cluster = code(
                layer,
                P=(period := setting.slack + 1 + window),
                R=window,
                c=period,
                selectors="recent" if params["compat"] else "new",
                aggregation=params["aggregation"],
                kernel_size=params["kernel"],
                pooling=f"{params['pooling']}pool",
                num_key_value_groups=shape.heads // shape.kv_heads,
            )
            cluster.prompt_len = setting.prompt_tokens
            cluster.agg_func = params["gqa"]
            queries = round_.queries(layer, period)[None]
            # As its attention layers do while `length` tokens are cached.
            for length in range(period if params["compat"] else 0):
                if length > period - window:
                    cluster.cache_recent(queries[:, :, length : length + 1])
            asked = queries[:, :, -1 if params["compat"] else -window :]
            keys = round_.keys(layer)[None]
            with ranked() as seen:
                cluster.compress_kv(keys, keys, asked)
            scores.append(nn.functional.pad(seen[-1][0], (setting.prompt_tokens, window)))
        return scores

    return scorer


def rpc() -> list[dict[str, Any]]:
    name = reference("ReasoningPathCompression", "jiwonsong-dev", "RPCCluster")
    runs = []
    for seed, aggregation, gqa, window, kernel, pooling, compat in (
        (1, "all", "mean", 8, 7, "avg", False),
        (2, "all", "mean", 8, 7, "avg", True),
        (3, "all", "max", 5, 3, "max", False),
        (4, "group", "mean", 8, 5, "avg", False),
        (5, "group", "max", 6, 7, "max", True),
    ):
        setting = Setting(
            seed=seed,
            budget=32,
            prompt_tokens=10,
            tokens=110,
            slack=7,
            prompt=10,
            recent=window,
            params={
                "window": window,
                "kernel": kernel,
                "pooling": pooling,
                "aggregation": aggregation,
                "gqa": gqa,
                "compat": compat,
                "slack": 7,
            },
            shares="layer" if aggregation == "all" else "head",
        )
        runs.append(play(name, rpc_scores(setting), setting))
    return runs


# ---------------------------------------------------------------------------------------------
# The EpiKV authors' classes: one mask for all lanes, called after every decode token.


class Watched:
    """One of their objects over a run. It drops by itself; world.py checks that it agrees."""

    def __init__(self, policy: Any):
        self.policy = policy
        self.scores: list[Tensor] = []
        self.kept: list[int] = []

    def watch(self, round_: Round) -> None:
        shape = round_.world.shape
        index = torch.tensor(round_.index[0][0], dtype=torch.float32)
        past = [(round_.keys(layer)[None], round_.values(layer)[None]) for layer in layers(shape)]
        rows = [attention(round_, layer, 1)[None] for layer in layers(shape)]
        with ranked() as self.scores:
            result = self.policy.evict_past_key_values(tuple(past), tuple(rows))
        kept = result[0][1][0, 0]
        all_rows = round_.values(0)[0]
        self.kept = [int(index[(all_rows == row).all(-1)][0]) for row in kept]

    def scorer(self, round_: Round) -> list[Tensor]:
        # Infinite: of tokens that it keeps anyway.
        scores = self.scores[-1].nan_to_num(posinf=0)
        return [scores[None]] * round_.world.shape.layers

    def chooser(self, scores: list[Tensor], lanes: list[list[int]]) -> list[list[int]]:
        return [sorted(set(lanes[0]) - set(self.kept))]

    def play(self, name: str, setting: Setting, **kwargs: Any) -> dict[str, Any]:
        return play(name, self.scorer, setting, watch=self.watch, chooser=self.chooser, **kwargs)


def layers(shape: Shape) -> range:
    return range(shape.layers)


def epikv_authors() -> ModuleType:
    return load("epiphany-kv-cache", "src.eviction")


def epikv_name(policy: type) -> str:
    return reference("epiphany-kv-cache", "stevenkolawole", policy.__name__)


def rkv_epikv() -> list[dict[str, Any]]:
    authors = epikv_authors()
    runs = []
    for seed, prompt, mix, kernel in ((1, 12, 0.1, 7), (2, 30, 0.5, 5), (4, 24, 0.1, 7)):
        setting = Setting(
            seed=seed,
            budget=32,
            prompt_tokens=prompt,
            tokens=130,
            slack=9,
            recent=8,
            params={"lambda": mix, "kernel": kernel, "slack": 9},
            shares="token",
        )
        config = authors.EvictionConfig(cache_size=setting.budget)
        policy = authors.RKVEviction(
            config, kernel_size=kernel, mix_lambda=mix, buffer_size=setting.slack + 1
        )
        policy.reset(prompt)
        runs.append(Watched(policy).play(epikv_name(authors.RKVEviction), setting))
    return runs


def longflow() -> list[dict[str, Any]]:
    authors = epikv_authors()
    name = epikv_name(authors.LongFlowEviction)
    runs = []
    for seed, prompt in ((1, 12), (2, 24)):
        setting = Setting(
            seed=seed,
            budget=24,
            prompt_tokens=prompt,
            tokens=90,
            recent=0,
            params={"scope": "model"},
            shares="token",
        )
        policy = authors.LongFlowEviction(authors.EvictionConfig(cache_size=setting.budget))
        runs.append(Watched(policy).play(name, setting))

    def one_by_one(round_: Round) -> list[Tensor]:
        """Of each lane as if it were the only one."""
        shape = round_.world.shape
        group = shape.heads // shape.kv_heads
        scores = []
        for layer in layers(shape):
            rows, values = attention(round_, layer, 1), round_.values(layer)
            of_layer = []
            for head in range(shape.kv_heads):
                lane = values[None, head : head + 1]
                config = authors.EvictionConfig(cache_size=lane.shape[2] - 1)
                with ranked() as seen:
                    authors.LongFlowEviction(config).evict_past_key_values(
                        ((lane, lane),), (rows[None, head * group : (head + 1) * group],)
                    )
                of_layer.append(seen[-1])
            scores.append(torch.stack(of_layer))
        return scores

    for seed, prompt, slack in ((1, 12, 0), (2, 50, 3)):
        setting = Setting(
            seed=seed,
            budget=20,
            prompt_tokens=prompt,
            tokens=70,
            slack=slack,
            recent=1,
            params={"scope": "head", "slack": slack},
        )
        runs.append(play(name, one_by_one, setting))
    return runs


def raas() -> list[dict[str, Any]]:
    authors = epikv_authors()
    runs = []
    for seed, prompt, budget in ((1, 12, 32), (2, 0, 20), (3, 20, 27)):
        setting = Setting(
            seed=seed,
            budget=budget,
            prompt_tokens=prompt,
            tokens=110,
            prompt=prompt,
            recent=0,
            shares="token",
        )
        policy = authors.RaaSEviction(authors.EvictionConfig(cache_size=budget))
        policy.reset(prompt)
        runs.append(RaasWatched(policy).play(epikv_name(authors.RaaSEviction), setting))
    return runs


class RaasWatched(Watched):
    """It ranks decoded tokens alone."""

    def scorer(self, round_: Round) -> list[Tensor]:
        stamps = self.scores[-1].to(torch.float32)
        prompt = len(round_.index[0][0]) - len(stamps)
        return [nn.functional.pad(stamps, (prompt, 0))[None]] * round_.world.shape.layers


# ---------------------------------------------------------------------------------------------
# DefensiveKV: a fork of kvpress.


@lru_cache
def defensive_press() -> type:
    """Without what CriticalKV does to the scores, which asks for the output projection."""
    mine = {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith("kvpress")}
    root = CHECKOUTS / "DefensiveKV" / "kvpress"
    for name, path in (("kvpress", root), ("kvpress.presses", root / "presses")):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(path)]
    for name in ("kvpress.ops.vw_norm", "kvpress.ada_cache"):  # Triton, flash attention
        sys.modules[name] = ModuleType(name)
    sys.modules["kvpress.ops.vw_norm"].vw_l1norm = None
    sys.modules["kvpress.ada_cache"].DynamicCacheSplitHeadFlatten = None
    code = load("DefensiveKV", "kvpress.presses.efficient_defensivekv_press")
    sys.path.remove(str(CHECKOUTS / "DefensiveKV"))
    for name in [name for name in sys.modules if name.startswith("kvpress")]:
        del sys.modules[name]
    sys.modules.update(mine)

    class Bare(code.EfficientDefensiveKVPress):
        def vwl1norm_triton(self, values: Any, module: Any, scores: Tensor, *_: Any) -> Tensor:
            return scores

    return Bare


def defensive_kv() -> list[dict[str, Any]]:
    name = reference("DefensiveKV", "FFY0", "EfficientDefensiveKVPress")
    runs = []
    for seed, window, kernel, prompt in ((1, 8, 5, 12), (2, 6, 3, 60), (3, 4, 1, 60)):
        press = defensive_press()(0.5, window_size=window, kernel_size=kernel)

        def scorer(round_: Round, press: Any = press) -> list[Tensor]:
            shape = round_.world.shape
            scores = []
            for layer in layers(shape):
                keys, values = round_.keys(layer)[None], round_.values(layer)[None]
                n = keys.shape[2]
                metadata = SimpleNamespace(
                    bsz=1, num_key_value_heads=shape.kv_heads, head_lens=[n] * shape.kv_heads
                )
                rotary = (torch.ones(1, n, shape.width), torch.zeros(1, n, shape.width))
                kwargs = {"metadata": metadata, "position_embeddings": rotary}
                module = make_kvpress.attention_module(round_, layer, press.window_size)
                flat = press.score(module, torch.zeros(1, n, 1), keys, values, None, kwargs)
                scores.append(flat.view(shape.kv_heads, n))
            return scores

        setting = Setting(
            seed=seed,
            budget=24,
            prompt_tokens=prompt,
            tokens=100,
            slack=7,
            recent=window,
            params={"window": window, "kernel": kernel, "slack": 7},
        )
        runs.append(play(name, scorer, setting))
    return runs


def scissorhands() -> list[dict[str, Any]]:
    name = reference("vatp", "guozhiyu", "LlamaAttention_heavy_hitter")
    runs = []
    # A sink, for else some query of the window has seen nothing of what is left.
    for seed, window, prompt in ((1, 400, 12), (2, 20, 60)):
        setting = Setting(
            seed=seed,
            budget=24,
            prompt_tokens=prompt,
            tokens=100,
            slack=7,
            sinks=1,
            recent=10,
            params={"window": window, "slack": 7, "history": "mass"},
            shape=Shape(heads=2),
        )
        runs.append(play(name, vatp_scores(window, values=False), setting))
    return runs


POLICIES: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "defensive_kv": defensive_kv,
    "longflow": longflow,
    "raas": raas,
    "rkv": rkv,
    "rkv_epikv": rkv_epikv,
    "rpc": rpc,
    "scissorhands": scissorhands,
    "snapkv": snapkv,
}


def main() -> None:
    global CHECKOUTS
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    CHECKOUTS = Path(sys.argv[1])
    torch.set_num_threads(1)
    for name in sys.argv[2:] or POLICIES:
        write(name, COMMAND, POLICIES[name]())


if __name__ == "__main__":
    main()
