"""What an evaluation has found so far: a folder with its plan and one JSON line a completion.

A line is written by one system call as soon as its completion is judged, so whatever ends the
process leaves whole lines, and at most a torn last one, which the next run drops.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import click

from epikv.eval.items import Right, score

PLAN, RESULTS, LOCK = "plan.json", "results.jsonl", "lock"


class Key(NamedTuple):
    """What one completion is of. There is one line of each."""

    task: str
    item: str
    arm: str
    budget: str  # "50%", "1024"; empty: the whole cache
    seed: int


@dataclass(frozen=True)
class Record:
    """How one completion went; `fault` instead of figures, where the daemon would not run it."""

    task: str
    item: str
    arm: str
    budget: str
    seed: int
    fault: str = ""
    right: Right = field(default_factory=list)  # of the parts asked for
    finish: str = ""
    prompt_tokens: int = 0
    output_tokens: int = 0  # of a probe: forced through
    budget_tokens: int = 0
    evicted_tokens: int = 0
    rounds: int = 0
    doubted_steps: int = 0  # that ran a second time, with tokens of the tier
    peak_tokens: int = 0
    peak_bytes: int = 0
    uncalibrated: bool = False
    decode_seconds: float = 0  # from the first to the last output token
    digest: str = ""  # of the output token ids
    tail: str = ""  # the end of the text
    acc_norm: bool | None = None  # of choices, as is acc: whether the likeliest by length is right
    acc: bool | None = None
    choice_logprobs: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # of an answer that others are held against

    @property
    def key(self) -> Key:
        return Key(self.task, self.item, self.arm, self.budget, self.seed)

    @property
    def solved(self) -> float:
        """1 or 0, and between them where answers are graded."""
        return float(score(self.right))


class Store:
    """The records of a folder, and the one process that adds to them."""

    def __init__(self, lines: Path, records: dict[Key, Record]) -> None:
        self._fd = os.open(lines, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        self.records = records

    def append(self, record: Record) -> None:
        """Raises OSError if it could not be written whole."""
        line = (json.dumps(asdict(record)) + "\n").encode()
        if os.write(self._fd, line) != len(line):
            raise OSError("the disk is full")
        self.records[record.key] = record

    def close(self) -> None:
        os.close(self._fd)


@contextmanager
def store(folder: Path, plan: dict[str, Any]) -> Iterator[Store]:
    """The records of `plan` in `folder`, to go on with; made where there are none.

    A plan that has more arms or budgets than the folder's, and is the same otherwise, takes its
    place. Raises click.ClickException if another process is at it, if the folder holds another
    plan's, or if a line is not one that an evaluation wrote.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise click.ClickException(f"another evaluation is running in {folder}") from None
        _agree(folder, plan)
        records, whole = _read(folder / RESULTS)
        if (folder / RESULTS).exists():
            os.truncate(folder / RESULTS, whole)
        opened = Store(folder / RESULTS, records)
        try:
            yield opened
        finally:
            opened.close()


def read(folder: Path) -> tuple[dict[str, Any], list[Record]]:
    """The plan and the records so far, of an evaluation that may be running."""
    try:
        plan = json.loads((folder / PLAN).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise click.ClickException(f"{folder} holds no evaluation: {error}") from error
    return plan, list(_read(folder / RESULTS)[0].values())


def _agree(folder: Path, plan: dict[str, Any]) -> None:
    """That the folder's plan is this one, or becomes it."""
    file = folder / PLAN
    want = json.loads(json.dumps(plan))
    if not file.exists():
        if (folder / RESULTS).exists():
            raise click.ClickException(f"{folder} holds results without their plan")
        return _keep(file, want)
    have = read(folder)[0]
    if different := [name for name in {**have, **want} if have.get(name) != want.get(name)]:
        if all(_grown(name, have, want) for name in different):
            return _keep(file, want)
        told = "\n".join(
            f"  {name}: there {json.dumps(have.get(name))}, here {json.dumps(want.get(name))}"
            for name in different
        )
        raise click.ClickException(
            f"{folder} holds results of another plan; go on with that one, add arms or budgets to"
            f" it, or name another folder\n{told}"
        )
    return None


def _grown(name: str, have: dict[str, Any], want: dict[str, Any]) -> bool:
    """Whether all that was to be run still is."""
    return name in ("arms", "budgets") and all(each in want[name] for each in have[name])


def _keep(file: Path, plan: dict[str, Any]) -> None:
    draft = file.with_suffix(".new")
    draft.write_text(json.dumps(plan, indent=1) + "\n", "utf-8")
    draft.replace(file)


def _read(file: Path) -> tuple[dict[Key, Record], int]:
    """The records of a file, and its length in bytes up to the end of the last whole line."""
    content = file.read_bytes() if file.exists() else b""
    whole = content.rfind(b"\n") + 1
    records: dict[Key, Record] = {}
    for number, line in enumerate(content[:whole].splitlines(), 1):
        try:
            record = Record(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise click.ClickException(f"{file}:{number}: no result: {error}") from error
        if record.key in records:
            raise click.ClickException(f"{file}:{number}: a second result of {record.key}")
        records[record.key] = record
    return records, whole
