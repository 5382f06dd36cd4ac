"""The sample model: a Llama of 0.9M parameters, and its files in the Hugging Face layout.

Modules are named so that `state_dict()` is what `transformers.LlamaForCausalLM` loads. Shapes use
B sequences, T tokens fed, S cached tokens, H query heads, G key-value heads, D head size, C width.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from epikv.sample.chat import TEMPLATE
from epikv.sample.vocabulary import BOS, EOS, PAD, SPECIALS, TOKEN_IDS, UNK
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

LAYERS = 6
WIDTH = 128
HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 32
FFN_WIDTH = 256
ROPE_THETA = 1e4
NORM_EPS = 1e-5
MAX_POSITIONS = 1280


@dataclass
class Cache:
    """Keys and values of one decode run, and which of them may still be attended to.

    A token keeps its true position for life; evicting it clears its column of `visible`.
    """

    keys: Tensor  # [L, B, G, S, D], rotated
    values: Tensor  # [L, B, G, S, D]
    visible: Tensor  # [B, S] bool
    length: int = 0

    @classmethod
    def empty(cls, batch: int, capacity: int, device: torch.device) -> "Cache":
        shape = (LAYERS, batch, KV_HEADS, capacity, HEAD_SIZE)
        visible = torch.ones(batch, capacity, dtype=torch.bool, device=device)
        return cls(torch.zeros(shape, device=device), torch.zeros(shape, device=device), visible)

    def seen(self, layer: int, end: int) -> Tensor:
        """Which of the first `end` columns a layer's query may attend to: [B, 1 or G, 1, end]."""
        return self.visible[:, None, None, :end]


@dataclass
class Taps:
    """What a forward pass records beside its logits."""

    residuals: list[Tensor]  # after block l: [B, T, C]
    attention: Tensor | None = None  # of one decode step, over all layers and heads: [B, S]


class RMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), (WIDTH,), self.weight.float(), NORM_EPS).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD_SIZE, bias=False)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_SIZE, bias=False)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * HEAD_SIZE, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_SIZE, WIDTH, bias=False)

    def forward(
        self, x: Tensor, rope: Tensor, mask: Tensor | None, cache: Cache | None, taps: Taps | None
    ) -> Tensor:
        batch, count, _ = x.shape
        q, k, v = (
            proj(x).view(batch, count, -1, HEAD_SIZE).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, rope), rotate(k, rope)
        if cache is not None:
            end = cache.length + count
            cache.keys[self.layer, :, :, cache.length : end] = k
            cache.values[self.layer, :, :, cache.length : end] = v
            k, v = cache.keys[self.layer, :, :, :end], cache.values[self.layer, :, :, :end]
        if cache is not None and count == 1:
            out = self._decode(q, k, v, cache.seen(self.layer, end), taps)
        else:
            groups = HEADS // KV_HEADS
            k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=mask is None)
        return self.o_proj(out.transpose(1, 2).reshape(batch, count, -1))

    def _decode(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor, taps: Taps | None) -> Tensor:
        """One new token a sequence, q [B, H, 1, D] over what it sees of the cache; adds up attention."""
        grouped = q.view(q.shape[0], KV_HEADS, -1, HEAD_SIZE) * HEAD_SIZE**-0.5
        scores = (grouped @ k.transpose(-1, -2)).masked_fill_(~seen, -torch.inf)
        weights = scores.softmax(-1)  # [B, G, H/G, S]
        if taps is not None:
            mass = weights.sum((1, 2))
            taps.attention = mass if taps.attention is None else taps.attention + mass
        return (weights @ v).view(q.shape)


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, FFN_WIDTH, bias=False)
        self.up_proj = nn.Linear(WIDTH, FFN_WIDTH, bias=False)
        self.down_proj = nn.Linear(FFN_WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, layer: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm()
        self.self_attn = Attention(layer)
        self.post_attention_layernorm = RMSNorm()
        self.mlp = FeedForward()

    def forward(
        self, x: Tensor, rope: Tensor, mask: Tensor | None, cache: Cache | None, taps: Taps | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, mask, cache, taps)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    rope: Tensor  # [2, positions, D]

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(len(TOKEN_IDS), WIDTH),
                "layers": nn.ModuleList(Block(layer) for layer in range(LAYERS)),
                "norm": RMSNorm(),
            }
        )
        self.lm_head = nn.Linear(WIDTH, len(TOKEN_IDS), bias=False)
        self.register_buffer("rope", _rope_table(), persistent=False)

    def forward(
        self,
        tokens: Tensor,
        mask: Tensor | None = None,
        cache: Cache | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """Logits [B, T, vocabulary] of `tokens` [B, T].

        Without a cache attention is causal, or follows `mask` [B or 1, 1, T, T] (True = may see).
        With one, `tokens` are a prompt that fills it from empty or one new token a sequence.
        """
        start = 0 if cache is None else cache.length
        rope = self.rope[:, start : start + tokens.shape[1]]
        x = self.model["embed_tokens"](tokens)
        for block in self.model["layers"].children():
            x = block(x, rope, mask, cache, taps)
            if taps is not None:
                taps.residuals.append(x)
        if cache is not None:
            cache.length += tokens.shape[1]
        return self.lm_head(self.model["norm"](x))


def save(model: Llama, folder: Path) -> None:
    """Write config.json, model.safetensors (bfloat16), the tokenizer and the chat template to
    `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: w.detach().cpu().to(torch.bfloat16) for name, w in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config())
    tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": PAD,
            "unk_token": UNK,
            "clean_up_tokenization_spaces": False,
            "model_max_length": MAX_POSITIONS,
        },
    )


def load(folder: Path, device: str | torch.device = "cpu") -> Llama:
    """The saved model, its weights widened to float32, ready to evaluate."""
    weights = load_file(folder / "model.safetensors")
    model = Llama()
    model.load_state_dict({name: weight.float() for name, weight in weights.items()})
    return model.to(device).eval()


def tokenizer() -> Tokenizer:
    """One token per word. Adds nothing: a prompt spells its own `<bos>`."""
    result = Tokenizer(models.WordLevel(TOKEN_IDS, unk_token=UNK))
    result.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    result.add_special_tokens([AddedToken(word, special=True) for word in SPECIALS])
    return result


def _rope_table() -> Tensor:
    """Cosines and sines [2, positions, D]; both halves of a head use the same frequencies."""
    frequencies = ROPE_THETA ** -(torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    angles = torch.outer(torch.arange(MAX_POSITIONS), frequencies).repeat(1, 2)
    return torch.stack([angles.cos(), angles.sin()])


def rotate(x: Tensor, rope: Tensor) -> Tensor:
    cos, sin = rope.to(x.dtype)
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-high, low], dim=-1) * sin


def _config() -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(TOKEN_IDS),
        "hidden_size": WIDTH,
        "intermediate_size": FFN_WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": ROPE_THETA,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": TOKEN_IDS[BOS],
        "eos_token_id": TOKEN_IDS[EOS],
        "pad_token_id": TOKEN_IDS[PAD],
        "torch_dtype": "bfloat16",
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
