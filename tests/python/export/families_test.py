"""What the exporter reads in released configurations, and which it refuses by the field's name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from epikv.export import ExportError, export, load
from epikv.export.checkpoint import read_config
from epikv.export.families import FAMILIES, attention_of, shape_of
from epikv.export.manifest import Layer, Rope
from epikv.export.synthetic import write_directory
from epikv_lab.export.zoo import configuration

# The fields of published config.json files that say what is computed.
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
QWEN2_5_7B = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_act": "silu",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 131072,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 32000,
}
PHI_3_MINI_4K = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": 2047,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
OLMO_2_7B = {
    "architectures": ["Olmo2ForCausalLM"],
    "model_type": "olmo2",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "max_position_embeddings": 4096,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 500000,
    "tie_word_embeddings": False,
    "vocab_size": 100352,
}
SMOLLM3_3B = {
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": ["full_attention"] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
GEMMA_2_9B = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "attention_bias": False,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "sliding_window_size": 4096,
    "vocab_size": 256000,
}
GEMMA_3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}
# Phi-4-mini: three quarters of a head rotate, by LongRoPE.
LONGROPE = {
    "long_factor": [1.0] * 48,
    "short_factor": [1.0] * 48,
    "type": "longrope",
}
PHI_4_MINI = {
    **PHI_3_MINI_4K,
    "max_position_embeddings": 131072,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "rope_scaling": LONGROPE,
    "sliding_window": 262144,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}


def read(raw: dict[str, Any], directory: Path) -> tuple[list[Rope], list[Layer], Any]:
    path = directory / "config.json"
    path.write_text(json.dumps(raw))
    architecture, config = read_config(path)
    family = FAMILIES[architecture]
    return *attention_of(family, config), shape_of(family, config, torch.bfloat16)


def test_llama_3_1(tmp_path: Path) -> None:
    (rope,), layers, shape = read(LLAMA_3_1_8B, tmp_path)
    assert len(rope.inv_freq) == 64 and rope.inv_freq[0] == 1
    assert rope.inv_freq[-1] == pytest.approx(500000 ** (-126 / 128) / 8)  # slowest: interpolated
    assert layers == [
        Layer(128, 128, 128**-0.5, f"model.layers.{i}.self_attn.o_proj.weight") for i in range(32)
    ]
    assert not shape.qkv_bias and not shape.tied


def test_qwen_2_5_has_biases_and_a_window_that_is_off(tmp_path: Path) -> None:
    _, layers, shape = read(QWEN2_5_7B, tmp_path)
    assert shape.qkv_bias and not shape.output_bias
    assert {layer.window for layer in layers} == {None}
    _, layers, _ = read(
        {**QWEN2_5_7B, "use_sliding_window": True, "max_window_layers": 20}, tmp_path
    )
    assert [layer.window for layer in layers] == [None] * 20 + [131072] * 8


def test_qwen3_norms_each_head(tmp_path: Path) -> None:
    _, layers, shape = read(QWEN3_8B, tmp_path)
    assert shape.qk_norm == "head" and not shape.qkv_bias
    assert layers[0].key_width == 128 and layers[0].window is None


def test_mistral_slides_in_all_layers(tmp_path: Path) -> None:
    assert {layer.window for layer in read(MISTRAL_7B, tmp_path)[1]} == {4096}
    assert {
        layer.window for layer in read({**MISTRAL_7B, "sliding_window": None}, tmp_path)[1]
    } == {None}


def test_phi_rotates_in_part(tmp_path: Path) -> None:
    (rope,), layers, _ = read(PHI_3_MINI_4K, tmp_path)
    assert len(rope.inv_freq) == 48 and layers[0].window == 2047
    (rope,), layers, _ = read({**PHI_4_MINI, "rope_scaling": None}, tmp_path)
    assert len(rope.inv_freq) == 48 and layers[0].key_width == 128


def test_olmo_2_norms_after(tmp_path: Path) -> None:
    _, _, shape = read(OLMO_2_7B, tmp_path)
    assert shape.norms == {"attention_post_norm", "mlp_post_norm"}
    assert shape.qk_norm == "projection"


def test_smollm3_leaves_each_fourth_layer_unrotated(tmp_path: Path) -> None:
    ropes, layers, shape = read(SMOLLM3_3B, tmp_path)
    assert [len(ropes[layer.rope].inv_freq) for layer in layers] == [64, 64, 64, 0] * 9
    assert shape.tied


def test_gemma_2(tmp_path: Path) -> None:
    _, layers, shape = read(GEMMA_2_9B, tmp_path)
    assert [layer.window for layer in layers] == [4096, None] * 21
    assert {(layer.soft_cap, layer.scale) for layer in layers} == {(50.0, 1 / 16)}
    assert shape.logit_cap == 30 and shape.activation == "gelu_pytorch_tanh" and shape.tied
    assert shape.norm.wide and shape.norm.offset == 1 and len(shape.norms) == 4
    assert shape.embedding_factor == 59.75  # sqrt(3584) = 59.867, in bfloat16


def test_gemma_3_has_two_ropes(tmp_path: Path) -> None:
    ropes, layers, shape = read(GEMMA_3_1B, tmp_path)
    assert [layer.window for layer in layers[:7]] == [512] * 5 + [None, 512]
    slowest = [ropes[layer.rope].inv_freq[-1] for layer in layers[4:6]]
    assert slowest == pytest.approx([10000 ** (-254 / 256), 1000000 ** (-254 / 256)])
    assert shape.qk_norm == "head" and shape.logit_cap is None


def test_gemma_3_with_vision_is_its_text_model(tmp_path: Path) -> None:
    """As published, where text_config leaves out what is as the class has it."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": text,
        "vision_config": {"model_type": "siglip_vision_model", "num_hidden_layers": 27},
    }
    ropes, layers, shape = read(raw, tmp_path)
    assert [layer.window for layer in layers[:6]] == [1024] * 5 + [None]
    fastest = [ropes[layer.rope].inv_freq[0] for layer in layers[4:6]]
    assert fastest == [1, 1 / 8] and shape.num_heads == 8 and shape.tied
    with pytest.raises(ExportError, match="quantization_config"):
        read({**raw, "text_config": {**text, "quantization_config": {}}}, tmp_path)


REFUSED: list[tuple[dict[str, Any], str]] = [
    (PHI_4_MINI, r"rope_scaling.rope_type is 'longrope'"),
    ({**LLAMA_3_1_8B, "rope_scaling": LONGROPE}, r"rope_scaling.rope_type is 'longrope'"),
    ({**MISTRAL_7B, "architectures": ["MixtralForCausalLM"], "num_local_experts": 8}, "num_local"),
    ({**QWEN3_8B, "architectures": ["Qwen3MoeForCausalLM"], "num_experts": 128}, "num_experts"),
    ({**GEMMA_3_1B, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ({**GEMMA_3_1B, "use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ({**LLAMA_3_1_8B, "residual_multiplier": 0.2}, "residual_multiplier"),
    ({**MISTRAL_7B, "layer_types": ["full_attention"] * 32}, "layer_types"),
    ({**QWEN3_8B, "layer_types": ["chunked_attention"] * 36}, "chunked_attention"),
    ({**QWEN3_8B, "layer_types": ["sliding_attention"] * 36}, "sliding_window is None"),
    ({**OLMO_2_7B, "sliding_window": 4096}, "sliding_window"),
    ({**GEMMA_2_9B, "hidden_activation": "quick_gelu"}, "hidden_activation"),
]


@pytest.mark.parametrize(("raw", "named"), REFUSED)
def test_refuses_by_field(tmp_path: Path, raw: dict[str, Any], named: str) -> None:
    with pytest.raises(ExportError, match=named):
        read(raw, tmp_path)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("architecture", FAMILIES)
def test_an_exported_file_equals_transformers(
    tmp_path: Path, architecture: str, dtype: str
) -> None:
    """In Python alone; over gRPC, and more of them: tests/e2e/models/served_families_test.py."""
    config = configuration(architecture, 100)
    write_directory(config, tmp_path / "hf", dtype, architecture=architecture)
    report = export(tmp_path / "hf", tmp_path / "model.pt", dtype=dtype)
    assert report is not None and report.passed() and report.greedy_rows > report.rows / 4
    _, manifest, _ = load(tmp_path / "model.pt")
    assert (manifest.architecture, manifest.dtype) == (architecture, dtype)
