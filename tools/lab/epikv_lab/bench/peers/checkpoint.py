"""One random-weight checkpoint a shape, which every peer converts: Qwen2's architecture in float32.

Weights are large enough, and the output head is not the embedding, so that greedy tokens do not
repeat. The head's row of the end-of-text token is zero: no peer ever chooses it, so that none has to
be told to go on.
"""

import hashlib
import json
import random
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType

from epikv import harness

END = "<|endoftext|>"
END_ID = 0
CONTEXT = 20480  # the longest that is measured is 16384, and what is generated behind it
_WORDS = 5  # of the tokenizer's training text, a token of its vocabulary


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder; a head has hidden / heads."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int

    @property
    def kv_width(self) -> int:
        return self.hidden // self.heads * self.kv_heads

    @property
    def linears(self) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's weight matrices, q, k and v as one, gate and up as one."""
        return [
            (self.hidden, self.hidden + 2 * self.kv_width),
            (self.hidden, self.hidden),
            (self.hidden, 2 * self.ffn),
            (self.ffn, self.hidden),
        ]

    @property
    def matrix_weights(self) -> int:
        """Weights that every token is multiplied with: all but the embedding, norms and biases."""
        layer = sum(inputs * outputs for inputs, outputs in self.linears)
        return self.layers * layer + self.hidden * self.vocabulary

    def kv_bytes(self, bytes_per_value: int) -> int:
        """Of one cached token, over all layers."""
        return 2 * self.layers * self.kv_width * bytes_per_value


SHAPES = MappingProxyType(
    {
        "small": Shape(384, 8, 6, 2, 1024, 4096),
        "0.5b": Shape(896, 24, 14, 2, 4864, 32000),
        "shallow": Shape(896, 6, 14, 2, 4864, 32000),
        "shallow-mha": Shape(896, 6, 14, 14, 4864, 32000),
    }
)


def checkpoint(shape: Shape, name: str, folder: Path) -> Path:
    """A Hugging Face directory of it in `folder`, made once."""
    made_of = json.dumps(asdict(shape)).encode() + Path(__file__).read_bytes()
    path = folder / f"{name}-{hashlib.sha256(made_of).hexdigest()[:12]}"
    if not path.exists():
        harness.say(f"making {path.name}: {shape}")
        partial = path.with_name(f".{path.name}")
        shutil.rmtree(partial, ignore_errors=True)
        write(shape, partial)
        partial.rename(path)
    return path


def write(shape: Shape, directory: Path, context: int = CONTEXT) -> None:
    """Makes it there."""
    from epikv.export.synthetic import write_directory
    from safetensors.torch import load_file, save_file

    config = {
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.ffn,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
        "rope_theta": 1e6,
        "bos_token_id": END_ID,
        "eos_token_id": END_ID,
    }
    write_directory(config, directory, architecture="Qwen2ForCausalLM")
    file = directory / "model.safetensors"
    weights = load_file(file)
    weights["lm_head.weight"][END_ID] = 0
    save_file(weights, file, {"format": "pt"})
    _write_tokenizer(shape.vocabulary, directory)
    generation = {"bos_token_id": END_ID, "eos_token_id": END_ID, "do_sample": False}
    (directory / "generation_config.json").write_text(json.dumps(generation))


def _write_tokenizer(vocabulary: int, directory: Path) -> None:
    """A byte-level BPE as GPT-2's, trained on words made up from syllables."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(_WORDS * vocabulary), trainer)
    if tokenizer.get_vocab_size() != vocabulary:
        raise ValueError(f"the tokenizer has {tokenizer.get_vocab_size()} tokens, not {vocabulary}")
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END,
        "eos_token": END,
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def _sentences(words: int) -> Iterator[str]:
    rng = random.Random(0)
    syllables = [a + b + c for a in "bdfgklmnprstvz" for b in "aeiou" for c in ("", *"lnrst")]
    for _ in range(words // 10):
        yield " ".join("".join(rng.choices(syllables, k=rng.randint(1, 5))) for _ in range(10))
