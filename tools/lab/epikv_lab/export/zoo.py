"""Random configurations of every family: what real ones set, scaled down. For tests and sweeps."""

import random
from collections.abc import Callable
from typing import Any

Config = dict[str, Any]
CONTEXT = 256


def configuration(architecture: str, seed: int) -> Config:
    """Arguments of the family's configuration class; the same for the same seed."""
    rng = random.Random(f"{architecture}/{seed}")
    config = {
        **_shape(rng),
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": rng.random() < 0.4,
    }
    return {**config, **_FAMILIES[architecture](rng, config)}


def _shape(rng: random.Random) -> Config:
    heads = rng.choice([4, 6, 8])
    return {
        "hidden_size": rng.choice([8, 16]) * heads,
        "num_hidden_layers": rng.randint(3, 5),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in (1, 2, 4, heads) if heads % n == 0]),
        "intermediate_size": rng.choice([80, 96, 144]),
        "vocab_size": rng.randint(150, 300),
    }


def _window(rng: random.Random) -> int:
    """Short enough that tests' texts are longer."""
    return rng.randint(6, 24)


def _scaled_rope(rng: random.Random, theta: float, *kinds: str) -> Config:
    """rope_parameters of one of `kinds`, which bend within the few tokens of tests' texts."""
    kind = rng.choice(kinds)
    said: Config = {"rope_type": kind, "rope_theta": theta}
    if kind in ("linear", "dynamic", "llama3", "yarn"):
        said["factor"] = rng.choice([2.0, 4.0, 8.0])
    if kind in ("llama3", "yarn"):
        said["original_max_position_embeddings"] = rng.choice([16, 32])
    if kind == "llama3":
        said |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return said


def _llama(rng: random.Random, config: Config) -> Config:
    """Llama 3.x, R1-Distill-Llama; older ones' linear and dynamic scaling."""
    kinds = ("default", "llama3", "llama3", "linear", "dynamic")
    return {
        "rope_parameters": _scaled_rope(rng, 500000.0, *kinds),
        "head_dim": rng.choice([None, 12, 32]),
        "attention_bias": rng.random() < 0.3,
        "mlp_bias": rng.random() < 0.3,
    }


def _qwen(rng: random.Random, config: Config) -> Config:
    """Some with the sliding window that their configurations know and released ones leave off."""
    return {
        "rope_parameters": _scaled_rope(rng, 1000000.0, "default", "default", "yarn"),
        "use_sliding_window": rng.random() < 0.4,
        "sliding_window": _window(rng),
        "max_window_layers": rng.randint(1, config["num_hidden_layers"] - 1),
    }


def _qwen3(rng: random.Random, config: Config) -> Config:
    return {**_qwen(rng, config), "head_dim": rng.choice([16, 32])}


def _mistral(rng: random.Random, config: Config) -> Config:
    return {
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([1e4, 1e6])},
        "head_dim": rng.choice([None, 32]),
        "sliding_window": rng.choice([None, _window(rng), _window(rng)]),
    }


def _phi3(rng: random.Random, config: Config) -> Config:
    """Phi-3 with its window, Phi-4, and Phi-4-mini's partial rotary (its LongRoPE is refused)."""
    size = config["hidden_size"] // config["num_attention_heads"]
    partial = rng.choice([1.0, 0.75, 0.5]) if size % 8 == 0 else 1.0
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": rng.choice([1e4, 250000.0]),
            "partial_rotary_factor": partial,
        },
        "sliding_window": rng.choice([None, _window(rng)]),
    }


def _olmo2(rng: random.Random, config: Config) -> Config:
    return {
        "rope_parameters": _scaled_rope(rng, 500000.0, "default", "yarn"),
        "attention_bias": rng.random() < 0.3,
    }


def _smollm3(rng: random.Random, config: Config) -> Config:
    """Some with windows in the layers that do not rotate."""
    return {
        "rope_parameters": _scaled_rope(rng, 5000000.0, "default", "yarn"),
        "no_rope_layer_interval": rng.choice([2, 3]),
        "use_sliding_window": rng.random() < 0.4,
        "sliding_window": _window(rng),
    }


def _gemma(rng: random.Random, config: Config) -> Config:
    return {
        "head_dim": rng.choice([16, 32]),
        "query_pre_attn_scalar": rng.choice([8, 16, 40]),
        "sliding_window": _window(rng),
    }


def _gemma2(rng: random.Random, config: Config) -> Config:
    """Caps that bite at these logits, as 50 and 30 do at theirs."""
    return {
        **_gemma(rng, config),
        "attn_logit_softcapping": rng.choice([2.0, 5.0, 50.0]),
        "final_logit_softcapping": 30.0
        if config["tie_word_embeddings"]
        else rng.choice([3.0, 10.0]),
    }


def _gemma3(rng: random.Random, config: Config) -> Config:
    """Global and local layers with a rope each; that of the global ones may be scaled."""
    types = ["full_attention", "sliding_attention"]
    types += rng.choices(types, k=config["num_hidden_layers"] - 2)
    rng.shuffle(types)
    return {
        **_gemma(rng, config),
        "layer_types": types,
        "rope_parameters": {
            "full_attention": _scaled_rope(rng, 1000000.0, "default", "linear"),
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    }


def _granite(rng: random.Random, config: Config) -> Config:
    return {
        "embedding_multiplier": rng.choice([3.0, 12.0]),
        "residual_multiplier": rng.choice([0.22, 0.6]),
        "logits_scaling": rng.choice([2.0, 8.0, 13.0]),
        "attention_multiplier": rng.choice([0.1, 0.4]),
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


_FAMILIES: dict[str, Callable[[random.Random, Config], Config]] = {
    "LlamaForCausalLM": _llama,
    "Qwen2ForCausalLM": _qwen,
    "Qwen3ForCausalLM": _qwen3,
    "MistralForCausalLM": _mistral,
    "Phi3ForCausalLM": _phi3,
    "Olmo2ForCausalLM": _olmo2,
    "SmolLM3ForCausalLM": _smollm3,
    "Gemma2ForCausalLM": _gemma2,
    "Gemma3ForCausalLM": _gemma3,
    "Gemma3ForConditionalGeneration": _gemma3,
    "GraniteForCausalLM": _granite,
}
