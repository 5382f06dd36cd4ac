"""`manifest.json`: what a model file says of itself (read by runtime/model/manifest.h)."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any

FORMAT = "epikv.model/1"


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of a set of layers: pair i turns by position * inv_freq[i].

    Cosine and sine are multiplied by `attention_factor`. Layout "half" pairs channel i with
    i + len(inv_freq); channels beyond 2 * len(inv_freq) are not rotated: of an empty list, none (NoPE).
    """

    inv_freq: list[float]
    attention_factor: float = 1.0
    layout: str = "half"


@dataclass(frozen=True)
class Layer:
    """What attention needs to know of one layer."""

    key_width: int  # channels of one K row
    value_width: int  # channels of one V row
    scale: float  # attention logits are scale * q.k
    output_projection: str  # name of the W_O parameter in the module
    soft_cap: float | None = None  # attention logits become cap * tanh(logits / cap)
    window: int | None = None  # positions a query sees, its own included
    rope: int = 0  # index into Manifest.ropes


@dataclass(frozen=True)
class FinalNorm:
    """The norm before the head, as the operator `epikv::rms_norm` has it."""

    weight: str  # name of the parameter in the module
    eps: float
    wide: bool
    offset: float


@dataclass(frozen=True)
class Calibration:
    """The layers and sign with which `policy` ranks this model's tokens, and what they achieved."""

    policy: str
    layer_a: int
    layer_b: int
    sign: int
    window: int
    confirmed: bool
    figures: dict[str, Any]


@dataclass(frozen=True)
class Manifest:
    name: str
    architecture: str
    dtype: str  # "float32", "bfloat16" or "float16"
    vocab_size: int
    context_length: int  # prompt + output, in tokens
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    bos_token_id: int | None
    eos_token_ids: list[int]
    ropes: list[Rope]
    layers: list[Layer]
    calibration: Calibration | None = None
    final_norm: FinalNorm | None = None  # None in older files, and of norms of another kind
    weights: str | None = None  # digest of the checkpoint's tensors; None in older files
    quantization: str | None = None  # of the linears: "int8" or "int4"; None: as `dtype` says
    # What requests that say nothing sample with; fields of SamplingParams in generation.proto.
    sampling: dict[str, float] = field(default_factory=dict)
    format: str = FORMAT

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Manifest":
        """The inverse of `to_json`, for files that this package wrote."""
        fields = json.loads(text)
        fields["ropes"] = [Rope(**rope) for rope in fields["ropes"]]
        fields["layers"] = [Layer(**layer) for layer in fields["layers"]]
        if fields.get("final_norm") is not None:
            fields["final_norm"] = FinalNorm(**fields["final_norm"])
        if fields["calibration"] is not None:
            fields["calibration"] = Calibration(**fields["calibration"])
        return cls(**fields)
