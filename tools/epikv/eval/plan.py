"""What an evaluation runs: every arm at every budget on every problem with every seed.

`full` comes first, for a budget that is a share counts a problem's prompt and that share of its
reference trace, which is what the model wrote under `full` where the task has none of its own.
Both kinds of `random` are always there, and `oracle` where it is known what a task needs. A policy
evicts in rounds of `slack` + 1 tokens and holds up to `slack` above its budget between them, so all
run with one slack, and each is held against `random` with its own.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from epikv.eval.files import Reading
from epikv.eval.items import Item, Probe, Question
from epikv.eval.results import Key
from epikv.eval.tasks import axis
from epikv.messages import Model, Policy
from epikv.options import Kv, parse_param

FORMAT = "epikv.eval/1"
FULL, ORACLE, RANDOM, FROZEN = "full", "oracle", "random", "random:frozen=true"
SLACK = 15  # of all arms, unless said otherwise


@dataclass(frozen=True)
class Arm:
    """A policy with parameters; what is not given is the server's default."""

    label: str
    policy: str
    params: dict[str, Any]
    slack: int  # in `params`, too, but for `full`
    steering: float | None = None  # coefficient; None: not steered
    kv: Mapping[str, float] | None = None  # more fields of Kv; None: none

    def at(self, budget: int, equal_protection: bool = True) -> Kv:
        """What a request asks for that runs it."""
        more: dict[str, Any] = dict(self.kv or {})
        return Kv(self.policy, budget, self.params, equal_protection=equal_protection, **more)

    def facts(self) -> dict[str, Any]:
        """What the plan says of it. Steering and fields of Kv are told where there are some: plans
        that are older stay what they are."""
        told = asdict(self)
        for name in ("steering", "kv"):
            if told[name] is None:
                del told[name]
        return told


@dataclass(frozen=True)
class Task:
    """A loaded task."""

    name: str
    axis: str
    items: Sequence[Question]
    reading: Reading | None = None  # of a file; None: it is none

    @property
    def generated(self) -> bool:
        """Whether the model writes; else texts are forced through."""
        return all(isinstance(item, Item) for item in self.items)

    @property
    def oracle(self) -> bool:
        """Whether it is known what each of its problems needs."""
        return all(item.needed is not None for item in self.items)

    def facts(self) -> dict[str, Any]:
        """What the plan says of it. digest: of its problems. How a file is read is told where something
        was said of it: plans that are older stay what they are."""
        digest = hashlib.sha256()
        for item in self.items:
            needed = item.needed and item.needed(1 << 20)
            parts = item.parts if isinstance(item, Probe) else ()
            content = [item.id, item.prompt, parts, item.trace_tokens, needed]
            if not isinstance(item, Probe) and item.expects:
                content.append(item.expects)
            digest.update(json.dumps(content).encode())
        return {
            "name": self.name,
            "axis": str(self.axis),
            "problems": len(self.items),
            "oracle": self.oracle,
            "digest": digest.hexdigest()[:16],
            **({"reading": self.reading.facts()} if self.reading and self.reading.facts() else {}),
        }


def named(name: str, items: Sequence[Question], reading: Reading = Reading()) -> Task:
    """A task's problems. The folder that a file lies in is nobody's business."""
    kind, _, rest = name.partition(":")
    if kind != "file":
        return Task(name, axis(name), items)
    return Task(f"file:{Path(rest).name}", axis(name), items, reading)


@dataclass(frozen=True)
class Settings:
    """What all completions share."""

    split: str = "test"
    seeds: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    max_output_tokens: int | None = None  # None: as the task's reference trace lets expect
    equal_protection: bool = True
    positions: str = "absolute"


def document(
    model: Model, tasks: Sequence[Task], arms: Sequence[Arm], budgets: Sequence[str], of: Settings
) -> dict[str, Any]:
    """The plan in JSON: two runs of one plan give one set of results."""
    return {
        "format": FORMAT,
        "model": {
            "name": model.name,
            "weights": model.weights,
            "dtype": model.dtype,
            # Told where there is something to tell: plans that are older stay what they are.
            **({"quantization": model.quantization} if model.quantization else {}),
            **({"kv_dtype": model.kv_dtype} if model.kv_dtype != model.dtype else {}),
            "calibration": model.calibration and asdict(model.calibration),
        },
        "tasks": [task.facts() for task in tasks],
        "arms": [arm.facts() for arm in arms],
        "budgets": list(budgets),
        **asdict(of),
    }


def keys(plan: dict[str, Any], items: Mapping[str, Sequence[str]]) -> Iterator[Key]:
    """Of every completion of a plan, in the order in which they are run. items: ids, by task."""
    arms = [(arm["label"], unbudgeted(arm)) for arm in plan["arms"]]
    for budget in ("", *plan["budgets"]):
        for task in plan["tasks"]:
            for arm, anywhere in arms:
                if anywhere != (budget == "") or not runs(task, plan, arm):
                    continue
                for seed in range(plan["seeds"]):
                    for item in items[task["name"]]:
                        yield Key(task["name"], item, arm, budget, seed)


def total(plan: dict[str, Any]) -> int:
    """Completions of a plan."""
    return sum(1 for _ in keys(plan, {t["name"]: [""] * t["problems"] for t in plan["tasks"]}))


def runs(task: dict[str, Any], plan: dict[str, Any], arm: str) -> bool:
    """Whether the arm is run on a task of the plan: an oracle, where it knows what is needed."""
    policy = next(a["policy"] for a in plan["arms"] if a["label"] == arm)
    return policy != ORACLE or task["oracle"]


def unbudgeted(arm: Mapping[str, Any]) -> bool:
    """Whether an arm of a plan is `full`, steered or not: it is run once, at no budget."""
    policy: str = arm["policy"]
    return policy == FULL


def arms(
    catalog: Sequence[Policy],
    wanted: Sequence[str],
    slack: int | None,
    oracle: bool,
    steering: Sequence[float] = (),
    kv: Sequence[Mapping[str, float]] = (),
) -> list[Arm]:
    """`full`, the oracle if it `oracle`, both kinds of random, and the wanted policies; at the end
    `full` and the wanted ones once more with each `steering`, and the wanted ones with each `kv`.

    wanted: "all", and "name" or "name:param=value,param=value". slack: of all that do not name one;
    None: each policy's own.
    """
    known = {policy.name: policy for policy in catalog}
    everything = [policy.name for policy in catalog if not policy.evaluation_only]
    texts = [text for want in wanted for text in (everything if want == "all" else [want])]
    made = [_arm(known, text, slack) for text in texts]
    made = [arm for arm in made if arm.policy not in (FULL, ORACLE)]
    lengths = sorted({arm.slack for arm in made}) or [SLACK if slack is None else slack]
    anchors = [_arm(known, FULL, slack)]
    if oracle:
        anchors += [_arm(known, f"{ORACLE}:slack={length}", slack) for length in lengths]
    for text in (f"{RANDOM}:slack=", f"{FROZEN},slack="):
        anchors += [_arm(known, f"{text}{length}", slack) for length in lengths]
    steered = [
        replace(arm, label=f"{arm.label} steered {coefficient:g}", steering=coefficient)
        for coefficient in steering
        for arm in [anchors[0], *made]
    ]
    varied = [
        replace(
            arm, label=" ".join([arm.label, *(f"{k}={v}" for k, v in fields.items())]), kv=fields
        )
        for fields in kv
        for arm in made
    ]
    return list({arm.label: arm for arm in [*anchors, *made, *steered, *varied]}.values())


def control(plan: dict[str, Any], arm: str) -> str | None:
    """The label of fresh `random` in rounds of the same length; None of `full`."""
    mine = next(a for a in plan["arms"] if a["label"] == arm)
    for other in plan["arms"]:
        fresh = other["policy"] == RANDOM and set(other["params"]) == {"slack"}
        fresh &= "steering" not in other and "kv" not in other
        if fresh and other["slack"] == mine["slack"] and not unbudgeted(mine):
            return other["label"]
    return None


def _arm(known: dict[str, Policy], text: str, common: int | None) -> Arm:
    name, _, rest = text.partition(":")
    if name not in known:
        near = ", ".join(get_close_matches(name, known))
        meant = f"did you mean {near}? " if near else ""
        raise click.BadParameter(
            f"no policy is called {name}; {meant}`epikv policies --all` lists all"
        )
    try:
        params = dict(map(parse_param, re.split(r",(?=\w+=)", rest))) if rest else {}
    except ValueError as error:
        raise click.BadParameter(f"{text}: {error}") from error
    params_of = {param.name for param in known[name].params}
    if unknown := set(params) - params_of:
        raise click.BadParameter(f"{name} has no parameter {', '.join(sorted(unknown))}")
    slack = 0
    if "slack" in params_of:
        own = known[name].slack_tokens
        slack = params.setdefault("slack", own if common is None else common)
        if not isinstance(slack, int):
            raise click.BadParameter(f"{text}: slack is a number of tokens")
    shown = {key: params[key] for key in sorted(params) if key != "slack" or slack != common}
    told = ",".join(f"{key}={_shown(value)}" for key, value in shown.items())
    return Arm(f"{name}:{told}" if told else name, name, params, slack)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
