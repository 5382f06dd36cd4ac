"""A model of one's own, as a file that epikvd serves: a GPT-2 in small, of random weights.

    python tools/examples/own_model.py own.pt

Any module that can be scripted will do, if its forward takes packed rows of all sequences and
calls two operators: `epikv::block` as each layer begins and once after the last, and
`epikv::attention` in place of its own attention. The daemon owns positions, RoPE and the KV cache,
so the file does not change with the policy that evicts.
"""

import sys
from pathlib import Path

import torch
from epikv.export import Layer, Manifest, Rope, save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

CONTEXT, HIDDEN, HEADS, LAYERS = 256, 64, 4, 3
WIDTH = HIDDEN // HEADS  # channels of a head
END = "<|endoftext|>"
TEXTS = ["The quick brown fox jumps over the lazy dog.", "Once upon a time there was a model."]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.width = HEADS, WIDTH  # the compiler knows no globals
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)  # W_O, which some policies read
        self.mlp = nn.Sequential(
            nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU("tanh"), nn.Linear(4 * HIDDEN, HIDDEN)
        )

    def forward(self, residual: Tensor, layer: int) -> Tensor:
        residual = torch.ops.epikv.block(residual, layer)
        normed = self.ln_1(residual)
        q, k, v = (
            self.qkv(normed).view(-1, 3, self.heads, self.width).unbind(1)
        )  # [n, HEADS, WIDTH] each
        attended = torch.ops.epikv.attention(q, k, v, normed, layer)
        residual = residual + self.out(attended.flatten(1))
        return residual + self.mlp(self.ln_2(residual))


class Gpt(nn.Module):
    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocab_size, HIDDEN)
        self.wpe = nn.Embedding(CONTEXT, HIDDEN)  # learned positions
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, vocab_size, bias=False)

    def forward(self, token_ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        """Logits of rows `last` [b] of the packed tokens [n], float32 [b, vocabulary]."""
        residual = self.wte(token_ids) + self.wpe(positions)
        for layer, block in enumerate(self.blocks):  # unrolled: `layer` is a constant
            residual = block(residual, layer)
        residual = torch.ops.epikv.block(residual, len(self.blocks))
        return self.head(self.ln_f(residual.index_select(0, last))).float()


def tokenizer() -> Tokenizer:
    """Byte-level BPE, as GPT-2 has it, trained on little."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=280, initial_alphabet=alphabet, special_tokens=[END]),
    )
    return made


def manifest(vocab_size: int, end: int) -> Manifest:
    """What the daemon must know of the module beside its code."""
    return Manifest(
        name="own",
        architecture="Gpt",
        dtype="float32",
        vocab_size=vocab_size,
        context_length=CONTEXT,
        hidden_size=HIDDEN,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        bos_token_id=None,
        eos_token_ids=[end],
        ropes=[Rope([])],  # nothing is rotated
        layers=[
            Layer(
                key_width=WIDTH,
                value_width=WIDTH,
                scale=WIDTH**-0.5,
                output_projection=f"blocks.{layer}.out.weight",
            )
            for layer in range(LAYERS)
        ],
    )


def main(out: Path) -> None:
    words = tokenizer()
    torch.manual_seed(0)
    module = Gpt(words.get_vocab_size())  # here you would load what you have trained
    end = words.token_to_id(END)
    assert end is not None  # it is a special token
    save(module, manifest(words.get_vocab_size(), end), words.to_str(), out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
