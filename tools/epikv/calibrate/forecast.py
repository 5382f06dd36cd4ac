"""What epikv_forecast knows of a model: read-outs of a token's worth by age, and the moments of queries.

What a token is worth to a KV head from an age on is the largest attention that it gets from one of the head's queries at
least so much younger. Ridge regressions read the log of that off what the token's layer is given, at its birth. The
moments are of queries before RoPE: what they would ask of a key is Expected Attention (arXiv 2510.00636).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from epikv.export.manifest import Manifest
from epikv.export.operators import KvCache, Step, running

CHUNK = 64  # rows of a forward
AGES = tuple(4**power for power in range(2, 8))  # tokens; policies/epikv/forecast.cc takes up to 12
LEAST = 1e-3  # a smaller attention counts as this one
ROUNDING = 1e-5  # of a logarithm in float32
LEAST_TEXTS = 8  # that are twice as long as an age
OUTLIERS = 4  # first tokens of a text, whose queries do not count (CacheView::kFirstMeasuredQuery)
STRENGTHS = (1e-3, 1e-2, 1e-1, 1.0)  # of the ridge, in units of a channel's mean variance
Ids = Sequence[int]


class CalibrationError(ValueError):
    """The texts do not say what is asked of them."""


@dataclass(frozen=True)
class Samples:
    """Of all tokens of a text."""

    given: Tensor  # float32 [layers, n, hidden]
    worth: Tensor  # the log of it, float32 [ages, layers, n, kv_heads]
    left: Tensor  # tokens that follow in the text, [n]


@dataclass
class Moments:
    """Sums over queries, in double, by layer and head."""

    count: int
    total: Tensor  # [layers, heads, width]
    squares: Tensor  # [layers, heads, width, width]

    @classmethod
    def none(cls, manifest: Manifest) -> "Moments":
        width = max(layer.key_width for layer in manifest.layers)
        shape = (len(manifest.layers), manifest.num_heads, width)
        zeros = torch.zeros(*shape, width, dtype=torch.double)
        return cls(0, torch.zeros(shape, dtype=torch.double), zeros)


def ages_of(texts: Sequence[Ids]) -> list[int]:
    """Those that the texts can tell of. Raises CalibrationError where there is none."""
    found = [age for age in AGES if sum(len(text) >= 2 * age for text in texts) >= LEAST_TEXTS]
    if not found:
        raise CalibrationError(f"{LEAST_TEXTS} texts of {2 * AGES[0]} tokens or more are needed")
    return found


def measure(
    module: torch.jit.ScriptModule,
    manifest: Manifest,
    ids: Ids,
    ages: Sequence[int],
    moments: Moments,
) -> Samples:
    """Of all tokens of a text; adds their queries to `moments`."""
    layers, heads = len(manifest.layers), manifest.num_kv_heads
    cache = KvCache.empty(manifest)
    most = torch.zeros(len(ages), layers, heads, len(ids))
    given: list[list[Tensor]] = [[] for _ in range(layers)]
    for start in range(0, len(ids), CHUNK):
        part = ids[start : start + CHUNK]
        positions = torch.arange(start, start + len(part))
        seen = start + len(part)
        by_age = positions[:, None] - torch.arange(seen)
        outliers = max(0, OUTLIERS - start)

        def attended(
            layer: int, weights: Tensor, by_age: Tensor = by_age, seen: int = seen
        ) -> None:
            of_heads = weights.unflatten(0, (heads, -1)).amax(1)  # [G, rows, seen]
            for into, age in zip(most, ages, strict=True):
                old = of_heads.masked_fill(by_age < age, 0).amax(1)
                into[layer, :, :seen] = torch.maximum(into[layer, :, :seen], old)

        def asked(layer: int, queries: Tensor, outliers: int = outliers) -> None:
            rows = queries[outliers:].double().transpose(0, 1)  # [H, rows, width]
            moments.total[layer] += rows.sum(1)
            moments.squares[layer] += rows.mT @ rows

        step = Step(
            manifest,
            [cache],
            [len(part)],
            positions,
            watch=attended,
            watch_queries=asked,
            watch_inputs=lambda layer, rows: given[layer].append(rows.float().clone()),
        )
        with running(step):
            module(torch.tensor(part), positions, torch.zeros(1, dtype=torch.int64))
        moments.count += max(0, len(part) - outliers)
    worth = most.transpose(2, 3).clamp_min(LEAST).log()
    left = torch.arange(len(ids) - 1, -1, -1)
    return Samples(torch.stack([torch.cat(rows) for rows in given]), worth, left)


def fit(
    texts: Sequence[Samples], ages: Sequence[int], tell: Callable[[int], None] = lambda _: None
) -> tuple[dict[str, Tensor], list[float]]:
    """The arrays of a gate of one map (policies/mlp_gate.h), a head's ages side by side; and, by age, how much of the
    variance one half of the texts explains of the other, mean over those layers and heads that attend to such tokens.
    tell: layers that are done."""
    halves = _dealt(texts)
    layers, heads = texts[0].given.shape[0], texts[0].worth.shape[3]
    explained: list[list[Tensor]] = [[] for _ in ages]
    arrays = {}
    for layer in range(layers):
        maps = []
        for number, age in enumerate(ages):
            one, other = (_sums(half, number, age, layer) for half in halves)
            spread = _spread(one, heads) + _spread(other, heads)
            attends = spread > 0
            errors = torch.stack([_across(one, other, heads, each) for each in STRENGTHS])
            missed = errors[:, attends] / spread[attends]
            best = int(missed.sum(1).argmin())
            explained[number].append(1 - missed[best])
            fitted = _ridge(one + other, heads, STRENGTHS[best])
            fitted[-1] += math.log(LEAST)
            maps.append(fitted)
        both = torch.stack(maps, 2).flatten(1)  # [hidden + 1, kv_heads x ages]
        arrays[f"layers.{layer}.linear1.weight"] = both[:-1].T.float().contiguous()
        arrays[f"layers.{layer}.linear1.bias"] = both[-1].float().contiguous()
        tell(layer + 1)
    shares = [torch.cat(of_age) for of_age in explained]
    return arrays, [float(share.mean()) if len(share) else 0.0 for share in shares]


def _dealt(texts: Sequence[Samples]) -> tuple[list[Samples], list[Samples]]:
    """Two halves, of long texts and of short ones alike."""
    by_length = sorted(texts, key=lambda text: len(text.left))
    swapped = np.random.default_rng(0).integers(2, size=len(texts))
    halves: tuple[list[Samples], list[Samples]] = ([], [])
    for place, text in enumerate(by_length):
        halves[(place + swapped[place // 2]) % 2].append(text)
    return halves


def queries(moments: Moments) -> dict[str, Tensor]:
    """The arrays of the queries' mean and covariance: float32 [heads, width], [heads, width, width]."""
    mean = moments.total / moments.count
    covariance = moments.squares / moments.count - mean[..., None] * mean[..., None, :]
    arrays = {}
    for layer, (of_mean, of_spread) in enumerate(zip(mean, covariance, strict=True)):
        arrays[f"layers.{layer}.query_mean"] = of_mean.float().contiguous()
        arrays[f"layers.{layer}.query_covariance"] = of_spread.float().contiguous()
    return arrays


def _sums(texts: Sequence[Samples], number: int, age: int, layer: int) -> Tensor:
    """Sums of products of (channels, 1, labels), of the tokens with `age` more behind them. Labels are what is above the
    log of LEAST: all 0 of a head that attends to none."""
    counted = [text.left >= age for text in texts]
    pairs = list(zip(texts, counted, strict=True))
    x = torch.cat([text.given[layer, some] for text, some in pairs]).double()
    y = torch.cat([text.worth[number, layer, some] for text, some in pairs]).double()
    above = y - math.log(LEAST)
    above = above.where(above.abs() > ROUNDING, 0)
    rows = torch.cat([x, x.new_ones(len(x), 1), above], 1)
    return rows.T @ rows


def _ridge(sums: Tensor, heads: int, strength: float) -> Tensor:
    """Weights and, last, biases: [hidden + 1, kv_heads]."""
    size = len(sums) - heads - 1
    count = sums[size, size].clamp_min(1)
    mean_x, mean_y = sums[size, :size] / count, sums[size, size + 1 :] / count
    within = sums[:size, :size] / count - mean_x[:, None] * mean_x
    across = sums[:size, size + 1 :] / count - mean_x[:, None] * mean_y
    ridge = (strength * within.diagonal().mean()).clamp_min(1e-30)
    weights = torch.linalg.solve(within + ridge * torch.eye(size, dtype=within.dtype), across)
    return torch.cat([weights, (mean_y - mean_x @ weights)[None]])


def _across(one: Tensor, other: Tensor, heads: int, strength: float) -> Tensor:
    """Squared errors of each half's fit on the other: [kv_heads]."""
    fits = [_ridge(half, heads, strength) for half in (one, other)]
    return _miss(other, fits[0]) + _miss(one, fits[1])


def _miss(sums: Tensor, fitted: Tensor) -> Tensor:
    """The sum of a fit's squared errors: [kv_heads]."""
    miss = torch.cat([-fitted, torch.eye(fitted.shape[1], dtype=fitted.dtype)])
    return torch.einsum("ih,ij,jh->h", miss, sums, miss)


def _spread(sums: Tensor, heads: int) -> Tensor:
    """The sum of squared deviations of the labels from their mean: [kv_heads]."""
    first = len(sums) - heads
    mean = sums[first - 1, first:] / sums[first - 1, first - 1].clamp_min(1)
    return sums.diagonal()[first:] - sums[first - 1, first - 1] * mean.square()
