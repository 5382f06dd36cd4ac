"""Time to make tokens of text, and text of tokens, over the `tokenizers` library's.

Each algorithm is trained here on text of the kind that is measured: code and prose of Python's
standard library, and made-up words of several scripts that repeat as words do. A round encodes and
decodes about 1 MB of other such text once with the library, on one thread and without the offsets that
nobody asks for, and once through the daemon's RPCs, whose cost counts; who begins, takes turns. A
sample is a round's ratio, above 1 where the daemon is slower.
"""

import json
import os
import random
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import click
from epikv import harness
from epikv.stats import bootstrap
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from epikv_lab.bench.targets import Target, finish

BOUND = 2.0
MEGABYTE = 1 << 20
VOCAB = 16_000
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SCRIPTS = (
    (0x61, 0x7A), (0xDF, 0xFF), (0x3B1, 0x3C9), (0x430, 0x44F), (0x5D0, 0x5EA), (0x627, 0x64A),
    (0x905, 0x939), (0xE01, 0xE2E), (0x3041, 0x3093), (0x4E00, 0x5200), (0xAC00, 0xB000),
    (0x1F600, 0x1F64F),
)  # fmt: skip


@dataclass(frozen=True)
class Round:
    """Seconds."""

    encode: float
    decode: float
    library_encode: float
    library_decode: float


@click.command("tokenizer")
@click.option("--rounds", default=11, show_default=True)
@click.option(
    "--tokenizer",
    "files",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    multiple=True,
    help="A tokenizer.json to measure instead; may be given again.",
)
@harness.options
def command(rounds: int, files: tuple[Path, ...], json_file: Path | None, **where: Any) -> None:
    """Speed of encoding and decoding 1 MB of mixed text over the tokenizers library's."""
    if where["server"] is not None:
        raise click.UsageError("it serves tokenizers of its own: leave --server out")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    text = mixed_text("measured", MEGABYTE)
    named = {file.stem: file for file in files} or {name: _trained(name) for name in TRAINED}
    targets, samples = [], {}
    load = [os.getloadavg()[0]]
    for name, file in named.items():
        samples[name] = list(_measure(file, text, rounds, where))
        for what in ("encode", "decode"):
            ratios = [getattr(r, what) / getattr(r, f"library_{what}") for r in samples[name]]
            estimate = bootstrap(ratios, median)
            targets.append(Target(f"{name}_{what}_ratio", estimate, BOUND))
            best = [
                min(getattr(r, f"{by}{what}") for r in samples[name]) for by in ("", "library_")
            ]
            megabytes = len(text.encode()) / 1e6
            told = " and ".join(f"{megabytes / seconds:.1f} MB/s" for seconds in best)
            harness.say(f"{name} {what}: {told} at best, here and in the library")
    load.append(os.getloadavg()[0])
    details = {
        "rounds": rounds,
        "load_average": load,
        "samples": {name: [asdict(r) for r in of] for name, of in samples.items()},
    }
    finish("tokenizer", targets, details, json_file)


def _measure(file: Path, text: str, rounds: int, where: dict[str, Any]) -> Iterator[Round]:
    library = Tokenizer.from_file(str(file))
    with harness.serving(lambda: _model(file), ["--threads=1"], **where) as served:
        expected = library.encode(text, add_special_tokens=False).ids
        if served.client.tokenize(text, add_special_tokens=False) != expected:
            raise click.ClickException(f"{file}: ids differ from the library's")

        def ours() -> tuple[float, float]:
            return (
                _seconds(lambda: served.client.tokenize(text, add_special_tokens=False)),
                _seconds(lambda: served.client.detokenize(expected)),
            )

        def theirs() -> tuple[float, float]:
            return (
                _seconds(lambda: library.encode_batch_fast([text], add_special_tokens=False)),
                _seconds(lambda: library.decode(expected)),
            )

        for index in range(rounds):
            if index % 2 == 0:
                mine, other = ours(), theirs()
            else:
                other, mine = theirs(), ours()
            yield Round(*mine, *other)


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def _model(file: Path) -> Path:
    """A small random model with this tokenizer."""
    from epikv.export import export
    from epikv.export.synthetic import write_directory

    vocab = max(Tokenizer.from_file(str(file)).get_vocab(with_added_tokens=True).values()) + 1
    shape = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": vocab,
    }  # fmt: skip
    path = harness.cached("tokenizer", shape, [file])
    if not path.exists():
        with tempfile.TemporaryDirectory() as folder:
            write_directory(shape, Path(folder))
            (Path(folder) / "tokenizer.json").write_bytes(file.read_bytes())
            export(Path(folder), path, name=file.stem, check=False)
    return path


def _trained(name: str) -> Path:
    path = harness.cached(name, {"vocab": VOCAB}, [Path(__file__)]).with_suffix(".json")
    if not path.exists():
        harness.say(f"training {name}")
        TRAINED[name](mixed_text("trained", 4 * MEGABYTE).split("\n")).save(str(path))
    return path


def _byte_level(lines: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_LLAMA3), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens([f"<|reserved_{i}|>" for i in range(256)])
    return tokenizer


def _metaspace(lines: list[str]) -> Tokenizer:
    """Trained word by word; text is then one piece, as with Llama 2."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, limit_alphabet=1500, special_tokens=specials, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    made = json.loads(tokenizer.to_str())
    del made["added_tokens"][3:]  # bytes are no special tokens
    tokenizer = Tokenizer.from_str(json.dumps(made))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.pre_tokenizer = None
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    return tokenizer


def _unigram(lines: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=VOCAB // 2, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(lines[::4], trainer)
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


TRAINED: dict[str, Callable[[list[str]], Tokenizer]] = {
    "byte_level": _byte_level,
    "metaspace": _metaspace,
    "unigram": _unigram,
}


def mixed_text(seed: str, size: int) -> str:
    """About `size` bytes; the same for the same seed and Python version."""
    rng = random.Random(seed)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    rng.shuffle(files)
    words = {script: _words(script) for script in _SCRIPTS}
    parts: list[str] = []
    while size > 0:
        source = files.pop().read_text(errors="ignore")[: 64 << 10] if files else ""
        foreign = "\n".join(_sentence(rng, words) for _ in range(max(len(source), 4096) // 150))
        parts += [source, foreign]
        size -= len(source.encode()) + len(foreign.encode())
    return "\n".join(parts)


def _words(script: tuple[int, int]) -> list[str]:
    rng = random.Random(str(script))
    return [
        "".join(chr(rng.randint(*script)) for _ in range(rng.randint(1, 8))) for _ in range(2000)
    ]


def _sentence(rng: random.Random, words: dict[tuple[int, int], list[str]]) -> str:
    """Words of one script, the first of which are the most frequent."""
    known = words[rng.choice(_SCRIPTS)]
    chosen = [known[int(len(known) ** rng.random()) - 1] for _ in range(rng.randint(3, 15))]
    chosen.insert(rng.randrange(len(chosen)), str(rng.randint(0, 99_999)))
    return " ".join(chosen) + rng.choice((".", "!", "?", "...", ",", ";"))
