"""A linear probe of the residual stream that foretells what epikv_probe should keep.

What a token is worth to a cache is the largest attention that it gets, in any layer and head, from
a query at least `gap` tokens younger. A ridge regression reads that off the residual after a block
as the policy sees it: at the token's birth, brought to root mean square 1.

By age, the same is read off for several gaps: of what the next tokens look at most is said from where on they do not
any more. That is in units of attention, so that tokens of different ages can be compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from epikv.export.manifest import Manifest
from epikv.export.operators import KvCache, Step, running

CHUNK = 64  # rows of a forward
EPSILON = 1e-6  # under the root, as in policies/epikv/probe.cc
TOP = 0.1  # of a text's tokens, those that a probe ought to find
STRENGTHS = tuple(10.0**power for power in range(-6, 2))  # in units of a channel's mean variance
LEAST_TOKENS, LEAST_TEXTS = 20, 8
LEVEL = 0.05  # of the interval, over all layers of which the best is taken
# Read-outs by age explain at least such a share of what they could: weaker weights serve other kinds of text better.
EXPLAINED = 0.6
AGES = tuple(2**power for power in range(4, 16))  # tokens, of read-outs by age


class CalibrationError(ValueError):
    """The measurements do not say what is asked of them."""


@dataclass(frozen=True)
class Text:
    ids: Sequence[int]
    first: int = 0  # index of the first token that counts


@dataclass(frozen=True)
class Probe:
    layer: int
    weights: list[float]  # [hidden]; what it reads has standard deviation 1 over the texts
    recall: list[float]  # by layer, see `recall`
    interval: tuple[float, float]  # of the chosen layer's, 95 % for all layers at once
    strength: float  # of the ridge
    texts: int
    tokens: int


@dataclass(frozen=True)
class ReadOut:
    """What a token will be worth from an age on: the largest attention from a query at least so much younger."""

    age: int  # tokens
    weights: list[float]  # [hidden]
    bias: float


def measure(
    module: torch.jit.ScriptModule, manifest: Manifest, text: Text, gap: int
) -> tuple[Tensor, Tensor]:
    """Of the tokens that count and are at least `gap` older than the text's end: what a probe reads
    after every block, double [layers, n, hidden], and what it should say, [n]."""
    residuals, [far] = measure_all(module, manifest, text, [gap])
    counted = _counted(text, gap)
    return normalised(residuals[:, counted]), far[counted].double()


def _counted(text: Text, gap: int) -> slice:
    return slice(text.first, max(text.first, len(text.ids) - gap))


def measure_all(
    module: torch.jit.ScriptModule, manifest: Manifest, text: Text, gaps: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Of all tokens of a text: residuals after every block, [layers, n, hidden], and the largest attention from a query
    at least `gap` younger, [gaps, n]."""
    cache = KvCache.empty(manifest)
    far = torch.zeros(len(gaps), len(text.ids))
    chunks: list[Tensor] = []
    for start in range(0, len(text.ids), CHUNK):
        ids = text.ids[start : start + CHUNK]
        positions = torch.arange(start, start + len(ids))
        seen = start + len(ids)
        ages = positions[:, None] - torch.arange(seen)

        def watch(_: int, weights: Tensor, ages: Tensor = ages, seen: int = seen) -> None:
            by_query = weights.amax(0)  # of the heads
            for of, gap in zip(far, gaps, strict=True):
                most = by_query.masked_fill(ages < gap, 0).amax(0)
                of[:seen] = torch.maximum(of[:seen], most)

        with running(Step(manifest, [cache], [len(ids)], positions, watch=watch)) as step:
            module(torch.tensor(ids), positions, torch.zeros(1, dtype=torch.int64))
        chunks.append(torch.stack(step.residuals[1:]))
    return torch.cat(chunks, 1), far


def normalised(residuals: Tensor) -> Tensor:
    """Rows of root mean square 1, in double."""
    rows = residuals.double()
    return rows / (rows.square().mean(-1, keepdim=True) + EPSILON).sqrt()


def moments(residuals: Tensor, labels: Tensor) -> Tensor:
    """Sums of products of (channels, 1, label), by layer: [layers, hidden + 2, hidden + 2]. Those of
    several texts add up."""
    layers, count, _ = residuals.shape
    one = torch.ones(layers, count, 1, dtype=torch.double)
    rows = torch.cat([residuals, one, labels.expand(layers, count)[..., None]], -1)
    return rows.mT @ rows


def regress(sums: Tensor, strength: Tensor) -> Tensor:
    """Ridge regression from `moments`: weights and intercept, [layers, hidden + 1]. strength:
    [layers]"""
    hidden = sums.shape[-1] - 2
    covariance, mean = centred(sums)
    within = covariance[:, :hidden, :hidden]
    ridge = strength * within.diagonal(dim1=1, dim2=2).mean(-1)
    # Of a stream without variance (no text has one), nothing.
    within = within + ridge.clamp_min(1e-30)[:, None, None] * torch.eye(hidden, dtype=torch.double)
    weights = torch.linalg.solve(within, covariance[:, :hidden, -1])
    intercept = mean[:, -1] - (weights * mean[:, :hidden]).sum(-1)
    return torch.cat([weights, intercept[:, None]], -1)


def centred(sums: Tensor) -> tuple[Tensor, Tensor]:
    """Covariance and mean of (channels, label) from `moments`."""
    some = [*range(sums.shape[-1] - 2), sums.shape[-1] - 1]
    mean = sums[:, some, -2] / sums[:, -2:-1, -2]
    return sums[:, some][:, :, some] / sums[:, -2, -2, None, None] - (
        mean[:, :, None] * mean[:, None, :]
    ), mean


def error(sums: Tensor, fit: Tensor) -> Tensor:
    """The mean squared error of a fit on what `moments` are of: [layers]."""
    miss = torch.cat([-fit, torch.ones(len(fit), 1, dtype=torch.double)], -1)
    return torch.einsum("li,lij,lj->l", miss, sums, miss) / sums[:, -2, -2]


def recall(scores: Tensor, labels: Tensor) -> Tensor:
    """Of the tenth of a text's tokens with the largest labels [n], the share that is in the better
    half by scores [layers, n]: [layers]. Chance finds one half."""
    count = len(labels)
    wanted = labels.argsort(stable=True)[-max(1, round(TOP * count)) :]
    kept = torch.zeros(scores.shape, dtype=torch.bool)
    kept.scatter_(1, scores.argsort(dim=1, stable=True)[:, -(count // 2) :], True)
    return kept[:, wanted].double().mean(1)


def find(
    module: torch.jit.ScriptModule, manifest: Manifest, texts: Sequence[Text], gap: int
) -> Probe:
    """Fits one half of the texts, and takes the layer that finds most in the other.

    Raises CalibrationError where there is too little text, or no layer finds more than chance.
    """
    usable = [text for text in texts if len(text.ids) - gap - text.first >= LEAST_TOKENS]
    if len(usable) < LEAST_TEXTS:
        raise CalibrationError(
            f"{len(usable)} of {len(texts)} texts have {LEAST_TOKENS} tokens that count and are at"
            f" least {gap} older than the end; {LEAST_TEXTS} are needed"
        )
    order = np.random.default_rng(0).permutation(len(usable))
    to_fit, to_judge = np.array_split(order, 2)
    parts: list[Tensor | int] = [0, 0]
    for place, number in enumerate(to_fit):
        parts[place % 2] = parts[place % 2] + moments(
            *measure(module, manifest, usable[number], gap)
        )
    one, other = (torch.as_tensor(part) for part in parts)
    weights, strengths = fitted(one, other)
    recalls, tokens = [], int((one + other)[0, -2, -2])
    for number in to_judge:
        residuals, labels = measure(module, manifest, usable[number], gap)
        recalls.append(recall((residuals @ weights[..., None])[..., 0], labels))
        tokens += len(labels)
    found = torch.stack(recalls).numpy()  # [texts, layers]
    layer = int(found.mean(0).argmax())
    interval = confidence(found[:, layer], LEVEL / found.shape[1])
    by_layer = [float(share) for share in found.mean(0)]
    if interval[0] <= 0.5:
        raise CalibrationError(
            "no block's residual foretells attention in this model and these texts: "
            + shown(layer, by_layer, interval)
        )
    return Probe(
        layer,
        weights[layer].tolist(),
        by_layer,
        interval,
        float(strengths[layer]),
        len(usable),
        tokens,
    )


def by_age(
    module: torch.jit.ScriptModule, manifest: Manifest, texts: Sequence[Text], layer: int
) -> list[ReadOut]:
    """Read-outs of the residual after block `layer`, for those of AGES that LEAST_TEXTS texts have twice over."""

    def long_enough(age: int) -> list[int]:
        # In what is left of a text behind an age, as much should be able to look at a token as before.
        return [i for i, text in enumerate(texts) if len(text.ids) - text.first >= 2 * age]

    halves: dict[int, dict[int, int]] = {}  # by age, of each text that is read for it
    for age in AGES:
        if len(enough := long_enough(age)) < LEAST_TEXTS:
            break
        dealt = np.random.default_rng(0).permutation(enough)
        halves[age] = {int(text): place % 2 for place, text in enumerate(dealt)}
    size = manifest.hidden_size + 2
    parts = torch.zeros(len(halves), 2, 1, size, size, dtype=torch.double)
    for number, text in enumerate(texts):
        ages = [age for age, of in halves.items() if number in of]
        if not ages:
            continue
        residuals, far = measure_all(module, manifest, text, ages)
        rows = normalised(residuals[layer : layer + 1])
        for part, age, labels in zip(
            parts, ages, far, strict=False
        ):  # those that it has come first
            counted = _counted(text, age)
            part[halves[age][number]] += moments(rows[:, counted], labels[counted].double())
    found = []
    for age, (one, other) in zip(halves, parts, strict=True):
        [fit] = regress(one + other, _strengths(one, other, EXPLAINED))
        found.append(ReadOut(age, fit[:-1].tolist(), float(fit[-1])))
    return found


def fitted(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The weights for both parts, [layers, hidden], so that what they read has standard deviation
    1; and the strength of the ridge, [layers]: that which predicts one part best from the other."""
    strengths = _strengths(one, other)
    weights = regress(one + other, strengths)[:, :-1]
    covariance, _ = centred(one + other)
    spread = torch.einsum("li,lij,lj->l", weights, covariance[:, :-1, :-1], weights).sqrt()
    return weights / spread.clamp_min(1e-30)[:, None], strengths


def _strengths(one: Tensor, other: Tensor, share: float = 1) -> Tensor:
    """By layer, the largest strength with which one part explains of the other's variance at least a share of what it
    explains with the best."""
    errors = []
    for strength in STRENGTHS:
        each = torch.full((len(one),), strength, dtype=torch.double)
        errors.append(error(other, regress(one, each)) + error(one, regress(other, each)))
    whole = sum(centred(part)[0][:, -1, -1] for part in (one, other))
    explained = whole - torch.stack(errors)  # [strengths, layers]
    best = explained.amax(0)
    enough = explained >= torch.where(best > 0, share * best, best)
    last = len(STRENGTHS) - 1 - enough.flip(0).int().argmax(0)
    return torch.tensor(STRENGTHS, dtype=torch.double)[last]


def confidence(shares: np.ndarray, level: float) -> tuple[float, float]:
    """Student's interval of their mean, which misses it with probability `level`. A bootstrap over
    as few texts misses several times as often."""
    middle, deviation = shares.mean(), stats.sem(shares)
    margin = stats.t.isf(level / 2, len(shares) - 1) * deviation
    return float(max(0, middle - margin)), float(min(1, middle + margin))


def shown(layer: int, recalls: Sequence[float], interval: tuple[float, float]) -> str:
    """What the judged half says."""
    by_layer = ", ".join(f"{share:.2f}" for share in recalls)
    return (
        f"block {layer} finds {recalls[layer]:.2f} [{interval[0]:.2f}, {interval[1]:.2f}] of the"
        f" tokens that far queries look at most, where chance finds .50; by block: {by_layer}"
    )
