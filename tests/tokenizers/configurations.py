"""Tokenizers as the model families have them, trained here by the `tokenizers` library.

`CONFIGURATIONS[algorithm][name]()` makes one: the family's own normalizer, pre-tokenizer with its
regexes, post-processor and decoder around a small model of the algorithm, as a tokenizer.json is
read back. Sources: the families' files and transformers 5.23.
"""

import argparse
import inspect
import json
import textwrap
from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = (  # and SmolLM3, OLMo 2, Phi-4
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
QWEN = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
CL100K = (  # tiktoken's own, possessive
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
O200K = (  # Phi-4-mini
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
TEKKEN = (  # Mistral Nemo
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
)
DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}"
)
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"

TEXT = """
The quick brown fox jumps over the lazy dog. It's what they're doing; I'd say we've won, haven't we?
She sells 12 sea shells, 345 in all, for $6,789.10 each. Call 555-0123 at 10:30, or DON'T.
Größe, façade, naïve, señor, Åse, Ελληνικά κείμενα, Русский текст, עברית, العربية, हिन्दी, ไทย.
日本語の文章、らーめん、らーめん。中文文本,中文。한국어 문장입니다. x² ½ Ⅷ ﬁne ｆｕｌｌ ①②  \t\t  →→ ██ 😀😀 🚀 👍🏽
"""
CORPUS = (TEXT * 8 + inspect.getsource(argparse) + inspect.getsource(textwrap)).split("\n")
CHAT = ("<|bos|>", "<|eot|>", "<|im_start|>", "<think>", "</think>")


def _split(pattern: str, behavior: str = "isolated", invert: bool = False) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior=behavior, invert=invert)


def _bytes_as_they_are() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def _byte_level(
    before: Any, vocab_size: int = 1200, normalizer: Any = None, **model: Any
) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(**model))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = before
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(list(CHAT))
    return tokenizer


def _cut(*patterns: str) -> Any:
    return pre_tokenizers.Sequence([*map(_split, patterns), _bytes_as_they_are()])


def _begin(tokenizer: Tokenizer, *tokens: str) -> Tokenizer:
    special = [(token, tokenizer.token_to_id(token)) for token in tokens]
    template = processors.TemplateProcessing(
        single=f"{' '.join(tokens)} $A", special_tokens=special
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return tokenizer


def gpt2() -> Tokenizer:  # and Phi-2
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))


def gpt2_prefix_space() -> Tokenizer:
    return _byte_level(pre_tokenizers.ByteLevel(add_prefix_space=True))


def llama3() -> Tokenizer:  # and SmolLM3
    return _begin(_byte_level(_cut(LLAMA3), ignore_merges=True), "<|bos|>")


def qwen() -> Tokenizer:
    tokenizer = _byte_level(_cut(QWEN), normalizer=normalizers.NFC())
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False, special=False)])
    return tokenizer


def qwen_marks() -> Tokenizer:  # Qwen 3.5
    return _byte_level(
        _cut(QWEN.replace(r"\p{L}", r"\p{L}\p{M}").replace(r"?\p{L}\p{M}+", r"?[\p{L}\p{M}]+"))
    )


def olmo2() -> Tokenizer:  # and Phi-4
    cut = [_split(LLAMA3, "removed", invert=True), _bytes_as_they_are()]
    tokenizer = _byte_level(pre_tokenizers.Sequence(cut))
    tokenizer.add_special_tokens([AddedToken("<|fim|>", lstrip=True, rstrip=True)])
    return tokenizer


def olmo() -> Tokenizer:  # GPT-NeoX's: runs of spaces are added tokens
    tokenizer = _byte_level(pre_tokenizers.ByteLevel(False), normalizer=normalizers.NFC())
    runs = [AddedToken(" " * n, normalized=True, special=False) for n in range(2, 9)]
    tokenizer.add_tokens([*runs, AddedToken("|||EMAIL|||", single_word=True, normalized=True)])
    return tokenizer


def cl100k() -> Tokenizer:
    return _byte_level(_cut(CL100K))


def o200k() -> Tokenizer:
    return _byte_level(_cut(O200K))


def tekken() -> Tokenizer:
    return _byte_level(_cut(TEKKEN), ignore_merges=True)


def deepseek_v3() -> Tokenizer:  # and R1
    return _begin(_byte_level(_cut(r"\p{N}{1,3}", _CJK, DEEPSEEK_V3)), "<|bos|>")


def deepseek_llm() -> Tokenizer:
    digits = pre_tokenizers.Digits(individual_digits=True)
    cut = [_split("[\r\n]"), _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+"), _split(r"\s+$"),
           _split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"), digits, _bytes_as_they_are()]  # fmt: skip
    return _byte_level(pre_tokenizers.Sequence(cut))


def smollm2() -> Tokenizer:
    cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    return _byte_level(pre_tokenizers.Sequence(cut))


def behaviors() -> Tokenizer:
    """What a Split and Punctuation can do with what they find."""
    cut = [_split(r"\p{Lu}", "merged_with_next"), _split("[aeiou]", "merged_with_previous"),
           _split(r"\p{N}", "contiguous"), _split("[x-z]", "removed"),
           _split(r"\p{Greek}+", "merged_with_next", invert=True),
           pre_tokenizers.Split("or", "merged_with_previous"),
           pre_tokenizers.Punctuation("contiguous"), _bytes_as_they_are()]  # fmt: skip
    return _byte_level(pre_tokenizers.Sequence(cut))


def _fallback_decoder(strip: bool) -> Any:
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence(parts + [decoders.Strip(" ", 1, 0)] * strip)


def _metaspace_bpe(
    normalizer: Any, before: Any, decoder: Any, byte_fallback: bool = True, alphabet: int = 90,
    **model: Any
) -> Tokenizer:  # fmt: skip
    """A model of characters, the rarer of which have no token."""
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    trained.normalizer = normalizers.Replace(" ", "▁")
    # Cut so that some tokens run over spaces.
    trained.pre_tokenizer = _split(r"▁+\p{L}+|▁+|\p{L}+▁\p{L}+|[^▁\p{L}]+")
    trainer = trainers.BpeTrainer(
        vocab_size=1200, limit_alphabet=alphabet, special_tokens=["<unk>", "<s>", "</s>"],
        show_progress=False,
    )  # fmt: skip
    trained.train_from_iterator(CORPUS, trainer)
    made = json.loads(trained.to_str())
    vocab = made["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    made["model"] |= {"byte_fallback": byte_fallback, "fuse_unk": True, **model}
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, before
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens(list(CHAT))
    return _begin(tokenizer, "<s>")


def _llama2_normalizer() -> Any:
    return normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])


def llama2_legacy() -> Tokenizer:  # and Mistral 7B
    return _metaspace_bpe(_llama2_normalizer(), None, _fallback_decoder(strip=True))


def phi3() -> Tokenizer:
    tokenizer = _metaspace_bpe(_llama2_normalizer(), None, _fallback_decoder(strip=True))
    tokenizer.add_special_tokens([AddedToken("<|assistant|>", rstrip=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("tool use", normalized=True)])
    return tokenizer


def llama2() -> Tokenizer:
    before = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=False)
    return _metaspace_bpe(None, before, _fallback_decoder(strip=True))


def mistral() -> Tokenizer:
    before = pre_tokenizers.Metaspace("▁", prepend_scheme="always", split=True)
    return _metaspace_bpe(None, before, decoders.Metaspace("▁", prepend_scheme="always"))


def gemma() -> Tokenizer:
    before = pre_tokenizers.Split(" ", "merged_with_previous")
    return _metaspace_bpe(normalizers.Replace(" ", "▁"), before, _fallback_decoder(strip=False))


def without_fallback() -> Tokenizer:
    before = pre_tokenizers.Metaspace("▁", prepend_scheme="never")
    decoder = decoders.Metaspace("▁", prepend_scheme="never")
    return _metaspace_bpe(None, before, decoder, byte_fallback=False)


def unknown_apart() -> Tokenizer:
    tokenizer = _metaspace_bpe(None, None, None, False, fuse_unk=False, ignore_merges=True)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def unknown_dropped() -> Tokenizer:
    return _metaspace_bpe(None, None, decoders.Fuse(), byte_fallback=False, unk_token=None)


def _unigram(
    before: Any, normalizer: Any = None, byte_fallback: bool = False, decoder: Any = None
) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = before
    trainer = trainers.UnigramTrainer(
        vocab_size=900, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>",
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(CORPUS, trainer)
    made = json.loads(tokenizer.to_str())
    # Rarer characters become unknown.
    known = [piece for piece in made["model"]["vocab"] if len(piece[0]) > 1 or piece[0] < "\u0400"]
    made["model"]["vocab"] = known
    if byte_fallback:
        known += [[f"<0x{byte:02X}>", -20.0] for byte in range(256)]
        made["model"]["byte_fallback"] = True
    made["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.decoder = decoder or decoders.Metaspace("▁", prepend_scheme="always")
    tokenizer.add_special_tokens(["<s>", "</s>", *CHAT])
    return tokenizer


def t5() -> Tokenizer:
    cut = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", prepend_scheme="always")]
    tokenizer = _unigram(pre_tokenizers.Sequence(cut))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", tokenizer.token_to_id("</s>"))]
    )
    return tokenizer


def albert() -> Tokenizer:
    steps = [normalizers.Replace("``", '"'), normalizers.NFKD(), normalizers.Lowercase(),
             normalizers.Replace(Regex(" {2,}"), " "), normalizers.Strip()]  # fmt: skip
    cut = [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace("▁", prepend_scheme="always")]
    return _unigram(pre_tokenizers.Sequence(cut), normalizers.Sequence(steps))


def unigram_fallback() -> Tokenizer:
    steps = [normalizers.NFKC(), normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    decoder = _fallback_decoder(strip=True)
    return _unigram(None, normalizers.Sequence(steps), byte_fallback=True, decoder=decoder)


def unigram_first() -> Tokenizer:
    before = pre_tokenizers.Metaspace("▁", prepend_scheme="first", split=True)
    return _unigram(before, normalizers.NFD(), decoder=decoders.Metaspace("▁", "first"))


def words() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(
        vocab_size=900, special_tokens=["<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens(list(CHAT))
    return tokenizer


def known_words() -> Tokenizer:
    """Without an unknown token: other words are an error."""
    made = json.loads(words().to_str())
    made["model"]["unk_token"] = "<missing>"
    return Tokenizer.from_str(json.dumps(made))


CONFIGURATIONS: dict[str, dict[str, Callable[[], Tokenizer]]] = {
    algorithm: {make.__name__: make for make in made}
    for algorithm, made in {
        "byte-level BPE": (gpt2, gpt2_prefix_space, llama3, qwen, qwen_marks, olmo2, olmo, cl100k,
                           o200k, tekken, deepseek_v3, deepseek_llm, smollm2, behaviors),
        "metaspace BPE": (llama2_legacy, phi3, llama2, mistral, gemma, without_fallback,
                          unknown_apart, unknown_dropped),
        "Unigram": (t5, albert, unigram_fallback, unigram_first),
        "WordLevel": (words, known_words),
    }.items()
}  # fmt: skip
