"""What the exporter cannot write, it refuses, and says why."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import broken_models
import pytest
import torch
from epikv.export import ExportError, export, exporter, load
from epikv.export.contract import violations
from epikv.export.decoder import LanguageModel, Shape, build
from epikv.export.operators import KvCache, forward
from json_file import edit

REFUSED = {
    "architectures": {"architectures": ["MambaForCausalLM"]},
    "hidden_act": {"hidden_act": "relu"},
    "sliding_window": {"sliding_window": 128},
    "num_local_experts": {"num_local_experts": 8},
    "quantization_config": {"quantization_config": {"quant_method": "gptq"}},
    "num_key_value_heads": {"num_key_value_heads": 3},
    "head_dim": {"head_dim": 7},
    "eos_token_id": {"eos_token_id": 61},
    "rope_type": {"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}},
    "partial_rotary_factor": {"partial_rotary_factor": 0.5},
    "final_logit_softcapping": {"final_logit_softcapping": 30.0},
    "layer_types": {"layer_types": ["full_attention"] * 3},
    "longrope": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
            "original_max_position_embeddings": 64,
        }
    },
    "vocab_size": {"vocab_size": 60},
    "attention_bias": {"attention_bias": True},
}


@pytest.mark.parametrize("named", REFUSED)
def test_refuses_config_by_field(directory: Path, tmp_path: Path, named: str) -> None:
    edit(directory / "config.json", **REFUSED[named])
    # What the config promises and the weights do not hold is named as the missing tensor.
    with pytest.raises(ExportError, match=named.replace("attention_bias", "q_proj.bias")):
        export(directory, tmp_path / "model.pt")
    assert list(tmp_path.iterdir()) == [directory]


def spoil_tokenizer(part: str, **changes: Any) -> Callable[[Path], None]:
    """Sets fields of one part of tokenizer.json."""

    def spoil(directory: Path) -> None:
        path = directory / "tokenizer.json"
        raw = json.loads(path.read_text())
        raw[part] = {**(raw[part] or {}), **changes}
        path.write_text(json.dumps(raw))

    return spoil


def truncate_weights(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def escape_directory(directory: Path) -> None:
    content = {"weight_map": {"lm_head.weight": "../model.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (spoil_tokenizer("model", type="WordPiece"), "model.type is 'WordPiece'"),
        (spoil_tokenizer("normalizer", type="Precompiled"), "normalizer is 'Precompiled'"),
        (spoil_tokenizer("pre_tokenizer", type="Bert"), "pre_tokenizer is 'Bert'"),
        (spoil_tokenizer("pre_tokenizer", type="ByteLevel"), "model.type must be BPE"),
        (spoil_tokenizer("decoder", type="CTC"), "decoder is 'CTC'"),
        (spoil_tokenizer("normalizer", type="Sequence", normalizers=[{"type": "Nmt"}]), "Nmt"),
        (truncate_weights, "model.safetensors"),
        (escape_directory, "weight_map"),
        (lambda d: (d / "tokenizer.json").unlink(), "tokenizer.json"),
        (lambda d: (d / "config.json").write_text("[]"), "config.json"),
        (lambda d: (d / "config.json").write_text('{"a": NaN}'), "NaN"),
    ],
)
def test_refuses_broken_files(
    directory: Path, tmp_path: Path, spoil: Callable[[Path], object], named: str
) -> None:
    spoil(directory)
    with pytest.raises(ExportError, match=named):
        export(directory, tmp_path / "model.pt")
    assert list(tmp_path.iterdir()) == [directory]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "swapped", [("mlp.gate_proj", "mlp.up_proj"), ("self_attn.k_proj", "self_attn.v_proj")]
)
def test_a_model_that_differs_is_not_written(
    directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    swapped: tuple[str, str],
    dtype: str,
) -> None:
    def faulty(shape: Shape, weights: dict[str, torch.Tensor], *how: Any) -> LanguageModel:
        one, other = (f"model.layers.1.{part}.weight" for part in swapped)
        return build(shape, {**weights, one: weights[other], other: weights[one]}, *how)

    monkeypatch.setattr(exporter, "build", faulty)
    (tmp_path / "model.pt").write_bytes(b"the one before")
    with pytest.raises(ExportError, match=r"nothing was written.*error \d\.\d+e.*limit"):
        export(directory, tmp_path / "model.pt", dtype=dtype)
    assert (tmp_path / "model.pt").read_bytes() == b"the one before"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "model.pt"]


def test_a_contract_breach_is_not_written(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "build", lambda *_: broken_models.WrongOrder().eval())
    with pytest.raises(ExportError, match="breaks the contract"):
        export(directory, tmp_path / "model.pt")
    assert list(tmp_path.iterdir()) == [directory]


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    out = tmp_path_factory.mktemp("broken")
    broken_models.write(out)
    yield out


def test_the_valid_model_among_the_broken_ones_is_valid(broken: Path) -> None:
    module, manifest, _ = load(broken / "valid.pt")
    assert violations(module, 2) == []
    assert forward(module, manifest, [(KvCache.empty(manifest), [1, 2, 3])]).shape == (3, 11)


BREACHES = {
    "missing_block": r"block\(1\) is called 0 times",
    "missing_last_block": r"block\(2\) is called 0 times",
    "missing_attention": r"attention\(1\) is called 0 times",
    "duplicated_block": r"block\(1\) is called 2 times",
    "duplicated_attention": r"attention\(0\) is called 2 times",
    "unused_attention": r"result of epikv::attention\(1\) is not used",
    "wrong_order": "the calls come in the order",
    "layer_not_constant": "not constant",
    "conditional": "under a condition",
    "forked": "forks",
    "wrong_inputs": "forward must take",
    "wrong_output": "forward must take",
}


@pytest.mark.parametrize("name", BREACHES)
def test_every_breach_is_named(broken: Path, name: str) -> None:
    found = violations(torch.jit.load(str(broken / f"{name}.pt")), 2)
    assert any(re.search(BREACHES[name], line) for line in found), found
