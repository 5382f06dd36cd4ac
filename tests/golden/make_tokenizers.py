"""Tokenizer files and what the `tokenizers` library makes of hostile text with them.

Writes tokenizers/NAME.tokenizer.json, tokenizers/texts.json and tokenizers/NAME.golden.json, which
tests/runtime/tokenizer_test.cc reads. Run again only to change the cases: python make_tokenizers.py
Needs `pip install tokenizers`; the goldens name the version they were made with.
"""

import json
import random
import sys
from pathlib import Path

import tokenizers
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

sys.path.append(str(Path(__file__).parents[1] / "tokenizers"))
import configurations
from parity import Reference

OUT = Path(__file__).parent / "tokenizers"

CORPUS = (
    """
The quick brown fox jumps over the lazy dog. It's what they're doing; I'd say we've won, haven't we?
She sells 12 sea shells, 345 in all, for $6,789.10 each. Call 555-0123 at 10:30, or don't.
2024 2025 2024 2025 and 1000 or 2000: years, or 1000 or 2000 of something, in 2024 and 2025.
らーめん、らーめん、らーめん。
def main(args):\n    for i in range(10):\n        print(f"{i}: {args[i]}")\n\n\treturn None\n
Größe, façade, naïve, señor, Åse, Ελληνικά, Русский текст, עברית, العربية, हिन्दी, ไทย, 日本語の文章, 中文文本, 한국어.
The cache keeps the tokens that matter. The tokens that do not matter are evicted from the cache.
"""
    * 4
)

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

TEXTS = [
    "",
    " ",
    "a",
    "Hello, world!",
    "The tokens that matter are kept.",
    "  two leading, two trailing  ",
    "tabs\tand\t\ttabs, \t mixed \t",
    "line\nline\n\nline\n\n\n",
    "CRLF\r\nCRLF\r\n\r\n  \r\n",
    "trailing newline and spaces \n   ",
    "   \n\n   \t\n x",
    "it's IT'S I'm we've they'll he'd don't 'tis ''s 'S 'Re",
    "long s: it'\u017f, Kelvin: \u212a'd",
    "0 1 12 123 1234 12345 1234567890 3.14159 1,000,000 \u0663\u0664\u0665 \u00bd \u2162 \u00b2",
    "snake_case camelCase PascalCase SCREAMING_CASE kebab-case x1y2z3",
    "!@#$%^&*()_+-=[]{}|;':\",./<>?`~\\",
    "...!!!???   ---===   \u2026\u2014\u201cquoted\u201d",
    "caf\u00e9 cafe\u0301 \u00c5 A\u030a \u212b \u1e69 s\u0323\u0307 s\u0307\u0323",
    "Zalgo: Z\u0351\u036b\u0343\u036a\u0302\u036b\u033d\u034f\u0334\u0319\u0324\u031ea\u0349\u034elgo",
    "many marks: a" + "".join(chr(0x300 + i * 7 % 64) for i in range(64)) + "b",
    "\u3089\u30fc\u3081\u3093 \u30e9\u30fc\u30e1\u30f3 \u3005\u3006",
    "\u0301starts with a mark, and ends with one e\u0301",
    "\ud55c\uad6d\uc5b4 \u1112\u1161\u11ab\u1100\u116e\u11a8 \u4e2d\u6587\uff0c\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3002\u309b",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea \u0939\u093f\u0928\u094d\u0926\u0940 \u0e44\u0e17\u0e22 \u0e20\u0e32\u0e29\u0e32",
    "\U0001f600\U0001f680 \U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd \u2764\ufe0f",
    "math \U0001d54f\U0001d7d8 \u2211\u222b\u2260 x\u00b2 \u2160\u2161",
    "control \x00\x01\x02\x07\x08\x0b\x0c\x1b\x1c\x1d\x1e\x1f\x7f\x80\x85\x9f end",
    "spaces \u00a0\u1680\u180e\u2000\u2003\u200a\u200b\u2028\u2029\u202f\u205f\u3000\ufeff end",
    "joiners a\u200db a\u200cb soft\u00adhyphen \u2060word",
    "circled \u24b6\u24d0\u2460 \U0001f150 roman \u2170 ordinal \u00aa\u00ba micro \u00b5",
    "connectors a\u203fb a\u2040c a\uff3fd",
    "private \ue000 \uf8ff nonchar \ufffe \uffff \U0010ffff replacement \ufffd",
    "for (int i = 0; i < n; ++i) {\n\tif (a[i] != 0) return -1;  // comment\n}\n",
    "https://example.com/path?q=1&r=%20#frag user@example.org C:\\dir\\file.txt",
    "a" * 70,
    " " * 33,
    "\n" * 9,
    "ab" * 40 + " " + "the" * 30,
    "tokens tokens  tokens   tokens",
    "<|bos|>Hello<|eot|>",
    "<|bos|><|bos|> <|eot|>\n<|eot|> after",
    "text<|eot|>text <|eot|> text",
    "<|eot|",
    "<<|eot|>> <|eot|>|> <|bos|<|eot|>",
    "a <tool> b<tool>c <tool></tool>",
    "wordx mask MASK maskx xmask mask_ mask1 mask. (mask) \u00e9mask mask\u0301 \u24d0mask mask\u200d",
    "left   <left>right <left> \t\n<left>",
    "<right>   right <right>\u3000\n<right>",
    "<both>  <both>  x  <both>",
    "caf\u00e9token cafe\u0301token x caf\u00e9tokenx",
    "<|long|><|long|>er> <|long|>er",
    "\u00e9\u00e9<|eot|>\u00e9 e\u0301<tool>\u0301",
    "<unk> <s> </s> [PAD] $a = 3 ; #1",
    "$a = 3 ; $b = $a + 4 ; ? $b",
    "unknownword $a zzz",
]


def byte_bpe(pre_tokenizer, *, vocab_size=512, ignore_merges=False, specials=("<|eot|>",)):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(specials),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS.split("\n"), trainer)
    return tokenizer


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior=behavior, invert=invert)


def plain_bytes():
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def gpt2():
    return byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=False))


def gpt2_prefix_space():
    tokenizer = byte_bpe(pre_tokenizers.ByteLevel(add_prefix_space=True))
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def llama3():
    tokenizer = byte_bpe(
        pre_tokenizers.Sequence([split(LLAMA3), plain_bytes()]),
        ignore_merges=True,
        specials=("<|bos|>", "<|eot|>", "<|long|>", "<|long|>er"),
    )
    template = processors.TemplateProcessing(
        single="<|bos|> $A",
        pair="<|bos|> $A <|bos|> $B",
        special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))],
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), template])
    return tokenizer


def qwen():
    tokenizer = byte_bpe(pre_tokenizers.Sequence([split(QWEN), plain_bytes()]), specials=())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens(["<|bos|>", "<|eot|>"])
    tokenizer.add_special_tokens([AddedToken("<left>", lstrip=True, special=True)])
    tokenizer.add_tokens(
        [
            AddedToken("<tool>", normalized=False),
            AddedToken("</tool>", normalized=False),
            AddedToken("mask", single_word=True, normalized=False),
            AddedToken("<right>", rstrip=True, normalized=False),
            AddedToken("<both>", lstrip=True, rstrip=True, normalized=True),
            AddedToken("caf\u00e9token", normalized=True),
            AddedToken("matter are", normalized=True),
        ]
    )
    return tokenizer


def deepseek():
    cut = [
        split(r"\p{N}{1,3}"),
        split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
        split(DEEPSEEK),
    ]
    tokenizer = byte_bpe(pre_tokenizers.Sequence([*cut, plain_bytes()]), specials=("<|bos|>",))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A <|bos|>", special_tokens=[("<|bos|>", 0)]
    )
    return tokenizer


def o200k():
    return byte_bpe(
        pre_tokenizers.Sequence([split(O200K, behavior="removed", invert=True), plain_bytes()])
    )


def digits():
    tokenizer = byte_bpe(pre_tokenizers.ByteLevel(False))  # knows numbers of several digits
    cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
    return tokenizer


def odd_patterns():
    """Shorthands, scripts, look-behind, literals, and gaps that are dropped."""
    cut = [
        pre_tokenizers.Digits(individual_digits=False),
        pre_tokenizers.Split("the", behavior="removed"),
        split(r"(?<=[\w])\W|[\d\s]+|[^\S\n]x|\p{Hiragana}+|[\u4e00-\u9fff]{2}|(?>a+)b"),
        split(r"[\p{Lu}]\P{Lu}*?", behavior="isolated"),
        plain_bytes(),
    ]
    tokenizer = byte_bpe(plain_bytes())  # knows tokens that the cuts keep from being used
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
    tokenizer.decoder = None
    return tokenizer


def word_level(pre_tokenizer, unknown):
    words = ["<unk>", "<s>", "</s>", "[PAD]", "=", "+", ";", "?", "$a", "$b", "$", "a", "b"]
    words += [str(n) for n in range(10)] + ["#1", "#", "tokens", "The", "line", "Hello", ",", "!"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token=unknown))
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_special_tokens(["<s>", "</s>", "[PAD]"])
    return tokenizer


def words():
    return word_level(pre_tokenizers.WhitespaceSplit(), "<unk>")


def words_and_punctuation():
    return word_level(pre_tokenizers.Whitespace(), "<unk>")


def words_without_unknown():
    return word_level(pre_tokenizers.WhitespaceSplit(), "<missing>")


def encode(tokenizer, text, add_special):
    try:
        return tokenizer.encode(text, add_special_tokens=add_special).ids
    except Exception:  # a word-level model without an unknown token
        return None


def golden(tokenizer, name):
    rng = random.Random(name)
    reference = Reference(tokenizer)
    top = reference.size - 1
    decodings = []
    for length in [1] * 20 + [2, 3, 5, 8, 13, 21] * 6:
        ids = [rng.randint(0, top + 2) for _ in range(length)]
        decodings.append([ids, reference.decode(ids, False), reference.decode(ids, True)])
    return {
        "tokenizers": tokenizers.__version__,
        "with_special": [encode(tokenizer, text, True) for text in TEXTS],
        "without_special": [encode(tokenizer, text, False) for text in TEXTS],
        "decodings": decodings,  # ids, text with special tokens, text without
    }


def main():
    OUT.mkdir(exist_ok=True)
    (OUT / "texts.json").write_text(json.dumps(TEXTS, indent=0) + "\n")
    of_families = [
        configurations.llama2_legacy,
        configurations.mistral,
        configurations.gemma,
        configurations.t5,
        configurations.unigram_fallback,
    ]
    for make in [
        *of_families,
        gpt2,
        gpt2_prefix_space,
        llama3,
        qwen,
        deepseek,
        o200k,
        digits,
        odd_patterns,
        words,
        words_and_punctuation,
        words_without_unknown,
    ]:
        name = make.__name__
        (OUT / f"{name}.tokenizer.json").write_text(make().to_str() + "\n")
        tokenizer = Tokenizer.from_file(str(OUT / f"{name}.tokenizer.json"))
        text = json.dumps(golden(tokenizer, name), separators=(",", ":"))
        (OUT / f"{name}.golden.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
