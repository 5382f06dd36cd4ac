"""Every registered policy on the sample model's problems, in one table.

Policies run with their default parameters, protected alike, at the same budget. One that evicts in
rounds holds up to `slack` tokens more than that, so all run in rounds of one length as well, and
each line is held against `random` in rounds of its own length, on the same problems. With
--results, each line is kept in policies.json beside the model as soon as it is measured, so that
some policies can be measured again, or what is missing, without the others.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import click
import grpc

from epikv.bench import harness
from epikv.bench.trial import PUBLISHED, Trial
from epikv.client import Client
from epikv.errors import RpcError
from epikv.messages import Policy
from epikv.options import Kv
from epikv.stats import Estimate, difference, wilson

CONTROL = "random"
COMMON_SLACK = 15  # at which all policies run beside their own
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

    def key(self, fraction: float) -> tuple[Any, ...]:
        return Line(self.policy.name, self.variant, self.slack, fraction).key

    def kv(self, trial: Trial, number: int) -> Kv:
        params = dict(self.params)
        if self.slack is None:
            return Kv(self.policy.name, params=params)
        if self.policy.name == "oracle":
            params["prefer"] = trial.needed(number)
        if self.slack != self.policy.slack_tokens:
            params["slack"] = self.slack
        return Kv(self.policy.name, trial.budgets[number], params, equal_protection=True)


@dataclass(frozen=True)
class Line:
    """How an entry did; `fault` instead, where the daemon would not run it."""

    policy: str
    variant: str
    slack: int | None
    fraction: float
    fault: str = ""
    rounds: float = 0  # a problem's mean
    dropped: float = 0  # of the cached tokens
    uncalibrated: bool = False
    asked: int = 0  # answers of a problem
    right: list[int] = field(default_factory=list)  # of these, by problem

    @property
    def key(self) -> tuple[Any, ...]:
        """Lines stand in this order, and one replaces another with the same key."""
        first = FIRST.index(self.policy) if self.policy in FIRST else len(FIRST)
        return (-self.fraction, first, self.policy, self.variant, -1 - (self.slack or 0))

    @property
    def solved(self) -> list[int]:
        return [int(right == self.asked) for right in self.right]

    @property
    def answers(self) -> list[float]:
        return [right / self.asked for right in self.right]


def run(
    client: Client,
    directory: Path,
    wanted: str,
    count: int,
    fractions: Sequence[float],
    *,
    missing: bool,
    at_once: int,
    results: bool,
) -> list[dict[str, Any]]:
    """Everything measured of the model in `directory`; prints its tables and, with `results`,
    keeps them there. missing: only what is not there yet."""
    lines: list[Line] = []
    for fraction in fractions:
        trial = Trial(directory, count, fraction)
        have = {line.key for line in _known(directory)} if missing else set()
        for entry in entries(client.policies(), wanted, trial.calibration["sign"]):
            if entry.key(fraction) in have:
                continue
            lines.append(_line(client, trial, entry, fraction, at_once))
            if results:
                _keep(directory, lines[-1:])
    click.echo("\n" + render(lines))
    faults = [line.fault for line in lines if line.fault]
    if failed := [fault for fault in faults if not fault.startswith(REFUSALS)]:
        raise click.ClickException("\n".join(failed))
    return [asdict(line) for line in lines]


def entries(catalog: Sequence[Policy], wanted: str, sign: int) -> list[Entry]:
    """What to run, the control first. sign: of the calibration."""
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
            lengths = sorted({policy.slack_tokens, COMMON_SLACK}, reverse=True)
        for variant, params in {"": {}, **variants.get(name, {})}.items():
            result += [Entry(policy, variant, slack, params) for slack in lengths]
    # The control in rounds of every length that somebody has.
    slacks = sorted({entry.slack or 0 for entry in result} | {0, COMMON_SLACK})
    others = [e for e in result if e.policy.name != CONTROL or e.variant]
    controls = [Entry(known[CONTROL], "", slack, {}) for slack in slacks]
    return controls + others


def render(lines: Sequence[Line]) -> str:
    """A table for each fraction."""
    controls = {
        (line.fraction, line.slack): line
        for line in lines
        if (line.policy, line.variant) == (CONTROL, "")
    }
    parts: list[str] = []
    fraction = None
    for line in sorted(lines, key=lambda line: line.key):
        if line.fraction != fraction:
            fraction = line.fraction
            parts += [f"\n## {fraction:.0%} of the trace kept\n", _cells(COLUMNS)]
            parts.append(_cells(["---"] * len(COLUMNS)))
        parts.append(_row(line, controls.get((line.fraction, line.slack or 0))))
    return "\n".join(parts) + "\n"


def _line(client: Client, trial: Trial, entry: Entry, fraction: float, at_once: int) -> Line:
    base = (entry.policy.name, entry.variant, entry.slack, fraction)
    try:
        outcome, usages = trial.run(client, at_once, lambda number: entry.kv(trial, number))
    except RpcError as error:
        if error.code is grpc.StatusCode.UNAVAILABLE:
            raise
        line = Line(*base, fault=f"{error.code.name}: {error}")
    else:
        line = Line(
            *base,
            rounds=mean(usage.rounds for usage in usages),
            dropped=mean(u.evicted_tokens / (u.evicted_tokens + u.final_tokens) for u in usages),
            uncalibrated=usages[0].uncalibrated,
            asked=len(outcome.correct[0]),
            right=[sum(row) for row in outcome.correct],
        )
    harness.say(_row(line, None))
    return line


def _known(directory: Path) -> list[Line]:
    file = directory / "policies.json"
    return [Line(**row) for row in json.loads(file.read_text())] if file.exists() else []


def _keep(directory: Path, lines: Sequence[Line]) -> None:
    """Puts the lines into the model's policies.json and renders its policies.md anew."""
    file = directory / "policies.json"
    by_key = {line.key: line for line in [*_known(directory), *lines]}
    merged = [by_key[key] for key in sorted(by_key)]
    rows = ",\n".join(json.dumps(asdict(line)) for line in merged)
    file.write_text(f"[\n{rows}\n]\n")
    (directory / "policies.md").write_text(_document(directory.name, merged))


def _document(model: str, lines: Sequence[Line]) -> str:
    return f"""# Every policy on {model}

Written by `epikv bench sample --policies all --results`, which replaces the lines of the policies that it is asked for. Problems `test/*`, greedy, through the daemon;
default parameters, and the model's calibration where a policy has one; the prompt and the newest min(128, K/4) tokens protected, for all alike. The budget K is the prompt
and a share of the expected trace. *slack*: how far a request may outgrow its budget before a round; a line with a larger slack held more tokens, so every policy stands here
with a slack of {COMMON_SLACK}, too. *rounds*: a problem's mean; 0: nothing was evicted, and the line says nothing of the policy. *dropped*: of all cached tokens.
*solved*: problems all of whose three answers are right [95 % Wilson interval]. *answers*: right ones. The last two: against `random` with the same slack on the same problems
[95 % bootstrap interval]. What holds on this model holds on this model: see the [card](../README.md).
{render(lines)}"""


def _row(line: Line, control: Line | None) -> str:
    name = f"`{line.policy}`" + (f", {line.variant}" if line.variant else "")
    slack = "" if line.slack is None else str(line.slack)
    if line.fault:
        return _cells([name, slack, f"not run: {line.fault}", *[""] * 5])
    solved, answers, asked = sum(line.solved), sum(line.right), line.asked * len(line.right)
    return _cells(
        [
            name + (" (uncalibrated)" if line.uncalibrated else ""),
            slack,
            f"{line.rounds:.1f}",
            f"{line.dropped:.0%}",
            f"{solved} of {len(line.right)}: {_share(solved, len(line.right))}",
            f"{answers} of {asked}: {answers / asked:.3f}",
            *_gains(line, control),
        ]
    )


def _gains(line: Line, control: Line | None) -> list[str]:
    """Over the control, on the problems that both have had."""
    if control is None or control.fault or control.key == line.key:
        return ["", ""]
    both = min(len(line.right), len(control.right))
    return [
        _signed(difference(line.solved[:both], control.solved[:both])),
        _signed(difference(line.answers[:both], control.answers[:both])),
    ]


def _share(hits: int, count: int) -> str:
    share = wilson(hits, count)
    return f"{share.value:.3f} [{share.low:.3f}, {share.high:.3f}]"


def _signed(gain: Estimate) -> str:
    return f"{gain.value:+.3f} [{gain.low:+.3f}, {gain.high:+.3f}]"


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
