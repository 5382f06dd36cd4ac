"""Gates for kvzap: the most that a query will take of a token, foretold at its birth.

What a token is worth to a KV head is the largest share that one of its queries adds of it to the
residual stream: alpha |W_O v| / |h|, with h what the query's layer is given (KVzip+). A ridge
regression, or a network of one hidden layer, reads the log of that off what the token's layer is
given (KVzap, arXiv 2601.07891; as in kvpress, kvzap/train.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from epikv.export.manifest import Manifest
from epikv.export.operators import KvCache, Step, running

LEAST = 1e-30  # a share below it counts as this one
RIDGE = 1.0
PASSES = 15  # over the samples, of a network
Ids = Sequence[int]


@dataclass(frozen=True)
class Text:
    """Tokens, and those that ask what they are worth: the text once more behind an instruction, as
    published; or, where that is empty, its own later tokens, at least `gap` behind."""

    ids: Ids
    instruction: Ids = ()
    gap: int = 1


@dataclass(frozen=True)
class Samples:
    given: Tensor  # float32 [layers, n, hidden]
    worth: Tensor  # the log of it, float32 [layers, n, kv_heads]


def measure(module: torch.jit.ScriptModule, manifest: Manifest, text: Text) -> Samples:
    """Of all tokens of a text that some query counts for."""
    count = len(text.ids)
    again = bool(text.instruction)
    ids = [*text.ids, *text.instruction, *text.ids] if again else list(text.ids)
    first = count + len(text.instruction) if again else 0  # of the rows that ask
    asked = slice(0, count if again else max(0, count - text.gap))
    given: list[Tensor] = []
    worth: list[Tensor] = []
    cache = KvCache.empty(manifest)

    def watch(layer: int, weights: Tensor) -> None:
        shares = _shares(module, manifest, layer, weights, cache, given[layer])
        shares = shares[:, first:, asked]  # [H, rows, n]
        if not again:
            age = torch.arange(len(ids))[:, None] - torch.arange(shares.shape[2])
            shares = shares.masked_fill(age < text.gap, 0)
        most = shares.amax(1).unflatten(0, (manifest.num_kv_heads, -1)).amax(1)
        worth.append(most.T.clamp_min(LEAST).log())

    step = Step(
        manifest,
        [cache],
        [len(ids)],
        torch.arange(len(ids)),
        watch=watch,
        watch_inputs=lambda _, of_layer: given.append(of_layer),
    )
    with running(step):
        module(torch.tensor(ids), step.positions, torch.zeros(1, dtype=torch.int64))
        return Samples(torch.stack(given)[:, asked].float().clone(), torch.stack(worth).clone())


def _shares(
    module: torch.jit.ScriptModule,
    manifest: Manifest,
    layer: int,
    weights: Tensor,
    cache: KvCache,
    given: Tensor,
) -> Tensor:
    """What each row takes of each token, as a share of what it is given: [H, rows, tokens]."""
    facts = manifest.layers[layer]
    heads, group = manifest.num_heads, manifest.num_heads // manifest.num_kv_heads
    output = dict(module.named_parameters())[facts.output_projection].float()
    by_head = output.unflatten(1, (heads, facts.value_width)).transpose(0, 1)  # [H, hidden, D]
    values = cache.values[layer].float().repeat_interleave(group, 1).transpose(0, 1)  # [H, S, D]
    length = (values @ by_head.mT).norm(dim=-1)  # [H, S]
    return weights * length[:, None] / given.float().norm(dim=-1)[:, None].clamp_min(LEAST)


def ridge(samples: Samples) -> dict[str, Tensor]:
    """The arrays of a gate of one map (policies/mlp_gate.h)."""
    arrays = {}
    for layer, (of_layer, worth) in enumerate(zip(samples.given, samples.worth, strict=True)):
        x, y = of_layer.double(), worth.double()
        x_mean, y_mean = x.mean(0), y.mean(0)
        inside = (x - x_mean).T @ (x - x_mean) + RIDGE * torch.eye(x.shape[1]).double()
        weight = torch.linalg.solve(inside, (x - x_mean).T @ (y - y_mean)).T
        arrays[f"layers.{layer}.linear1.weight"] = weight.float().contiguous()
        arrays[f"layers.{layer}.linear1.bias"] = (y_mean - weight @ x_mean).float()
    return arrays


def network(
    samples: Samples,
    width: int,
    *,
    passes: int = PASSES,
    rate: float = 5e-3,
    batch: int = 512,
    seed: int = 0,
    tell: Callable[[int], None] = lambda _: None,
) -> dict[str, Tensor]:
    """The arrays of a gate of two maps, all layers fitted together. tell: passes that are done."""
    torch.manual_seed(seed)
    layers, count, hidden = samples.given.shape
    heads = samples.worth.shape[2]
    nets = [(nn.Linear(hidden, width), nn.Linear(width, heads)) for _ in range(layers)]
    parameters = [array for net in nets for linear in net for array in linear.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, passes)
    for done in range(passes):
        for rows in torch.randperm(count).split(batch):
            said = torch.stack(
                [
                    last(functional.gelu(first(samples.given[layer, rows])))
                    for layer, (first, last) in enumerate(nets)
                ]
            )
            loss = functional.mse_loss(said, samples.worth[:, rows])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
        schedule.step()
        tell(done + 1)
    return {
        f"layers.{layer}.linear{i}.{name}": value.detach().clone()
        for layer, net in enumerate(nets)
        for i, linear in enumerate(net, 1)
        for name, value in linear.named_parameters()
    }


def said(arrays: dict[str, Tensor], given: Tensor) -> Tensor:
    """What a gate says of [layers, n, hidden]: [layers, n, kv_heads]."""
    rows = []
    for layer, x in enumerate(given):
        i = 1
        while (weight := arrays.get(f"layers.{layer}.linear{i}.weight")) is not None:
            x = functional.linear(
                functional.gelu(x) if i > 1 else x, weight, arrays[f"layers.{layer}.linear{i}.bias"]
            )
            i += 1
        rows.append(x)
    return torch.stack(rows)


def explained(arrays: dict[str, Tensor], samples: Samples) -> list[float]:
    """R squared of each layer, mean over heads."""
    miss = (samples.worth - said(arrays, samples.given)).square().mean(1)
    spread = samples.worth.var(1, correction=0).clamp_min(LEAST)
    return (1 - miss / spread).mean(1).tolist()


def together(samples: Sequence[Samples]) -> Samples:
    return Samples(
        torch.cat([one.given for one in samples], 1), torch.cat([one.worth for one in samples], 1)
    )
