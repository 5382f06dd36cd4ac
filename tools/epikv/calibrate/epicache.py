"""How much of each layer's keys hangs on what is far away, for epicache.

Keys of a text are computed twice: as the model has it, and with attention in all layers that sees no
more than a block, some of the block before, and the first tokens. A layer's similarity is the mean
cosine of the two, of vectors that are a head's keys of a window each. The less alike, the more of
the budget the policy gives the layer (EpiCache, arXiv 2509.17396; as in the authors' code,
apple/ml-epicache, layer_profile.py, which takes one text; here each text counts as much).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from epikv.export.manifest import Manifest
from epikv.export.operators import KvCache, Step, running

CHUNK = 64  # rows of a forward
# As published, for texts of 16,384 tokens: shorter ones have blocks of a quarter, and the others in
# proportion.
BLOCK, PARTS = 4096, 4
SINKS_OF_BLOCK = 32  # one in so many
WINDOW, WINDOWS_OF_BLOCK = 100, 4  # at least so many a block
OVERLAP = 0.5
Ids = Sequence[int]


class CalibrationError(ValueError):
    """The texts do not say what is asked of them."""


@dataclass(frozen=True)
class Blocks:
    """In tokens. A token sees, of those up to itself, its block, the last `overlap` of the block
    before, and the first `sinks`; these not where it is one of them."""

    block: int
    sinks: int
    overlap: int

    def seen(self, rows: int, keys: int) -> Tensor:
        """By the newest rows of so many keys: bool [rows, keys]."""
        row, key = torch.arange(keys - rows, keys)[:, None], torch.arange(keys)
        near = key >= row.div(self.block, rounding_mode="floor") * self.block - self.overlap
        sink = (key < self.sinks) & (row >= self.sinks)
        return (near | sink) & (key <= row)


@dataclass(frozen=True)
class Settings:
    """overlap: a share of the block. window: tokens of a head that are one vector."""

    block: int
    sinks: int
    overlap: float
    window: int

    def blocks(self) -> Blocks:
        return Blocks(self.block, self.sinks, int(self.block * self.overlap))


def settings_of(
    texts: Sequence[Ids],
    *,
    block: int | None = None,
    sinks: int | None = None,
    overlap: float = OVERLAP,
    window: int | None = None,
) -> Settings:
    """What is not told follows from the shortest text, and from the block."""
    if block is None:
        block = min(BLOCK, min(map(len, texts)) // PARTS)
        if block == 0:
            raise CalibrationError(f"a text has fewer than {PARTS} tokens")
    return Settings(
        block,
        block // SINKS_OF_BLOCK if sinks is None else sinks,
        overlap,
        max(1, min(WINDOW, block // WINDOWS_OF_BLOCK)) if window is None else window,
    )


def beyond_blocks(texts: Sequence[Ids], settings: Settings) -> list[Ids]:
    """Those whose last token does not see all. The others say nothing.

    Raises CalibrationError if there are none.
    """
    blocks = settings.blocks()
    found = [text for text in texts if text and not blocks.seen(1, len(text)).all()]
    if not found:
        raise CalibrationError(
            f"no text is so long that blocks of {settings.block} tokens hide any of it; the longest"
            f" has {max(map(len, texts))}"
        )
    return found


def measure(
    module: torch.jit.ScriptModule,
    manifest: Manifest,
    texts: Sequence[Ids],
    settings: Settings,
    tell: Callable[[int], None] = lambda _: None,
) -> Tensor:
    """Similarities: double [texts, layers]. tell: how many texts are done."""
    found = []
    for done, text in enumerate(texts, 1):
        full = keys(module, manifest, text)
        limited = keys(module, manifest, text, settings.blocks())
        found.append(
            [similarity(*both, settings.window) for both in zip(full, limited, strict=True)]
        )
        tell(done)
    return torch.tensor(found, dtype=torch.double)


def keys(
    module: torch.jit.ScriptModule, manifest: Manifest, text: Ids, blocks: Blocks | None = None
) -> list[Tensor]:
    """Of each layer, rotated: [tokens, kv_heads, width]. blocks: what attention sees; else all."""
    bias = None if blocks is None else _bias(blocks, manifest.num_kv_heads)
    cache = KvCache.empty(manifest)
    for start in range(0, len(text), CHUNK):
        ids = text[start : start + CHUNK]
        positions = torch.arange(start, start + len(ids))
        with running(Step(manifest, [cache], [len(ids)], positions, bias=bias)):
            module(torch.tensor(ids), positions, torch.zeros(1, dtype=torch.int64))
    return cache.keys


def _bias(blocks: Blocks, heads: int) -> Callable[[int, Tensor, Tensor], Tensor]:
    def hide(_: int, __: Tensor, age: Tensor) -> Tensor:
        rows, keys = age.shape
        hidden = torch.zeros(rows, keys).masked_fill(~blocks.seen(rows, keys), -torch.inf)
        return hidden.expand(heads, rows, keys)

    return hide


def similarity(full: Tensor, limited: Tensor, window: int) -> float:
    """Of a layer's keys [tokens, kv_heads, width], mean over windows and heads."""
    return (
        functional.cosine_similarity(_windows(full, window), _windows(limited, window), dim=-1)
        .mean()
        .item()
    )


def _windows(keys: Tensor, window: int) -> Tensor:
    """A vector of each window and head: double [windows, kv_heads, window * width]. The last window
    is filled with zeros, which change no cosine."""
    missing = -len(keys) % window
    filled = functional.pad(keys.double(), (0, 0, 0, 0, 0, missing))
    return filled.unflatten(0, (-1, window)).transpose(1, 2).flatten(2)


def thousandths(similarities: Tensor) -> list[int]:
    """Of the mean over texts [texts, layers], as the policy takes them."""
    return [round(1000 * of_layer) for of_layer in similarities.mean(0).tolist()]
