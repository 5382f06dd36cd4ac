"""Reads a Llama-family directory in the Hugging Face layout; refuses what would not be exact."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from epikv.export.errors import ExportError
from epikv.export.llama import Shape, output_projection
from epikv.export.manifest import Calibration, Layer, Manifest, Rope

STATIC_ROPES = ("default", "linear", "llama3", "yarn")  # those that a list of frequencies can say
TOKEN_MODELS = ("BPE", "Unigram", "WordLevel")
TOKENIZER_PARTS = {
    "normalizer": ("Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Strip"),
    "pre_tokenizer": (
        "ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "Whitespace", "WhitespaceSplit",
    ),
    "decoder": ("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip"),
}  # fmt: skip
WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# Fields that change the computation in ways the contract or this exporter does not know, with the
# values at which they do not.
_OFF: dict[str, tuple[object, ...]] = {
    "sliding_window": (None,),
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "quantization_config": (None,),
    "auto_map": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
}


@dataclass(frozen=True)
class Checkpoint:
    """What a directory holds, checked."""

    directory: Path
    config: LlamaConfig
    weights: dict[str, Tensor]
    tokenizer: str  # the text of tokenizer.json
    bos: int | None
    eos: list[int]
    calibration: Calibration | None

    def shape(self) -> Shape:
        config = self.config
        return Shape(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            ffn_size=config.intermediate_size,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_size=config.head_dim,
            norm_eps=config.rms_norm_eps,
            attention_bias=config.attention_bias,
            mlp_bias=config.mlp_bias,
            tied=config.tie_word_embeddings,
        )

    def dtype(self) -> str:
        """What to serve the weights in: bfloat16 where most are stored so, else float32."""
        stored: dict[torch.dtype, int] = {}
        for weight in self.weights.values():
            stored[weight.dtype] = stored.get(weight.dtype, 0) + weight.numel()
        return "bfloat16" if max(stored, key=stored.__getitem__) is torch.bfloat16 else "float32"

    def manifest(self, name: str, dtype: str) -> Manifest:
        config = self.config
        rope = LlamaRotaryEmbedding(config)  # folds the static scalings into its frequencies
        return Manifest(
            name=name,
            architecture="LlamaForCausalLM",
            dtype=dtype,
            vocab_size=config.vocab_size,
            context_length=config.max_position_embeddings,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            bos_token_id=self.bos,
            eos_token_ids=self.eos,
            ropes=[Rope(rope.inv_freq.tolist(), float(rope.attention_scaling))],
            layers=[
                Layer(config.head_dim, config.head_dim, config.head_dim**-0.5, output_projection(i))
                for i in range(config.num_hidden_layers)
            ],
            calibration=self.calibration,
            weights=self.digest(),
        )

    def digest(self) -> str:
        """Of the weights as stored, in whichever files and order: what was measured on one export
        of a checkpoint holds for all of them, and for no other checkpoint."""
        digest = hashlib.sha256()
        for name, weight in sorted(self.weights.items()):
            digest.update(f"{name} {weight.dtype} {list(weight.shape)}\n".encode())
            digest.update(weight.contiguous().view(torch.uint8).numpy())
        return f"sha256:{digest.hexdigest()}"


def read(directory: Path, calibration: Path | None = None) -> Checkpoint:
    """The checkpoint in `directory`, with `calibration` (default: its calibration.json, if any).

    Raises ExportError, naming the file and field that cannot be read or exported.
    """
    raw = _read_json(directory / "config.json")
    _check_config(raw)
    try:
        config = LlamaConfig.from_dict(raw)
    except Exception as error:  # transformers has no one type for a bad config
        raise ExportError(f"config.json: {error}") from error
    _check_shape(config)
    _check_rope(config)
    bos, eos = _special_tokens(directory, config)
    if calibration is None and (directory / "calibration.json").exists():
        calibration = directory / "calibration.json"
    return Checkpoint(
        directory=directory,
        config=config,
        weights=_read_weights(directory, config.tie_word_embeddings),
        tokenizer=_read_tokenizer(directory / "tokenizer.json", config.vocab_size),
        bos=bos,
        eos=eos,
        calibration=calibration and _read_calibration(calibration, config.num_hidden_layers),
    )


def _check_config(raw: dict[str, Any]) -> None:
    if raw.get("architectures") != ["LlamaForCausalLM"]:
        raise ExportError(
            f"config.json: architectures is {raw.get('architectures')};"
            " only ['LlamaForCausalLM'] can be exported"
        )
    if raw.get("hidden_act", "silu") not in ("silu", "swish"):
        raise ExportError(f"config.json: hidden_act is '{raw['hidden_act']}'; only 'silu' is known")
    for name, harmless in _OFF.items():
        if raw.get(name) not in harmless:
            raise ExportError(f"config.json: {name} is {raw[name]}; this cannot be exported")


def _check_shape(config: LlamaConfig) -> None:
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
    ):
        if getattr(config, name) < 1:
            raise ExportError(
                f"config.json: {name} is {getattr(config, name)}; it must be positive"
            )
    if config.num_attention_heads % config.num_key_value_heads:
        raise ExportError(
            f"config.json: num_attention_heads is {config.num_attention_heads}, which"
            f" num_key_value_heads ({config.num_key_value_heads}) does not divide"
        )
    if config.head_dim % 2:
        raise ExportError(f"config.json: head_dim is {config.head_dim}; RoPE needs it even")


def _check_rope(config: LlamaConfig) -> None:
    rope = config.rope_parameters or {}
    if rope.get("rope_type") not in STATIC_ROPES:
        raise ExportError(
            f"config.json: rope_scaling.rope_type is '{rope.get('rope_type')}'; only"
            f" {', '.join(STATIC_ROPES)} have frequencies that do not depend on the length"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ExportError(
            f"config.json: rope_scaling.partial_rotary_factor is {rope['partial_rotary_factor']};"
            " only 1 can be exported"
        )


def _special_tokens(directory: Path, config: LlamaConfig) -> tuple[int | None, list[int]]:
    """Begin and end tokens; generation_config.json, where present, overrules config.json."""
    bos, eos = config.bos_token_id, config.eos_token_id
    path = directory / "generation_config.json"
    if path.exists():
        overrides = _read_json(path)
        bos = overrides.get("bos_token_id", bos)
        eos = overrides.get("eos_token_id", eos)
    eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    for name, ids in (("bos_token_id", [] if bos is None else [bos]), ("eos_token_id", eos)):
        for token in ids:
            if not 0 <= token < config.vocab_size:
                raise ExportError(
                    f"config.json: {name} {token} is outside the vocabulary of {config.vocab_size}"
                )
    return bos, eos


def _read_weights(directory: Path, tied: bool) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the shards its index names."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(_read_json(index).get("weight_map", {}).values()))
        for name in names:
            if Path(name).name != name:
                raise ExportError(f"{index.name}: weight_map names '{name}', not a file beside it")
        files = [directory / name for name in names]
    else:
        files = [directory / "model.safetensors"]
    weights: dict[str, Tensor] = {}
    for file in files:
        try:
            weights |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ExportError(f"{file}: {error}") from error
    for name, weight in weights.items():
        if weight.dtype not in WEIGHT_DTYPES:
            raise ExportError(f"{directory}: tensor {name} is {weight.dtype}; export wants floats")
    skipped = ("rotary_emb.inv_freq", "lm_head.weight") if tied else ("rotary_emb.inv_freq",)
    return {name: weight for name, weight in weights.items() if not name.endswith(skipped)}


def _read_tokenizer(path: Path, vocab_size: int) -> str:
    """The file's text without truncation and padding, after checking that the daemon knows it."""
    raw = _read_json(path)
    model = raw.get("model")
    kind = model.get("type") if isinstance(model, dict) else None
    if kind not in TOKEN_MODELS:
        raise ExportError(f"{path}: model.type is '{kind}'; known: {', '.join(TOKEN_MODELS)}")
    for part, known in TOKENIZER_PARTS.items():
        for found in _kinds(raw.get(part)):
            if found not in known:
                raise ExportError(f"{path}: {part} is '{found}'; known: {', '.join(known)}")
    if "ByteLevel" in _kinds(raw.get("pre_tokenizer")) and kind != "BPE":
        raise ExportError(f"{path}: pre_tokenizer holds ByteLevel; model.type must be BPE")
    text = json.dumps({**raw, "truncation": None, "padding": None}, ensure_ascii=False)
    try:
        tokenizer = Tokenizer.from_str(text)
    except Exception as error:  # tokenizers raises nothing narrower
        raise ExportError(f"{path}: {error}") from error
    highest = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=0)
    if highest >= vocab_size:
        raise ExportError(
            f"{path}: token id {highest} is outside config.json's vocab_size {vocab_size}"
        )
    return text


def _kinds(part: Any) -> list[str]:
    """The types of a tokenizer part, sequences taken apart; of what is none, how it is written."""
    if part is None:
        return []
    if not isinstance(part, dict):
        return [repr(part)]
    if part.get("type") != "Sequence":
        return [str(part.get("type"))]
    children = [child for value in part.values() if isinstance(value, list) for child in value]
    return [kind for child in children for kind in _kinds(child)]


def _read_calibration(path: Path, num_layers: int) -> Calibration | None:
    """None of one that refused: what it chose, if anything, was not confirmed."""
    raw = _read_json(path)
    if raw.get("refusal"):
        return None
    try:
        result = Calibration(
            policy=raw.pop("policy"),
            layer_a=raw["layers"]["a"],
            layer_b=raw.pop("layers")["b"],
            sign=raw.pop("sign"),
            window=raw.pop("window"),
            confirmed=bool(raw["confirmed"]),
            figures=raw,
        )
    except (KeyError, TypeError) as error:
        raise ExportError(f"{path}: field {error} is missing or of the wrong type") from error
    for name, layer in (("a", result.layer_a), ("b", result.layer_b)):
        if not 0 <= layer < num_layers - 1:
            raise ExportError(
                f"{path}: layers.{name} is {layer}; the model's steps end at {num_layers - 2}"
            )
    if result.layer_a == result.layer_b:
        raise ExportError(f"{path}: layers.a and layers.b are both {result.layer_a}")
    if result.sign not in (1, -1):
        raise ExportError(f"{path}: sign is {result.sign}; it must be 1 or -1")
    if result.window < 2:
        raise ExportError(f"{path}: window is {result.window}; a deviation needs at least 2 tokens")
    return result


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except (OSError, ValueError) as error:
        raise ExportError(f"{path}: {error}") from error
    if not isinstance(raw, dict):
        raise ExportError(f"{path}: not a JSON object")
    return raw


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
