"""Layers and thresholds by which thinkv_tbe tells types of thought apart.

A layer's sparsity at a step is the share of the cached keys to which a query head gives less than
1 % of the probability of its favourite, averaged over query heads. In some layers its density over
many steps has three modes: execution, reasoning, transition. The minima between them are the
thresholds (ThinKV, arXiv 2510.01290).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from epikv.export.manifest import Manifest
from epikv.export.operators import KvCache, Step, running

NEGLIGIBLE = 0.01  # of a row's largest probability
LAYERS = 4  # at most so many are used
CHUNK = 64  # rows of a forward
BINS = 1024


class CalibrationError(ValueError):
    """The measurements do not say what is asked of them."""


@dataclass(frozen=True)
class Modes:
    """The maxima of a density, and the minima between them, ascending."""

    maxima: list[float]
    minima: list[float]
    depth: float  # of the shallowest minimum: 1 less its share of the lower maximum beside it


@dataclass(frozen=True)
class Choice:
    layers: list[int]
    theta1: float
    theta2: float


def measure(
    module: torch.jit.ScriptModule,
    manifest: Manifest,
    texts: Iterable[Sequence[int]],
    first: int,
) -> Tensor:
    """Sparsity of every layer at the tokens of each text from index `first` on: [layers, steps]."""
    steps: list[list[Tensor]] = [[] for _ in manifest.layers]
    for text in texts:
        cache = KvCache.empty(manifest)
        for start in range(0, len(text), CHUNK):
            ids = text[start : start + CHUNK]
            positions = torch.arange(start, start + len(ids))

            def watch(layer: int, weights: Tensor, positions: Tensor = positions) -> None:
                steps[layer].append(sparsity(weights)[positions >= first])

            with running(Step(manifest, [cache], [len(ids)], positions, watch=watch)):
                module(torch.tensor(ids), positions, torch.zeros(1, dtype=torch.int64))
    if not steps[0]:
        return torch.empty(len(steps), 0)
    return torch.stack([torch.cat(of_layer) for of_layer in steps])


def sparsity(weights: Tensor) -> Tensor:
    """Of attention rows [heads, n, S], of which the last n of S keys are the rows' own: [n]."""
    n, seen = weights.shape[1], weights.shape[2]
    negligible = (weights < NEGLIGIBLE * weights.amax(-1, keepdim=True)).sum(-1).double()
    ahead = torch.arange(n - 1, -1, -1)  # keys that a row does not see; all count as negligible
    return ((negligible - ahead) / (seen - ahead)).mean(0)


def modes(values: Tensor, bandwidth: float = 1) -> Modes:
    """Of a Gaussian kernel density; its width is `bandwidth` times Silverman's."""
    values = values.double()
    low, high = values.min().item(), values.max().item()
    if low == high:
        return Modes([low], [], 1)
    quartiles = torch.quantile(_thin(values), torch.tensor([0.25, 0.75], dtype=torch.double))
    spread = values.std().item()
    if quartiles[1] > quartiles[0]:
        spread = min(spread, (quartiles[1] - quartiles[0]).item() / 1.349)
    width = bandwidth * 0.9 * spread * len(values) ** -0.2
    # Beyond the ends, so that a mode there is one.
    edges = torch.linspace(low - 3 * width, high + 3 * width, BINS + 1, dtype=torch.double)
    centres = (edges[1:] + edges[:-1]) / 2
    counts = torch.histogram(values, edges).hist
    density = torch.exp(-0.5 * ((centres[:, None] - centres) / width) ** 2) @ counts

    # Between zeros, so that it rises first, also where a bin is wider than the kernel.
    rising = torch.nn.functional.pad(density, (1, 1)).diff() > 0
    turns = (rising[1:] != rising[:-1]).nonzero()[:, 0]
    maxima = turns[0::2]
    minima, depth = [], 1.0
    for left, right in pairwise(maxima.tolist()):
        between = density[left:right]
        lowest = (between == between.min()).nonzero()[:, 0]  # several where it is 0
        valley = left + int(lowest[len(lowest) // 2])
        minima.append(centres[valley].item())
        beside = min(density[left].item(), density[right].item())
        depth = min(depth, 1 - density[valley].item() / beside)
    return Modes(centres[maxima].tolist(), minima, depth)


def choose(by_layer: Sequence[Modes]) -> Choice:
    """The layers with exactly three modes, those with the deepest minima first."""
    three = [layer for layer, found in enumerate(by_layer) if len(found.maxima) == 3]
    if not three:
        counts = ", ".join(str(len(found.maxima)) for found in by_layer)
        raise CalibrationError(
            "no layer's sparsity has three modes, so it does not tell thoughts apart in this model"
            f" and these texts; modes by layer: {counts}"
        )
    best = sorted(sorted(three, key=lambda layer: -by_layer[layer].depth)[:LAYERS])
    theta1, theta2 = torch.tensor([by_layer[layer].minima for layer in best]).double().mean(0)
    return Choice(best, theta1.item(), theta2.item())


def _thin(values: Tensor) -> Tensor:
    """At most as many as torch.quantile takes, evenly."""
    return values[:: 1 + len(values) // 2**24]
