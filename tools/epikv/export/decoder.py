"""Llama as a scriptable module under the model contract: packed rows in, KV left to the runtime.

Submodules carry the names of `transformers.LlamaForCausalLM`, so its weights load as they are.
Shapes use n packed rows of all sequences, C hidden channels, H query heads, G key-value heads,
D channels of a head.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import epikv.export.operators  # noqa: F401  registers torch.ops.epikv


@dataclass(frozen=True)
class Shape:
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    attention_bias: bool
    mlp_bias: bool
    tied: bool  # lm_head shares the embedding's weight


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.num_kv_heads = shape.num_kv_heads
        self.head_size = shape.head_size
        hidden, bias = shape.hidden_size, shape.attention_bias
        self.q_proj = nn.Linear(hidden, shape.num_heads * shape.head_size, bias)
        self.k_proj = nn.Linear(hidden, shape.num_kv_heads * shape.head_size, bias)
        self.v_proj = nn.Linear(hidden, shape.num_kv_heads * shape.head_size, bias)
        self.o_proj = nn.Linear(shape.num_heads * shape.head_size, hidden, bias)

    def forward(self, normed: Tensor, layer: int) -> Tensor:
        q = self.q_proj(normed).view(-1, self.num_heads, self.head_size)
        k = self.k_proj(normed).view(-1, self.num_kv_heads, self.head_size)
        v = self.v_proj(normed).view(-1, self.num_kv_heads, self.head_size)
        attended = torch.ops.epikv.attention(q, k, v, normed, layer)  # [n, H, D]
        return self.o_proj(attended.reshape(-1, self.num_heads * self.head_size))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_size, shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_size, shape.mlp_bias)
        self.down_proj = nn.Linear(shape.ffn_size, shape.hidden_size, shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, residual: Tensor, layer: int) -> Tensor:
        residual = torch.ops.epikv.block(residual, layer)
        residual = residual + self.self_attn(self.input_layernorm(residual), layer)
        return residual + self.mlp(self.post_attention_layernorm(residual))


class Decoder(nn.Module):
    """Everything before the head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(self, token_ids: Tensor, last: Tensor) -> Tensor:
        residual = self.embed_tokens(token_ids)  # [n, C]
        for layer, block in enumerate(self.layers):  # unrolled: `layer` is a constant in the graph
            residual = block(residual, layer)
        residual = torch.ops.epikv.block(residual, len(self.layers))
        return self.norm(residual.index_select(0, last))  # [b, C]


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """Logits float32 [b, vocabulary] of rows `last` [b] of the packed tokens [n].

        `positions` [n] is part of the contract; Llama has none to learn, the runtime rotates.
        """
        return self.lm_head(self.model(token_ids, last)).float()


def output_projection(layer: int) -> str:
    """The parameter name of W_O."""
    return f"model.layers.{layer}.self_attn.o_proj.weight"


def build(shape: Shape, weights: dict[str, Tensor], dtype: torch.dtype) -> Llama:
    """The module with its weights, ready to script.

    Raises RuntimeError, naming every tensor that is missing, unexpected or of another shape.
    """
    with torch.device("meta"):
        module = Llama(shape)
    if shape.tied:
        weights = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"]}
    module.load_state_dict({k: w.to(dtype) for k, w in weights.items()}, assign=True)
    if shape.tied:
        module.lm_head.weight = module.model.embed_tokens.weight
    return module.eval().requires_grad_(False)
