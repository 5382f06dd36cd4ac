"""Soft tokens: rows that the model reads in place of embeddings, before and behind a document that is cached
alone (policies/soft_tokens.h).

They are trained with the model as it is, so that documents that were cached alone and lie side by side
answer as documents that were read one after another (KV Packet, arXiv 2604.13226; loss and schedule
as in the authors' code, ChuangtaoChen-TUM/KVPacket). One forward stands for all the caches: each
document sees itself alone, and the question sees everything.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from epikv.calibrate import gates as made
from epikv.calibrate.gates import CalibrationError, Ids, Module
from epikv.export.manifest import Manifest
from epikv.export.operators import KvCache, Step, forward, running
from epikv.sample.vocabulary import STEPS

POLICY = "packet"
SPREAD = 0.02  # of first rows
TOGETHER = 16  # prompts that are answered at a time
SAVED_EVERY = 1  # steps: they are long, and there is little to save


@dataclass(frozen=True)
class Training:
    """soft: header and trailer rows, each. A step reads a batch of problems. As published, but for the
    batch, of 64."""

    soft: int = 8
    steps: int = 240
    batch: int = 8
    rate: float = 5e-4
    seed: int = 0


@dataclass(frozen=True)
class Problem:
    """Token ids. The model reads preamble, documents and question, and says the answer."""

    preamble: Ids
    documents: tuple[Ids, ...]
    question: Ids
    answer: Ids = ()

    def plain(self) -> list[int]:
        """What the model answers."""
        documents = [token for document in self.documents for token in document]
        return [*self.preamble, *documents, *self.question]


class SoftTokens(nn.Module):
    def __init__(self, manifest: Manifest, training: Training) -> None:
        super().__init__()
        torch.manual_seed(training.seed)
        self.header, self.trailer = (
            nn.Parameter(SPREAD * torch.randn(training.soft, manifest.hidden_size))
            for _ in range(2)
        )

    def arrays(self) -> dict[str, Tensor]:
        """As the daemon reads them."""
        return {name: value.detach().clone() for name, value in self.named_parameters()}


@dataclass(frozen=True)
class Rows:
    """A problem as one forward reads it, its answer but for the last token included."""

    ids: Tensor  # [n]; a soft token has the id of a token beside it
    part: Tensor  # [n]; the preamble is the first, question and answer are the last
    header: Tensor  # which rows are soft, [documents, soft]
    trailer: Tensor  # [documents, soft]

    def hidden(self) -> Tensor:
        """Which rows do not see which others, even if those come before: bool [n, n]."""
        of_question = self.part == self.part[-1]
        return ~of_question[:, None] & (self.part[:, None] != self.part)

    def with_soft(self, soft: SoftTokens) -> Callable[[Tensor], Tensor]:
        """Puts soft tokens into the rows that enter the first block."""

        def put(residual: Tensor) -> Tensor:
            for places, rows in ((self.header, soft.header), (self.trailer, soft.trailer)):
                of_all = rows.to(residual.dtype).repeat(len(places), 1)
                residual = residual.index_copy(0, places.flatten(), of_all)
            return residual

        return put


def rows_of(problem: Problem, soft: int) -> Rows:
    """soft: header and trailer rows of a document, each."""
    ids, part = list(problem.preamble), [0] * len(problem.preamble)
    headers, trailers = [], []
    for number, document in enumerate(problem.documents, 1):
        wrapped = [document[0]] * soft + list(document) + [document[-1]] * soft
        headers.append(range(len(ids), len(ids) + soft))
        ids += wrapped
        trailers.append(range(len(ids) - soft, len(ids)))
        part += [number] * len(wrapped)
    asked = [*problem.question, *problem.answer[:-1]]
    ids += asked
    part += [len(problem.documents) + 1] * len(asked)
    return Rows(
        torch.tensor(ids),
        torch.tensor(part),
        torch.tensor([list(places) for places in headers], dtype=torch.int64),
        torch.tensor([list(places) for places in trailers], dtype=torch.int64),
    )


def teacher(module: Module, manifest: Manifest, problem: Problem) -> Tensor:
    """Of each token of the answer, where everything is read in turn: float32 [answer, vocabulary]."""
    ids = torch.tensor([*problem.plain(), *problem.answer[:-1]])
    positions = torch.arange(len(ids))
    step = Step(manifest, [KvCache.empty(manifest)], [len(ids)], positions)
    with torch.no_grad(), running(step, gradients=True):
        logits: Tensor = module(ids, positions, positions[-len(problem.answer) :])
    return logits.log_softmax(-1)


def student(
    module: Module, manifest: Manifest, problem: Problem, soft: SoftTokens | None
) -> Tensor:
    """The same, where each document was read alone: between soft tokens, if there are any."""
    count = 0 if soft is None else len(soft.header)
    rows = rows_of(problem, count)
    hidden = rows.hidden()
    unseen = torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)
    positions = torch.arange(len(rows.ids))
    step = Step(
        manifest,
        [KvCache.empty(manifest)],
        [len(rows.ids)],
        positions,
        bias=lambda *_: unseen.expand(manifest.num_kv_heads, -1, -1),
        replace=None if soft is None else rows.with_soft(soft),
    )
    with running(step, gradients=True):
        logits: Tensor = module(rows.ids, positions, positions[-len(problem.answer) :])
    return logits.log_softmax(-1)


def divergence(of_student: Tensor, of_teacher: Tensor) -> Tensor:
    """Nats, of each token of the answer: [answer]."""
    return functional.kl_div(of_student, of_teacher, log_target=True, reduction="none").sum(-1)


def parts_of_prompt(prompt: str, documents: int) -> list[str]:
    """Of a sample problem: what stands before its first line, its lines dealt into documents, and what it
    asks."""
    words = prompt.split()
    asked = words.index("ask")
    begins = [place for place, word in enumerate(words) if word in STEPS]
    if not 1 <= documents <= len(begins):
        raise CalibrationError(f"a problem of {len(begins)} lines cannot be {documents} documents")
    ends = [*begins[1:], asked]
    parts = [words[begins[lines[0]] : ends[lines[-1]]] for lines in _dealt(len(begins), documents)]
    return [" ".join(part) for part in (words[: begins[0]], *parts, words[asked:])]


def parts_of_text(ids: Ids, bos: int | None, documents: int, question: int) -> list[Ids]:
    """Of any text: its first token if that is `bos`, documents of one length, and the last tokens."""
    first = 1 if ids[0] == bos else 0
    body = len(ids) - question - first
    if body < documents:
        raise CalibrationError(f"{len(ids)} tokens are too few for {documents} documents")
    parts = [ids[first + places[0] : first + places[-1] + 1] for places in _dealt(body, documents)]
    return [ids[:first], *parts, ids[first + body :]]


def _dealt(count: int, parts: int) -> list[range]:
    """So many things into parts of as good as the same size, in their order."""
    bounds = [count * part // parts for part in range(parts + 1)]
    return [range(*pair) for pair in pairwise(bounds)]


def problem_of(parts: Sequence[Ids]) -> Problem:
    return Problem(parts[0], tuple(parts[1:-1]), parts[-1])


def answered(
    module: Module,
    manifest: Manifest,
    problems: Sequence[Problem],
    most: int,
    tell: Callable[[int], None] = lambda _: None,
) -> list[Problem]:
    """With what the model says: its likeliest tokens, to its end or `most` of them. tell: how many
    are answered."""
    found: list[Problem] = []
    for first in range(0, len(problems), TOGETHER):
        some = problems[first : first + TOGETHER]
        answers = _answers(module, manifest, [problem.plain() for problem in some], most)
        found += [replace(one, answer=said) for one, said in zip(some, answers, strict=True)]
        tell(len(found))
    return found


def _answers(
    module: Module, manifest: Manifest, prompts: Sequence[Ids], most: int
) -> list[list[int]]:
    said: list[list[int]] = [[] for _ in prompts]
    caches = [KvCache.empty(manifest) for _ in prompts]
    new = dict(enumerate(prompts))
    while new:
        last = torch.tensor([len(ids) for ids in new.values()]).cumsum(0) - 1
        batch = [(caches[number], ids) for number, ids in new.items()]
        logits = forward(module, manifest, batch, last.tolist())
        for number, token in zip(new, logits.argmax(-1).tolist(), strict=True):
            said[number].append(token)
        new = {
            number: said[number][-1:]
            for number in new
            if len(said[number]) < most and said[number][-1] not in manifest.eos_token_ids
        }
    return said


def check(manifest: Manifest, problems: Sequence[Problem], training: Training, most: int) -> None:
    """Raises CalibrationError unless the model can be trained for, with answers of `most` tokens."""
    made.check(manifest)
    if len(problems) < made.HELD_OUT:
        raise CalibrationError(f"{len(problems)} problems; {made.HELD_OUT} or more are needed")
    for problem in problems:
        tokens = len(problem.plain()) + 2 * training.soft * len(problem.documents) + most
        if tokens > manifest.context_length:
            raise CalibrationError(
                f"a problem with its soft tokens and its answer has {tokens} tokens, the model"
                f" reads {manifest.context_length}"
            )


def train(
    module: Module,
    manifest: Manifest,
    problems: Sequence[Problem],
    training: Training,
    work: Path,
    tell: Callable[[int], None] = lambda _: None,
) -> SoftTokens:
    """See gates.take_steps."""
    soft = SoftTokens(manifest, training)
    settings = {
        **asdict(training),
        "policy": POLICY,
        "weights": manifest.weights,
        "problems": made.digest([asdict(problem) for problem in problems]),
    }
    optimizer = torch.optim.AdamW(soft.parameters(), lr=training.rate, weight_decay=0)

    def slope(step: int) -> None:
        for number in range(step * training.batch, (step + 1) * training.batch):
            problem = made.drawn(problems, training.seed, number)
            wanted = teacher(module, manifest, problem)
            loss = divergence(student(module, manifest, problem, soft), wanted).sum()
            (loss / training.batch).backward()

    steps = made.Steps(
        training.steps, lambda step: training.rate * (1 - step / training.steps), SAVED_EVERY
    )
    made.take_steps(soft, optimizer, steps, slope, work, settings, tell)
    return soft


@dataclass(frozen=True)
class Figures:
    """Means over problems: nats a token of the answer, and the share of its tokens that are the
    student's likeliest, too."""

    divergence: float
    agreed: float

    def __str__(self) -> str:
        return f"divergence {self.divergence:.4f}, agreed {self.agreed:.3f}"


def judge(
    module: Module,
    manifest: Manifest,
    problems: Sequence[Problem],
    training: Training,
    soft: SoftTokens,
) -> dict[str, Figures]:
    """On problems that were held out: of the soft tokens; of the same before they were trained; of
    documents without any, which were read alone as well; of the question without documents, which is
    all there is to lose."""
    ways: dict[str, Callable[[Problem], Tensor]] = {
        "trained": lambda problem: student(module, manifest, problem, soft),
        "untrained": lambda problem: student(
            module, manifest, problem, SoftTokens(manifest, training)
        ),
        "none": lambda problem: student(module, manifest, problem, None),
        "unread": lambda problem: student(module, manifest, replace(problem, documents=()), None),
    }
    return {name: _mean(_figures(module, manifest, problems, way)) for name, way in ways.items()}


def _figures(
    module: Module,
    manifest: Manifest,
    problems: Sequence[Problem],
    way: Callable[[Problem], Tensor],
) -> Iterator[Figures]:
    for problem in problems:
        with torch.no_grad():
            said, wanted = way(problem), teacher(module, manifest, problem)
        agreed = (said.argmax(-1) == torch.tensor(problem.answer)).float().mean()
        yield Figures(divergence(said, wanted).mean().item(), agreed.item())


def _mean(figures: Iterator[Figures]) -> Figures:
    rows = [tuple(asdict(row).values()) for row in figures]
    return Figures(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))
