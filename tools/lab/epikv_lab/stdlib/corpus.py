"""What the model reads: Python 3.11 as Debian 12 packages it, under the PSF licence.

Sources of the library and of its tests, and the manual's reStructuredText. A file belongs to the validation set, to the
test set, or else to the training set, by a hash of its name: what is asked of the model later was never read.
"""

import hashlib
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

PACKAGES = (
    "libpython3.11-minimal",
    "libpython3.11-stdlib",
    "libpython3.11-testsuite",
    "python3.11-doc",
)
END = "<|endoftext|>"
VOCABULARY = 4096
SUFFIXES = (".py", ".rst.txt")
LEAST_BYTES = 200
MOST_BYTES = 400_000  # of a file: longer ones are tables
EXCERPT = 3000  # characters, of `excerpts`
REQUEST = 1600  # of `requests`
# Data in the form of programs: tables of characters, encodings and the like.
TABLES = (
    "encodings/",
    "pydoc_data/",
    "test/test_unicodedata",
    "lib2to3/tests/data/",
    "_sysconfigdata",
)

Part = Literal["train", "validation", "test"]


@dataclass(frozen=True)
class Text:
    """A file, by its path below its root, and what it says."""

    name: str
    text: str

    @property
    def part(self) -> Part:
        share = int.from_bytes(hashlib.sha256(self.name.encode()).digest()[:4]) / 2**32
        return "validation" if share < 0.02 else "test" if share < 0.06 else "train"


def fetch(folder: Path) -> Path:
    """Downloads the packages of Debian and unpacks them below `folder`, once."""
    root = folder / "root"
    if not root.exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=folder, check=True)
        partial = folder / "root.partial"
        for package in PACKAGES:
            [file] = folder.glob(f"{package}_*.deb")
            subprocess.run(["dpkg-deb", "-x", file, partial], check=True)
        partial.rename(root)
    return root


def texts(root: Path) -> list[Text]:
    """All files that are read, each text once, by name."""
    found: dict[str, Text] = {}
    for path in sorted(root.rglob("*")):
        if not path.is_file() or path.is_symlink() or not path.name.endswith(SUFFIXES):
            continue
        name = str(path.relative_to(root))
        if any(table in name for table in TABLES):
            continue
        content = path.read_bytes()
        if not LEAST_BYTES <= len(content) <= MOST_BYTES:
            continue
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        found.setdefault(hashlib.sha256(content).hexdigest(), Text(name, text))
    return list(found.values())


def excerpts(read: list[Text], count: int) -> list[Text]:
    """What policies are calibrated on: the middle of `count` files of the training set, spread over all that are long."""
    long = [text for text in read if text.part == "train" and len(text.text) > 2 * EXCERPT]
    chosen = [long[i] for i in np.linspace(0, len(long) - 1, count).astype(int)]
    return [
        Text(text.name, text.text[len(text.text) // 2 - EXCERPT // 2 :][:EXCERPT])
        for text in chosen
    ]


def requests(read: list[Text], count: int) -> list[str]:
    """Parts of test files, for a model to go on from: `count` at most of those that lie behind one another."""
    parts = [
        text.text[begin : begin + REQUEST]
        for text in read
        if text.part == "test"
        for begin in range(0, len(text.text) - REQUEST + 1, REQUEST)
    ]
    chosen = np.linspace(0, len(parts) - 1, min(count, len(parts))).astype(int)
    return [parts[i] for i in chosen]


def digest(read: list[Text]) -> str:
    """Of names and contents."""
    whole = hashlib.sha256()
    for text in read:
        whole.update(f"{text.name}\0{text.text}\0".encode())
    return whole.hexdigest()


def make_tokenizer(read: list[Text]) -> Tokenizer:
    """Byte-level BPE of the training set, with GPT-2's way of cutting words."""
    result = Tokenizer(models.BPE())
    result.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    result.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    result.train_from_iterator((each.text for each in read if each.part == "train"), trainer)
    result.add_special_tokens([AddedToken(END, special=True)])
    return result


def encode(tokenizer: Tokenizer, read: list[Text], part: Part) -> np.ndarray:
    """The texts of a part behind one another, each behind the end-of-text token: uint16 [n]."""
    end = tokenizer.token_to_id(END)
    assert end is not None  # `make_tokenizer` has it

    def ids() -> Iterator[int]:
        for text in read:
            if text.part == part:
                yield end
                yield from tokenizer.encode(text.text).ids

    return np.fromiter(ids(), dtype=np.uint16)
