"""A decoder as a scriptable module under the model contract: packed rows in, KV left to the runtime.

One module for every family that `families.py` lists; what a family lacks is an identity, which
freezing removes. Shapes use n packed rows of all sequences, C hidden channels, H query heads, G
key-value heads, D channels of a head.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

import epikv.export.operators  # noqa: F401  registers torch.ops.epikv
from epikv.export.quantize import Quantization, QuantizedLinear

# By the names that configurations give them.
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_pytorch_tanh": lambda: nn.GELU("tanh"),
}
NORMS = ("attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm")  # of a block


@dataclass(frozen=True)
class NormKind:
    """How RMS norms weigh x / rms(x), which is made in float32."""

    eps: float
    wide: bool = (
        False  # by offset + weight in float32, then narrowed; else narrowed, then by weight
    )
    offset: float = 0.0


@dataclass(frozen=True)
class Shape:
    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm: NormKind
    norms: frozenset[str]  # those of NORMS that blocks have
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    tied: bool  # lm_head shares the embedding's weight
    # Norms of queries and keys: of each head, or of all heads together.
    qk_norm: Literal["head", "projection"] | None = None
    activation: str = "silu"  # of ACTIVATIONS
    embedding_factor: float = 1.0
    residual_factor: float = 1.0  # of what each half of a block adds
    logit_factor: float = 1.0
    logit_cap: float | None = None  # logits become cap * tanh(logits / cap)


class RMSNorm(nn.Module):
    def __init__(self, size: int, kind: NormKind) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.wide, self.offset = kind.eps, kind.wide, kind.offset

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.epikv.rms_norm(x, self.weight, self.eps, self.wide, self.offset)


class SwiGlu(nn.Module):
    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return torch.ops.epikv.swiglu(gate, up)


class Gated(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.activation(gate) * up


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


class Cap(nn.Module):
    def __init__(self, cap: float) -> None:
        super().__init__()
        self.cap = cap

    def forward(self, x: Tensor) -> Tensor:
        return self.cap * torch.tanh(x / self.cap)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads = shape.num_heads
        self.num_kv_heads = shape.num_kv_heads
        self.head_size = shape.head_size
        hidden, queries = shape.hidden_size, shape.num_heads * shape.head_size
        keys = shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(hidden, queries, shape.qkv_bias)
        self.k_proj = nn.Linear(hidden, keys, shape.qkv_bias)
        self.v_proj = nn.Linear(hidden, keys, shape.qkv_bias)
        self.o_proj = nn.Linear(queries, hidden, shape.output_bias)
        # Channels that are normed together.
        whole = shape.qk_norm == "projection"
        self.q_width = queries if whole else shape.head_size
        self.k_width = keys if whole else shape.head_size
        self.q_groups = queries // self.q_width
        self.k_groups = keys // self.k_width
        self.q_norm = _norm(self.q_width, shape.norm, shape.qk_norm is not None)
        self.k_norm = _norm(self.k_width, shape.norm, shape.qk_norm is not None)

    def forward(self, normed: Tensor, layer: int) -> Tensor:
        q = self.q_norm(self.q_proj(normed).view(-1, self.q_groups, self.q_width))
        k = self.k_norm(self.k_proj(normed).view(-1, self.k_groups, self.k_width))
        q = q.view(-1, self.num_heads, self.head_size)
        k = k.view(-1, self.num_kv_heads, self.head_size)
        v = self.v_proj(normed).view(-1, self.num_kv_heads, self.head_size)
        attended = torch.ops.epikv.attention(q, k, v, normed, layer)  # [n, H, D]
        return self.o_proj(attended.reshape(-1, self.num_heads * self.head_size))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.ffn_size, shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden_size, shape.ffn_size, shape.mlp_bias)
        self.down_proj = nn.Linear(shape.ffn_size, shape.hidden_size, shape.mlp_bias)
        activation = ACTIVATIONS[shape.activation]()
        self.gated = SwiGlu() if isinstance(activation, nn.SiLU) else Gated(activation)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gated(self.gate_proj(x), self.up_proj(x)))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        norms = {name: _norm(shape.hidden_size, shape.norm, name in shape.norms) for name in NORMS}
        self.attention_norm = norms["attention_norm"]
        self.self_attn = Attention(shape)
        self.attention_post_norm = norms["attention_post_norm"]
        self.mlp_norm = norms["mlp_norm"]
        self.mlp = FeedForward(shape)
        self.mlp_post_norm = norms["mlp_post_norm"]
        self.added = _scaled(shape.residual_factor)

    def forward(self, residual: Tensor, layer: int) -> Tensor:
        residual = torch.ops.epikv.block(residual, layer)
        attended = self.self_attn(self.attention_norm(residual), layer)
        residual = residual + self.added(self.attention_post_norm(attended))
        return residual + self.added(self.mlp_post_norm(self.mlp(self.mlp_norm(residual))))


class Decoder(nn.Module):
    """Everything before the head."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.embedded = _scaled(shape.embedding_factor)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = _norm(shape.hidden_size, shape.norm)

    def forward(self, token_ids: Tensor, last: Tensor) -> Tensor:
        residual = self.embedded(self.embed_tokens(token_ids))  # [n, C]
        for layer, block in enumerate(self.layers):  # unrolled: `layer` is a constant in the graph
            residual = block(residual, layer)
        residual = torch.ops.epikv.block(residual, len(self.layers))
        return self.norm(residual.index_select(0, last))  # [b, C]


class LanguageModel(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = Decoder(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)
        self.scale = _scaled(shape.logit_factor)
        self.cap = nn.Identity() if shape.logit_cap is None else Cap(shape.logit_cap)

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """Logits float32 [b, vocabulary] of rows `last` [b] of the packed tokens [n].

        `positions` [n] is part of the contract; there are none to learn, the runtime rotates.
        """
        return self.cap(self.scale(self.lm_head(self.model(token_ids, last)).float()))


FINAL_NORM = "model.norm.weight"  # the parameter name


def output_projection(layer: int) -> str:
    """The parameter name of W_O."""
    return f"model.layers.{layer}.self_attn.o_proj.weight"


def build(
    shape: Shape,
    weights: Mapping[str, Tensor],
    dtype: torch.dtype,
    quantization: Quantization | None = None,
) -> LanguageModel:
    """The module with its weights, ready to script. Each weight is asked for once, in order.

    Raises RuntimeError, naming every tensor that is missing, unexpected or of another shape.
    """
    with torch.device("meta"):
        module = LanguageModel(shape)
    if shape.tied:
        module.lm_head.weight = module.model.embed_tokens.weight
    wanted = dict(module.named_parameters())  # one name of those that are tied
    faults = [f"{name} is missing" for name in sorted(wanted.keys() - weights.keys())]
    faults += [f"{name} is not expected" for name in sorted(weights.keys() - wanted.keys())]
    for name, weight in weights.items() if not faults else ():
        if weight.shape != wanted[name].shape:
            faults.append(f"{name} is {list(weight.shape)}, not {list(wanted[name].shape)}")
            continue
        parent, _, leaf = name.rpartition(".")
        if leaf == "weight" and _quantized(module, parent, weight, quantization):
            continue
        copy = weight.to(dtype, copy=True)  # of its own: files are mapped
        setattr(module.get_submodule(parent), leaf, nn.Parameter(copy, requires_grad=False))
    if faults:
        raise RuntimeError("; ".join(faults))
    embedding = module.model.embed_tokens.weight
    if shape.tied and not _quantized(module, "lm_head", embedding, quantization):
        module.lm_head.weight = embedding
    return module.eval().requires_grad_(False)


def _quantized(
    module: nn.Module, name: str, weight: Tensor, quantization: Quantization | None
) -> bool:
    """Puts a linear of integers in the place of the linear `name`, if it is one and shall be."""
    linear = module.get_submodule(name)
    if quantization is None or not isinstance(linear, nn.Linear):
        return False
    how = quantization.of(name, weight.shape[1])
    if how is None:
        return False
    module.set_submodule(name, QuantizedLinear(weight, *how, linear.bias))
    return True


def _norm(size: int, kind: NormKind, there: bool = True) -> nn.Module:
    if not there:
        return nn.Identity()
    return RMSNorm(size, kind)


def _scaled(factor: float) -> nn.Module:
    return nn.Identity() if factor == 1 else Scale(factor)
