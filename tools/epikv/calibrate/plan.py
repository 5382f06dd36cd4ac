"""What a calibration of epikv_flat is to do, and what it reports."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from epikv.calibrate.eviction import Eviction
from epikv.calibrate.findings import Pair, Rule, Search
from epikv.calibrate.occlusion import Occlusion
from epikv.eval.files import Reading
from epikv.eval.items import Choices, Item
from epikv.eval.plan import Settings, Task, named
from epikv.eval.tasks import load
from epikv.export.manifest import Calibration, Manifest

POLICY = "epikv_flat"
SPLIT = "calibration"


@dataclass(frozen=True)
class Plan:
    """What to do. Problems are counted by task."""

    tasks: tuple[str, ...]
    traces: int = 32
    trials: int = 24
    confirm: int = 100
    fractions: tuple[float, ...] = (0.5,)  # of the trace that is kept; the first decides
    labels: tuple[str, ...] = ("eviction",)  # of labels.KINDS; the first decides
    eviction: Eviction = Eviction()
    occlusion: Occlusion = Occlusion()
    rule: Rule = Rule()
    max_output_tokens: int | None = None  # None: as the task's reference trace lets expect
    reading: Reading = Reading()  # of files

    @property
    def fraction(self) -> float:
        return self.fractions[0]

    @property
    def settings(self) -> Settings:
        """Of trials and confirmation."""
        return Settings(split=SPLIT, max_output_tokens=self.max_output_tokens)

    def to_json(self) -> dict[str, Any]:
        plan = asdict(replace(self, reading=Reading()))
        return {**plan, "reading": self.reading.facts()}

    def problems(self) -> tuple[list[Task], list[Task], list[Task]]:
        """To label, to try and to confirm on: of each task the first, the next and those after.

        Raises ValueError if a task has not so many, or nothing to generate, or the name of another.
        """
        every = [list(self._parts(name)) for name in self.tasks]
        if len({task.name for task, *_ in every}) < len(every):
            raise ValueError("two tasks have one name")
        label, trial, confirm = (list(part) for part in zip(*every, strict=True))
        return label, trial, confirm

    def _parts(self, name: str) -> Iterator[Task]:
        counts = (self.traces, self.trials, self.confirm)
        items = load(name, SPLIT, sum(counts), reading=self.reading)
        if any(isinstance(item, Choices) for item in items):
            raise ValueError(
                f"{name} has choices to score; a trace is what the model generates: give --match choice"
            )
        if not all(isinstance(item, Item) for item in items):
            raise ValueError(f"{name} is forced through the model; a trace is what it generates")
        if len(items) < sum(counts):
            raise ValueError(
                f"{name} has {len(items)} problems; labels, trials and confirmation take"
                f" {sum(counts)}"
            )
        for count in counts:
            yield named(name, items[:count], self.reading)
            items = items[count:]


@dataclass
class Report:
    """What was measured, as far as it came, and the verdict."""

    plan: Plan
    manifest: Manifest
    details: dict[str, Any] = field(default_factory=dict)
    search: Search | None = None
    chosen: Pair | None = None
    refusal: str = ""  # why nothing is to be written; empty: the choice is confirmed
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def to_json(self) -> dict[str, Any]:
        """In the form that `epikv export --calibration` reads, if something was chosen."""
        pair = self.chosen
        layers = {} if pair is None else {"layers": {"a": pair.a, "b": pair.b}, "sign": pair.sign}
        return {
            "policy": POLICY,
            **layers,
            "window": self.plan.rule.window,
            "confirmed": not self.refusal,
            "refusal": self.refusal,
            "date": self.date,
            "model": {"name": self.manifest.name, "weights": self.manifest.weights},
            "plan": self.plan.to_json(),
            **self.details,
            "search": None if self.search is None else asdict(self.search),
        }

    def calibration(self) -> Calibration:
        """The block for the model file, of a confirmed choice."""
        pair, label = self.chosen, self.plan.labels[0]
        assert pair is not None and self.search is not None
        return Calibration(
            policy=POLICY,
            layer_a=pair.a,
            layer_b=pair.b,
            sign=pair.sign,
            window=self.plan.rule.window,
            confirmed=True,
            figures={
                "date": self.date,
                "tasks": self.plan.tasks,
                "kept_fraction": self.plan.fraction,
                "label": {label: asdict(getattr(self.plan, label))},
                "traces": sum(self.search.traces),
                "pair": asdict(pair),
                "bands": [asdict(band) for band in self.search.bands],
                "confirmation": self.details["confirmation"],
            },
        )
