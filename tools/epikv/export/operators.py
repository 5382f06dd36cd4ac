"""The two operators every model calls, as a plain reference in Python; and three that it may call.

The daemon registers the same schemas in C++. `block` may return its argument, so its schema says
that they alias. `attention` writes the KV cache, which no schema can say: it is registered as
CONSERVATIVE, so the TorchScript compiler never merges, moves or deletes a call. (Under the default
analysis, freezing merges equal calls and deletes unused ones without a word.)

Shapes use n packed rows of all sequences, S cached tokens, H query heads, G key-value heads and
D channels.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import Tensor

from epikv.export.manifest import Layer, Manifest, Rope

_library = torch.library.Library("epikv", "DEF")
_library.define("block(Tensor(a) residual, int layer) -> Tensor(a)", alias_analysis="FROM_SCHEMA")
_library.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor normed, int layer) -> Tensor",
    alias_analysis="CONSERVATIVE",
)
_library.define(
    "rms_norm(Tensor x, Tensor weight, float eps, bool wide=False, float offset=0.) -> Tensor"
)
_library.define("swiglu(Tensor gate, Tensor up) -> Tensor")
_library.define(
    "quantized_linear(Tensor x, Tensor weight, Tensor scale, Tensor? bias=None) -> Tensor"
)


@dataclass
class KvCache:
    """Keys and values of one sequence. A forward that throws leaves it undefined."""

    keys: list[Tensor]  # per layer [S, G, D], rotated
    values: list[Tensor]  # per layer [S, G, D]

    @classmethod
    def empty(cls, manifest: Manifest) -> "KvCache":
        dtype = getattr(torch, manifest.dtype)
        heads = manifest.num_kv_heads
        return cls(
            [torch.empty(0, heads, layer.key_width, dtype=dtype) for layer in manifest.layers],
            [torch.empty(0, heads, layer.value_width, dtype=dtype) for layer in manifest.layers],
        )

    def __len__(self) -> int:
        return self.keys[0].shape[0]


@dataclass
class Step:
    """One forward: whose rows it packs, and what the operators saw."""

    manifest: Manifest
    caches: list[KvCache]
    counts: list[int]  # rows of each sequence, in packed order
    positions: Tensor  # [n], RoPE positions
    residuals: list[Tensor] = field(default_factory=list)  # entering block l: [n, hidden]
    attended: list[int] = field(default_factory=list)  # layers whose attention ran, in order
    # Called for each layer and sequence with the new rows' probabilities, [H, n, S]; for each layer
    # with all rows' queries before RoPE, [n, H, D].
    watch: Callable[[int, Tensor], None] | None = None
    watch_queries: Callable[[int, Tensor], None] | None = None
    # Called for each layer with what its attention is given of all rows, [n, hidden].
    watch_inputs: Callable[[int, Tensor], None] | None = None
    # Of one sequence: called for each layer with what its attention is given of the new rows,
    # [n, hidden], and how much older than each row each key is, [n, S]. What is added to the logits
    # of each key-value head, [G, n, S].
    bias: Callable[[int, Tensor, Tensor], Tensor] | None = None
    # Called with what enters the first block, [n, hidden]: what is read in its place.
    replace: Callable[[Tensor], Tensor] | None = None


# A model that is ready to run: of TorchScript, or compiled. Takes (token_ids, positions, last).
Module = Callable[[Tensor, Tensor, Tensor], Tensor]

_current: ContextVar[Step] = ContextVar("epikv_step")


def forward(
    module: Module,
    manifest: Manifest,
    batch: Sequence[tuple[KvCache, Sequence[int]]],
    last: Sequence[int] | None = None,
) -> Tensor:
    """Feeds each sequence its new token ids and appends to its cache.

    Returns float32 logits of the packed rows `last` (default: all), [len(last), vocabulary].
    Positions continue each sequence's cache.
    """
    counts = [len(token_ids) for _, token_ids in batch]
    positions = torch.cat(
        [
            torch.arange(len(cache), len(cache) + n)
            for (cache, _), n in zip(batch, counts, strict=True)
        ]
    )
    token_ids = torch.tensor([token for _, ids in batch for token in ids])
    rows = torch.arange(len(token_ids)) if last is None else torch.tensor(last, dtype=torch.int64)
    with running(Step(manifest, [cache for cache, _ in batch], counts, positions)):
        return module(token_ids, positions, rows)


@contextmanager
def running(step: Step, *, gradients: bool = False) -> Iterator[Step]:
    """Binds the operators to `step` on this thread. gradients: as the caller has them; else none."""
    token = _current.set(step)
    try:
        with nullcontext() if gradients else torch.inference_mode():
            yield step
    finally:
        _current.reset(token)


def _block(residual: Tensor, layer: int) -> Tensor:
    step = _current.get()
    if layer != len(step.residuals):
        raise RuntimeError(f"block({layer}) was called where block({len(step.residuals)}) was due")
    if layer == 0 and step.replace is not None:
        residual = step.replace(residual)
    step.residuals.append(residual.clone())
    return residual


def _rms_norm(
    x: Tensor, weight: Tensor, eps: float, wide: bool = False, offset: float = 0.0
) -> Tensor:
    """x [..., C] over its root mean square, in float32; then narrowed and weighed by weight [C].
    `wide`: weighed by offset + weight in float32, then narrowed."""
    of = x.float()
    normed = of * torch.rsqrt(of.pow(2).mean(-1, keepdim=True) + eps)
    if wide:
        return ((offset + weight.float()) * normed).to(x.dtype)
    return weight * normed.to(x.dtype)


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def _quantized_linear(
    x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None
) -> Tensor:
    """x [..., in] by a weight [out, in] of integers, as `epikv.export.quantize` makes it, of groups
    with a scale each, [out, in / group]. x too is rounded to 8 bits in those groups."""
    integers = weight if weight.dtype == torch.int8 else _unpack(weight)
    groups = scale.shape[1]
    wide = integers.float().unflatten(1, (groups, -1)) * scale.float().unsqueeze(-1)
    of = x.float().unflatten(-1, (groups, -1))
    step = of.abs().amax(-1, keepdim=True) / 127
    rounded = torch.where(step > 0, (of / step).round() * step, of)
    bias = None if bias is None else bias.float()
    return torch.nn.functional.linear(rounded.flatten(-2), wide.flatten(1), bias).to(x.dtype)


def _unpack(weight: Tensor) -> Tensor:
    """Two integers of 4 bits out of each byte: [out, in / 2] -> [out, in]."""
    return torch.stack([weight & 15, weight >> 4], -1).flatten(1).to(torch.int8) - 8


def _attention(q: Tensor, k: Tensor, v: Tensor, normed: Tensor, layer: int) -> Tensor:
    step = _current.get()
    if layer != len(step.attended):
        raise RuntimeError(
            f"attention({layer}) was called where attention({len(step.attended)}) was due"
        )
    step.attended.append(layer)
    if step.watch_queries is not None:
        step.watch_queries(layer, q)
    if step.watch_inputs is not None:
        step.watch_inputs(layer, normed)
    facts = step.manifest.layers[layer]
    rope = step.manifest.ropes[facts.rope]
    q, k = _rotate(q, rope, step.positions), _rotate(k, rope, step.positions)
    result = []
    split = (t.split(step.counts) for t in (q, k, v))
    for cache, *new in zip(step.caches, *split, strict=True):
        cache.keys[layer] = torch.cat([cache.keys[layer], new[1]])
        cache.values[layer] = torch.cat([cache.values[layer], new[2]])
        age = _age(new[0].shape[0], len(cache.keys[layer]))
        bias = None if step.bias is None else step.bias(layer, normed, age)
        weights = _weights(new[0], cache.keys[layer], facts, age, bias)
        if step.watch is not None:
            step.watch(layer, weights)
        result.append(_mix(weights, cache.values[layer]).to(q.dtype))
    return torch.cat(result)


def _age(rows: int, keys: int) -> Tensor:
    """How much older than each of the newest rows each key is: [rows, keys]."""
    return torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)


def _weights(
    q: Tensor, keys: Tensor, facts: Layer, age: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Causal attention of the newest rows q [n, H, D] over keys [S, G, D], in float32 [H, n, S]."""
    groups = q.shape[1] // keys.shape[1]
    keys = keys.float().repeat_interleave(groups, dim=1)
    logits = torch.einsum("nhd,shd->hns", q.float(), keys) * facts.scale
    if facts.soft_cap is not None:
        logits = facts.soft_cap * torch.tanh(logits / facts.soft_cap)
    if bias is not None:
        logits = logits + bias.repeat_interleave(groups, dim=0)
    hidden = age < 0 if facts.window is None else (age < 0) | (age >= facts.window)
    return logits.masked_fill(hidden, -torch.inf).softmax(-1)


def _mix(weights: Tensor, values: Tensor) -> Tensor:
    """Values [S, G, D] by weights [H, n, S]: float32 [n, H, D]."""
    values = values.float().repeat_interleave(weights.shape[0] // values.shape[1], dim=1)
    return torch.einsum("hns,shd->nhd", weights, values)


def _rotate(x: Tensor, rope: Rope, positions: Tensor) -> Tensor:
    """RoPE of x [n, heads, D] at `positions` [n], in float32, back in x's dtype."""
    if rope.layout != "half":
        raise NotImplementedError(f"RoPE layout '{rope.layout}'")
    angles = positions[:, None].float() * torch.tensor(rope.inv_freq, dtype=torch.float32)
    cos = (angles.cos() * rope.attention_factor)[:, None]  # [n, 1, D / 2]
    sin = (angles.sin() * rope.attention_factor)[:, None]
    half = angles.shape[1]
    low, high, rest = x.float().split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1).to(x.dtype)


_library.impl("block", _block, "CompositeImplicitAutograd")
_library.impl("attention", _attention, "CompositeImplicitAutograd")
_library.impl("rms_norm", _rms_norm, "CompositeImplicitAutograd")
_library.impl("swiglu", _swiglu, "CompositeImplicitAutograd")
_library.impl("quantized_linear", _quantized_linear, "CompositeExplicitAutograd")
