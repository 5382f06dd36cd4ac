"""Runs of the RaaS authors' cache as data.

    git clone https://github.com/DerekHJH/RaaS /tmp/RaaS
    git -C /tmp/RaaS checkout 71cb3c7
    git -C /tmp/RaaS checkout 22d925d quest/models/raas_llama.py    # all layers
    python tests/golden/make_raas.py /tmp/RaaS

Their code is imported from the checkout given and is no part of this repository. It caches every
token; after each one its attention layer dates pages, and its cache masks all but the newest dates.
What it masks is what must go. Two things are put into its dates, as its kernels' controller
(quest/raas_utils) has them: a page is born with the date of its first token, and the prompt's with
that of the prompt; the eager code leaves both at none until they are used. One query head a KV head.
"""

import sys
from dataclasses import asdict
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from make_attention import ranked
from torch import Tensor
from world import Setting, Shape, World, write


class DynamicCache:
    """As much of it as theirs builds on. Of one layer."""

    def __init__(self, *_: Any) -> None:
        self.key_cache: list[Tensor] = []
        self.value_cache: list[Tensor] = []

    @property
    def _seen_tokens(self) -> int:
        return self.get_seq_length()

    def get_seq_length(self) -> int:
        return self.key_cache[0].shape[2]

    def update(self, keys: Tensor, values: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        self.key_cache = [torch.cat([*self.key_cache, keys], 2)]
        self.value_cache = [torch.cat([*self.value_cache, values], 2)]
        return self.key_cache[0], self.value_cache[0]


def load(checkout: str) -> tuple[Any, type]:
    """Its attention, and its cache."""
    full = ModuleType("quest.models.full_llama")
    full.Cache = full.LlamaAttention = None
    full.apply_rotary_pos_emb = lambda q, k, *_: (q, k)
    full.repeat_kv = lambda rows, _: rows
    sys.modules[full.__name__] = full
    sys.modules["transformers"] = SimpleNamespace(DynamicCache=DynamicCache)
    for name in ("quest", "quest.models", "quest.utils"):
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [f"{checkout}/{name.replace('.', '/')}"]
    from quest.models.raas_llama import forward
    from quest.utils.cache_utils import RaaSCache

    return forward, RaaSCache


class Reference:
    """A cache of theirs for each layer, fed with every token."""

    def __init__(self, forward: Any, cache_type: type, setting: Setting):
        self.forward = forward
        self.setting = setting
        self.world = World(setting.seed, setting.shape)
        alpha = setting.params["alpha"] or None
        self.page = setting.params["page"]
        self.caches = [cache_type(self.page, setting.budget, alpha=alpha) for _ in self.layers]
        for layer, cache in enumerate(self.caches):
            prompt = [list(range(setting.prompt_tokens))] * setting.shape.kv_heads
            keys, values = (self.world.lanes(kind, layer, prompt) for kind in ("key", "value"))
            cache.update(keys[None], values[None])

    @property
    def layers(self) -> range:
        return range(self.setting.shape.layers)

    def attend(self, layer: int, token: int) -> None:
        shape, cache = self.setting.shape, self.caches[layer]
        first = not cache.page_id_to_access_status

        def rows(kind: str) -> Any:
            lanes = [[token]] * shape.kv_heads
            return lambda _: self.world.lanes(kind, layer, lanes).reshape(1, 1, -1)

        module = SimpleNamespace(
            q_proj=lambda _: self.world.queries(layer, [token]).reshape(1, 1, -1),
            k_proj=rows("key"),
            v_proj=rows("value"),
            o_proj=lambda output: output,
            head_dim=shape.width,
            num_heads=shape.heads,
            num_key_value_groups=1,
            layer_idx=0,
            page_size=self.page,
            cache_budget=self.setting.budget,
        )
        with ranked():
            self.forward(
                module,
                torch.zeros(1, 1, 1),
                position_ids=torch.tensor([[token]]),
                past_key_value=cache,
                position_embeddings=(None, None),
            )
        dates = cache.page_id_to_access_status[0][0, :, 0]  # [heads, pages]
        if first:
            prompt = -(-self.setting.prompt_tokens // self.page)
            dates[:, :prompt] = dates[:, :prompt].clamp_min(self.setting.prompt_tokens)
        if token % self.page == 0:
            dates[:, token // self.page] = token + 1

    def masked(self) -> list[list[int]]:
        """Tokens that it goes on without. [layers x heads]"""
        lanes = []
        for layer in self.layers:
            cache, shape = self.caches[layer], self.setting.shape
            like = torch.zeros(1, shape.heads, 1, cache.get_seq_length())
            with ranked():
                mask = cache.get_attention_mask(like, 0)
            for row in torch.zeros_like(like[0, :, 0]) if mask is None else mask[0, :, 0]:
                lanes.append(row.nonzero()[:, 0].tolist())
        return lanes

    def run(self) -> dict[str, Any]:
        setting = self.setting
        rounds = []
        gone = self.masked()
        for newest in range(setting.prompt_tokens, setting.tokens):
            for layer in self.layers:
                self.attend(layer, newest)
            masked = self.masked()
            dropped = [sorted(set(now) - set(old)) for now, old in zip(masked, gone, strict=True)]
            assert all(set(old) <= set(now) for now, old in zip(masked, gone, strict=True))
            if any(dropped):
                rounds.append({"newest": newest, "dropped": dropped})
            gone = masked
        assert len(rounds) >= 5 and sum(map(len, gone)) >= 50
        known = asdict(setting)
        del known["shares"], known["budgets"]
        return {"reference": "DerekHJH/RaaS 71cb3c7 `RaaSCache`", **known, "rounds": rounds}


def main() -> None:
    forward, cache = load(sys.argv[1])
    runs = []
    for seed, page, budget, alpha, prompt in (
        (1, 16, 64, 0, 20),
        (2, 4, 24, 0, 12),
        (3, 4, 28, 0, 10),
        (4, 4, 24, 0.05, 12),
        (5, 8, 32, 0.001, 5),
    ):
        setting = Setting(
            seed=seed,
            budget=budget,
            prompt_tokens=prompt,
            tokens=160 if page == 16 else 100,
            recent=1,
            params={"page": page, "alpha": alpha},
            shape=Shape(heads=2),
        )
        runs.append(Reference(forward, cache, setting).run())
    write("raas_page", "python tests/golden/make_raas.py CHECKOUT", runs)


if __name__ == "__main__":
    main()
