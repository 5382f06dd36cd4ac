"""Gates: small models beside the model, one of each layer, that say of a token at its birth one
number for each KV head (policies/mlp_gate.h). How they are made and trained, whatever they say."""

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from epikv.calibrate import artefacts
from epikv.export.manifest import Manifest
from epikv.export.operators import KvCache, Step, running

HELD_OUT = 10  # one text of so many is not trained on
SAVED_EVERY = 100  # steps
LEAST_RATE = 1e-6
Of = TypeVar("Of")
Ids = Sequence[int]
Module = torch.jit.ScriptModule
# Of a layer, what its attention is given, and the age of each key for each row [n, n]: what is added
# to the logits of each KV head, [G, n, n].
Bias = Callable[[int, Tensor, Tensor], Tensor]


class CalibrationError(ValueError):
    """What was asked for cannot be trained."""


@dataclass(frozen=True)
class Training:
    """How gates are made and trained: `depth` linear maps of a layer, the last one of which is the
    same in all layers if `tied`. bias: of the last map at the start."""

    depth: int
    bias: float
    tied: bool = False
    width: int = 64
    steps: int = 2000
    rate: float = 2e-4
    warm_up: int = 100
    decay: float = 1e-6
    seed: int = 0


class Gates(nn.Module):
    def __init__(self, manifest: Manifest, training: Training) -> None:
        super().__init__()
        torch.manual_seed(training.seed)
        depth = training.depth
        sizes = [manifest.hidden_size, *[training.width] * (depth - 1), manifest.num_kv_heads]

        def linear(i: int) -> nn.Linear:
            made = nn.Linear(sizes[i], sizes[i + 1])
            nn.init.normal_(made.weight, std=0.02)
            nn.init.constant_(made.bias, training.bias if i == depth - 1 else 0.0)
            return made

        last = linear(depth - 1)
        self.linears = [
            [
                *(linear(i) for i in range(depth - 1)),
                last if training.tied else linear(depth - 1),
            ]
            for _ in manifest.layers
        ]
        self.layers = nn.ModuleList(nn.ModuleList(linears) for linears in self.linears)

    def said(self, layer: int, given: Tensor) -> Tensor:
        """given: [n, hidden]. float32 [n, kv_heads]"""
        x = given.float()
        for i, linear in enumerate(self.linears[layer]):
            x = linear(functional.silu(x) if i > 0 else x)
        return x

    def arrays(self) -> dict[str, Tensor]:
        """As the daemon reads them; shared maps are told of each layer."""
        return {
            f"layers.{layer}.linear{i}.{name}": value.detach().clone()
            for layer, linears in enumerate(self.linears)
            for i, linear in enumerate(linears, 1)
            for name, value in linear.named_parameters()
        }


def check(manifest: Manifest) -> None:
    """Raises CalibrationError unless gates can be trained for the model."""
    try:
        artefacts.check(manifest)
    except ValueError as error:
        raise CalibrationError(str(error)) from error
    if manifest.quantization is not None:
        raise CalibrationError(
            f"its linears are of {manifest.quantization}, which rounds gradients away: train on the"
            " same model without --quantize"
        )


def longer_than(texts: Sequence[Ids], tokens: int) -> list[Ids]:
    """The others say nothing."""
    found = [text for text in texts if len(text) > tokens]
    if len(found) < HELD_OUT:
        raise CalibrationError(
            f"{len(found)} of {len(texts)} texts are longer than {tokens} tokens; {HELD_OUT} or"
            " more are needed"
        )
    return found


def parted(texts: Sequence[Of]) -> tuple[list[Of], list[Of]]:
    """Those to train on, and those held out."""
    return [text for i, text in enumerate(texts) if i % HELD_OUT], list(texts[::HELD_OUT])


def logprobs(module: Module, manifest: Manifest, ids: Ids, bias: Bias | None = None) -> Tensor:
    """Of the next token at each place of a text: float32 [n, vocabulary]."""
    positions = torch.arange(len(ids))
    step = Step(manifest, [KvCache.empty(manifest)], [len(ids)], positions, bias=bias)
    with running(step, gradients=True):
        logits: Tensor = module(torch.tensor(ids), positions, positions)
    return logits.log_softmax(-1)


def next_token(student: Tensor, ids: Ids) -> Tensor:
    """Cross-entropy, nats a token."""
    return functional.nll_loss(student[:-1], torch.tensor(ids[1:]))


def train(
    gates: Gates,
    training: Training,
    texts: Sequence[Ids],
    loss: Callable[[Ids, int], Tensor],
    work: Path,
    settings: dict[str, Any],
    tell: Callable[[int], None] = lambda _: None,
) -> None:
    """Trains gates, as they were made, on one text a step. loss: of a text, and of the step's number.

    See take_steps, whose settings are these, the training's and the texts'.
    """
    settings = {**asdict(training), **settings, "texts": digest([list(text) for text in texts])}
    optimizer = torch.optim.AdamW(gates.parameters(), lr=training.rate, weight_decay=training.decay)

    def slope(step: int) -> None:
        loss(drawn(texts, training.seed, step), step).backward()

    steps = Steps(training.steps, lambda step: _rate(training, step), SAVED_EVERY)
    take_steps(gates, optimizer, steps, slope, work, settings, tell)


@dataclass(frozen=True)
class Steps:
    count: int
    rate: Callable[[int], float]  # of learning, in each
    saved_every: int


def take_steps(
    trained: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: Steps,
    slope: Callable[[int], None],
    work: Path,
    settings: dict[str, Any],
    tell: Callable[[int], None] = lambda _: None,
) -> None:
    """Trains what the optimizer has. slope: adds to the gradients what a step takes.

    What was done so far is kept in the file `work`, with `settings`; from there a run that was cut
    off goes on, to the same end. tell: how many steps are done. Raises CalibrationError if the file is
    of other settings.
    """
    done = _resume(work, trained, optimizer, settings)
    tell(done)
    for step in range(done, steps.count):
        for group in optimizer.param_groups:
            group["lr"] = steps.rate(step)
        optimizer.zero_grad()
        slope(step)
        optimizer.step()
        tell(step + 1)
        if (step + 1) % steps.saved_every == 0 or step + 1 == steps.count:
            state = {
                "settings": settings,
                "done": step + 1,
                "trained": trained.state_dict(),
                "optimizer": optimizer.state_dict(),
            }
            work.parent.mkdir(parents=True, exist_ok=True)
            beside = work.with_name(work.name + ".new")
            torch.save(state, beside)
            beside.replace(work)


def digest(of: Any) -> str:
    return hashlib.sha256(json.dumps(of).encode()).hexdigest()


def _rate(training: Training, step: int) -> float:
    """Linear, then a cosine to LEAST_RATE."""
    if step < training.warm_up:
        return training.rate * (step + 1) / training.warm_up
    past = (step - training.warm_up) / max(1, training.steps - training.warm_up)
    return LEAST_RATE + (training.rate - LEAST_RATE) * (1 + math.cos(math.pi * past)) / 2


def drawn(texts: Sequence[Of], seed: int, number: int) -> Of:
    """Each once in each pass, in another order."""
    passed, place = divmod(number, len(texts))
    draw = torch.Generator().manual_seed(seed * 1_000_003 + passed)
    return texts[int(torch.randperm(len(texts), generator=draw)[place])]


def _resume(
    work: Path, trained: nn.Module, optimizer: torch.optim.Optimizer, settings: dict[str, Any]
) -> int:
    """How many steps were done."""
    if not work.exists():
        return 0
    try:
        state = torch.load(work, weights_only=True)
        begun, kept = state["settings"], state["trained"]
    except Exception as error:  # whatever a file that is none of ours makes of it
        raise CalibrationError(f"{work} holds no training: {error}") from error
    differ = [name for name, value in settings.items() if begun.get(name) != value]
    if differ:
        raise CalibrationError(
            f"{work} was begun with another {', another '.join(differ)}: delete it, or name another"
            " with --work"
        )
    trained.load_state_dict(kept)
    optimizer.load_state_dict(state["optimizer"])
    done: int = state["done"]
    return done
