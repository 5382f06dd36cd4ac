"""Makes the model files that the C++ tests load.

python tests/make_models.py --out DIR
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "python")]

import broken_models  # noqa: E402
import torch  # noqa: E402
from epikv.export import export, random_model  # noqa: E402
from epikv.export.reference import prompts_of, write  # noqa: E402
from epikv.export.synthetic import word_tokenizer, write_directory  # noqa: E402

TINY = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 331,
    "max_position_embeddings": 4096,
}
# Wide enough for the kernels' blocking to show.
WIDE = {
    **TINY,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mha": ("float32", {**TINY, "num_key_value_heads": 4}),
    "gqa": ("float32", {**TINY, "num_key_value_heads": 2}),
    "mqa": ("float32", {**TINY, "num_key_value_heads": 1, "head_dim": 24}),
    "tied": (
        "float32",
        {**TINY, "num_key_value_heads": 2, "tie_word_embeddings": True, "attention_bias": True},
    ),
    "gqa_bf16": ("bfloat16", {**TINY, "num_key_value_heads": 2}),
    "gqa_fp16": ("float16", {**TINY, "num_key_value_heads": 2}),
    "wide": ("float32", WIDE),
    "wide_bf16": ("bfloat16", WIDE),
    "wide_fp16": ("float16", WIDE),
}

# The same with linears of integers.
QUANTIZED = {"wide_int8": ("float32", "int8"), "wide_int4": ("bfloat16", "int4")}

# Soft caps, and windows in every other layer that hide much of what the laws' texts have.
BENT = {
    **TINY,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 24,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 30.0,
}

# Windows without soft caps: the kernels that are chosen run at the layers between.
WINDOWS = {
    **TINY,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "sliding_window": 24,
    "layer_types": ["full_attention", "sliding_attention"] * 2,
}
# The first layers see everything. Its tokens are bytes, so its texts can be JSON.
WINDOWS_MQA = {
    **TINY,
    "num_key_value_heads": 1,
    "use_sliding_window": True,
    "sliding_window": 20,
    "max_window_layers": 2,
}


# Models of other families than Llama: name, architecture, configuration, tokenizer.
OTHERS = (
    ("bent", "Gemma2ForCausalLM", BENT, "words"),
    ("windows", "Gemma3ForCausalLM", WINDOWS, "words"),
    ("windows_mqa", "Qwen2ForCausalLM", WINDOWS_MQA, "bytes"),
)
SEED = 1  # of the weights


def source_of(name: str, folder: Path) -> tuple[Path, str]:
    """The Hugging Face directory of a model, made in `folder` but for the sample's, and its dtype."""
    if name == "sample":
        return sample_directory(), "float32"
    if name in MODELS:
        dtype, config = MODELS[name]
        write_directory(config, folder, dtype, SEED)
        return folder, dtype
    [(_, architecture, config, tokenizer)] = [other for other in OTHERS if other[0] == name]
    write_directory(config, folder, "float32", SEED, tokenizer, architecture)
    return folder, "float32"


def sample_directory() -> Path:
    directory = ROOT / "tools" / "sample_model"
    return directory / (directory / "SHIPPED").read_text().strip()


def write_many_faults(path: Path) -> None:
    """A module and a manifest with five faults between them."""
    manifest = broken_models.manifest()
    layers = [replace(manifest.layers[0], output_projection="nowhere.weight"), manifest.layers[1]]
    manifest = replace(manifest, vocab_size=10, layers=layers)
    extra = {
        "manifest.json": manifest.to_json(),
        "tokenizer.json": word_tokenizer(manifest.vocab_size).to_str(),
    }
    broken_models.save(ManyFaults(), path, extra)


class ManyFaults(broken_models.Tiny):
    """block(1) is called twice, attention(1) is not used, and an embedding is wider."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = torch.nn.Embedding(2, 8, dtype=torch.float64)

    def forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, last: torch.Tensor
    ) -> torch.Tensor:
        x = torch.ops.epikv.block(self.embed(token_ids), 0)
        x = self.first(x, 0) + self.wide(token_ids * 0).float()
        x = torch.ops.epikv.block(x, 1) + torch.ops.epikv.block(x, 1)
        q = self.second.q_proj(x).view(-1, 2, 4)
        kv = self.second.k_proj(x).view(-1, 1, 4)
        torch.ops.epikv.attention(q, kv, kv, x, 1)
        return self.finish(torch.ops.epikv.block(x, 2), last)


def write_reference(config: dict[str, Any], path: Path) -> None:
    """What transformers computes with the weights of the model of this config (law 1)."""
    with tempfile.TemporaryDirectory() as folder:
        write_directory(config, Path(folder), "float32", SEED)
        write(Path(folder), path, "float32", prompts_of((), config["vocab_size"], 100), 16)


def write_sample(out: Path) -> None:
    """The shipped sample model, with its calibration, and what transformers computes with it."""
    directory = sample_directory()
    vocab_size = json.loads((directory / "config.json").read_text())["vocab_size"]
    export(directory, out / "sample.pt", dtype="float32", name=directory.name)
    write(directory, out / "sample.json", "float32", prompts_of((), vocab_size, 100), 16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.set_num_threads(1)
    broken_models.write(out / "broken")
    write_many_faults(out / "many_faults.pt")
    for name, (dtype, config) in MODELS.items():
        random_model(config, out / f"{name}.pt", dtype, SEED, name=name, check=False)
        if dtype == "float32":
            write_reference(config, out / f"{name}.json")
    for name, (dtype, quantization) in QUANTIZED.items():
        path = out / f"{name}.pt"
        random_model(WIDE, path, dtype, SEED, name=name, quantization=quantization, check=False)
    for name, architecture, config, tokenizer in OTHERS:
        random_model(
            config,
            out / f"{name}.pt",
            seed=SEED,
            architecture=architecture,
            tokenizer=tokenizer,
            name=name,
        )
    write_sample(out)


if __name__ == "__main__":
    main()
