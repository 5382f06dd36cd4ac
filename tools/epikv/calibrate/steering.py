"""Steering (policies/steering.h): a direction in the residual stream that enters one block, from sentences in which a
model turns back on its work to those in which it does it. A difference of means (SkipKV, arXiv 2512.07993)."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epikv.export.manifest import Manifest
from epikv.export.operators import KvCache, Step, running

Ids = Sequence[int]
LEAST = 10  # sentences of a kind, in the texts of either part
HELD_OUT = 4  # one text of so many does not make the direction


class CalibrationError(ValueError):
    """The texts do not say what is asked of them."""


@dataclass(frozen=True)
class Words:
    """Token ids."""

    ends: Collection[int]  # of sentences
    marks: Collection[int]  # a sentence with one of these is marked
    begin: int | None = None  # sentences count behind it; None: from the first token on
    end: int | None = None  # and before it; None: to the last


@dataclass(frozen=True)
class Sentences:
    """Mean residuals of the sentences of each kind. [sentences, hidden]"""

    marked: Tensor
    others: Tensor


@dataclass(frozen=True)
class Direction:
    layer: int
    vector: Tensor  # [hidden]
    # Of a marked sentence and another, both of texts that are held out, how often the other lies
    # further along the vector; .5: chance.
    auc: float
    marked: int  # sentences that made it
    others: int


def spans(ids: Ids, words: Words) -> list[tuple[int, int, bool]]:
    """Sentences: [first, end), and whether it is marked. One that has no end does not count."""
    found = []
    inside = words.begin is None
    first = 0
    for place, token in enumerate(ids):
        if token == words.begin:
            inside, first = True, place + 1
            continue
        if token == words.end:
            inside = False
        if token in words.ends:
            if inside and place > first:
                marked = any(of in words.marks for of in ids[first:place])
                found.append((first, place + 1, marked))
            first = place + 1
    return found


def find(
    module: torch.jit.ScriptModule,
    manifest: Manifest,
    texts: Sequence[Ids],
    words: Words,
    layer: int | None = None,
) -> Direction:
    """The direction at `layer`; without one, at the block where held-out sentences are told apart best.

    Raises CalibrationError where either part of the texts has too few sentences of a kind.
    """
    if layer is not None and not 0 <= layer < len(manifest.layers):
        raise CalibrationError(f"layer must be a block, 0 to {len(manifest.layers) - 1}")
    kept = [text for place, text in enumerate(texts) if place % HELD_OUT < HELD_OUT - 1]
    held_out = texts[HELD_OUT - 1 :: HELD_OUT]
    making = measure(module, manifest, kept, words)
    judging = measure(module, manifest, held_out, words)
    candidates = [
        Direction(
            place,
            vector := direction(made),
            separation(vector, judged),
            len(made.marked),
            len(made.others),
        )
        for place, (made, judged) in enumerate(zip(making, judging, strict=True))
        if layer in (None, place)
    ]
    return max(candidates, key=lambda found: found.auc)


def measure(
    module: torch.jit.ScriptModule, manifest: Manifest, texts: Sequence[Ids], words: Words
) -> list[Sentences]:
    """Of each block, what enters it."""
    kinds: dict[bool, list[Tensor]] = {True: [], False: []}  # [layers, hidden] each
    for ids in texts:
        found = spans(ids, words)
        if not found:
            continue
        positions = torch.arange(len(ids))
        step = Step(manifest, [KvCache.empty(manifest)], [len(ids)], positions)
        with running(step):
            module(torch.tensor(ids), positions, positions[-1:])
        entering = torch.stack(step.residuals[: len(manifest.layers)]).float()
        for first, end, kind in found:
            kinds[kind].append(entering[:, first:end].mean(1))
    for kind, name in ((True, "marked"), (False, "other")):
        if len(kinds[kind]) < LEAST:
            raise CalibrationError(
                f"{len(kinds[kind])} {name} sentences in {len(texts)} texts; at least {LEAST} are needed"
            )
    marked, others = torch.stack(kinds[True], 1), torch.stack(kinds[False], 1)
    return [Sentences(marked[layer], others[layer]) for layer in range(len(marked))]


def direction(sentences: Sentences) -> Tensor:
    """From marked sentences to the others: [hidden]."""
    return sentences.others.mean(0) - sentences.marked.mean(0)


def separation(vector: Tensor, sentences: Sentences) -> float:
    """How often, of a marked sentence and another, the other lies further along the vector."""
    marked, others = (kind @ vector for kind in (sentences.marked, sentences.others))
    pairs = others[:, None] - marked[None]
    return float((pairs > 0).float().mean() + 0.5 * (pairs == 0).float().mean())
