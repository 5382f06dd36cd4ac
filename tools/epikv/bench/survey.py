"""Every registered policy on the sample model's problems, in one table.

Policies run with their default parameters, protected alike, at the same budget. One that evicts in
rounds holds up to `slack` tokens more than that, so it runs with slack 0 as well, and each line is
held against `random` in rounds of its own length, on the same problems.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import click
import grpc

from epikv.bench import harness
from epikv.bench.targets import Estimate
from epikv.bench.trial import PUBLISHED, Trial, difference, exact, share
from epikv.client import Client
from epikv.errors import RpcError
from epikv.messages import KvUsage, Policy
from epikv.options import Kv

if TYPE_CHECKING:
    from epikv.sample.simulate import Outcome

CONTROL = "random"
FIRST = ("full", "oracle", CONTROL)  # lines that others are read against
REFUSALS = ("INVALID_ARGUMENT", "FAILED_PRECONDITION")
COLUMNS = (
    "policy", "slack", "rounds", "dropped", "solved", "answers", "solved - random",
    "answers - random",
)  # fmt: skip


@dataclass(frozen=True)
class Entry:
    """A policy with `params` in place of its defaults. slack: None of a policy that has none."""

    policy: Policy
    variant: str
    slack: int | None
    params: dict[str, Any]

    @property
    def unslacked(self) -> bool:
        """Whether it is the second line of a policy that evicts in rounds."""
        return self.slack == 0 and self.policy.slack_tokens > 0

    @property
    def name(self) -> str:
        return f"{self.policy.name}, {self.variant}" if self.variant else self.policy.name

    def kv(self, trial: Trial, number: int) -> Kv:
        params = dict(self.params)
        if self.slack is None:
            return Kv(self.policy.name, params=params)
        if self.policy.name == "oracle":
            params["prefer"] = trial.needed(number)
        if self.slack != self.policy.slack_tokens:
            params["slack"] = self.slack
        return Kv(self.policy.name, trial.budgets[number], params, equal_protection=True)


@dataclass
class Line:
    """How an entry did; `fault` instead, where the daemon would not run it."""

    entry: Entry
    outcome: "Outcome | None" = None
    usages: list[KvUsage] = field(default_factory=list)
    fault: str = ""
    solved_gain: Estimate | None = None  # over the control in the same rounds
    answers_gain: Estimate | None = None

    @property
    def rounds(self) -> float:
        return mean(usage.rounds for usage in self.usages)

    @property
    def dropped(self) -> float:
        """The share of the cached tokens that were evicted."""
        return mean(u.evicted_tokens / (u.evicted_tokens + u.final_tokens) for u in self.usages)

    def compare(self, control: "Line | None") -> None:
        if self.outcome is None or control is None or control.outcome is None or self is control:
            return
        solved, answers = exact(self.outcome), _answers(self.outcome)
        both = len(solved)  # this line may have had fewer
        self.solved_gain = difference(solved, exact(control.outcome)[:both])
        self.answers_gain = difference(answers, _answers(control.outcome)[:both])

    def details(self) -> dict[str, Any]:
        """All of it, for --json."""
        entry = self.entry
        found = {"policy": entry.policy.name, "params": entry.params, "slack": entry.slack}
        if self.outcome is None:
            return {**found, "fault": self.fault}
        return {
            **found,
            "rounds": self.rounds,
            "dropped": self.dropped,
            "uncalibrated": self.usages[0].uncalibrated,
            **self.outcome.summary(),
            "solved_gain": self.solved_gain and vars(self.solved_gain),
            "answers_gain": self.answers_gain and vars(self.answers_gain),
            "right_answers": [sum(row) for row in self.outcome.correct],
        }


def run(
    client: Client,
    directory: Path,
    wanted: str,
    count: int,
    fractions: Sequence[float],
    *,
    unslacked: int | None,
    at_once: int,
    results: bool,
) -> list[dict[str, Any]]:
    """Everything measured of the model in `directory`; prints its tables and, with `results`,
    writes its policies.md. unslacked: problems of the lines with slack 0 in place of another."""
    found: list[dict[str, Any]] = []
    tables: list[str] = []
    for fraction in fractions:
        lines = _lines(client, Trial(directory, count, fraction), wanted, unslacked, at_once)
        tables.append(render(lines, fraction, count))
        click.echo("\n" + tables[-1])
        found += [{"fraction": fraction, **line.details()} for line in lines]
    if results:
        (directory / "policies.md").write_text(document(directory.name, tables))
    faults = [row["fault"] for row in found if "fault" in row]
    if failed := [fault for fault in faults if not fault.startswith(REFUSALS)]:
        raise click.ClickException("\n".join(failed))
    return found


def _lines(
    client: Client, trial: Trial, wanted: str, unslacked: int | None, at_once: int
) -> list[Line]:
    controls: dict[int | None, Line] = {}
    lines = []
    for entry in entries(client.policies(), wanted, trial.calibration["sign"]):
        line = Line(entry)
        try:
            line.outcome, line.usages = trial.run(
                client,
                at_once,
                lambda number, entry=entry: entry.kv(trial, number),
                unslacked if entry.unslacked else None,
            )
        except RpcError as error:
            if error.code is grpc.StatusCode.UNAVAILABLE:
                raise
            line.fault = f"{error.code.name}: {error}"
        if entry.name == CONTROL:
            controls[entry.slack] = line
        line.compare(controls.get(entry.slack or 0))
        harness.say(_row(line))
        lines.append(line)
    return lines


def entries(catalog: Sequence[Policy], wanted: str, sign: int) -> list[Entry]:
    """What to run, the control first. sign: of the model's calibration."""
    known = {policy.name: policy for policy in catalog}
    names = list(known) if wanted == "all" else wanted.split(",")
    if unknown := set(names) - set(known):
        raise click.ClickException(f"no policy is called {', '.join(sorted(unknown))}")
    variants: dict[str, dict[str, dict[str, Any]]] = {
        "epikv_flat": {"inverse": {"sign": -sign}, "published": PUBLISHED},
        "h2o": {"scope = model": {"scope": "model"}},
        CONTROL: {"frozen": {"frozen": True}},
    }
    result: list[Entry] = []
    for name in names:
        policy = known[name]
        lengths: list[int | None] = [None]
        if any(param.name == "slack" for param in policy.params):
            lengths = sorted({policy.slack_tokens, 0}, reverse=True)
        for variant, params in {"": {}, **variants.get(name, {})}.items():
            result += [Entry(policy, variant, slack, params) for slack in lengths]
    # The control in rounds of every length that somebody has.
    slacks = sorted({entry.slack or 0 for entry in result} | {0})
    others = [entry for entry in result if entry.name != CONTROL]
    result = [Entry(known[CONTROL], "", slack, {}) for slack in slacks] + others
    first = {name: place for place, name in enumerate(FIRST)}
    return sorted(result, key=lambda entry: first.get(entry.policy.name, len(FIRST)))


def render(lines: Sequence[Line], fraction: float, count: int) -> str:
    """The table."""
    head = [f"## {fraction:.0%} of the trace kept, {count} problems\n", _cells(COLUMNS)]
    return "\n".join([*head, _cells(["---"] * len(COLUMNS)), *map(_row, lines)]) + "\n"


def document(model: str, tables: Sequence[str]) -> str:
    """The page that --results writes."""
    return f"""# Every policy on {model}

Written by `epikv bench sample --policies all --results`. Problems `test/*`, greedy, through the daemon; default parameters, and the model's calibration
where a policy has one; the prompt and the newest min(128, K/4) tokens protected, for all alike. The budget K is the prompt and a share of the expected trace.
*slack*: how far a request may outgrow its budget before a round; a line with a larger slack held more tokens, so each such policy stands here
with slack 0 too. *rounds*: a problem's mean; 0: nothing was evicted, and the line says nothing of the policy. *dropped*: of all cached tokens. *solved*: problems all of
whose three answers are right [95 % Wilson interval]. *answers*: right ones. The last two: against `random` with the same slack, on the same problems [95 % bootstrap
interval]. What holds on this model holds on this model: see the [card](../README.md).

""" + "\n".join(tables)


def _row(line: Line) -> str:
    entry, outcome = line.entry, line.outcome
    slack = "" if entry.slack is None else str(entry.slack)
    if outcome is None:
        return _cells([f"`{entry.name}`", slack, f"not run: {line.fault}", *[""] * 5])
    name = f"`{entry.name}`" + (" (uncalibrated)" if line.usages[0].uncalibrated else "")
    solved = share(outcome)
    right = f"{solved.value:.3f} [{solved.low:.3f}, {solved.high:.3f}]"
    answers = sum(map(len, outcome.correct))
    return _cells(
        [
            name,
            slack,
            f"{line.rounds:.1f}",
            f"{line.dropped:.0%}",
            f"{outcome.exact} of {len(outcome.correct)}: {right}",
            f"{outcome.right_answers} of {answers}: {outcome.right_answers / answers:.3f}",
            _gain(line.solved_gain),
            _gain(line.answers_gain),
        ]
    )


def _gain(gain: Estimate | None) -> str:
    return "" if gain is None else f"{gain.value:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _answers(outcome: "Outcome") -> list[float]:
    """The share of each problem's answers that are right."""
    return [mean(row) for row in outcome.correct]
