"""How much of what a model says each head looks up far back, for headkv and duo_attention.

A head looks a token up where it attends most to an earlier occurrence of the very token that comes
next. Its score is the share of tokens that it looks up, of those that have been said far back: the
retrieval score (arXiv 2404.15574) that HeadKV (arXiv 2410.19258) shares budgets out by. There the
token is of a needle that was put into a text; here, whatever the texts repeat.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epikv.export.manifest import Manifest
from epikv.export.operators import KvCache, Step, running

CHUNK = 64  # rows of a forward
Ids = Sequence[int]


class CalibrationError(ValueError):
    """The texts do not say what is asked of them."""


@dataclass(frozen=True)
class Profile:
    scores: Tensor  # double [layers, kv_heads], the mean over a KV head's query heads
    tokens: int  # that had been said far back


def measure(
    module: torch.jit.ScriptModule,
    manifest: Manifest,
    texts: Sequence[Ids],
    gap: int,
    tell: Callable[[int], None] = lambda _: None,
) -> Profile:
    """gap: how many tokens back is far, from the token that attends. tell: how many texts are done.

    Raises CalibrationError if no text repeats what it said far back, or no head looks it up.
    """
    found = torch.zeros(len(manifest.layers), manifest.num_heads, dtype=torch.double)
    tokens = 0
    for done, text in enumerate(texts, 1):
        tokens += _read(module, manifest, torch.tensor(text), gap, found)
        tell(done)
    if tokens == 0:
        raise CalibrationError(f"the texts repeat no token that is {gap} tokens back or more")
    if not found.any():
        raise CalibrationError("no head looks up what comes next: there is nothing to go by")
    by_kv_head = found.unflatten(1, (manifest.num_kv_heads, -1)).mean(-1)
    return Profile(by_kv_head / tokens, tokens)


def _read(
    module: torch.jit.ScriptModule, manifest: Manifest, text: Tensor, gap: int, found: Tensor
) -> int:
    """Adds to `found` [layers, heads] what heads look up in a text. Returns how many tokens they
    might have."""
    cache = KvCache.empty(manifest)
    tokens = 0
    for start in range(0, len(text), CHUNK):
        ids = text[start : start + CHUNK]
        positions = torch.arange(start, start + len(ids))
        said = said_far_back(text, positions, gap)

        def watch(layer: int, weights: Tensor, said: Tensor = said) -> None:
            favourites = weights.argmax(-1, keepdim=True)  # [heads, n, 1]
            found[layer] += said.expand(len(weights), -1, -1).gather(2, favourites).sum((1, 2))

        with running(Step(manifest, [cache], [len(ids)], positions, watch=watch)):
            module(ids, positions, torch.zeros(1, dtype=torch.int64))
        tokens += int(said.any(-1).sum())
    return tokens


def said_far_back(text: Tensor, rows: Tensor, gap: int) -> Tensor:
    """Which tokens up to the newest row are what comes after a row, and `gap` before it or more:
    bool [rows, rows[-1] + 1]. Nothing comes after the text's last."""
    seen = torch.arange(int(rows[-1]) + 1)
    after = text[(rows + 1).clamp_max(len(text) - 1)]
    is_next = (text[seen] == after[:, None]) & (rows + 1 < len(text))[:, None]
    return is_next & (seen <= rows[:, None] - gap)
