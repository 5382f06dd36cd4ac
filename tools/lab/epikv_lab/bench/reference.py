"""A model in Hugging Face transformers, run in the ways in which the EpiKV authors' code runs it.

Their attention-reading policies are run with `maps`, the others with `hidden` (flash attention 2 on
their GPUs is `sdpa` on a CPU). `eager` and `sdpa` are what each costs when it returns nothing.

`python -m epikv_lab.bench.reference SHAPE WAY LENGTH` measures one prefill in a process of its own.
"""

import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import CausalLMOutputWithPast

from epikv_lab.bench.resident import forget_peak, resident

if TYPE_CHECKING:
    from epikv.harness import Shape

Scores = Tensor | list[Tensor] | None


@dataclass(frozen=True)
class Way:
    """An attention implementation, and what a forward is asked to return."""

    attention: str
    returns: Mapping[str, bool]
    told: str


WAYS = MappingProxyType(
    {
        "hidden": Way(
            "sdpa", {"output_hidden_states": True}, "sdpa, hidden states of all layers returned"
        ),
        "maps": Way(
            "eager", {"output_attentions": True}, "eager, attention maps of all layers returned"
        ),
        "eager": Way("eager", {}, "eager, the maps of one layer at a time"),
        "sdpa": Way("sdpa", {}, "sdpa, nothing returned"),
    }
)
LAYERS = (0.344, 0.688)  # of whose outputs `hidden` takes the steps, as shares of the depth


def load(shape: "Shape") -> LlamaForCausalLM:
    """A model of a bench's SHAPE with random weights, in bfloat16."""
    config = LlamaConfig(
        hidden_size=shape["hidden"],
        num_hidden_layers=shape["layers"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=shape["head_dim"],
        intermediate_size=shape["ffn"],
        vocab_size=shape["vocab"],
        max_position_embeddings=shape["context"],
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    return model.to(torch.bfloat16).eval()  # type: ignore[arg-type]  # their decorator drops self


def forward(
    model: LlamaForCausalLM, way: Way, ids: Tensor, cache: DynamicCache
) -> CausalLMOutputWithPast:
    """Runs ids [1, n] behind what is cached; logits of the last one alone. The model is to have the
    way's attention."""
    with torch.inference_mode():
        return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1, **way.returns)


def scores(out: CausalLMOutputWithPast, before: Scores) -> Scores:
    """What a policy of theirs takes from a decode step: the newest query's attention, a mean over
    layers and heads (H2O, RaaS); or how far two layers' outputs moved (EpiKV). before: these."""
    if out.attentions:
        return torch.stack([row[:, :, -1] for row in out.attentions]).mean((0, 1, 2))
    if out.hidden_states:
        depth = len(out.hidden_states) - 1
        here = [out.hidden_states[round(share * depth)][0, -1] for share in LAYERS]
        if before is not None:
            [float((a - b).norm()) for a, b in zip(here, before, strict=True)]
        return here
    return None


def filled(model: LlamaForCausalLM, tokens: int) -> DynamicCache:
    """A cache of so many random tokens."""
    config = model.config
    assert config.num_key_value_heads is not None and config.head_dim is not None  # filled in
    cache = DynamicCache()
    for layer in range(config.num_hidden_layers):
        shape = (2, 1, config.num_key_value_heads, tokens, config.head_dim)
        keys, values = torch.randn(shape, dtype=torch.bfloat16)
        cache.update(keys, values, layer)
    return cache


@dataclass(frozen=True)
class Prefill:
    """Bytes that a prefill needed at its peak beyond what the process held before, weights loaded
    and libraries warm; and its CPU time."""

    tokens: int
    bytes: int
    seconds: float


def prefill(shape: "Shape", way: Way, tokens: int) -> Prefill:
    """Measures it in this process, which should do nothing else."""
    torch.set_num_threads(1)
    model = load(shape)
    model.set_attn_implementation(way.attention)
    ids = torch.arange(tokens)[None] % shape["vocab"]
    forward(model, way, ids[:, :16], DynamicCache())
    forget_peak()
    before, begin = resident(), time.process_time()
    out = forward(model, way, ids, DynamicCache())
    seconds = time.process_time() - begin
    del out
    return Prefill(tokens, resident(peak=True) - before, seconds)


if __name__ == "__main__":
    of, name, length = sys.argv[1:]
    print(json.dumps(asdict(prefill(json.loads(of), WAYS[name], int(length)))))
