"""What a model's queries are like before RoPE, for triattention.

Channels that are rotated together are a complex number. Of each query head and pair: the mean of
those numbers, and the mean of their lengths (TriAttention, arXiv 2604.04921).
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from epikv.export.manifest import Manifest, Rope
from epikv.export.operators import KvCache, Step, running

CHUNK = 64  # rows of a forward


def measure(
    module: torch.jit.ScriptModule, manifest: Manifest, texts: Iterable[Sequence[int]]
) -> dict[str, Any]:
    """The data of the policy's artefact, over all tokens of the texts: [layers][heads][pairs] each,
    and the number of tokens."""
    layers = range(len(manifest.layers))
    sums: list[Tensor | None] = [None for _ in layers]  # complex [heads, pairs]
    lengths: list[Tensor | None] = [None for _ in layers]
    tokens = 0

    def watch(layer: int, queries: Tensor) -> None:
        pairs = as_pairs(queries, manifest.ropes[manifest.layers[layer].rope])
        total, length = pairs.sum(0), pairs.abs().sum(0)
        sum_so_far, length_so_far = sums[layer], lengths[layer]
        sums[layer] = total if sum_so_far is None else sum_so_far + total
        lengths[layer] = length if length_so_far is None else length_so_far + length

    for text in texts:
        cache = KvCache.empty(manifest)
        tokens += len(text)
        for start in range(0, len(text), CHUNK):
            ids = text[start : start + CHUNK]
            positions = torch.arange(start, start + len(ids))
            with running(Step(manifest, [cache], [len(ids)], positions, watch_queries=watch)):
                module(torch.tensor(ids), positions, torch.zeros(1, dtype=torch.int64))
    if tokens == 0:
        raise ValueError("the texts hold no tokens")
    means = [total / tokens for total in sums if total is not None]
    return {
        "q_mean_real": [mean.real.tolist() for mean in means],
        "q_mean_imag": [mean.imag.tolist() for mean in means],
        "q_abs_mean": [(length / tokens).tolist() for length in lengths if length is not None],
    }


def as_pairs(queries: Tensor, rope: Rope) -> Tensor:
    """Rotated channels of [n, heads, width] as complex numbers, in double: [n, heads, pairs]."""
    half = len(rope.inv_freq)
    rotated = queries[..., : 2 * half].double()
    if rope.layout == "interleaved":
        return torch.complex(rotated[..., 0::2], rotated[..., 1::2])
    return torch.complex(rotated[..., :half], rotated[..., half:])
