"""Reads a directory in the Hugging Face layout; refuses what would not be exact."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from transformers import PreTrainedConfig

from epikv.export import chat
from epikv.export.decoder import ACTIVATIONS, FINAL_NORM, Shape
from epikv.export.errors import ExportError
from epikv.export.families import (
    FAMILIES,
    Family,
    attention_of,
    head_size,
    is_text,
    shape_of,
    stored_as,
)
from epikv.export.manifest import Calibration, FinalNorm, Manifest
from epikv.export.sampling import sampling_of
from epikv.export.weights import Stored, Weights

TOKEN_MODELS = ("BPE", "Unigram", "WordLevel")
TOKENIZER_PARTS = {
    "normalizer": ("Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "Strip"),
    "pre_tokenizer": (
        "ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "Whitespace", "WhitespaceSplit",
    ),
    "decoder": ("ByteFallback", "ByteLevel", "Fuse", "Metaspace", "Replace", "Strip"),
}  # fmt: skip

# Fields that change the computation in ways that no family here knows, with the values at which they
# do not.
_OFF: dict[str, tuple[object, ...]] = {
    "num_local_experts": (None, 0),
    "num_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "quantization_config": (None,),
    "auto_map": (None,),
    "use_bidirectional_attention": (None, False),
}


@dataclass(frozen=True)
class Checkpoint:
    """What a directory holds, checked. Its weights are read when asked for."""

    directory: Path
    architecture: str
    config: PreTrainedConfig
    stored: Stored
    tokenizer: str  # the text of tokenizer.json
    bos: int | None
    eos: list[int]
    sampling: dict[str, float]
    calibration: Calibration | None

    @property
    def family(self) -> Family:
        return FAMILIES[self.architecture]

    def shape(self, dtype: str) -> Shape:
        return shape_of(self.family, self.config, getattr(torch, dtype))

    def weights(self) -> Weights:
        """By the names of the module's parameters."""
        shape = self.shape("float32")
        return Weights(
            self.stored,
            {
                own: (name, rows)
                for name in self.stored.names()
                for own, rows in stored_as(self.family, shape, name)
            },
        )

    def dtype(self) -> str:
        """What to serve the weights in: bfloat16 where most are stored so, else float32; float16 is
        slow on most processors, and only asked for."""
        return "bfloat16" if self.stored.dtype() is torch.bfloat16 else "float32"

    def manifest(self, name: str, dtype: str, quantization: str | None = None) -> Manifest:
        config = self.config
        ropes, layers = attention_of(self.family, config)
        norm = self.shape(dtype).norm
        return Manifest(
            name=name,
            architecture=self.architecture,
            dtype=dtype,
            vocab_size=config.vocab_size,
            context_length=config.max_position_embeddings,
            hidden_size=config.hidden_size,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            bos_token_id=self.bos,
            eos_token_ids=self.eos,
            ropes=ropes,
            layers=layers,
            final_norm=FinalNorm(FINAL_NORM, norm.eps, norm.wide, norm.offset),
            calibration=self.calibration,
            weights=self.stored.digest(),
            quantization=quantization,
            sampling=self.sampling,
        )

    def chat(self) -> chat.ChatFormats | chat.Refusal:
        """Takes seconds."""
        return chat.read(self.directory)

    def chat_template(self) -> str:
        """As a model file has it; "" if there is none."""
        return chat.template_json(self.directory)


def read(
    directory: Path,
    calibration: Path | None = None,
    progress: Callable[[int], object] | None = None,
) -> Checkpoint:
    """The checkpoint in `directory`, with `calibration` (default: its calibration.json, if any).

    `progress` is told the bytes of each read of weights. Raises ExportError, naming the file and
    field that cannot be read or exported.
    """
    architecture, config = read_config(directory / "config.json")
    generation = _read_generation(directory)
    bos, eos = _special_tokens(generation, config)
    if calibration is None and (directory / "calibration.json").exists():
        calibration = directory / "calibration.json"
    stored = Stored(_shards(directory), progress)
    tied = ("lm_head.weight",) if config.tie_word_embeddings else ()
    stored.keep(lambda name: is_text(name) and not name.endswith(("rotary_emb.inv_freq", *tied)))
    return Checkpoint(
        directory=directory,
        architecture=architecture,
        config=config,
        stored=stored,
        tokenizer=_read_tokenizer(directory / "tokenizer.json", config.vocab_size),
        bos=bos,
        eos=eos,
        sampling=sampling_of(generation),
        calibration=None
        if calibration is None
        else _read_calibration(calibration, config.num_hidden_layers),
    )


def read_config(path: Path) -> tuple[str, PreTrainedConfig]:
    """The architecture and its configuration, which can be exported. Raises ExportError."""
    raw = _read_json(path)
    architecture = _check_architecture(raw)
    family = FAMILIES[architecture]
    if family.whole is not None:
        tied = {key: raw[key] for key in ("tie_word_embeddings",) if key in raw}
        raw = {**tied, **(raw.get("text_config") or {})}
    _check_unknown(architecture, raw)
    try:
        config = getattr(transformers, family.config).from_dict(raw)
    except Exception as error:  # transformers has no one type for a bad config
        raise ExportError(f"config.json: {error}") from error
    _check_shape(config)
    activation = getattr(config, family.activation)
    if activation not in ACTIVATIONS:
        raise ExportError(
            f"config.json: {family.activation} is '{activation}'; known: {', '.join(ACTIVATIONS)}"
        )
    attention_of(family, config)  # for what it refuses
    return architecture, config


def _check_architecture(raw: dict[str, Any]) -> str:
    _check_off(raw)
    architectures: Any = raw.get("architectures")
    known = isinstance(architectures, list) and len(architectures) == 1
    if not known or architectures[0] not in FAMILIES:
        raise ExportError(
            f"config.json: architectures is {architectures}; one of {', '.join(FAMILIES)} can be"
            " exported"
        )
    return architectures[0]


def _check_off(raw: dict[str, Any]) -> None:
    for name, harmless in _OFF.items():
        if raw.get(name) not in harmless:
            raise ExportError(f"config.json: {name} is {raw[name]}; this cannot be exported")


def _check_unknown(architecture: str, raw: dict[str, Any]) -> None:
    """What the family does not know must not be set."""
    _check_off(raw)
    for name in FAMILIES[architecture].unknown():
        if raw.get(name) not in (None, 1, 1.0):
            raise ExportError(
                f"config.json: {name} is {raw[name]}; {architecture} cannot be exported with it"
            )


def _check_shape(config: PreTrainedConfig) -> None:
    for name in (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
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
    size = head_size(config)
    if size < 1 or size % 2:
        raise ExportError(f"config.json: head_dim is {size}; RoPE needs it even")


def _read_generation(directory: Path) -> dict[str, Any]:
    """generation_config.json; empty, if there is none."""
    path = directory / "generation_config.json"
    return _read_json(path) if path.exists() else {}


def _special_tokens(
    generation: dict[str, Any], config: PreTrainedConfig
) -> tuple[int | None, list[int]]:
    """Begin and end tokens; generation_config.json overrules config.json."""
    bos = generation.get("bos_token_id", config.bos_token_id)
    eos = generation.get("eos_token_id", config.eos_token_id)
    eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
    for name, ids in (("bos_token_id", [] if bos is None else [bos]), ("eos_token_id", eos)):
        for token in ids:
            if not 0 <= token < config.vocab_size:
                raise ExportError(
                    f"config.json: {name} {token} is outside the vocabulary of {config.vocab_size}"
                )
    return bos, eos


def _shards(directory: Path) -> list[Path]:
    """model.safetensors, or the shards that its index names."""
    index = directory / "model.safetensors.index.json"
    if not index.exists():
        return [directory / "model.safetensors"]
    names = sorted(set(_read_json(index).get("weight_map", {}).values()))
    for name in names:
        if Path(name).name != name:
            raise ExportError(f"{index.name}: weight_map names '{name}', not a file beside it")
    return [directory / name for name in names]


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
