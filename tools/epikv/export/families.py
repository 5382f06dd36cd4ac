"""The families that can be exported, and how each differs from Llama: one row each.

A row says how to read a configuration of `transformers` (the class that it names) as a `Shape` and
the attention of each layer, and what the checkpoint calls the module's parameters.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from epikv.export.decoder import NormKind, Shape, output_projection
from epikv.export.errors import ExportError
from epikv.export.manifest import Layer, Rope

# Rotary embeddings that a list of frequencies can say. "dynamic" grows beyond the model's context,
# which is the most that the daemon serves; within it, its frequencies are those it begins with.
ROPES = ("default", "linear", "dynamic", "llama3", "yarn")

_PRE = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_POST = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
_BOTH = {"attention_norm": "input_layernorm", "mlp_norm": "pre_feedforward_layernorm", **_POST}
_OTHER_SENSES = ("vision_tower", "multi_modal_projector")  # parts of a tensor's name
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class Family:
    config: str  # the class in transformers
    # The class of a model with more senses than text, whose `text_config` that is. Its other parts
    # are left out.
    whole: str | None = None
    norms: Mapping[str, str] = field(default_factory=lambda: _PRE)  # of a block; their names stored
    norm_offset: float | None = None  # NormKind.offset of wide norms; None: norms are not wide
    qk_norm: Literal["head", "projection"] | None = None
    # Biases of q, k, v and of the output; None: as `attention_bias` says.
    qkv_bias: bool | None = None
    output_bias: bool | None = None
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # stored: what it holds
    partial_rotary: bool = False  # knows partial_rotary_factor
    # Which layers slide by sliding_window: all, or those that layer_types says.
    windows: Literal["all", "typed"] | None = None
    # Config fields by what they say; those of other rows are refused where they are set.
    activation: str = "hidden_act"
    query_scalar: str | None = None  # attention logits are q.k / sqrt(query_scalar)
    attention_factor: str | None = None  # or attention_factor * q.k
    attention_cap: str | None = None
    logit_cap: str | None = None
    logit_divisor: str | None = None
    residual_factor: str | None = None
    embedding_factor: str | None = None
    scaled_embedding: bool = False  # the embedding is multiplied by sqrt(hidden_size)

    def unknown(self) -> Iterator[str]:
        """Fields that this family does not read, and that would change what it computes."""
        if self.windows is None:
            yield "sliding_window"
        if self.windows != "typed":
            yield "layer_types"
        if not self.partial_rotary:
            yield "partial_rotary_factor"
        for family in FAMILIES.values():
            for name in family._read():
                if name not in self._read():
                    yield name

    def _read(self) -> set[str]:
        named = (
            self.query_scalar,
            self.attention_factor,
            self.attention_cap,
            self.logit_cap,
            self.logit_divisor,
            self.residual_factor,
            self.embedding_factor,
        )
        return {name for name in named if name is not None}


_GEMMA: dict[str, Any] = {
    "norms": _BOTH,
    "norm_offset": 1.0,
    "windows": "typed",
    "activation": "hidden_activation",
    "query_scalar": "query_pre_attn_scalar",
    "logit_cap": "final_logit_softcapping",
    "scaled_embedding": True,
}

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family("LlamaConfig"),
    "Qwen2ForCausalLM": Family("Qwen2Config", qkv_bias=True, output_bias=False, windows="typed"),
    "Qwen3ForCausalLM": Family("Qwen3Config", qk_norm="head", windows="typed"),
    "MistralForCausalLM": Family("MistralConfig", qkv_bias=False, output_bias=False, windows="all"),
    "Phi3ForCausalLM": Family(
        "Phi3Config",
        qkv_bias=False,
        output_bias=False,
        fused=_FUSED,
        partial_rotary=True,
        windows="all",
    ),
    "Olmo2ForCausalLM": Family("Olmo2Config", norms=_POST, norm_offset=0.0, qk_norm="projection"),
    "SmolLM3ForCausalLM": Family("SmolLM3Config", windows="typed"),
    "Gemma2ForCausalLM": Family("Gemma2Config", attention_cap="attn_logit_softcapping", **_GEMMA),
    "Gemma3ForCausalLM": Family("Gemma3TextConfig", qk_norm="head", **_GEMMA),
    "Gemma3ForConditionalGeneration": Family(
        "Gemma3TextConfig", whole="Gemma3Config", qk_norm="head", **_GEMMA
    ),
    "GraniteForCausalLM": Family(
        "GraniteConfig",
        attention_factor="attention_multiplier",
        logit_divisor="logits_scaling",
        residual_factor="residual_multiplier",
        embedding_factor="embedding_multiplier",
    ),
}


def shape_of(family: Family, config: PreTrainedConfig, dtype: torch.dtype) -> Shape:
    """What the module is built from. The embedding's factor is rounded as its weights are."""

    def value(name: str | None, default: Any) -> Any:
        return default if name is None else getattr(config, name)

    bias = getattr(config, "attention_bias", False)
    embedding = config.hidden_size**0.5 if family.scaled_embedding else 1.0
    if family.scaled_embedding:
        embedding = torch.tensor(embedding, dtype=dtype).item()
    return Shape(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        ffn_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=head_size(config),
        norm=NormKind(
            config.rms_norm_eps, family.norm_offset is not None, family.norm_offset or 0.0
        ),
        norms=frozenset(family.norms),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        mlp_bias=getattr(config, "mlp_bias", False),
        tied=config.tie_word_embeddings,
        qk_norm=family.qk_norm,
        activation=getattr(config, family.activation),
        embedding_factor=value(family.embedding_factor, embedding),
        residual_factor=value(family.residual_factor, 1.0),
        logit_factor=1.0 / value(family.logit_divisor, 1.0),
        logit_cap=value(family.logit_cap, None),
    )


def head_size(config: PreTrainedConfig) -> int:
    size = getattr(config, "head_dim", None)
    return config.hidden_size // config.num_attention_heads if size is None else size


def attention_of(family: Family, config: PreTrainedConfig) -> tuple[list[Rope], list[Layer]]:
    """How each layer attends, and the rotary embeddings that they share.

    Raises ExportError, naming the field that cannot be exported.
    """
    size = head_size(config)
    scale = size**-0.5
    if family.query_scalar is not None:
        scale = getattr(config, family.query_scalar) ** -0.5
    if family.attention_factor is not None:
        scale = getattr(config, family.attention_factor)
    ropes: list[Rope] = []
    layers = []
    for index in range(config.num_hidden_layers):
        rope = _rope(family, config, index)
        if rope not in ropes:
            ropes.append(rope)
        layers.append(
            Layer(
                size,
                size,
                scale,
                output_projection(index),
                soft_cap=None
                if family.attention_cap is None
                else getattr(config, family.attention_cap),
                window=_window(family, config, index),
                rope=ropes.index(rope),
            )
        )
    return ropes, layers


def is_text(stored: str) -> bool:
    return not any(part in _OTHER_SENSES for part in stored.split("."))


def stored_as(
    family: Family, shape: Shape, stored: str
) -> Iterator[tuple[str, tuple[int, int] | None]]:
    """The parameters of the module that a stored tensor holds; which of its rows, None for all."""
    sizes = {
        "q_proj": shape.num_heads * shape.head_size,
        "k_proj": shape.num_kv_heads * shape.head_size,
        "v_proj": shape.num_kv_heads * shape.head_size,
        "gate_proj": shape.ffn_size,
        "up_proj": shape.ffn_size,
    }
    parts = [part for part in stored.split(".") if part != "language_model"]
    own_names = {theirs: own for own, theirs in family.norms.items()}
    parts = [own_names.get(part, part) for part in parts]
    held = next((part for part in parts if part in family.fused), None)
    if held is None:
        yield ".".join(parts), None
        return
    begin = 0
    for part in family.fused[held]:
        end = begin + sizes[part]
        yield ".".join(part if name == held else name for name in parts), (begin, end)
        begin = end


def _window(family: Family, config: PreTrainedConfig, index: int) -> int | None:
    if family.windows is None:
        return None
    if family.windows == "all":
        return config.sliding_window
    kind = config.layer_types[index]
    if kind not in ("full_attention", "sliding_attention"):
        raise ExportError(
            f"config.json: layer_types[{index}] is '{kind}'; known: full_attention,"
            " sliding_attention"
        )
    if kind == "full_attention":
        return None
    if not config.sliding_window:
        raise ExportError(
            f"config.json: sliding_window is {config.sliding_window}, and layer_types has layers"
            " that need one"
        )
    return config.sliding_window


def _rope(family: Family, config: PreTrainedConfig, index: int) -> Rope:
    rotates = getattr(config, "no_rope_layers", None)
    if rotates is not None and not rotates[index]:
        return Rope([])
    said = config.rope_parameters
    kind = config.layer_types[index] if "full_attention" in said else None
    if kind is not None:
        said = said[kind]
    name = said["rope_type"]
    if name not in ROPES:
        raise ExportError(
            f"config.json: rope_scaling.rope_type is '{name}'; only {', '.join(ROPES)} have"
            " frequencies that do not depend on the length"
        )
    partial = said.get("partial_rotary_factor", 1.0)
    if partial != 1 and not family.partial_rotary:
        raise ExportError(
            f"config.json: partial_rotary_factor is {partial}; only 1 can be exported for this"
            " architecture"
        )
    if name == "default":
        width = int(head_size(config) * partial)
        pairs = torch.arange(0, width, 2, dtype=torch.float) / width
        return Rope((1.0 / said["rope_theta"] ** pairs).tolist())
    frequencies, factor = ROPE_INIT_FUNCTIONS[name](config, None, layer_type=kind)
    return Rope(frequencies.tolist(), float(factor))
