"""The pair of layers and the sign with which epikv_flat keeps what this model needs.

Traces, labels and search, trials, confirmation, each on problems of its own. README.md says what each
step measures. What was measured is kept in a folder, so that a run that is cut short goes on where
it was.
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from epikv.calibrate import labels
from epikv.calibrate.choose import CalibrationError, Pair, search
from epikv.calibrate.confirm import arms, flat, run, verdicts
from epikv.calibrate.journal import Journal
from epikv.calibrate.labels import Labels
from epikv.calibrate.occlusion import Vocabulary
from epikv.calibrate.plan import Plan, Report
from epikv.calibrate.runs import Runner
from epikv.calibrate.separation import Case, pooled_correlation
from epikv.calibrate.traces import Problem, Trace, collect
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
        run = _Run(plan, runner, manifest, tokenizer, folder, files)
        try:
            run.measure()
        except CalibrationError as error:
            run.report.refusal = str(error)
    return run.report


class _Run:
    """One calibration, from traces to the verdict. Each step adds to `report`."""

    def __init__(
        self,
        plan: Plan,
        runner: Runner,
        manifest: Manifest,
        tokenizer: str,
        folder: Path,
        files: ExitStack,
    ) -> None:
        self.report = Report(plan, manifest)
        self._plan = plan
        self._runner = runner
        self._manifest = manifest
        self._tokenizer = tokenizer
        self._folder = folder
        self._files = files

    def measure(self) -> None:
        """Raises CalibrationError, saying why, when nothing is confirmed."""
        to_label, to_try, to_confirm = self._plan.problems()
        cases = self._label(self._collect(to_label))
        self.report.search = search(cases, self._plan.rule)
        self.report.details["pooled_rho"] = pooled_correlation(cases, self._plan.rule.window)
        if not self.report.search.pairs:
            raise CalibrationError(self.report.search.why_nothing())
        book = self._journal("runs", most=self._plan.most)
        self.report.chosen = self._try(to_try, book)
        self._confirm(to_confirm, book)

    def _journal(self, name: str, **settings: Any) -> Journal:
        model = {"model": self._manifest.name, "weights": self._manifest.weights}
        journal = Journal(self._folder / f"{name}.jsonl", {**model, **settings})
        return self._files.enter_context(journal)

    def _collect(self, problems: Sequence[Problem]) -> list[Trace]:
        plan = self._plan
        book = self._journal("traces", fraction=plan.fraction, most=plan.most)
        traces = collect(self._runner, problems, book, plan.fraction, plan.most)
        self.report.details["traces"] = {"problems": len(problems), "solved": len(traces)}
        return traces

    def _label(self, traces: Sequence[Trace]) -> list[Case]:
        """By each kind of label that the plan names; the first decides."""
        plan, runner = self._plan, self._runner
        found: dict[str, Labels] = {}
        if "eviction" in plan.labels:
            book = self._journal("eviction", fraction=plan.fraction)
            found["eviction"] = labels.by_eviction(
                runner, traces, plan.fraction, plan.eviction, book
            )
        if "occlusion" in plan.labels:
            book = self._journal("occlusion", fraction=plan.fraction, **asdict(plan.occlusion))
            ends = self._manifest.eos_token_ids
            vocabulary = Vocabulary.of(self._tokenizer, self._manifest.vocab_size, ends)
            found["occlusion"] = labels.by_occlusion(
                runner, traces, plan.fraction, plan.occlusion, vocabulary, book
            )
        self.report.details["labels"] = {kind: each.details for kind, each in found.items()}
        if len(found) == len(labels.KINDS):
            self.report.details["agreement"] = labels.agreement(
                found["occlusion"], found["eviction"]
            )
        return [
            Case(trace.problem.task, trace.steps[:-1], each, trace.budget(plan.fraction).old)
            for trace, each in zip(traces, found[plan.labels[0]].needed, strict=True)
        ]

    def _try(self, problems: Sequence[Problem], book: Journal) -> Pair:
        """The accepted pair with which most parts of answers are right."""
        plan, pairs = self._plan, self.report.search.pairs
        tried = [
            flat(f"layers {p.a}, {p.b}, sign {p.sign:+d}", p.a, p.b, p.sign, plan.rule.window)
            for p in pairs
        ]
        outcomes = run(self._runner, problems, tried, plan.fraction, plan.most, book)
        self.report.details["trials"] = {name: o.figures() for name, o in outcomes.items()}
        ran = zip(pairs, outcomes.values(), strict=True)
        return max(ran, key=lambda each: (sum(each[1].parts), sum(each[1].solved)))[0]

    def _confirm(self, problems: Sequence[Problem], book: Journal) -> None:
        """Holds the chosen pair against its inverse and others, at every fraction."""
        plan = self._plan
        over = arms(self.report.chosen, len(self._manifest.layers), plan.rule.window)
        told: dict[str, Any] = {}
        self.report.details["confirmation"] = told
        for fraction in plan.fractions:
            outcomes = run(self._runner, problems, over, fraction, plan.most, book)
            told[str(fraction)] = {
                "arms": {name: outcome.figures() for name, outcome in outcomes.items()},
                "chosen_less": {v.against: asdict(v) for v in verdicts(outcomes)},
            }
            if fraction == plan.fraction:
                found = [v for v in verdicts(outcomes) if v.against in DECIDE and not v.better]
        if found:
            raise CalibrationError(
                "run on held-out problems, the chosen pair does not beat "
                + " or ".join(
                    f"{v.against} (parts right, difference {v.parts.value:+.3f}"
                    f" [{v.parts.low:+.3f}, {v.parts.high:+.3f}])"
                    for v in found
                )
            )
