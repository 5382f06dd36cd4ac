"""Answers over documents that were cached alone, on a seed's model: with soft tokens as they were
trained, as they began, and without; beside documents that are read in turn, and none at all."""

import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from epikv import Client, Stop, processes
from epikv.calibrate.soft_tokens import parts_of_prompt
from epikv.cli.eval_models import SHIPPED, exported
from epikv.sample import problem
from epikv.sample.families import FAMILIES
from epikv.sample.vocabulary import encode
from epikv.testing import Daemon

from epikv_lab.sample.scores import Score, write

NAME = "claims-packets"
TURN, TRAINED, RANDOM_ROWS, ALONE, UNREAD = (
    "read in turn",
    "packets, soft tokens trained",
    "packets, soft tokens as they begin",
    "packets",
    "no documents",
)
DOCUMENTS = 4  # that a problem's lines are dealt into
PROBLEMS = 50  # of each family
AT_ONCE = 16
_MOST_TOKENS = 800  # of an answer
_FLAGS = ("--threads=1", "--packet_bytes=1GiB")
# The rate is higher than published: embeddings are 20 times as large.
SOFT_TOKENS = ("--rate=5e-3", "--problems=150", f"--documents={DOCUMENTS}")
_UNTRAINED = ("--steps=1", "--rate=1e-12", "--problems=10", f"--documents={DOCUMENTS}")


def train(seed: Path, out: Path, work: Path, settings: Sequence[str] = SOFT_TOKENS) -> None:
    """Trains soft tokens for a seed's model, into `out`/packet.json, unless they are there. Exits as
    the command does; the same call goes on, from `work`."""
    out.mkdir(parents=True, exist_ok=True)
    file = out / "packet.json"
    if file.exists():
        return
    command = [sys.executable, "-c", "from epikv.cli import main; main()", "calibrate", "packet"]
    command += [str(exported(seed)), "-o", str(file), f"--work={work}", *settings]
    command += [f"--task=sample:{family}" for family in FAMILIES]
    if status := processes.start(command, end=signal.SIGTERM).wait():
        raise SystemExit(status)


def measure(seed: Path, out: Path) -> Path:
    """Trains what is missing, and writes the scores into the seed's folder."""
    out.mkdir(parents=True, exist_ok=True)
    train(seed, seed / SHIPPED, out / "trained.work")
    train(seed, out / "untrained", out / "untrained.work", _UNTRAINED)
    scores = [
        *_scores(seed, seed / SHIPPED, (TURN, TRAINED, ALONE, UNREAD)),
        *_scores(seed, out / "untrained", (RANDOM_ROWS,)),
    ]
    order = [TURN, TRAINED, RANDOM_ROWS, ALONE, UNREAD]
    scores.sort(key=lambda score: (list(FAMILIES).index(score.task), order.index(score.arm)))
    file = seed / f"{NAME}.jsonl"
    write(file, scores)
    return file


def _scores(seed: Path, artefacts: Path, arms: Iterable[str]) -> Iterator[Score]:
    flags = (*_FLAGS, f"--artefact_dir={artefacts}")
    with (
        Daemon(exported(seed), *flags) as daemon,
        daemon.client() as client,
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        for arm in arms:
            for family in FAMILIES:
                right = list(pool.map(_answering(client, arm, family), range(PROBLEMS)))
                shares = [sum(parts) / len(parts) for parts in right]
                solved = "".join(str(int(all(parts))) for parts in right)
                yield Score(family, "", arm, solved, answers=round(sum(shares) / PROBLEMS, 4))


def _answering(client: Client, arm: str, family: str) -> Callable[[int], list[bool]]:
    """Which parts of a problem's answer are right."""

    def answer(number: int) -> list[bool]:
        posed = problem(f"claims/{number}", family)
        preamble, *documents, question = map(encode, parts_of_prompt(posed.prompt, DOCUMENTS))
        stop = Stop(_MOST_TOKENS)
        if arm in (TURN, UNREAD):
            read = documents if arm == TURN else []
            prompt = [*preamble, *(token for document in read for token in document), *question]
            return posed.correct(client.generate_once(prompt, stop=stop).text)
        soft = arm in (TRAINED, RANDOM_ROWS)
        made = [client.create_packet(preamble)]
        made += [client.create_packet(document, soft_tokens=soft) for document in documents]
        ids = [each.packet.id for each in made if each.packet is not None]
        return posed.correct(client.generate_once(question, packets=ids, stop=stop).text)

    return answer
