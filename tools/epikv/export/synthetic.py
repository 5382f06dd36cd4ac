"""Random-weight models of any family and shape, for tests and benches."""

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from epikv.export.exporter import export
from epikv.export.families import FAMILIES


def random_model(
    config: Mapping[str, Any],
    path: Path,
    dtype: str = "float32",
    seed: int = 0,
    *,
    architecture: str = "LlamaForCausalLM",
    tokenizer: str = "words",
    name: str = "random",
    quantization: str | None = None,
    compile: bool = False,
    calibration: Path | None = None,
    check: bool = True,
) -> None:
    """Writes an exported model with random weights to `path`.

    `config`, `architecture` and `tokenizer` are those of `write_directory`; other arguments are
    `export`'s.
    """
    with tempfile.TemporaryDirectory() as directory:
        write_directory(config, Path(directory), dtype, seed, tokenizer, architecture)
        export(
            Path(directory),
            path,
            dtype=dtype,
            quantization=quantization,
            compile=compile,
            name=name,
            calibration=calibration,
            check=check,
        )


def write_directory(
    config: Mapping[str, Any],
    directory: Path,
    dtype: str = "float32",
    seed: int = 0,
    tokenizer: str = "words",
    architecture: str = "LlamaForCausalLM",
    shard_bytes: int | None = None,
    device: str = "cpu",
) -> None:
    """A Hugging Face directory with random weights, large enough that greedy tokens vary.

    `config` are arguments of the configuration class in transformers of one of FAMILIES.
    `tokenizer` is "words" (w0, w1, ...) or "bytes" (byte-level BPE; vocab_size >= 256).
    `shard_bytes`: weights lie in files of about so many bytes, one of which is in memory at a time;
    default: in one.
    `device`: where the weights are drawn; they are others there.
    """
    family = FAMILIES[architecture]
    none = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    checked = getattr(transformers, family.config)(**{**none, **config})
    whole = checked if family.whole is None else _with_vision(family.whole, checked)
    with torch.device("meta"):
        module = getattr(transformers, architecture)(whole)
    # Published checkpoints with a vision tower name it and the language model the other way round.
    shapes = {
        k.replace("model.language_model.", "language_model.model.").replace(
            "model.vision_tower", "vision_tower"
        ): w.shape
        for k, w in module.state_dict().items()
    }
    generator = torch.Generator(device).manual_seed(seed)
    center = 1 - (family.norm_offset or 0)
    weights = (
        (k, _random(k, shape, generator, center).to(getattr(torch, dtype)).cpu())
        for k, shape in shapes.items()
        if not (checked.tie_word_embeddings and k == "lm_head.weight")
    )
    directory.mkdir(parents=True, exist_ok=True)
    _save(weights, directory, shard_bytes)
    raw = {**whole.to_dict(), "architectures": [architecture], "dtype": dtype}
    (directory / "config.json").write_text(json.dumps(raw))
    make = {"words": word_tokenizer, "bytes": byte_tokenizer}[tokenizer]
    make(checked.vocab_size).save(str(directory / "tokenizer.json"))


def _save(weights: Iterable[tuple[str, Tensor]], directory: Path, shard_bytes: int | None) -> None:
    """As one file, or as shards and the index that names them."""
    metadata = {"format": "pt"}
    if shard_bytes is None:
        save_file(dict(weights), directory / "model.safetensors", metadata=metadata)
        return
    weight_map: dict[str, str] = {}
    shard: dict[str, Tensor] = {}

    def end() -> None:
        file = f"model-{len(set(weight_map.values())) + 1:05}.safetensors"
        save_file(shard, directory / file, metadata=metadata)
        weight_map.update(dict.fromkeys(shard, file))
        shard.clear()

    for name, weight in weights:
        shard[name] = weight
        if sum(w.nbytes for w in shard.values()) >= shard_bytes:
            end()
    if shard:
        end()
    size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _with_vision(whole: str, text: transformers.PreTrainedConfig) -> transformers.PreTrainedConfig:
    """The configuration of a model that has `text` beside the smallest of vision towers."""
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }
    return getattr(transformers, whole)(
        text_config=text.to_dict(),
        vision_config=vision,
        mm_tokens_per_image=4,
        tie_word_embeddings=text.tie_word_embeddings,
    )


def word_tokenizer(vocab_size: int) -> Tokenizer:
    """One token per word w0 .. w<vocab_size - 1>; unknown words are w0."""
    result = Tokenizer(models.WordLevel({f"w{i}": i for i in range(vocab_size)}, unk_token="w0"))
    result.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return result


def byte_tokenizer(vocab_size: int) -> Tokenizer:
    """Byte-level BPE: ids 0 .. 255 are the bytes, higher ones pairs of lower-case letters."""
    if vocab_size < 256:
        raise ValueError(f"a byte-level tokenizer needs 256 tokens, vocab_size is {vocab_size}")
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    symbols = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    merges = [(a, b) for a in letters for b in letters][: vocab_size - len(symbols)]
    words = symbols + [a + b for a, b in merges]
    result = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    return result


def _random(name: str, shape: torch.Size, generator: torch.Generator, center: float) -> Tensor:
    """Unit-variance activations throughout; queries and keys larger, so that attention differs.

    `center`: of the weights of norms.
    """
    noise = torch.randn(shape, generator=generator, device=generator.device)
    if "norm" in name:
        return center + 0.1 * noise
    if name.endswith("bias"):
        return 0.1 * noise
    if "embed_tokens" in name:
        return noise
    gain = 1.5 if any(part in name for part in ("q_proj", "k_proj", "qkv_proj")) else 1.0
    return gain * shape[1] ** -0.5 * noise
