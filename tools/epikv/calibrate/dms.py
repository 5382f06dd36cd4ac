"""Gates for dms: whether a token may go, told when the token after it comes.

A gate says a number for each KV head; above 0 the token before goes once it is `window` tokens old.
It is trained with the model as it is, with noise and a temperature in place of the decision, so that
the student says what the model says while an ever larger share of tokens goes (Dynamic Memory
Sparsification, arXiv 2506.05345; as in NVIDIA's Model-Optimizer, experimental/dms).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from epikv.calibrate import gates as made
from epikv.calibrate.gates import Gates, Ids, Module, Training
from epikv.export.manifest import Manifest

TEMPERATURE = 0.1
FACTOR, SHIFT = 100.0, -5.0  # what is said is FACTOR times what the map gives, and SHIFT
NEVER = -1e9  # added to a logit, it leaves nothing

TRAINING = Training(depth=1, bias=0.0, rate=3e-4, decay=0.0)
# Of what a layer's attention is given [n, hidden]: how surely the token before each may go. [n, G]
Said = Callable[[int, Tensor], Tensor]


def said_by(gates: Gates) -> Said:
    return lambda layer, given: FACTOR * gates.said(layer, given) + SHIFT


def arrays(gates: Gates) -> dict[str, Tensor]:
    """As the daemon reads them: with factor and shift in the map."""
    return {
        name: FACTOR * value + (SHIFT if name.endswith("bias") else 0.0)
        for name, value in gates.arrays().items()
    }


def _of_token(said: Tensor) -> Tensor:
    """What is said of each token: by the one after it. Nobody says anything of the last."""
    return torch.cat([said[1:], torch.full_like(said[:1], NEVER)])


def _dropped(log_left: Tensor, age: Tensor, window: int) -> Tensor:
    """What is added to logits where the log of what is left of a token is [n, G]: [G, n, n]."""
    return log_left.T[:, None] * (age >= window)


@dataclass(frozen=True)
class Goal:
    """window: tokens that stay; compression: of all others one in so many stays in the end."""

    window: int = 512
    compression: float = 8.0

    def share(self, progress: float) -> float:
        """Of tokens that go, once so much of the training is done."""
        return 1 - 1 / (1 + (self.compression - 1) * progress)


def loss_of(
    module: Module,
    manifest: Manifest,
    ids: Ids,
    goal: Goal,
    share: float,
    said: Said,
    draw: torch.Generator,
) -> Tensor:
    """Of one text, where `share` of its tokens are to go."""
    going: list[Tensor] = []

    def bias(layer: int, given: Tensor, age: Tensor) -> Tensor:
        told = _of_token(said(layer, given))
        uniform = torch.rand(told.shape, generator=draw).clamp(1e-6, 1 - 1e-6)
        noisy = (told + uniform.logit()) / TEMPERATURE  # the difference of two Gumbel numbers
        going.append(noisy[:-1].sigmoid())
        return _dropped(functional.logsigmoid(-noisy), age, goal.window)

    with torch.no_grad():
        teacher = made.logprobs(module, manifest, ids)
    student = made.logprobs(module, manifest, ids, bias)
    divergence = functional.kl_div(teacher, student, log_target=True, reduction="none").sum(-1)
    return divergence.mean() + (share - torch.stack(going).mean()).clamp_min(0)


def train(
    module: Module,
    manifest: Manifest,
    texts: Sequence[Ids],
    training: Training,
    goal: Goal,
    work: Path,
    tell: Callable[[int], None] = lambda _: None,
) -> Gates:
    """See gates.train."""
    gates = Gates(manifest, training)

    def loss(ids: Ids, step: int) -> Tensor:
        draw = torch.Generator().manual_seed(training.seed * 1_000_003 + step)
        share = goal.share((step + 1) / training.steps)
        return loss_of(module, manifest, ids, goal, share, said_by(gates), draw)

    settings = {"policy": "dms", "weights": manifest.weights, **asdict(goal)}
    made.train(gates, training, texts, loss, work, settings, tell)
    return gates


@dataclass(frozen=True)
class Figures:
    """Means over texts: nats a token, and the share of tokens that go."""

    divergence: float
    next_token: float
    gone: float

    def __str__(self) -> str:
        return (
            f"divergence {self.divergence:.4f}, next token {self.next_token:.4f}, gone"
            f" {self.gone:.3f}"
        )


def judge(
    module: Module,
    manifest: Manifest,
    texts: Sequence[Ids],
    training: Training,
    goal: Goal,
    gates: Gates,
) -> dict[str, Figures]:
    """On texts that were held out, with decisions in place of chance: of the gates; of the same with
    each text's tokens in another order, which let as many go; of gates that let none go."""
    draw = torch.Generator().manual_seed(training.seed)
    trained = said_by(gates)

    def shuffled(layer: int, given: Tensor) -> Tensor:
        return trained(layer, given)[torch.randperm(len(given), generator=draw)]

    def none(_: int, given: Tensor) -> Tensor:
        return torch.full((len(given), manifest.num_kv_heads), -1.0)

    ways = {"trained": trained, "shuffled": shuffled, "none": none}
    return {
        name: _mean(_figures(module, manifest, texts, goal, said)) for name, said in ways.items()
    }


def _figures(
    module: Module, manifest: Manifest, texts: Sequence[Ids], goal: Goal, said: Said
) -> Iterator[Figures]:
    for ids in texts:
        gone: list[Tensor] = []

        def bias(layer: int, given: Tensor, age: Tensor, gone: list[Tensor] = gone) -> Tensor:
            goes = _of_token(said(layer, given)) > 0
            gone.append(goes.float().mean())
            return _dropped(goes * NEVER, age, goal.window)

        with torch.no_grad():
            teacher = made.logprobs(module, manifest, ids)
            student = made.logprobs(module, manifest, ids, bias)
            divergence = functional.kl_div(student, teacher, log_target=True, reduction="none")
        yield Figures(
            divergence.sum(-1).mean().item(),
            made.next_token(student, ids).item(),
            torch.stack(gone).mean().item(),
        )


def _mean(figures: Iterator[Figures]) -> Figures:
    rows = [tuple(asdict(row).values()) for row in figures]
    return Figures(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))
