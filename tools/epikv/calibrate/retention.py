"""Gates for trimkv and dbtrimkv: how fast each KV head will forget a token, told at its birth.

A gate says the logit of beta. It is trained with the model as it is: in the student's attention a
key of age a has beta^a of its weight. The student is to say what the model says, and to remember no
more than a budget of tokens (TRIM-KV, arXiv 2512.03324; DBTrimKV, arXiv 2605.09649; schedule and
loss as in the authors' code, ngocbh/trimkv).
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

# Of what a layer's attention is given [n, hidden]: log beta, at most 0. [n, kv_heads]
LogBeta = Callable[[int, Tensor], Tensor]

# The authors begin with a bias of 18, for texts of 16,000 tokens and more; for shorter ones its
# gradients are near nothing. At 9 little is forgotten in some hundreds.
TRAININGS = {
    "trimkv": Training(depth=2, bias=9.0),
    "dbtrimkv": Training(depth=3, bias=9.0, tied=True),
}


@dataclass(frozen=True)
class Loss:
    divergence: Tensor  # of the student from the model, nats a token
    next_token: Tensor  # cross-entropy, nats a token
    excess: Tensor  # what is remembered beyond the budget, as a share of what there is beyond it

    def total(self) -> Tensor:
        return self.divergence + self.next_token + self.excess


def log_beta_of(gates: Gates) -> LogBeta:
    return lambda layer, given: functional.logsigmoid(gates.said(layer, given))


def loss_of(
    module: Module, manifest: Manifest, ids: Ids, budget: int, tied: bool, log_beta: LogBeta
) -> Loss:
    """Of one text. budget: tokens of each lane; tied: of all lanes together, so many each."""
    told: list[Tensor] = []

    def forget(layer: int, given: Tensor, age: Tensor) -> Tensor:
        told.append(log_beta(layer, given))
        return age.clamp_min(0) * told[-1].T[:, None]

    with torch.no_grad():
        teacher = made.logprobs(module, manifest, ids)
    student = made.logprobs(module, manifest, ids, forget)
    divergence = functional.kl_div(student, teacher, log_target=True, reduction="none").sum(-1)
    return Loss(divergence.mean(), made.next_token(student, ids), _excess(told, budget, tied))


def _excess(log_betas: Sequence[Tensor], budget: int, tied: bool) -> Tensor:
    """The mean over places and lanes (tied: all lanes together) at which more than the budget is
    remembered, of how much more, as a share of how much more there is."""
    remembered = torch.stack([_remembered(of_layer) for of_layer in log_betas])  # [L, T, G]
    seen = torch.arange(1.0, remembered.shape[1] + 1)[:, None]
    most = float(budget)
    if tied:
        lanes = remembered.shape[0] * remembered.shape[2]
        remembered, seen, most = remembered.sum((0, 2))[:, None], seen * lanes, most * lanes
    beyond = (remembered - most).clamp_min(0) / (seen - most).clamp_min(1)
    return beyond.sum() / (beyond > 0).sum().clamp_min(1)


def _remembered(log_beta: Tensor) -> Tensor:
    """Tokens that are left after each one, by weight: [T, G] -> [T, G]."""
    tokens = log_beta.shape[0]
    age = torch.arange(tokens)[:, None] - torch.arange(tokens)
    left = (age.clamp_min(0)[..., None] * log_beta).exp()  # [T, T, G]
    return left.masked_fill((age < 0)[..., None], 0).sum(1)


def train(
    module: Module,
    manifest: Manifest,
    policy: str,
    texts: Sequence[Ids],
    training: Training,
    budget: int,
    work: Path,
    tell: Callable[[int], None] = lambda _: None,
) -> Gates:
    """See gates.train."""
    gates = Gates(manifest, training)

    def loss(ids: Ids, _: int) -> Tensor:
        told = log_beta_of(gates)
        return loss_of(module, manifest, ids, budget, training.tied, told).total()

    settings = {"policy": policy, "weights": manifest.weights, "budget": budget}
    made.train(gates, training, texts, loss, work, settings, tell)
    return gates


@dataclass(frozen=True)
class Figures:
    """Means over texts: nats a token, and shares."""

    divergence: float
    next_token: float
    excess: float
    remembered: float  # of a text's tokens, at its end

    def __str__(self) -> str:
        return (
            f"divergence {self.divergence:.4f}, next token {self.next_token:.4f}, excess"
            f" {self.excess:.4f}, remembered {self.remembered:.3f}"
        )


def judge(
    module: Module,
    manifest: Manifest,
    texts: Sequence[Ids],
    training: Training,
    budget: int,
    gates: Gates,
) -> dict[str, Figures]:
    """On texts that were held out: of the gates; of the same with each text's tokens in another
    order, which know how much to forget and not what; of gates that were not trained; of gates that
    forget nothing, which is the model itself."""
    draw = torch.Generator().manual_seed(training.seed)
    trained = log_beta_of(gates)

    def shuffled(layer: int, given: Tensor) -> Tensor:
        return trained(layer, given)[torch.randperm(len(given), generator=draw)]

    def none(_: int, given: Tensor) -> Tensor:
        return torch.zeros(len(given), manifest.num_kv_heads)

    ways = {
        "trained": trained,
        "shuffled": shuffled,
        "untrained": log_beta_of(Gates(manifest, training)),
        "none": none,
    }
    return {
        name: _mean(_figures(module, manifest, texts, budget, training.tied, log_beta))
        for name, log_beta in ways.items()
    }


def _figures(
    module: Module,
    manifest: Manifest,
    texts: Sequence[Ids],
    budget: int,
    tied: bool,
    log_beta: LogBeta,
) -> Iterator[Figures]:
    for ids in texts:
        told: list[Tensor] = []

        def heard(layer: int, given: Tensor, told: list[Tensor] = told) -> Tensor:
            told.append(log_beta(layer, given))
            return told[-1]

        with torch.no_grad():
            loss = loss_of(module, manifest, ids, budget, tied, heard)
            left = torch.stack([_remembered(of_layer)[-1] for of_layer in told])
        yield Figures(
            loss.divergence.item(),
            loss.next_token.item(),
            loss.excess.item(),
            left.mean().item() / len(ids),
        )


def _mean(figures: Iterator[Figures]) -> Figures:
    rows = [tuple(asdict(row).values()) for row in figures]
    return Figures(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))
