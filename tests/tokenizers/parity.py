"""The C++ tokenizer against the `tokenizers` library: ids, decoded text, and text told token by token.

python parity.py BINARY [--strings N] [--algorithm NAME]: N random strings for each algorithm (100,000),
dealt to its configurations; exits 1 if one differs. BINARY is built from tokenizer_lines.cc.
"""

import argparse
import json
import operator
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from configurations import CONFIGURATIONS
from random_texts import random_texts
from tokenizers import Tokenizer

BATCH = 2000  # strings
_BYTES = "\uf8ff\uf8fe\uf8ff"  # in no text; stands for a "▁" that is made of bytes


@dataclass
class Counts:
    strings: int = 0
    invalid: int = 0  # strings that are no UTF-8
    unknown: int = 0  # that the vocabulary has no tokens for
    ids: int = 0
    round_trips: int = 0  # decoded text equal to the string
    splits: int = 0  # prefixes of ids whose text was compared

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(*map(operator.add, astuple(self), astuple(other)))


class Difference(Exception):
    pass


class Lines:
    """What the binary answers. Raises Difference if it ends early."""

    def __init__(self, binary: Path, tokenizer: Path) -> None:
        self._command = [str(binary), str(tokenizer)]

    def answers(self, lines: Sequence[str]) -> list[dict[str, Any]]:
        done = subprocess.run(
            self._command,
            input="\n".join(lines) + "\n",
            capture_output=True,
            text=True,
            check=False,
        )
        answers = [json.loads(line) for line in done.stdout.split("\n") if line]
        if done.returncode != 0 or len(answers) != len(lines):
            at = lines[len(answers)] if len(answers) < len(lines) else ""
            raise Difference(f"exit status {done.returncode} at {at!r}: {done.stderr}")
        return answers


class Reference:
    """The library, and how its text is told where ours is meant to differ."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
        made = json.loads(tokenizer.to_str())
        self._special = {token["id"] for token in made["added_tokens"] if token["special"]}
        self._fallback = "ByteFallback" in json.dumps(made["decoder"])
        self.tokens = [tokenizer.id_to_token(id) for id in range(self.size)]
        self._bytes = [_fallback_byte(token) for token in self.tokens]

    def encode(self, text: str, add_special: bool) -> list[int] | None:
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special).ids
        except Exception:  # tokenizers raises nothing narrower
            return None

    def decode(self, ids: Sequence[int], skip: bool) -> str:
        if not self._fallback:
            return self.tokenizer.decode(ids, skip_special_tokens=skip)
        # Of bytes that are no UTF-8 what can be is text: see runtime/text/tokenizer.h.
        tokens: list[str] = []
        run, spelt = b"", []
        for id in [*ids, None]:
            if id is not None and (
                id >= self.size or self.tokens[id] is None or (skip and id in self._special)
            ):
                continue
            if id is not None and self._bytes[id] is not None:
                run += bytes([self._bytes[id]])
                spelt.append(self.tokens[id])
                continue
            broken = run.decode(errors="ignore").encode() != run
            # Bytes are no text yet where the decoder replaces something in text.
            tokens += [run.decode(errors="replace").replace("▁", _BYTES)] if broken else spelt
            run, spelt = b"", []
            if id is not None:
                tokens.append(self.tokens[id])
        return self.tokenizer.decoder.decode(tokens).replace(_BYTES, "▁")


def _fallback_byte(token: str | None) -> int | None:
    if token is None or len(token) != 6 or not (token.startswith("<0x") and token.endswith(">")):
        return None
    return int(token[3:5], 16)


def compare(
    lines: Lines, reference: Reference, texts: Sequence[bytes], seed: str, split_share: float = 1
) -> Counts:
    """Raises Difference for the first text that is treated otherwise."""
    counts = Counts()
    rng = random.Random(seed)
    questions: list[list[int]] = []
    for text, answer in zip(texts, lines.answers([f"text {t.hex()}" for t in texts]), strict=True):
        counts.strings += 1
        ids = _compare_ids(reference, text, answer, counts)
        if ids is not None:
            questions.append(ids)
            if rng.random() < 0.2:
                questions.append(_spoilt(rng, ids, reference.size))
    told = lines.answers(["ids " + " ".join(map(str, ids)) for ids in questions])
    for ids, answer in zip(questions, told, strict=True):
        every = rng.random() < split_share
        for skip in (False, True):
            counts.splits += _compare_text(
                reference, ids, answer["skip" if skip else "keep"], skip, every
            )
    return counts


def _compare_ids(
    reference: Reference, text: bytes, answer: dict[str, Any], counts: Counts
) -> list[int] | None:
    try:
        whole = text.decode()
    except UnicodeDecodeError as error:
        if f"not UTF-8 at byte {error.start}" not in answer.get("error", ""):
            raise Difference(f"{text!r} is no UTF-8 from {error.start}: {answer}") from error
        counts.invalid += 1
        return None
    for special in (True, False):
        expected = reference.encode(whole, special)
        if expected is None and "vocabulary" in answer.get("error", ""):
            counts.unknown += 1
            return None
        found = answer.get("with_special" if special else "without_special")
        if found != expected:
            raise Difference(f"ids of {whole!r}: {found}, expected {expected}; {answer}")
    counts.ids += len(expected)
    counts.round_trips += reference.decode(expected, skip=False) == whole
    return expected


def _compare_text(
    reference: Reference, ids: list[int], told: dict[str, Any], skip: bool, every: bool
) -> int:
    """Each prefix, or all of it alone. Returns how many were compared."""
    text, pieces, flushes = "", told["pieces"], told["flushes"]
    compared = 0
    for length in range(len(ids) + 1):
        text += pieces[length - 1] if length else ""
        if not every and length < len(ids):
            continue
        expected = reference.decode(ids[:length], skip)
        if text + flushes[length] != expected:
            raise Difference(
                f"text of {ids[:length]}: {text + flushes[length]!r}, expected {expected!r}"
            )
        compared += 1
    if told["decoded"] != expected:
        raise Difference(f"decoding {ids}: {told['decoded']!r}, expected {expected!r}")
    if not told["decoded"].startswith(text):
        raise Difference(f"told too soon of {ids}: {text!r}")
    return compared


def _spoilt(rng: random.Random, ids: list[int], size: int) -> list[int]:
    """Tokens that no text gives: others, fewer, in another order."""
    kept = [id for id in ids if rng.random() < 0.8]
    kept += [rng.randrange(size) for _ in range(rng.randint(0, 5))]
    if rng.random() < 0.5:
        rng.shuffle(kept)
    return kept


def run(
    binary: Path, algorithm: str, strings: int, split_share: float
) -> Iterator[tuple[str, Counts]]:
    made = CONFIGURATIONS[algorithm]
    for name, make in made.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "tokenizer.json"
            make().save(str(path))
            lines, reference = Lines(binary, path), Reference(Tokenizer.from_file(str(path)))
            counts = Counts()
            left = -(-strings // len(made))
            texts = random_texts(f"{name} {strings}", left)
            while left > 0:
                batch = [next(texts) for _ in range(min(BATCH, left))]
                left -= len(batch)
                try:
                    counts += compare(lines, reference, batch, f"{name} {left}", split_share)
                except Difference as difference:
                    raise Difference(f"{name}: {difference}") from difference
            yield name, counts


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("binary", type=Path)
    parser.add_argument("--strings", type=int, default=100_000)
    parser.add_argument("--algorithm", choices=CONFIGURATIONS)
    parser.add_argument("--split-share", type=float, default=0.1)
    options = parser.parse_args()
    failed = 0
    for algorithm in [options.algorithm] if options.algorithm else CONFIGURATIONS:
        total, begin = Counts(), time.monotonic()
        try:
            for name, counts in run(
                options.binary, algorithm, options.strings, options.split_share
            ):
                total += counts
                print(f"  {name:18} {counts}", flush=True)
        except Difference as difference:
            print(f"  DIFFERENCE: {difference}", flush=True)
            failed = 1
        print(f"{algorithm}: {total}, {time.monotonic() - begin:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
