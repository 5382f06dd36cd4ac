"""Interleaved rounds: in each, every cell is measured once with every engine, in shuffled order."""

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from epikv import harness
from epikv.options import Kv

from epikv_lab.bench.peers.agree import Agreement
from epikv_lab.bench.peers.cells import Cell
from epikv_lab.bench.peers.engines import Arm, Place
from epikv_lab.bench.peers.process import Engine, Epikvd, Job, Reply
from epikv_lab.bench.peers.venvs import Refused

MEMORY_ROUNDS = 3  # each loads every engine anew
_ROOM = 2 << 30  # bytes that stay free when another engine is loaded
_WEIGHTS = 2  # times the checkpoint that an engine is expected to take, before it was seen
WARM_SECONDS = 120
_WARM = Cell("decode1", 1, 128, 8)

Start = Callable[[Place], Engine]


@dataclass(frozen=True)
class Sample:
    """A figure in the cell's unit."""

    round: int
    threads: int
    cell: str
    arm: str
    value: float


@dataclass
class Results:
    samples: list[Sample] = field(default_factory=list)
    refused: dict[tuple[int, str, str], str] = field(default_factory=dict)  # threads, cell, arm
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)  # of arms, by threads
    idle: dict[str, float] = field(default_factory=dict)  # most share of a core used while idle
    # Of our own, by threads and arm, in the memory cell: bytes that it is to hold.
    held: dict[tuple[int, str], float] = field(default_factory=dict)
    agreed: dict[str, Agreement] = field(default_factory=dict)


class Loaded:
    """Engines that stay loaded while memory allows; those used longest ago end first."""

    def __init__(self, place: Place, results: Results) -> None:
        self.results = results
        self._place = place
        self._engines: OrderedDict[Start, Engine] = OrderedDict()
        self._peaks: dict[Start, int] = {}
        self._rest: dict[Start, tuple[float, float]] = {}  # processor time and moment
        self._refused: dict[Start, str] = {}

    @property
    def threads(self) -> int:
        return self._place.threads

    def job(self, cell: Cell, seed: int, kv: Kv, lookup: bool = False) -> Job:
        return cell.job(self._place.shape.vocabulary, seed, kv, lookup)

    def run(self, arm: Arm, job: Job, limit: float) -> Reply:
        """Raises Refused; an engine that did is loaded anew for its next job."""
        engine = self._get(arm)
        self._note_idle(arm, engine)
        try:
            reply = engine.run(job, limit)
        except Refused:
            self._end(arm.start)
            raise
        self._peaks[arm.start] = reply.peak
        self._rest[arm.start] = engine.cpu(), time.monotonic()
        return reply

    def close(self) -> None:
        for start in list(self._engines):
            self._end(start)

    def _get(self, arm: Arm) -> Engine:
        start = arm.start
        if start not in self._engines:
            if start in self._refused:
                raise Refused(self._refused[start])
            self._make_room(start)
            harness.say(f"loading {arm.name}, {self._place.threads} threads")
            try:
                engine = start(self._place)
            except Refused as error:
                self._refused[start] = str(error)
                raise
            self._engines[start] = engine
            of_arm = self.results.settings.setdefault(arm.name, {})
            of_arm[str(self._place.threads)] = dict(engine.settings)
            engine.run(self.job(_WARM, -1, arm.kv), WARM_SECONDS)
        self._engines.move_to_end(start)
        return self._engines[start]

    def _make_room(self, start: Start) -> None:
        weights = (self._place.checkpoint / "model.safetensors").stat().st_size
        needed = self._peaks.get(start, _WEIGHTS * weights) + _ROOM
        while self._engines and _available() < needed:
            self._end(next(iter(self._engines)))

    def _end(self, start: Start) -> None:
        self._rest.pop(start, None)
        self._engines.pop(start).close()

    def _note_idle(self, arm: Arm, engine: Engine) -> None:
        if arm.start not in self._rest:
            return
        cpu, since = self._rest[arm.start]
        if (seconds := time.monotonic() - since) > 1:
            share = (engine.cpu() - cpu) / seconds
            self.results.idle[arm.name] = max(share, self.results.idle.get(arm.name, 0))

    def fresh(self, arm: Arm, job: Job, limit: float, pool_tokens: int) -> Reply:
        """Of an engine that has run nothing else, and is alone."""
        self.close()
        engine = arm.start(replace(self._place, pool_tokens=pool_tokens))
        try:
            if isinstance(engine, Epikvd):
                self.results.held[self._place.threads, arm.name] = engine.held_bytes
            return engine.run(job, limit)
        finally:
            engine.close()


def measure(
    loaded: Loaded, cells: Sequence[Cell], arms: Sequence[Arm], rounds: int, limit: float
) -> None:
    """Adds what it finds to the results. limit: seconds that a job may take."""
    for number in range(rounds):
        for cell in cells:
            if cell.kind == "memory" and number >= MEMORY_ROUNDS:
                continue
            order = [arm for arm in arms if arm.takes_part(cell)]
            random.Random(f"{number} {cell.name}").shuffle(order)
            for arm in order:
                _measure_one(loaded, cell, arm, number, limit)


def replies(loaded: Loaded, cell: Cell, arms: Sequence[Arm], limit: float) -> dict[str, Reply]:
    """Of one job, by arm; those that refuse are left out."""
    found = {}
    for arm in arms:
        try:
            found[arm.name] = loaded.run(arm, loaded.job(cell, 0, arm.kv), limit)
        except Refused as error:
            loaded.results.refused[loaded.threads, cell.name, arm.name] = str(error)
            harness.say(f"{cell.name}, {arm.name}: refused: {error}")
    return found


def _measure_one(loaded: Loaded, cell: Cell, arm: Arm, number: int, limit: float) -> None:
    results, key = loaded.results, (loaded.threads, cell.name, arm.name)
    if key in results.refused:
        return
    told = f"round {number + 1}: {cell.name}, {arm.name}, {loaded.threads} threads"
    job = loaded.job(cell, number, arm.kv, arm.lookup)
    try:
        if cell.kind == "memory":
            reply = loaded.fresh(arm, job, limit, pool_tokens([cell]))
        else:
            reply = loaded.run(arm, job, limit)
        value = cell.figure(reply)
    except (Refused, ValueError) as error:
        results.refused[key] = str(error)
        harness.say(f"{told}: refused: {error}")
        return
    results.samples.append(Sample(number, loaded.threads, cell.name, arm.name, value))
    harness.say(f"{told}: {value:.4g} {cell.unit}")


def pool_tokens(cells: Sequence[Cell]) -> int:
    """That the largest of them needs of a KV pool: a request reserves up to a page more."""
    return max(cell.tokens + 64 * cell.streams for cell in cells)


def _available() -> int:
    """Bytes that can be had without swapping."""
    text = Path("/proc/meminfo").read_text()
    return 1024 * int(text.partition("MemAvailable:")[2].split()[0])
