"""Which tokens may come next under constraints, by xgrammar's own Python wheel.

Writes constraints.json, which tests/runtime/constraint_golden_test.cc reads. Run again only to change the cases:
python make_constraints.py
Needs `pip install xgrammar==0.2.8 tokenizers`: the version whose C++ core cmake/xgrammar.cmake builds, with
edits that the wheel lacks. So its masks are no oracle, but its matcher is: it is asked of each token by its
bytes, and what would be no UTF-8 is left out. Not here: strings of JSON with lengths, in which the wheel
allows control characters.
"""

import json
import random
from pathlib import Path

import tokenizers
import xgrammar
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).parent
# Byte-level BPE, BPE and Unigram with tokens of bytes, Unigram without, words.
NAMES = ["gpt2", "llama2_legacy", "gemma", "unigram_fallback", "t5", "words"]
STEPS = 8

REGEXES = [
    r"[a-z]+ing",
    r"(the|their|them) (cache|tokens?)( that (matter|do not))?",
    r"\d{1,3}(,\d{3})*(\.\d+)?",
    r"([ab]?c{2,4})+|x",
    r"(a|ab|abc)(c|bcd|d*)",
    r"[^a-z]{2,5}",
    r".{3}",
    r"(é|ñ|日本語?|[α-ω]+|😀){1,3}!",
    r"\s*\S+\s*",
    r"\w+@\w+(\.com|\.org)",
    r"(0|[1-9]\d*)(-(0|[1-9]\d*))?",
    r"(?:yes|no)(?:, (?:yes|no)){0,2}\.?",
]
CHOICES = [
    ["the", "the cache", "the tokens", "they"],
    ["yes", "no", "maybe"],
    ["日本", "日本語", "日", "Ελληνικά"],
    ['a"b\\c', "\n\t", " ", "  x", "é"],
    ["in", "in the", "in all", "int"],
]
SCHEMAS = [
    {"type": "string"},
    {"type": "integer"},
    {"type": "number"},
    {"type": "boolean"},
    {"enum": ["the", 12, None, True, [1, "x"]]},
    {"type": "integer", "minimum": -12, "maximum": 345},
    {"type": "string", "pattern": "[a-c]{2}x?"},
    {"type": "string", "format": "date"},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {
        "type": "array",
        "prefixItems": [{"type": "null"}, {"const": "the"}],
        "items": {"type": "integer"},
    },
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "tokens": {"type": "integer"}},
        "required": ["name"],
        "additionalProperties": False,
    },
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#"}}]},
]
GRAMMARS = [
    'root ::= sum\nsum ::= term ("+" term)*\nterm ::= [0-9]+ | "(" sum ")"',
    'root ::= "[" (item ("," item)*)? "]"\nitem ::= "the" | "a" | root',
    'root ::= "a" root "b" | ""',
    'root ::= [^\\x00-\\x1f]{1,4} "!"',
    'root ::= word (" " word){0,3} "."\nword ::= [A-Za-z] [a-z]*',
]


def cases():
    yield from (("regex", [text]) for text in REGEXES)
    yield from (("choice", texts) for texts in CHOICES)
    yield from (("json_schema", [json.dumps(schema, ensure_ascii=False)]) for schema in SCHEMAS)
    yield from (("grammar", [text]) for text in GRAMMARS)


class Vocabulary:
    """Tokens as bytes: `bytes[id]`, and `first[id]` of a completion's first; None of what is no text."""

    def __init__(self, name):
        path = str(HERE / "tokenizers" / f"{name}.tokenizer.json")
        tokenizer = Tokenizer.from_file(path)
        self.size = max(tokenizer.get_vocab().values()) + 1
        special = {i for i, t in tokenizer.get_added_tokens_decoder().items() if t.special}
        info = xgrammar.TokenizerInfo.from_huggingface(PreTrainedTokenizerFast(tokenizer_file=path))
        decoded = info.decoded_vocab
        byte_level = info.vocab_type is xgrammar.VocabType.BYTE_LEVEL
        anchor = next(i for i in range(self.size) if tokenizer.decode([i]).isalpha())
        before = tokenizer.decode([anchor])
        self.bytes, self.first = [], []
        for i in range(self.size):
            if i in special or tokenizer.id_to_token(i) is None:
                self.bytes.append(None)
                self.first.append(None)
                continue
            text, first = tokenizer.decode([anchor, i])[len(before) :], tokenizer.decode([i])
            if info.vocab_type is xgrammar.VocabType.RAW:
                self.bytes.append(text.encode())
            else:
                self.bytes.append(decoded[i])
            whole = not byte_level and "\ufffd" not in first
            self.first.append(first.encode() if whole else self.bytes[-1])

    def compiler(self):
        raw = [b or b"" for b in self.bytes]
        info = xgrammar.TokenizerInfo(raw, xgrammar.VocabType.RAW, stop_token_ids=[])
        return xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)


def grammar_of(kind, texts):
    match kind:
        case "regex":
            return xgrammar.Grammar.from_regex(texts[0])
        case "choice":
            return xgrammar.Grammar.from_ebnf("root ::= " + " | ".join(map(json.dumps, texts)))
        case "json_schema":
            return xgrammar.Grammar.from_json_schema(texts[0])
    return xgrammar.Grammar.from_ebnf(texts[0])


def begins_utf8(text):
    try:
        text.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data"
    return True


def allowed(matcher, text, tokens):
    """Ids of those of `tokens` (id -> bytes) that may follow `text`."""
    ids = []
    for i, token in tokens:
        if not begins_utf8(text + token):
            continue
        if not token:
            ids.append(i)
        elif matcher.accept_string(token):
            matcher.rollback(1)
            ids.append(i)
    return ids


def walk(vocabulary, compiled, rng):
    """[[ids that may come next, whether the text may end, the token taken or None] ...]"""
    matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
    text, steps = b"", []
    for step in range(STEPS):
        table = vocabulary.bytes if step else vocabulary.first
        kept = [(i, b) for i, b in enumerate(table) if b is not None and vocabulary.bytes[i]]
        ids = allowed(matcher, text, kept)
        # Long ones more often: they reach further.
        taken = rng.choices(ids, [1 + len(table[i]) ** 2 for i in ids])[0] if ids else None
        steps.append([ids, matcher.is_completed(), taken])
        if taken is None:
            break
        text += table[taken]
        if table[taken]:
            assert matcher.accept_string(table[taken])
    return steps


def bits(ids, size):
    """Hex digits, each of four tokens, the lowest bit the first."""
    mask = [0] * (-(-size // 4))
    for i in ids:
        mask[i // 4] |= 1 << i % 4
    return "".join(f"{digit:x}" for digit in mask)


def main():
    golden = {"xgrammar": "0.2.8", "tokenizers": tokenizers.__version__, "vocabularies": []}
    for name in NAMES:
        vocabulary, masks, walks = Vocabulary(name), {}, []
        compiler = vocabulary.compiler()
        for number, (kind, texts) in enumerate(cases()):
            compiled = compiler.compile_grammar(grammar_of(kind, texts))
            for seed in range(2):
                steps = walk(vocabulary, compiled, random.Random(f"{name} {number} {seed}"))
                if not steps[0][0]:
                    continue  # words cannot say it
                for step in steps:
                    step[0] = masks.setdefault(bits(step[0], vocabulary.size), len(masks))
                walks.append({"kind": kind, "texts": texts, "steps": steps})
        golden["vocabularies"].append({"tokenizer": name, "masks": list(masks), "walks": walks})
    text = json.dumps(golden, ensure_ascii=False, separators=(",", ":"))
    (HERE / "constraints.json").write_text(text.replace('{"kind"', '\n{"kind"') + "\n")


if __name__ == "__main__":
    main()
