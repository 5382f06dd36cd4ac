"""Which pages the Quest authors' attention reads, as data.

    git clone https://github.com/mit-han-lab/Quest /tmp/Quest    # 01c1623
    python tests/golden/make_quest.py /tmp/Quest

Their code is imported from the checkout given and is no part of this repository. Its attention layer
runs with projections and rotations that change nothing and one query head a KV head; what its
local_heavy_hitter_mask answers is kept. It has no rule for the page of the newest token, so that
token's key is made to meet the query best; ours reads that page whatever its bound is.
"""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

CASES = (  # tokens, width, page, budget
    (50, 16, 4, 12),
    (64, 16, 4, 20),
    (97, 24, 8, 31),
    (200, 32, 16, 64),
    (201, 32, 16, 65),
    (333, 8, 16, 10),  # less than three pages
    (40, 8, 16, 64),  # more than there are
)


def attention(checkout: str) -> Any:
    """Their module. It asks transformers for what its forward does not use here."""
    llama = ModuleType("transformers.models.llama.modeling_llama")
    llama.LlamaAttention = None
    llama.apply_rotary_pos_emb = lambda q, k, *_: (q, k)
    llama.repeat_kv = lambda rows, _: rows
    mistral = ModuleType("transformers.models.mistral.modeling_mistral")
    mistral.MistralAttention = None
    cache = ModuleType("transformers.cache_utils")
    cache.DynamicCache = type("DynamicCache", (), {})
    for module in (llama, mistral, cache):
        sys.modules[module.__name__] = module
    for name in ("transformers", "transformers.models", "transformers.models.llama",
                 "transformers.models.mistral"):  # fmt: skip
        sys.modules[name] = ModuleType(name)
    sys.path.insert(0, f"{checkout}/evaluation")
    import quest_attention

    return quest_attention


def read_by(theirs: Any, query: Tensor, keys: Tensor, page: int, budget: int) -> list[int]:
    """Tokens that a decode step of the query reads. query: [width]; keys: [tokens, width]"""
    tokens, width = keys.shape
    rows = {"q": query, "k": keys[-1], "v": keys[-1]}
    layer = SimpleNamespace(
        layer_id=2,
        num_heads=1,
        num_key_value_heads=1,
        num_key_value_groups=1,
        head_dim=width,
        hidden_size=width,
        chunk_size=page,
        token_budget=budget,
        rotary_emb=lambda *_: (torch.ones(1), torch.zeros(1)),
        o_proj=lambda out: out,
        **{f"{name}_proj": lambda _, row=row: row for name, row in rows.items()},
    )
    masks: list[Tensor] = []
    chosen = theirs.local_heavy_hitter_mask

    def watched(*given: Any) -> Tensor:
        masks.append(chosen(*given))
        return masks[-1]

    theirs.local_heavy_hitter_mask = watched
    past = keys[None, None, :-1]
    theirs.forward(
        layer,
        torch.zeros(1, 1, width),
        position_ids=torch.tensor([[tokens - 1]]),
        past_key_value=(past, past),
    )
    theirs.local_heavy_hitter_mask = chosen
    return torch.nonzero(masks[0].flatten()).flatten().tolist()


def main(checkout: str) -> None:
    theirs = attention(checkout)
    torch.manual_seed(1)
    cases = []
    for tokens, width, page, budget in CASES:
        keys, query = torch.randn(tokens, width), torch.randn(width)
        keys[-1] = 4 * query
        cases.append(
            {
                "page": page,
                "budget": budget,
                "width": width,
                "query": query.tolist(),
                "keys": keys.flatten().tolist(),
                "read": read_by(theirs, query, keys, page, budget),
            }
        )
    Path(__file__).with_name("quest.json").write_text(json.dumps(cases) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
