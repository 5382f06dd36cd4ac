"""The pair of layers and the sign with which epikv_flat keeps what this model needs.

Traces, labels and search, trials, confirmation, each on problems of its own. README.md says what each
step measures. What was measured is kept in a folder, so that a run that is cut short goes on where
it was.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from epikv.calibrate import labels
from epikv.calibrate.choose import search
from epikv.calibrate.confirm import arms, flat, gain, run, told
from epikv.calibrate.findings import CalibrationError, Pair
from epikv.calibrate.journal import Journal
from epikv.calibrate.labels import Labels
from epikv.calibrate.occlusion import Vocabulary
from epikv.calibrate.plan import Plan, Report
from epikv.calibrate.runs import Runner
from epikv.calibrate.separation import Case, pooled_correlation
from epikv.calibrate.traces import Problem, Trace, collect
from epikv.eval.items import Item
from epikv.eval.plan import Task
from epikv.export.manifest import Manifest

DECIDE = ("random", "inverse")  # what a pair must beat


def calibrate(
    plan: Plan, runner: Runner, manifest: Manifest, tokenizer: str, folder: Path
) -> Report:
    """Measures what is not in `folder` yet.

    tokenizer: the text of tokenizer.json. Raises JournalError if the folder is of something else,
    RpcError if the daemon fails, ValueError if a task or the tokenizer lacks what the plan wants.
    """
    with ExitStack() as files:
        report = Report(plan, manifest)
        try:
            _Run(report, plan, runner, manifest, tokenizer, folder, files).measure()
        except CalibrationError as error:
            report.refusal = str(error)
    return report


@dataclass
class _Run:
    """One calibration, from traces to the verdict. Each step adds to `report`."""

    report: Report
    plan: Plan
    runner: Runner
    manifest: Manifest
    tokenizer: str
    folder: Path
    files: ExitStack

    def measure(self) -> None:
        """Raises CalibrationError, saying why, when nothing is confirmed."""
        to_label, to_try, to_confirm = self.plan.problems()
        cases = self._label(self._collect(to_label))
        self.report.search = search(cases, self.plan.rule)
        self.report.details["pooled_rho"] = pooled_correlation(cases, self.plan.rule.window)
        if not self.report.search.pairs:
            raise CalibrationError(self.report.search.why_nothing())
        self.report.chosen = self._try(to_try)
        self._confirm(to_confirm)

    def _journal(self, name: str, **settings: Any) -> Journal:
        if reading := self.plan.reading.facts():  # else as in journals that are older
            settings["reading"] = reading
        model = {"model": self.manifest.name, "weights": self.manifest.weights}
        journal = Journal(self.folder / f"{name}.jsonl", {**model, **settings})
        return self.files.enter_context(journal)

    def _collect(self, tasks: Sequence[Task]) -> list[Trace]:
        plan = self.plan
        problems = [
            Problem(task.name, item)
            for task in tasks
            for item in task.items
            if isinstance(item, Item)  # all are: Plan has seen to it
        ]
        book = self._journal("traces", fraction=plan.fraction, most=plan.max_output_tokens)
        traces = collect(self.runner, problems, book, plan.fraction, plan.max_output_tokens)
        self.report.details["tasks"] = {
            task.name: {
                "problems": len(task.items),
                "solved": sum(trace.problem.task == task.name for trace in traces),
            }
            for task in tasks
        }
        return traces

    def _label(self, traces: Sequence[Trace]) -> list[Case]:
        """By each kind of label that the plan names; the first decides."""
        plan, runner = self.plan, self.runner
        found: dict[str, Labels] = {}
        if "eviction" in plan.labels:
            book = self._journal("eviction", fraction=plan.fraction)
            found["eviction"] = labels.by_eviction(
                runner, traces, plan.fraction, plan.eviction, book
            )
        if "occlusion" in plan.labels:
            book = self._journal("occlusion", fraction=plan.fraction, **asdict(plan.occlusion))
            ends = self.manifest.eos_token_ids
            vocabulary = Vocabulary.of(self.tokenizer, self.manifest.vocab_size, ends)
            found["occlusion"] = labels.by_occlusion(
                runner, traces, plan.fraction, plan.occlusion, vocabulary, book
            )
        self.report.details["labels"] = {kind: each.details for kind, each in found.items()}
        if len(found) == len(labels.KINDS):
            self.report.details["agreement"] = labels.agreement(
                found["occlusion"], found["eviction"]
            )
        cases = [
            Case(trace.problem.task, trace.steps[:-1], each, trace.budget(plan.fraction).old)
            for trace, each in zip(traces, found[plan.labels[0]].needed, strict=True)
        ]
        for name, figures in self.report.details["tasks"].items():
            of = [case for case in cases if case.task == name]
            figures["usable"] = sum(case.usable(plan.rule.least) for case in of)
            figures["needed tokens"] = fmean(int(c.needed.sum()) for c in of) if of else None
        return cases

    def _try(self, tasks: Sequence[Task]) -> Pair:
        """The accepted pair with which most parts of answers are right."""
        assert self.report.search is not None  # it comes first
        plan, pairs = self.plan, self.report.search.pairs
        over = [
            flat(f"layers {p.a}, {p.b}, sign {p.sign:+d}", p.a, p.b, p.sign, plan.rule.window)
            for p in pairs
        ]
        outcomes = run(
            self.runner, tasks, over, [plan.fraction], plan.settings, self.folder / "trials"
        )[plan.fraction]
        self.report.details["trials"] = {name: o.figures() for name, o in outcomes.items()}
        ran = [outcomes[arm.label] for arm in over]
        best = max(range(len(pairs)), key=lambda i: (sum(ran[i].parts), sum(ran[i].solved)))
        return pairs[best]

    def _confirm(self, tasks: Sequence[Task]) -> None:
        """Holds the chosen pair against its inverse and others, at every fraction."""
        plan = self.plan
        assert self.report.chosen is not None  # it comes first
        over = arms(self.report.chosen, len(self.manifest.layers), plan.rule.window)
        found = run(
            self.runner,
            tasks,
            over,
            plan.fractions,
            plan.settings,
            self.folder / "confirmation",
        )
        self.report.details["confirmation"] = {str(f): told(found[f]) for f in plan.fractions}
        decisive = found[plan.fraction]
        gains = {name: gain(decisive["chosen"], decisive[name]) for name in DECIDE}
        if lost := {name: each.parts for name, each in gains.items() if not each.beats}:
            raise CalibrationError(
                "run on held-out problems, the chosen pair does not beat "
                + " or ".join(
                    f"{name} (parts right, difference {parts.value:+.3f}"
                    f" [{parts.low:+.3f}, {parts.high:+.3f}])"
                    for name, parts in lost.items()
                )
            )
